"""Say how gate and up projections of an expert become the input of its down projection."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels import _options
from kernels import _tensors as check

# The numbers are those of `Activation` in csrc/ffn/ffn.h.
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "clamped_swiglu": 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gating:
    """The way in which gate and up projections become the input of the down projection.

    silu, gelu, gelu_tanh: activation(gate) * up
    clamped_swiglu:        (up' + 1) * gate' * sigmoid(alpha * gate'), gate' = min(gate, limit), up' within +-limit
                           (gpt-oss, whose constants are the defaults)
    Biases: float32, bfloat16 or float16, gate_bias and up_bias [expert_dim] (either order of a fused tensor: slice it),
    down_bias [hidden].
    """

    activation: str = "silu"
    alpha: float = 1.702
    limit: float = 7.0
    gate_bias: torch.Tensor | None = None
    up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None

    @property
    def has_biases(self) -> bool:
        return self.gate_bias is not None or self.up_bias is not None or self.down_bias is not None

    def checked(self) -> tuple[int, float, float]:
        """Return what the extension is told of all but the biases."""
        _options.one_of("activation", self.activation, ACTIVATIONS)
        _options.finite("alpha", self.alpha)
        _options.at_least_zero("limit", self.limit)
        return ACTIVATIONS[self.activation], float(self.alpha), float(self.limit)

    def float_biases(self, hidden: int, expert_dim: int) -> tuple[torch.Tensor | None, ...]:
        self.checked()
        if not self.has_biases:
            return None, None, None
        sizes = {"gate_bias": expert_dim, "up_bias": expert_dim, "down_bias": hidden}
        return tuple(_float_vector(name, getattr(self, name), size) for name, size in sizes.items())


def _float_vector(name: str, tensor: torch.Tensor | None, size: int) -> torch.Tensor | None:
    if tensor is None:
        return None
    check.cpu(name, tensor, 1)
    check.float_code(name, tensor)
    check.shape(name, tensor, (size,))
    check.spans(**{name: tensor})
    return tensor.float().contiguous()
