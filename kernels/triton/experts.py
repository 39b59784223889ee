"""The experts of a layer in one grouped product each way, reading every expert's weights where they lie."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton import arguments as check
from kernels.triton import grouping
from kernels.triton.device import cdiv, chip, power_of_two, product, widens
from kernels.triton.matrices import ACTIVATIONS, ADDRESSES, ExpertShape
from kernels.triton.scratch import Scratch
from kernels.triton.sizes import grouped_experts_bytes
from kernels.triton.tiling import Tiles, columns_together, expert_tiles

_COLUMNS = 1024  # of a row that one program of `_combine` sums


@triton.jit
def _tile(tile, starts, tile_ends, NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """Return a tile's expert, the rows of its pairs in sorted order, and the row behind its last. Behind all tiles the
    expert is NUM_EXPERTS."""
    expert = tl.arange(0, EXPERTS)
    ends = tl.load(tile_ends + expert, mask=expert < NUM_EXPERTS, other=2147483647)
    found = tl.sum((ends <= tile).to(tl.int32))
    safe = tl.minimum(found, NUM_EXPERTS - 1)
    first_tile = tl.load(tile_ends + tl.maximum(safe, 1) - 1)
    first_tile = tl.where(safe > 0, first_tile, 0)
    row = tl.load(starts + safe) + (tile - first_tile) * ROWS + tl.arange(0, ROWS)
    return found, row, tl.load(starts + safe + 1)


@triton.jit
def _place(num_tiles, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr, TOGETHER: tl.constexpr):
    """Return this program's row tile and column tile. TOGETHER column tiles run side by side over one row tile, then
    over the next: rows are read once for all of them, and their weights once for all row tiles of an expert."""
    all_columns: tl.constexpr = (OUTPUTS + COLUMNS - 1) // COLUMNS
    first = tl.program_id(0) // (num_tiles * TOGETHER) * TOGETHER
    count = tl.minimum(all_columns - first, TOGETHER)
    inside = tl.program_id(0) - num_tiles * first
    return inside // count, first + inside % count


@triton.jit
def _matrix(table, expert, COLUMN: tl.constexpr, ADDRESSES: tl.constexpr, kind: tl.constexpr):
    """Return the pointer to one matrix or bias of one expert."""
    address = tl.load(table + expert * ADDRESSES + COLUMN)
    return tl.multiple_of(address.to(tl.pointer_type(kind)), 16)


@triton.jit
def _activate(gate, up, alpha, limit, ACTIVATION: tl.constexpr):
    if ACTIVATION == 0:
        h = gate * tl.sigmoid(gate) * up
    elif ACTIVATION == 1:
        h = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476)) * up
    elif ACTIVATION == 2:  # tanh(y) = 2 sigmoid(2 y) - 1
        h = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)) * up
    else:
        gate, up = tl.minimum(gate, limit), tl.minimum(tl.maximum(up, -limit), limit)
        h = (up + 1.0) * gate * tl.sigmoid(alpha * gate)
    return h


@triton.jit(do_not_specialize=["num_tiles"])
def _gate_up(
    x, table, order, starts, tile_ends, h, gate_stride, num_tiles, alpha, limit,
    HIDDEN: tl.constexpr, EXPERT_DIM: tl.constexpr, TOP_K: tl.constexpr, NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr, ADDRESSES: tl.constexpr, ACTIVATION: tl.constexpr, HAS_BIASES: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, TOGETHER: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Compute h [pairs, EXPERT_DIM], sorted by expert."""
    kind: tl.constexpr = x.dtype.element_ty
    tile, column_tile = _place(num_tiles, EXPERT_DIM, COLUMNS, TOGETHER)
    expert, row, stop = _tile(tile, starts, tile_ends, NUM_EXPERTS, EXPERTS, ROWS)
    if expert >= NUM_EXPERTS:
        return
    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    token = tl.load(order + row, mask=row < stop, other=0) // TOP_K
    weight_row = tl.minimum(column, EXPERT_DIM - 1).to(tl.int64) * gate_stride
    depth = tl.arange(0, DEPTH)
    x_at = x + token.to(tl.int64)[:, None] * HIDDEN + depth[None, :]
    gate_at = _matrix(table, expert, 0, ADDRESSES, kind) + weight_row[None, :] + depth[:, None]
    up_at = _matrix(table, expert, 1, ADDRESSES, kind) + weight_row[None, :] + depth[:, None]
    gate, up = tl.zeros((ROWS, COLUMNS), tl.float32), tl.zeros((ROWS, COLUMNS), tl.float32)
    for k in range(0, HIDDEN, DEPTH):
        if HIDDEN % DEPTH == 0:
            inputs, gates, ups = tl.load(x_at + k), tl.load(gate_at + k), tl.load(up_at + k)
        else:
            within = depth < HIDDEN - k
            inputs = tl.load(x_at + k, mask=within[None, :], other=0.0)
            gates = tl.load(gate_at + k, mask=within[:, None], other=0.0)
            ups = tl.load(up_at + k, mask=within[:, None], other=0.0)
        gate = product(inputs, gates, gate, WIDEN)
        up = product(inputs, ups, up, WIDEN)
    is_column = column < EXPERT_DIM
    if HAS_BIASES:
        gate += tl.load(_matrix(table, expert, 3, ADDRESSES, kind) + column, mask=is_column, other=0.0)[None, :]
        up += tl.load(_matrix(table, expert, 4, ADDRESSES, kind) + column, mask=is_column, other=0.0)[None, :]
    out = _activate(gate, up, alpha, limit, ACTIVATION)
    h_at = h + row.to(tl.int64)[:, None] * EXPERT_DIM + column[None, :]
    tl.store(h_at, out.to(kind), mask=(row < stop)[:, None] & is_column[None, :])


