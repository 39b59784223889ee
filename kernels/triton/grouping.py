"""Sorts (token, choice) pairs by expert on the device, in launches that need no count on the host.

Few pairs take one launch, others three.

Pair p = token * top_k + choice. Experts that the address table lacks, and ids out of range, are left out. Each expert's
pairs keep their order, so that the result is the same in every run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.triton.device import cdiv, power_of_two
from kernels.triton.matrices import ADDRESSES
from kernels.triton.scratch import Scratch
from kernels.triton.sizes import PAIRS_OF_A_CHUNK, chunks_of

_BLOCK = 32  # chunks that the offsets' only program handles at once


@dataclass(frozen=True, slots=True)
class Groups:
    """order:     int32 [pairs], the pairs of expert 0, then of expert 1, ...
    places:    int32 [tokens * top_k], where each pair stands in `order`, -1 where it does not
    starts:    int32 [experts + 1], the first of each expert's pairs in `order`
    tile_ends: int32 [experts], number of tiles of all experts up to this one, each expert's last tile partly full
    """

    order: torch.Tensor
    places: torch.Tensor
    starts: torch.Tensor
    tile_ends: torch.Tensor
    num_tiles: int  # upper bound


@triton.jit
def _members(pair, ids, table, num_pairs, NUM_EXPERTS: tl.constexpr, ADDRESSES: tl.constexpr, EXPERTS: tl.constexpr):
    """Return int32 [pairs, EXPERTS], 1 where the pair goes to that expert of the table."""
    expert_id = tl.load(ids + pair, mask=pair < num_pairs, other=-1)
    known = (expert_id >= 0) & (expert_id < NUM_EXPERTS)
    present = tl.load(table + tl.where(known, expert_id, 0) * ADDRESSES) != 0
    expert = tl.arange(0, EXPERTS)
    return ((expert[None, :] == expert_id[:, None]) & (known & present)[:, None]).to(tl.int32)


@triton.jit(do_not_specialize=["num_pairs"], do_not_specialize_on_alignment=["ids"])
def _count(
    ids, table, counts, num_pairs,
    NUM_EXPERTS: tl.constexpr, ADDRESSES: tl.constexpr, EXPERTS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    pair = chunk * CHUNK + tl.arange(0, CHUNK)
    members = _members(pair, ids, table, num_pairs, NUM_EXPERTS, ADDRESSES, EXPERTS)
    expert = tl.arange(0, EXPERTS)
    tl.store(counts + chunk * NUM_EXPERTS + expert, tl.sum(members, axis=0), mask=expert < NUM_EXPERTS)


@triton.jit(do_not_specialize=["num_chunks"])
def _offsets(
    counts, starts, tile_ends, num_chunks,
    NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Turn each chunk's count of each expert into the place of its first pair."""
    expert, row = tl.arange(0, EXPERTS), tl.arange(0, BLOCK)
    is_expert = expert < NUM_EXPERTS
    totals = tl.zeros((EXPERTS,), tl.int32)
    for first in range(0, num_chunks, BLOCK):
        mask = (first + row < num_chunks)[:, None] & is_expert[None, :]
        totals += tl.sum(tl.load(counts + (first + row)[:, None] * NUM_EXPERTS + expert[None, :], mask, 0), axis=0)
    ends = tl.cumsum(totals, 0)
    tl.store(starts + expert, ends - totals, mask=is_expert)
    tl.store(starts + NUM_EXPERTS, tl.sum(totals))
    tl.store(tile_ends + expert, tl.cumsum((totals + ROWS - 1) // ROWS, 0), mask=is_expert)
    places = ends - totals
    for first in range(0, num_chunks, BLOCK):
        mask = (first + row < num_chunks)[:, None] & is_expert[None, :]
        at = counts + (first + row)[:, None] * NUM_EXPERTS + expert[None, :]
        block = tl.load(at, mask, 0)
        tl.store(at, places[None, :] + tl.cumsum(block, 0) - block, mask=mask)
        places += tl.sum(block, axis=0)


@triton.jit(do_not_specialize=["num_pairs"], do_not_specialize_on_alignment=["ids"])
def _place(
    ids, table, firsts, order, places, num_pairs,
    NUM_EXPERTS: tl.constexpr, ADDRESSES: tl.constexpr, EXPERTS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    pair = chunk * CHUNK + tl.arange(0, CHUNK)
    members = _members(pair, ids, table, num_pairs, NUM_EXPERTS, ADDRESSES, EXPERTS)
    expert = tl.arange(0, EXPERTS)
    first = tl.load(firsts + chunk * NUM_EXPERTS + expert, mask=expert < NUM_EXPERTS, other=0)
    place = tl.sum(members * (first[None, :] + tl.cumsum(members, 0) - 1), axis=1)
    placed = tl.sum(members, axis=1) > 0
    tl.store(order + place, pair, mask=placed)
    tl.store(places + pair, tl.where(placed, place, -1), mask=pair < num_pairs)


@triton.jit(do_not_specialize=["num_pairs"], do_not_specialize_on_alignment=["ids"])
def _group_few(
    ids, table, order, places, starts, tile_ends, num_pairs,
    NUM_EXPERTS: tl.constexpr, ADDRESSES: tl.constexpr, EXPERTS: tl.constexpr, CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Do what the others do for the pairs of one chunk."""
    pair, expert = tl.arange(0, CHUNK), tl.arange(0, EXPERTS)
    members = _members(pair, ids, table, num_pairs, NUM_EXPERTS, ADDRESSES, EXPERTS)
    totals = tl.sum(members, axis=0)
    firsts = tl.cumsum(totals, 0) - totals
    tl.store(starts + expert, firsts, mask=expert < NUM_EXPERTS)
    tl.store(starts + NUM_EXPERTS, tl.sum(totals))
    tl.store(tile_ends + expert, tl.cumsum((totals + ROWS - 1) // ROWS, 0), mask=expert < NUM_EXPERTS)
    place = tl.sum(members * (firsts[None, :] + tl.cumsum(members, 0) - 1), axis=1)
    placed = tl.sum(members, axis=1) > 0
    tl.store(order + place, pair, mask=placed)
    tl.store(places + pair, tl.where(placed, place, -1), mask=pair < num_pairs)


def group(ids: torch.Tensor, table: torch.Tensor, num_present: int, tile_rows: int, scratch: Scratch) -> Groups:
    """Group the pairs of token and expert by expert; all results lie in `scratch`.

    ids: int64 [tokens, top_k], a token's own all different
    table: as `address_table`, of which `num_present` experts have weights
    """
    num_tokens, top_k = ids.shape
    num_experts, num_pairs = table.shape[0], ids.numel()
    most_pairs, num_chunks = num_tokens * min(top_k, num_present), chunks_of(num_pairs)
    counts = scratch.take((num_chunks, num_experts), torch.int32)
    order, places = scratch.take((most_pairs,), torch.int32), scratch.take((num_pairs,), torch.int32)
    starts, tile_ends = scratch.take((num_experts + 1,), torch.int32), scratch.take((num_experts,), torch.int32)
    sizes = {"NUM_EXPERTS": num_experts, "EXPERTS": power_of_two(num_experts)}
    by_pair = {**sizes, "ADDRESSES": ADDRESSES, "CHUNK": PAIRS_OF_A_CHUNK}
    if num_chunks == 1:
        _group_few[(1,)](ids, table, order, places, starts, tile_ends, num_pairs, **by_pair, ROWS=tile_rows)
    else:
        _count[(num_chunks,)](ids, table, counts, num_pairs, **by_pair)
        _offsets[(1,)](counts, starts, tile_ends, num_chunks, **sizes, ROWS=tile_rows, BLOCK=_BLOCK)
        _place[(num_chunks,)](ids, table, counts, order, places, num_pairs, **by_pair)
    # Each expert's last tile may be partly full; a token goes to an expert at most once.
    num_tiles = min(most_pairs // tile_rows + num_present, num_present * cdiv(num_tokens, tile_rows), most_pairs)
    return Groups(order, places, starts, tile_ends, num_tiles)
