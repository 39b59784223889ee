"""Optimise weights of 16 bits by float32 master copies, so that small steps are not lost in rounding."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_BETAS = (0.9, 0.95)


class MasterAdamW:
    """AdamW over float32 copies of a model's parameters; after each step the parameters are the rounded copies."""

    def __init__(self, model: nn.Module, weight_decay: float, clip_norm: float) -> None:
        named = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
        self._names = [name for name, _ in named]
        self._parameters = [parameter for _, parameter in named]
        self._masters = [parameter.detach().float().clone() for parameter in self._parameters]
        self._clip_norm = clip_norm
        matrices = [master for master in self._masters if master.dim() > 1]
        vectors = [master for master in self._masters if master.dim() == 1]
        groups = [
            {"params": matrices, "weight_decay": weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self._adam = torch.optim.AdamW([group for group in groups if group["params"]], betas=_BETAS, fused=True)

    def step(self, rate: float) -> float:
        """Apply the gradients, which are then forgotten. Return their norm before clipping."""
        for master, parameter in zip(self._masters, self._parameters, strict=True):
            grad = parameter.grad
            master.grad = torch.zeros_like(master) if grad is None else grad.float()  # an expert may have no token
            parameter.grad = None
        norm = nn.utils.clip_grad_norm_(self._masters, self._clip_norm)
        for group in self._adam.param_groups:
            group["lr"] = rate
        self._adam.step()
        self._write_parameters()
        for master in self._masters:
            master.grad = None
        return float(norm)

    def tensors(self) -> dict[str, Tensor]:
        """Return all that continues the optimisation, by name."""
        found = {}
        for name, master in zip(self._names, self._masters, strict=True):
            found[f"master.{name}"] = master
            for key, value in self._adam.state[master].items():
                found[f"{key}.{name}"] = value
        return found

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Go on from what `tensors` returned."""
        for name, master in zip(self._names, self._masters, strict=True):
            master.copy_(tensors[f"master.{name}"])
            keys = ("step", "exp_avg", "exp_avg_sq")
            self._adam.state[master] = {key: tensors[f"{key}.{name}"].clone() for key in keys}
        self._write_parameters()

    @torch.no_grad()
    def _write_parameters(self) -> None:
        for master, parameter in zip(self._masters, self._parameters, strict=True):
            parameter.copy_(master)
