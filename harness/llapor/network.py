"""Compute a predictor: one function of named tensors, used in training and on the gpu lane.

Input is a layer's gating input (reduced by PCA) with the experts that its router chose and their weights; output is a
logit for each expert of the next layer. Predictors near input and output have one hidden layer; those between have a
residual block too, whose output a gate scales by the reduced hidden state (PreScope §4.2.1).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.llapor.shape import PredictorShape

Weights = Mapping[str, Tensor]


def features(w: Weights, normed: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the reduced hidden state [tokens, pca_dims] and the routing [tokens, 2 experts], both float32.

    The routing says for each expert whether it was chosen, and then for each its share of the token's weights.
    """
    reduced = normed.float() @ w["pca"].T - w["pca_offset"]
    return reduced, routing_features(expert_ids, expert_weights, w["out_bias"].shape[0])


def routing_features(expert_ids: Tensor, expert_weights: Tensor, num_experts: int) -> Tensor:
    """Return the second of the `features`, [tokens, 2 experts]."""
    shares = expert_weights.float() / expert_weights.float().sum(dim=-1, keepdim=True).clamp_min(1e-12)
    routed = shares.new_zeros(len(shares), 2 * num_experts)
    routed.scatter_(-1, expert_ids, 1.0)
    routed.scatter_(-1, expert_ids + num_experts, shares)
    return routed


def logits(w: Weights, reduced: Tensor, routed: Tensor, dropout: float = 0.0) -> Tensor:
    """Return the logits [tokens, experts] of the next layer's experts; `dropout` is for training."""
    hidden = _linear_block(w, "in", torch.cat((reduced, routed), dim=-1), dropout)
    if "gate" in w:
        gate = torch.sigmoid(reduced @ w["gate"].T + w["gate_bias"])
        inner = _linear_block(w, "inner", hidden, dropout)
        hidden = hidden + gate * (inner @ w["outer"].T + w["outer_bias"])
    return hidden @ w["out"].T + w["out_bias"]


def _linear_block(w: Weights, name: str, x: Tensor, dropout: float) -> Tensor:
    out = F.gelu(x @ w[name].T + w[f"{name}_bias"])
    return F.dropout(out, dropout) if dropout else out


def foresee(
    w: Weights, normed: Tensor, expert_ids: Tensor, expert_weights: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """Return the `count` likeliest experts of the next layer for each token and how likely each is: int64 and float32
    [tokens, count]."""
    likely = chances(w, logits(w, *features(w, normed, expert_ids, expert_weights)))
    found = likely.topk(count, dim=-1)
    return found.indices, found.values


def chances(w: Weights, found: Tensor) -> Tensor:
    """Return the probabilities that logits stand for, by the layer's calibration."""
    scale, shift = w["calibration"]
    return torch.sigmoid(scale * found + shift)


def initial(shape: PredictorShape, seed: int) -> dict[str, Tensor]:
    """Return the first weights of the layers behind the PCA: uniform within 1 / sqrt(inputs), biases 0."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, size in shape.tensors().items():
        if name in ("pca", "pca_offset", "calibration"):
            continue
        bound = size[-1] ** -0.5 if len(size) == 2 else 0.0
        found[name] = (2 * torch.rand(size, generator=generator) - 1) * bound
    return found


def fit_pca(inputs: Tensor, dims: int) -> tuple[Tensor, Tensor]:
    """Return the projection [dims, hidden] and the offset [dims] that turn inputs [tokens, hidden] into their principal
    components. The components have mean 0, and together as many units of variance as there are."""
    wide = inputs.double()
    mean = wide.mean(dim=0)
    values, vectors = torch.linalg.eigh((wide - mean).T @ (wide - mean) / len(wide))
    kept = vectors[:, -dims:].flip(-1).T  # the largest variance first
    scale = (dims / values[-dims:].clamp_min(0).sum().clamp_min(1e-12)).sqrt()
    projection = kept * scale
    return projection.float(), (projection @ mean).float()
