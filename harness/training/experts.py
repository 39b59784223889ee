"""Compute a layer's experts fast enough on CPUs to train them: one batched product for all experts of a layer.

Each expert's rows are padded to those of the busiest one. Products of many different sizes, one after another, are slow
on a CPU: oneDNN compiles code for each size. What follows for autograd is written out below, since the general rules
would scatter rows where a gather does.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PACKED = "packed"  # its name among transformers' implementations of experts
_ROW_STEP = 64  # rows of an expert are padded to a multiple: few different sizes


class _Places(NamedTuple):
    """The places of (token, choice) pairs among the padded rows of all experts."""

    token: Tensor  # int64 [experts * rows], whose hidden state a row holds; 0 in padding
    pair: Tensor  # int64 [experts * rows], which pair a row is; `tokens * k` in padding
    row: Tensor  # int64 [tokens * k], the row of a pair
    num_rows: int  # of each expert


def _places(expert_ids: Tensor, num_experts: int) -> _Places:
    num_pairs, per_token = expert_ids.numel(), expert_ids.shape[-1]
    flat = expert_ids.reshape(-1)
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=num_experts)
    num_rows = -(-int(counts.max()) // _ROW_STEP) * _ROW_STEP
    within = torch.arange(num_pairs) - (counts.cumsum(0) - counts)[flat[order]]
    rows = flat[order] * num_rows + within
    pair = torch.full((num_experts * num_rows,), num_pairs)
    pair[rows] = order
    row = torch.empty_like(order)
    row[order] = rows
    return _Places((pair // per_token) * (pair < num_pairs), pair, row, num_rows)


class _PackedExperts(torch.autograd.Function):
    """The weighted sum of a token's SwiGLU experts. Padded rows hold token 0, and get the weight 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, expert_ids: Tensor) -> Tensor:
        """Compute [tokens, hidden] -> the same shape; `weights` and `expert_ids` are [tokens, k]."""
        places = _places(expert_ids, len(gate_up))
        width = down.shape[2]
        rows = x.index_select(0, places.token).view(len(gate_up), places.num_rows, -1)
        gate = torch.bmm(rows, gate_up[:, :width].transpose(1, 2))
        up = torch.bmm(rows, gate_up[:, width:].transpose(1, 2))
        out = torch.bmm(F.silu(gate).mul_(up), down.transpose(1, 2)).view(-1, x.shape[1])
        chosen = out.index_select(0, places.row).view(*weights.shape, -1)
        ctx.save_for_backward(rows, gate, up, chosen, gate_up, down, weights)
        ctx.places = places
        return torch.bmm(weights.to(x.dtype).unsqueeze(1), chosen).squeeze(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return gradients of hidden states, both matrices and weights."""
        (grad,) = grads
        rows, gate, up, chosen, gate_up, down, weights = ctx.saved_tensors
        places, width, hidden = ctx.places, down.shape[2], grad.shape[1]
        grad_weights = torch.bmm(chosen, grad.unsqueeze(2)).squeeze(2)
        padded = torch.cat([weights.reshape(-1).to(grad.dtype), weights.new_zeros(1, dtype=grad.dtype)])
        grad_out = grad.index_select(0, places.token).mul_(padded[places.pair].unsqueeze(1)).view_as(rows)
        activated = F.silu(gate)
        grad_act = torch.bmm(grad_out, down)
        grad_down = torch.bmm(grad_out.transpose(1, 2), activated * up)
        grad_gate = torch.ops.aten.silu_backward(grad_act * up, gate)
        grad_up = grad_act.mul_(activated)
        grad_gate_up = torch.empty_like(gate_up)
        grad_gate_up[:, :width] = torch.bmm(grad_gate.transpose(1, 2), rows)
        grad_gate_up[:, width:] = torch.bmm(grad_up.transpose(1, 2), rows)
        grad_rows = torch.bmm(grad_gate, gate_up[:, :width])
        grad_rows.add_(torch.bmm(grad_up, gate_up[:, width:]))
        by_pair = grad_rows.view(-1, hidden).index_select(0, places.row)
        grad_x = by_pair.view(*weights.shape, hidden).sum(1)
        return grad_x, grad_gate_up, grad_down, grad_weights.to(weights.dtype), None


def packed_experts(module: nn.Module, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
    """Run transformers' experts `module` on [tokens, hidden]; `expert_ids` and `weights` are [tokens, k]."""
    out: Tensor = _PackedExperts.apply(x, module.gate_up_proj, module.down_proj, weights, expert_ids)
    return out
