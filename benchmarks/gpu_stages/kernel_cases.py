"""The GPU kernels at a model's sizes, each beside the same computation in float32 by torch, and beside a rival.

A case is data and three functions without arguments: the kernel, what it should give, and what others offer for the
same work (cuBLAS, scaled_dot_product_attention). The rival's inputs are laid out before, so that only its work is
timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from harness.model import functional as model
from harness.model.dimensions import Router
from kernels import triton as gpu

_BLOCK_SIZE = 16


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The dimensions of a layer, and the sizes of the micro-batches that are tried."""

    hidden: int
    expert_dim: int
    num_experts: int
    top_k: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    expert_tokens: tuple[int, ...]
    prompts: tuple[int, int]  # how many, and their length
    contexts: tuple[int, int]
    few_contexts: tuple[int, int]  # that leave a GPU idle unless several programs share each


MIXTRAL_8X7B = Sizes(
    hidden=4096, expert_dim=14336, num_experts=8, top_k=2, num_heads=32, num_kv_heads=8, head_dim=128,
    expert_tokens=(16, 64, 512, 4096, 16384), prompts=(64, 256), contexts=(512, 512),
    few_contexts=(4, 8192),
)  # fmt: skip
TINY = Sizes(
    hidden=32, expert_dim=48, num_experts=4, top_k=2, num_heads=4, num_kv_heads=2, head_dim=16, expert_tokens=(5,),
    prompts=(2, 19), contexts=(3, 20), few_contexts=(1, 30),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    """`kernel` is one of `gpu.KERNELS`. `run` and `expected` give a tensor of the same shape; `tolerance` is the most
    by which they may differ, relative to the largest number expected."""

    name: str
    kernel: str
    run: Callable[[], Tensor]
    expected: Callable[[], Tensor]  # float32
    rival: Callable[[], Tensor]
    rival_name: str
    flops: float = 0.0
    nbytes: float = 0.0
    tolerance: float = 2e-2  # bfloat16 rounds by up to 4e-3, twice on the way

    def error(self) -> float:
        """Return the largest difference from what is expected, relative to the largest number; NaN where either has
        one."""
        found, expected = self.run().float(), self.expected()
        return float((found - expected).abs().max() / expected.abs().max())


def cases(sizes: Sizes, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Iterator[Case]:
    """Yield the cases one by one: the memory of one is free before the next is made."""
    yield _routing(sizes, device, dtype)
    yield _forecasts(sizes, device, dtype)
    for num_tokens in sizes.expert_tokens:
        yield _experts(sizes, device, dtype, num_tokens)
    yield _prefill(sizes, device, dtype)
    for contexts in (sizes.contexts, sizes.few_contexts):
        for staged in (False, True):
            yield _decode(sizes, device, dtype, contexts, staged=staged)
    yield _gather(sizes, device, dtype)
    yield _rows(sizes, device, dtype)
    yield _kept_rows(sizes, device, dtype)


def _drawn(device: torch.device, dtype: torch.dtype, *shape: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator(device).manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator, device=device) * scale).to(dtype)


def _routing(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Case:
    num_tokens = max(sizes.expert_tokens)
    logits = _drawn(device, dtype, num_tokens, sizes.num_experts)

    def dense(ids: Tensor, weights: Tensor) -> Tensor:
        return torch.zeros(num_tokens, sizes.num_experts, device=device).scatter_(1, ids, weights.float())

    def best(ids: Tensor, weights: Tensor) -> Tensor:
        return dense(ids, weights / weights.sum(-1, keepdim=True))

    def expected() -> Tensor:
        weights, ids = logits.float().softmax(-1).sort(descending=True, stable=True)  # the lower number among equals
        return best(ids[:, : sizes.top_k], weights[:, : sizes.top_k])

    def rival() -> Tensor:
        weights, ids = logits.softmax(-1).topk(sizes.top_k)
        return best(ids, weights)

    return Case(
        name=f"routing of {num_tokens} tokens", kernel="routing",
        run=lambda: dense(*gpu.choose_experts(logits, sizes.top_k)), expected=expected, rival=rival,
        rival_name="torch", nbytes=logits.nbytes,
    )  # fmt: skip


def _forecasts(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Case:
    """Make the case of the chances of all experts, among which equal ones have no order."""
    count, num_experts, top_k = min(sizes.expert_tokens), sizes.num_experts, sizes.top_k
    logits = _drawn(device, dtype, count, num_experts)
    options = {"steepness": model.STEEPNESS, "least": model.LEAST_SHARE}

    def dense(ids: Tensor, chances: Tensor) -> Tensor:
        return torch.zeros(count, num_experts, device=device).scatter_(1, ids, chances)

    def by_torch() -> Tensor:
        return dense(*model.foresee_experts(logits, num_experts, top_k, Router()))

    return Case(
        name=f"forecasts of {count} tokens", kernel="routing",
        run=lambda: dense(*gpu.foresee_experts(logits, num_experts, top_k, **options)),
        expected=by_torch, rival=by_torch, rival_name="torch", nbytes=logits.nbytes, tolerance=1e-5,
    )  # fmt: skip


def _experts(sizes: Sizes, device: torch.device, dtype: torch.dtype, num_tokens: int) -> Case:
    hidden, expert_dim, count = sizes.hidden, sizes.expert_dim, sizes.num_experts
    gate_up = [_drawn(device, dtype, 2 * expert_dim, hidden, scale=hidden**-0.5) for _ in range(count)]
    down = [_drawn(device, dtype, hidden, expert_dim, scale=expert_dim**-0.5) for _ in range(count)]
    x, logits = _drawn(device, dtype, num_tokens, hidden), _drawn(device, dtype, num_tokens, count)
    weights, ids = logits.float().softmax(-1).topk(sizes.top_k)
    matrices = [
        gpu.ExpertMatrices(gate=both[:expert_dim], up=both[expert_dim:], down=last)
        for both, last in zip(gate_up, down, strict=True)
    ]
    shape = matrices[0].shape
    table = gpu.address_table({n: each.addresses for n, each in enumerate(matrices)}, count, device)
    scratch_bytes = gpu.expert_scratch_bytes(num_tokens, sizes.top_k, count, count, shape)
    scratch = torch.empty(scratch_bytes, dtype=torch.uint8, device=device)
    out = torch.empty(num_tokens, hidden, dtype=torch.float32, device=device)
    found = [(ids == expert).nonzero(as_tuple=True) for expert in range(count)]

    def run() -> Tensor:
        gpu.grouped_experts(x, ids, weights, out.zero_(), table, shape, num_present=count, scratch=scratch)
        return out

    def by_expert(kind: torch.dtype) -> Tensor:
        total = torch.zeros(num_tokens, hidden, device=device)
        for (tokens, choices), both, last in zip(found, gate_up, down, strict=True):
            gate, up = functional.linear(x[tokens].to(kind), both.to(kind)).chunk(2, dim=-1)
            y = functional.linear(functional.silu(gate) * up, last.to(kind))
            total.index_add_(0, tokens, y.float() * weights[tokens, choices, None])
        return total

    reached = sum(len(tokens) > 0 for tokens, _ in found)
    return Case(
        name=f"experts over {num_tokens} tokens", kernel="experts", run=run, expected=lambda: by_expert(torch.float32),
        rival=lambda: by_expert(dtype), rival_name="cuBLAS, expert by expert",
        flops=6.0 * num_tokens * sizes.top_k * hidden * expert_dim,
        nbytes=3.0 * reached * hidden * expert_dim * dtype.itemsize,
    )  # fmt: skip


def _attended(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """Attend in plain steps: q [sequences, heads, queries, head_dim], k and v with fewer heads and all tokens."""
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).transpose(-1, -2) * q.shape[-1] ** -0.5
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
    return scores.softmax(-1) @ v.repeat_interleave(group, 1)


def _fused(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)


def _prefill(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Case:
    count, length = sizes.prompts
    q, k, v = (
        _drawn(device, dtype, count * length, heads, sizes.head_dim)
        for heads in (sizes.num_heads, sizes.num_kv_heads, sizes.num_kv_heads)
    )
    positions = torch.arange(length, device=device).repeat(count)
    out = torch.empty_like(q)
    apart = [each.view(count, length, -1, sizes.head_dim).transpose(1, 2) for each in (q, k, v)]
    joined = [each.contiguous() for each in apart]

    def run() -> Tensor:
        gpu.causal_attention(q, k, v, positions, out, scale=sizes.head_dim**-0.5)
        return out.view(count, length, -1, sizes.head_dim).transpose(1, 2)

    return Case(
        name=f"prefill of {count} prompts of {length}", kernel="prefill", run=run,
        expected=lambda: _attended(*(each.float() for each in apart), causal=True),
        rival=lambda: _fused(*joined, causal=True), rival_name="scaled_dot_product_attention",
        flops=2.0 * count * length**2 * sizes.num_heads * sizes.head_dim, nbytes=2.0 * q.nbytes + 2.0 * k.nbytes,
    )  # fmt: skip


def _decode(sizes: Sizes, device: torch.device, dtype: torch.dtype, contexts: tuple[int, int], *, staged: bool) -> Case:
    count, length = contexts
    heads, dim, scale = sizes.num_kv_heads, sizes.head_dim, sizes.head_dim**-0.5
    q = _drawn(device, dtype, count, sizes.num_heads, dim)
    k, v = (_drawn(device, dtype, count, heads, length, dim, scale=s) for s in (1.0, 0.5))
    positions = torch.full((count,), length - 1, dtype=torch.int64, device=device)
    out, options = torch.empty_like(q), {"scale": scale}
    if staged:
        staging = torch.stack((k, v), dim=1).flatten()

        def run() -> Tensor:
            gpu.staged_decode_attention(q, staging, positions, out, num_kv_heads=heads, **options)
            return out[:, :, None]
    else:
        per_sequence = -(-length // _BLOCK_SIZE)
        blocks = torch.randperm(count * per_sequence, generator=torch.Generator().manual_seed(0)).to(device)
        keys, values = (_paged(each, blocks) for each in (k, v))
        table = blocks.int()

        def run() -> Tensor:
            gpu.paged_decode_attention(q, keys, values, table, positions, out, **options)
            return out[:, :, None]

    query = q[:, :, None]
    return Case(
        name=f"decode of {count} contexts of {length}, {'staged' if staged else 'paged'}", kernel="decode", run=run,
        expected=lambda: _attended(query.float(), k.float(), v.float(), causal=False),
        rival=lambda: _fused(query, k, v, causal=False), rival_name="scaled_dot_product_attention",
        flops=4.0 * count * length * sizes.num_heads * dim, nbytes=float(k.nbytes + v.nbytes),
    )  # fmt: skip


def _gather(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Case:
    count, length = sizes.contexts
    heads, dim, per_sequence = sizes.num_kv_heads, sizes.head_dim, -(-length // _BLOCK_SIZE)

    def pinned(tensor: Tensor) -> Tensor:
        return tensor.pin_memory() if device.type == "cuda" else tensor

    shape = (count * per_sequence, heads, _BLOCK_SIZE, dim)
    caches = [pinned(_drawn(device, dtype, *shape).cpu()) for _ in range(2)]
    tables = torch.randperm(count * per_sequence, generator=torch.Generator().manual_seed(0)).int().view(count, -1)
    lengths = torch.full((count,), length, dtype=torch.int32)
    token_dim = 2 * heads * dim
    numbers = pinned(gpu.gather_numbers(tables, lengths, token_dim))
    out = torch.empty(count * length * token_dim, dtype=dtype, device=device)
    plain = pinned(torch.ones(out.shape, dtype=dtype))

    def run() -> Tensor:
        gpu.gather_kv(caches, numbers, count, per_sequence, out)
        return out

    def expected() -> Tensor:
        each = [cache[tables.long()].transpose(1, 2).flatten(2, 3)[:, :, :length] for cache in caches]
        return torch.stack(each, 1).flatten().float().to(device)

    return Case(
        name=f"gather of {count} contexts of {length} out of host memory", kernel="copies", run=run,
        expected=expected, rival=lambda: out.copy_(plain, non_blocking=True), rival_name="one copy as large",
        nbytes=float(out.nbytes), tolerance=0.0,
    )  # fmt: skip


def _rows(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Case:
    """Make the case of what a layer's first op does beside its product, for so few tokens that launching takes the
    time."""
    count, half = min(sizes.expert_tokens), sizes.head_dim // 2
    heads = (sizes.num_heads, sizes.num_kv_heads)
    x, weight = _drawn(device, dtype, count, sizes.hidden), _drawn(device, dtype, sizes.hidden)
    q, k = (_drawn(device, dtype, count, each, sizes.head_dim) for each in heads)
    positions = torch.arange(count, device=device) * 7
    angles = torch.outer(torch.arange(7 * count, device=device), 1e4 ** -(torch.arange(half, device=device) / half))
    tables = [table.to(dtype)[:, None, :] for table in (angles.cos(), angles.sin())]

    def of(dtype: torch.dtype) -> Tensor:
        cos, sin = (table[positions].to(dtype) for table in tables)
        wide = x.float()
        scaled = weight.to(dtype) * (wide * (wide.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()).to(dtype)
        turned = []
        for each in (q, k):
            first, second = each.to(dtype).chunk(2, dim=-1)
            turned.append(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten())
        return torch.cat((scaled.flatten(), *turned))

    def run() -> Tensor:
        turned = gpu.rotate(q, k, positions, *tables)
        return torch.cat([each.flatten() for each in (gpu.rms_norm(x, weight, 1e-5), *turned)])

    return Case(
        name=f"norm and rotary embedding of {count} tokens", kernel="rows", run=run,
        expected=lambda: of(torch.float32), rival=lambda: of(dtype), rival_name="torch",
        nbytes=float(2 * (x.nbytes + q.nbytes + k.nbytes)),
    )  # fmt: skip


def _kept_rows(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Case:
    """Make the case of rows that go into a cache of several layers, each to a block of its own; all others stay."""
    count, heads, dim = min(sizes.expert_tokens), sizes.num_kv_heads, sizes.head_dim
    new = _drawn(device, dtype, count, heads, dim)
    slots = torch.randperm(count, generator=torch.Generator().manual_seed(0)).to(device) * _BLOCK_SIZE + 3
    ours, theirs = (torch.zeros(count, 2, heads, _BLOCK_SIZE, dim, dtype=dtype, device=device) for _ in range(2))

    def run() -> Tensor:
        gpu.append_rows(new, slots, ours[:, 1])
        return ours

    def by_torch() -> Tensor:
        theirs[slots // _BLOCK_SIZE, 1, :, slots % _BLOCK_SIZE] = new
        return theirs

    return Case(
        name=f"rows of {count} tokens kept in a cache", kernel="rows", run=run, expected=lambda: by_torch().float(),
        rival=by_torch, rival_name="torch", nbytes=float(2 * new.nbytes), tolerance=0.0,
    )  # fmt: skip


def _paged(rows: Tensor, blocks: Tensor) -> Tensor:
    """Lay keys or values [sequences, heads, tokens, width] out in blocks, at the places that `blocks` names in turn;
    NaN where no token lies."""
    count, heads, length, width = rows.shape
    room = -(-length // _BLOCK_SIZE) * _BLOCK_SIZE
    padded = torch.full((count, heads, room, width), float("nan"), dtype=rows.dtype, device=rows.device)
    padded[:, :, :length] = rows
    cut = padded.view(count, heads, -1, _BLOCK_SIZE, width).transpose(1, 2).flatten(0, 1)
    cache = torch.empty(cut.shape, dtype=rows.dtype, device=rows.device)
    cache[blocks] = cut
    return cache
