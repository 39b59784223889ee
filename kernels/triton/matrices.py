"""Tell kernels where the experts' weights lie: tables of device addresses let them read weight buffers in place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch

ALIGNMENT_BYTES = 16  # one load of a thread; the kernels are compiled for weights that begin so
ADDRESSES = 6  # columns of a table: gate, up, down and their biases


ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "clamped_swiglu": 3}  # as `kernels.Gating` names them


@dataclass(frozen=True, slots=True, kw_only=True)
class Activation:
    """The way in which gate and up projections become the input of the down projection; see `kernels.Gating`."""

    name: str = "silu"
    alpha: float = 1.702
    limit: float = 7.0

    def __post_init__(self) -> None:
        if self.name not in ACTIVATIONS:
            raise ValueError(f"activation: expected one of {', '.join(ACTIVATIONS)}, got {self.name!r}")


SILU = Activation()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertMatrices:
    """One expert as views of a weight buffer, as checkpoints have them: [outputs, inputs], the inputs contiguous.

    gate, up: [expert_dim, hidden]; rows at one common stride, so halves of a stacked tensor or its alternate rows do
    down:     [hidden, expert_dim]
    Biases:   gate_bias and up_bias [expert_dim], down_bias [hidden], all or none, contiguous, in the matrices' dtype
    """

    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    gate_bias: torch.Tensor | None = None
    up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    activation: Activation = SILU

    @property
    def biases(self) -> tuple[torch.Tensor, ...]:
        return tuple(b for b in (self.gate_bias, self.up_bias, self.down_bias) if b is not None)

    @property
    def shape(self) -> ExpertShape:
        """Raises ValueError naming what the kernels cannot read."""
        expert_dim, hidden = self.gate.shape
        for name, matrix, size in (
            ("gate", self.gate, (expert_dim, hidden)),
            ("up", self.up, (expert_dim, hidden)),
            ("down", self.down, (hidden, expert_dim)),
        ):
            if tuple(matrix.shape) != size or matrix.dtype is not self.gate.dtype:
                raise ValueError(f"{name}: expected {size} {self.gate.dtype}, got {tuple(matrix.shape)} {matrix.dtype}")
            if matrix.shape[1] > 1 and matrix.stride(1) != 1:
                raise ValueError(f"{name}: expected contiguous rows, got strides {matrix.stride()}")
        if self.up.stride(0) != self.gate.stride(0):
            raise ValueError(f"up: expected rows {self.gate.stride(0)} apart as gate has, got {self.up.stride(0)}")
        biases = self.biases
        if len(biases) not in (0, 3):
            raise ValueError("gate_bias, up_bias, down_bias: expected all or none")
        for bias, length in zip(biases, (expert_dim, expert_dim, hidden), strict=False):
            if tuple(bias.shape) != (length,) or bias.dtype is not self.gate.dtype or not bias.is_contiguous():
                raise ValueError(f"biases: expected contiguous [{length}] {self.gate.dtype}, got {bias}")
        return ExpertShape(
            hidden=hidden,
            expert_dim=expert_dim,
            gate_stride=self.gate.stride(0),
            down_stride=self.down.stride(0),
            has_biases=bool(biases),
            dtype=self.gate.dtype,
            activation=self.activation,
        )

    @property
    def addresses(self) -> tuple[int, ...]:
        """The addresses in the order of a table's columns, 0 where there is no bias. Raises ValueError on one that is
        not aligned."""
        found = [matrix.data_ptr() for matrix in (self.gate, self.up, self.down, *self.biases)]
        if any(address % ALIGNMENT_BYTES for address in found):
            raise ValueError(f"matrices: expected to begin at multiples of {ALIGNMENT_BYTES} bytes, got {found}")
        return (*found, *[0] * (ADDRESSES - len(found)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShape:
    """The properties that all experts of a layer share, with strides in elements between rows."""

    hidden: int
    expert_dim: int
    gate_stride: int
    down_stride: int
    has_biases: bool
    dtype: torch.dtype
    activation: Activation = SILU


def address_table(addresses: Mapping[int, tuple[int, ...]], num_experts: int, device: torch.device) -> torch.Tensor:
    """Build the table int64 [num_experts, ADDRESSES] on the device: each present expert's `ExpertMatrices.addresses`, 0
    for the others.

    Made once for each set of places: streams have few slots. The table says where weights lie, not that they lie there;
    the caller keeps the memory.
    """
    return _table(tuple(sorted(addresses.items())), num_experts, device)


@lru_cache(maxsize=4096)
def _table(addresses: tuple[tuple[int, tuple[int, ...]], ...], num_experts: int, device: torch.device) -> torch.Tensor:
    rows = dict(addresses)
    table = torch.tensor([rows.get(expert, (0,) * ADDRESSES) for expert in range(num_experts)], dtype=torch.int64)
    if device.type == "cuda":
        table = table.pin_memory()  # copies from pageable memory may wait for the stream; torch keeps this until then
    return table.to(device, non_blocking=True)
