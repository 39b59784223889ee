"""Compute a layer's experts fast enough on CPUs to train them: one product after another, of few different sizes.

Rows of all experts lie one after another, each expert's padded to a multiple of some rows, since oneDNN compiles code
for each size of a product. What follows for autograd is written out below: the general rules would scatter rows where
a gather does, and keep more.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PACKED = "packed"  # its name among transformers' implementations of experts
_ROW_STEP = 32  # rows of an expert are padded to a multiple


class _Places(NamedTuple):
    """The places of (token, choice) pairs among the padded rows of all experts."""

    token: Tensor  # int64 [rows], whose hidden state a row holds; 0 in padding
    pair: Tensor  # int64 [rows], which pair a row is; `tokens * k` in padding
    row: Tensor  # int64 [tokens * k], the row of a pair
    experts: list[tuple[int, slice]]  # each expert that has tokens, with its rows


def _places(expert_ids: Tensor, num_experts: int) -> _Places:
    num_pairs, per_token = expert_ids.numel(), expert_ids.shape[-1]
    flat = expert_ids.reshape(-1)
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=num_experts)
    padded = (counts + _ROW_STEP - 1) // _ROW_STEP * _ROW_STEP
    ends = padded.cumsum(0)
    starts = ends - padded
    within = torch.arange(num_pairs) - (counts.cumsum(0) - counts)[flat[order]]
    rows = starts[flat[order]] + within
    pair = torch.full((int(ends[-1]),), num_pairs)
    pair[rows] = order
    row = torch.empty_like(order)
    row[order] = rows
    bounds = zip(starts.tolist(), ends.tolist(), strict=True)
    experts = [(expert, slice(first, last)) for expert, (first, last) in enumerate(bounds) if last > first]
    return _Places((pair // per_token) * (pair < num_pairs), pair, row, experts)


class _PackedExperts(torch.autograd.Function):
    """The weighted sum of a token's SwiGLU experts. Padded rows hold token 0, and get the weight 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, expert_ids: Tensor) -> Tensor:
        """Compute [tokens, hidden] -> the same shape; `weights` and `expert_ids` are [tokens, k]."""
        places = _places(expert_ids, len(gate_up))
        rows = x.index_select(0, places.token)
        gate, up = (half.contiguous() for half in _products(rows, gate_up.mT, places).chunk(2, dim=1))
        out = _products(F.silu(gate).mul_(up), down.mT, places)
        chosen = out.index_select(0, places.row).view(*weights.shape, -1)
        ctx.save_for_backward(rows, gate, up, chosen, gate_up, down, weights)
        ctx.places = places
        return torch.bmm(weights.to(x.dtype).unsqueeze(1), chosen).squeeze(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return gradients of hidden states, both matrices and weights."""
        (grad,) = grads
        rows, gate, up, chosen, gate_up, down, weights = ctx.saved_tensors
        places, hidden = ctx.places, grad.shape[1]
        grad_weights = torch.bmm(chosen, grad.unsqueeze(2)).squeeze(2)
        padded = torch.cat([weights.reshape(-1).to(grad.dtype), weights.new_zeros(1, dtype=grad.dtype)])
        grad_out = grad.index_select(0, places.token).mul_(padded[places.pair].unsqueeze(1))
        activated = F.silu(gate)
        grad_act = _products(grad_out, down, places)
        grad_down = _outer_products(grad_out, activated * up, down, places)
        grad_gate = torch.ops.aten.silu_backward(grad_act * up, gate)
        grad_both = torch.cat([grad_gate, grad_act.mul_(activated)], dim=1)
        grad_gate_up = _outer_products(grad_both, rows, gate_up, places)
        by_pair = _products(grad_both, gate_up, places).index_select(0, places.row)
        grad_x = by_pair.view(*weights.shape, hidden).sum(1)
        return grad_x, grad_gate_up, grad_down, grad_weights.to(weights.dtype), None


def _products(rows: Tensor, matrices: Tensor, places: _Places) -> Tensor:
    """Multiply each expert's rows [rows, in] by its matrix of [experts, in, out]."""
    out = rows.new_empty(len(rows), matrices.shape[2])
    by_expert = matrices.unbind()
    for expert, its in places.experts:
        torch.mm(rows[its], by_expert[expert], out=out[its])
    return out


def _outer_products(left: Tensor, right: Tensor, like: Tensor, places: _Places) -> Tensor:
    """Multiply each expert's rows of `left`, transposed, by those of `right`: [experts, left, right], as `like`."""
    out = torch.empty_like(like) if len(places.experts) == len(like) else torch.zeros_like(like)
    by_expert = out.unbind()
    for expert, its in places.experts:
        torch.mm(left[its].T, right[its], out=by_expert[expert])
    return out


def packed_experts(module: nn.Module, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
    """Run transformers' experts `module` on [tokens, hidden]; `expert_ids` and `weights` are [tokens, k]."""
    out: Tensor = _PackedExperts.apply(x, module.gate_up_proj, module.down_proj, weights, expert_ids)
    return out
