"""Go on learning where predictors are used (PreScope §4.2.2): do a step on tokens for which a router has chosen.

The paper tells of "online gradient updates" and no more. Here AdamW does them, at a tenth of the training's rate and
without its past. The loss is cross-entropy of the calibrated chances, so that chances stay probabilities. Nothing is
random: there is no noise, no masking and no dropout.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from harness.llapor import network
from harness.llapor.learning import BETAS, plain_loss
from harness.llapor.settings import GroupSettings
from harness.llapor.shape import PredictorShape

BATCH = 32  # tokens of a step
_SLOWER = 10  # than in training
_FIXED = ("pca", "pca_offset", "calibration")
_LEAST = 1e-8  # of AdamW


class Pace(NamedTuple):
    """The learning rate and the weight decay of the steps."""

    rate: float
    decay: float

    @classmethod
    def of(cls, group: GroupSettings) -> Pace:
        """Return the pace of predictors that were trained with these settings."""
        return cls(group.learning_rate / _SLOWER, group.weight_decay)


def learned_sizes(shape: PredictorShape) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors that a step changes, by name."""
    return {name: size for name, size in shape.tensors().items() if name not in _FIXED}


def num_learned(shape: PredictorShape) -> int:
    """Return how many numbers a step changes."""
    return sum(map(prod, learned_sizes(shape).values()))


def step(
    w: network.Weights, moments: Tensor, number: int, reduced: Tensor, routed: Tensor, target: Tensor, pace: Pace
) -> None:
    """Change the predictor `w` and AdamW's `moments` in place: step `number`, counted from 0.

    `reduced` and `routed` are the features of some tokens (`network.features`), `target` float32 [tokens, experts] is 1
    where the router chose the expert. `moments` is float32 [2, learned numbers]; what it holds before step 0 is not
    used.
    """
    learned = {name: each for name, each in w.items() if name not in _FIXED}
    with torch.enable_grad():
        free = {name: each.detach().requires_grad_() for name, each in learned.items()}
        scale, shift = w["calibration"]
        loss = plain_loss(scale * network.logits(free, reduced, routed) + shift, target)
        gradients = torch.autograd.grad(loss, list(free.values()))
    if number == 0:
        moments.zero_()
    with torch.no_grad():
        gradient = torch.cat([each.flatten() for each in gradients])
        for at, (beta, value) in enumerate(zip(BETAS, (gradient, gradient**2), strict=True)):
            moments[at].lerp_(value, 1 - beta)
        first, second = (moments[at] / (1 - beta ** (number + 1)) for at, beta in enumerate(BETAS))
        changes = pace.rate * first / (second.sqrt() + _LEAST)
        sizes = [each.numel() for each in learned.values()]
        for each, change in zip(learned.values(), changes.split(sizes), strict=True):
            each.mul_(1 - pace.rate * pace.decay).sub_(change.view(each.shape))


def targets(chosen: Tensor, num_experts: int) -> Tensor:
    """Return float32 [tokens, experts]: 1 where a token's `chosen` experts, int64 [tokens, k], have the expert."""
    return torch.zeros(len(chosen), num_experts, device=chosen.device).scatter_(1, chosen, 1.0)