@triton.jit(do_not_specialize=["num_tiles"])
def _down(
    h, table, starts, tile_ends, y, down_stride, num_tiles,
    HIDDEN: tl.constexpr, EXPERT_DIM: tl.constexpr, NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr,
    ADDRESSES: tl.constexpr, HAS_BIASES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, TOGETHER: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Compute y [pairs, HIDDEN], sorted by expert, not yet weighted, rounded as the model rounds an expert's output."""
    kind: tl.constexpr = h.dtype.element_ty
    tile, column_tile = _place(num_tiles, HIDDEN, COLUMNS, TOGETHER)
    expert, row, stop = _tile(tile, starts, tile_ends, NUM_EXPERTS, EXPERTS, ROWS)
    if expert >= NUM_EXPERTS:
        return
    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    h_at = h + tl.minimum(row, stop - 1).to(tl.int64)[:, None] * EXPERT_DIM + depth[None, :]
    weight_row = tl.minimum(column, HIDDEN - 1).to(tl.int64) * down_stride
    down_at = _matrix(table, expert, 2, ADDRESSES, kind) + weight_row[None, :] + depth[:, None]
    out = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k in range(0, EXPERT_DIM, DEPTH):
        if EXPERT_DIM % DEPTH == 0:
            inputs, downs = tl.load(h_at + k), tl.load(down_at + k)
        else:
            within = depth < EXPERT_DIM - k
            inputs = tl.load(h_at + k, mask=within[None, :], other=0.0)
            downs = tl.load(down_at + k, mask=within[:, None], other=0.0)
        out = product(inputs, downs, out, WIDEN)
    is_column = column < HIDDEN
    if HAS_BIASES:
        out += tl.load(_matrix(table, expert, 5, ADDRESSES, kind) + column, mask=is_column, other=0.0)[None, :]
    y_at = y + row.to(tl.int64)[:, None] * HIDDEN + column[None, :]
    tl.store(y_at, out.to(kind), mask=(row < stop)[:, None] & is_column[None, :])


@triton.jit(do_not_specialize_on_alignment=["weights"])
def _combine(
    y, places, weights, out, HIDDEN: tl.constexpr, TOP_K: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add to `out` [tokens, HIDDEN] each token's weighted expert outputs, summed in the order of its choices."""
    token = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < HIDDEN
    at = out + token.to(tl.int64) * HIDDEN + column
    total = tl.load(at, mask=mask, other=0.0)
    for k in tl.static_range(TOP_K):
        place = tl.load(places + token * TOP_K + k)
        weight = tl.load(weights + token * TOP_K + k)
        placed = column < tl.where(place >= 0, HIDDEN, 0)
        found = tl.load(y + tl.maximum(place, 0).to(tl.int64) * HIDDEN + column, mask=placed, other=0.0)
        total += tl.where(place >= 0, weight * found.to(tl.float32), 0.0)
    tl.store(at, total, mask=mask)


def expert_scratch_bytes(num_tokens: int, top_k: int, num_experts: int, num_present: int, shape: ExpertShape) -> int:
    """Return the bytes of scratch memory that `grouped_experts` uses for so many tokens at once."""
    return grouped_experts_bytes(
        num_tokens, top_k=top_k, num_experts=num_experts, num_present=num_present, hidden_dim=shape.hidden,
        expert_dim=shape.expert_dim, number_bytes=shape.dtype.itemsize,
    )  # fmt: skip


def grouped_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor,
    table: torch.Tensor,
    shape: ExpertShape,
    *,
    num_present: int,
    scratch: torch.Tensor | None = None,
) -> None:
    """Add to `out` each token's sum of weight * down(activation(gate(x), up(x))) over its chosen experts in `table`.

    x:       [tokens, hidden] in the weights' dtype
    ids:     int64 [tokens, top_k], a token's own all different; weights: float32 [tokens, top_k]
    out:     float32 [tokens, hidden]
    table:   `address_table` of the experts that are present, `num_present` of them; others' choices add nothing
    scratch: uint8 memory for temporaries. Where it is less than `expert_scratch_bytes`, tokens are done in several
             runs, each of which reads the weights again; allocated where not given

    Products sum in float32; what is between the products, and an expert's output, is rounded to the weights' dtype.
    Raises ValueError naming the argument.
    """
    num_tokens, top_k = ids.shape
    num_experts = table.shape[0]
    check.tensor("x", x, (num_tokens, shape.hidden), shape.dtype, x)
    check.tensor("ids", ids, (num_tokens, top_k), torch.int64, x)
    check.tensor("weights", weights, (num_tokens, top_k), torch.float32, x)
    check.tensor("out", out, (num_tokens, shape.hidden), torch.float32, x)
    check.tensor("table", table, (num_experts, ADDRESSES), torch.int64, x)
    if not 1 <= num_present <= num_experts:
        raise ValueError(f"num_present: expected 1 to {num_experts} (the table's rows), got {num_present}")
    if num_tokens == 0:
        return
    sizes = (top_k, num_experts, num_present, shape)
    if scratch is None:
        scratch = torch.empty(expert_scratch_bytes(num_tokens, *sizes), dtype=torch.uint8, device=x.device)
    at_once = _tokens_at_once(num_tokens, scratch.numel(), *sizes)
    for first in range(0, num_tokens, at_once):
        run = slice(first, first + at_once)
        tokens = (x[run], ids[run], weights[run], out[run])
        launch(*tokens, table, shape, num_present, scratch, at_once * top_k / num_experts)


def _tokens_at_once(
    num_tokens: int, nbytes: int, top_k: int, num_experts: int, num_present: int, shape: ExpertShape
) -> int:
    """Halve the number of tokens until they fit: then the runs are of one size, and few sizes are ever seen."""
    while num_tokens > 1 and expert_scratch_bytes(num_tokens, top_k, num_experts, num_present, shape) > nbytes:
        num_tokens = cdiv(num_tokens, 2)
    least = expert_scratch_bytes(1, top_k, num_experts, num_present, shape)
    if least > nbytes:
        raise ValueError(f"scratch: expected at least {least} bytes (one token's), got {nbytes}")
    return num_tokens


def launch(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor,
    table: torch.Tensor,
    shape: ExpertShape,
    num_present: int,
    memory: torch.Tensor,
    mean_rows: float,
) -> None:
    """Launch one run with tiles for `mean_rows` tokens an expert."""
    num_tokens, top_k = ids.shape
    num_experts = table.shape[0]
    wide, narrow = (_tiles(x, mean_rows, num_weights) for num_weights in (2, 1))
    scratch = Scratch(memory)
    groups = grouping.group(ids, table, num_present, wide.rows, scratch)
    pairs = num_tokens * min(top_k, num_present)
    h = scratch.take((pairs, shape.expert_dim), shape.dtype)
    y = scratch.take((pairs, shape.hidden), shape.dtype)
    sizes = {
        "HIDDEN": shape.hidden,
        "EXPERT_DIM": shape.expert_dim,
        "NUM_EXPERTS": num_experts,
        "EXPERTS": power_of_two(num_experts),
        "ADDRESSES": ADDRESSES,
        "HAS_BIASES": shape.has_biases,
        "WIDEN": widens(x),
    }
    _gate_up[(groups.num_tiles * cdiv(shape.expert_dim, wide.columns),)](
        x, table, groups.order, groups.starts, groups.tile_ends, h, shape.gate_stride, groups.num_tiles,
        float(shape.activation.alpha), float(shape.activation.limit), TOP_K=top_k,
        ACTIVATION=ACTIVATIONS[shape.activation.name],
        TOGETHER=columns_together(wide, 2, shape.hidden, x.element_size()), **sizes, **_options(wide),
    )  # fmt: skip
    _down[(groups.num_tiles * cdiv(shape.hidden, narrow.columns),)](
        h, table, groups.starts, groups.tile_ends, y, shape.down_stride, groups.num_tiles,
        TOGETHER=columns_together(narrow, 1, shape.expert_dim, x.element_size()), **sizes, **_options(narrow),
    )  # fmt: skip
    _combine[(num_tokens, cdiv(shape.hidden, _COLUMNS))](
        y, groups.places, weights, out, HIDDEN=shape.hidden, TOP_K=top_k, COLUMNS=_COLUMNS
    )


def _tiles(x: torch.Tensor, mean_rows: float, num_weights: int) -> Tiles:
    return expert_tiles(x.element_size(), mean_rows, num_weights, chip(x.device))


def _options(tiles: Tiles) -> dict[str, int]:
    return {
        "ROWS": tiles.rows,
        "COLUMNS": tiles.columns,
        "DEPTH": tiles.depth,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }
