"""Train one layer's predictor on what the layer before had (PreScope §4.2.2)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.llapor import network
from harness.llapor.examples import Examples
from harness.llapor.groups import Group
from harness.llapor.settings import GroupSettings, LlaporSettings
from harness.llapor.shape import PredictorShape

BETAS = (0.9, 0.95)
Told = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, eq=False)
class LayerData:
    """The tokens of one layer: what its predecessor had, and the experts that it chose."""

    normed: Tensor  # [tokens, hidden]
    ids: Tensor  # int64 [tokens, k], of the layer before
    weights: Tensor  # float32 [tokens, k]
    target: Tensor  # float32 [tokens, experts]: 1 where the layer chose the expert

    @classmethod
    def of(cls, examples: Examples, place: int) -> LayerData:
        """Return the data of the layer at `place` among those with a router, from 1 on."""
        text, before = examples.text, place - 1
        return cls(
            normed=torch.from_numpy(examples.inputs[:, before].astype("float32")),
            ids=torch.from_numpy(text.experts[:, before].astype("int64")),
            weights=torch.from_numpy(examples.weights[:, before].astype("float32")),
            target=torch.from_numpy(text.chosen(place).astype("float32")),
        )

    def __len__(self) -> int:
        return len(self.target)

    def rows(self, at: Any) -> LayerData:
        """Return some of the tokens."""
        return LayerData(self.normed[at], self.ids[at], self.weights[at], self.target[at])


def plain_loss(found: Tensor, target: Tensor) -> Tensor:
    """Return the binary cross-entropy, mean over tokens and experts."""
    return F.binary_cross_entropy_with_logits(found, target)


def ends_loss(found: Tensor, target: Tensor, rarity: Tensor, balanced_share: float, gamma: float) -> Tensor:
    """Return the hybrid loss of the groups near input and output.

    One part is cross-entropy weighed by each expert's `rarity` [experts]; the other is focal loss, which leaves out
    what is predicted well by a factor (1 - probability of the true label) ^ gamma.
    """
    each = F.binary_cross_entropy_with_logits(found, target, reduction="none")
    focal = (1 - torch.exp(-each)) ** gamma * each
    return balanced_share * (rarity * each).mean() + (1 - balanced_share) * focal.mean()


def rarity_of(target: Tensor) -> Tensor:
    """Return the inverse frequency of each expert [experts], with mean 1; an expert that was never chosen counts as
    chosen once."""
    inverse = 1.0 / target.sum(dim=0).clamp_min(1.0)
    return inverse / inverse.mean()


def rate_at(epoch: float, epochs: int, group: GroupSettings) -> float:
    """Return the learning rate at a moment of the training, in epochs since it began."""
    warm = min(1.0, (epoch + 1e-9) / group.warmup_epochs) if group.warmup_epochs else 1.0
    if epoch < group.warmup_epochs or not group.cosine:
        return group.learning_rate * warm
    left = (epoch - group.warmup_epochs) / max(1e-9, epochs - group.warmup_epochs)
    return group.learning_rate * (1 + math.cos(math.pi * min(1.0, left))) / 2


class LayerTraining:
    """The training of one layer's predictor; `weights` are what it has come to."""

    def __init__(self, settings: LlaporSettings, group: Group, data: LayerData, seed: int) -> None:
        self.settings, self.group, self._seed = settings, group, seed
        self._own = settings.group(group)
        hidden, experts = data.normed.shape[1], data.target.shape[1]
        self.shape = PredictorShape(
            hidden, experts, min(self._own.pca_dims, hidden), self._own.width, is_deep=group == "middle"
        )
        projection, offset = network.fit_pca(data.normed, self.shape.pca_dims)
        self._fixed = {"pca": projection, "pca_offset": offset}
        self._learned = {name: each.requires_grad_() for name, each in network.initial(self.shape, seed).items()}
        self._calibration = torch.tensor([1.0, 0.0])
        self._rarity = rarity_of(data.target)
        decay = self._own.weight_decay
        self._adam = torch.optim.AdamW(self._learned.values(), self._own.learning_rate, BETAS, weight_decay=decay)

    @property
    def weights(self) -> dict[str, Tensor]:
        """All tensors by name, without gradients; those that are learned change in place."""
        learned = {name: each.detach() for name, each in self._learned.items()}
        return {**self._fixed, **learned, "calibration": self._calibration}

    def run(self, data: LayerData, held_out: LayerData, told: Told) -> None:
        """Train for all epochs, then calibrate. `told` gets a row for each epoch."""
        settings = self.settings
        generator = torch.Generator().manual_seed(self._seed)
        steps = -(-len(data) // settings.batch_tokens)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._seed)  # of dropout
            for epoch in range(settings.epochs):
                order, total = torch.randperm(len(data), generator=generator), 0.0
                for step, at in enumerate(order.split(settings.batch_tokens)):
                    rate = rate_at(epoch + (step + 1) / steps, settings.epochs, self._own)
                    total += self.step(data.rows(at), rate, generator) * len(at)
                found = {"loss": total / len(data), "held_out_loss": self.loss(held_out), "learning_rate": rate}
                if not found["loss"] < float("inf"):
                    raise ArithmeticError(f"the loss became {found['loss']}; use a lower learning rate")
                told({"epoch": epoch + 1, "group": self.group, **found})
        self.calibrate(held_out)

    def step(self, data: LayerData, rate: float, generator: torch.Generator) -> float:
        """Do one step of optimisation, and return its loss."""
        settings = self.settings
        reduced, routed = network.features(self.weights, data.normed, data.ids, data.weights)
        reduced = reduced + settings.noise_std * torch.randn(reduced.shape, generator=generator)
        kept = [torch.rand(x.shape, generator=generator) >= settings.mask_share for x in (reduced, routed)]
        found = network.logits(self._learned, reduced * kept[0], routed * kept[1], settings.dropout)
        loss = self._loss(found, data.target)
        self._adam.zero_grad()
        loss.backward()
        for group in self._adam.param_groups:
            group["lr"] = rate
        self._adam.step()
        return float(loss.detach())

    @torch.no_grad()
    def loss(self, data: LayerData) -> float:
        """Return the loss without augmentation."""
        return float(self._loss(self.logits(data), data.target))

    @torch.no_grad()
    def logits(self, data: LayerData) -> Tensor:
        """Return what the predictor says of tokens [tokens, experts], before calibration."""
        w = self.weights
        return network.logits(w, *network.features(w, data.normed, data.ids, data.weights))

    def _loss(self, found: Tensor, target: Tensor) -> Tensor:
        if self.group == "middle":
            return plain_loss(found, target)
        return ends_loss(found, target, self._rarity, self.settings.balanced_share, self.settings.focal_gamma)

    def calibrate(self, held_out: LayerData) -> None:
        """Fit scale and shift of the logits, so that their sigmoid is a probability; losses that weigh experts apart
        distort it (Platt's method)."""
        found = self.logits(held_out)
        free = torch.tensor([0.0, 0.0], requires_grad=True)  # the scale's logarithm, and the shift
        search = torch.optim.LBFGS([free], max_iter=50, line_search_fn="strong_wolfe")

        def closure() -> Tensor:
            search.zero_grad()
            loss = plain_loss(free[0].exp() * found + free[1], held_out.target)
            loss.backward()
            return loss

        search.step(closure)
        self._calibration = torch.stack([free[0].exp(), free[1]]).detach()
