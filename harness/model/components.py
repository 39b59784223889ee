"""A model consists of components with parameters, bytes and FLOPs. Torch-free.

Matrices multiply tokens and may be stored in a narrow format; vectors are norms, biases, sinks. FLOPs count two per
multiply-add of the matrices; attention's products with the KV cache depend on the context and are counted separately
(`ModelSpec.decode_pair_flops`, `prefill_pair_flops`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType

from harness.config import require
from harness.model.dimensions import WeightFormat

EMBEDDING, HEAD, FINAL_NORM = "embedding", "head", "final_norm"
ATTENTION, NORMS, ROUTER, EXPERT = "attention", "norms", "router", "expert"
SHARED_EXPERTS, DENSE_MLP = "shared_experts", "dense_mlp"
COMPONENT_NAMES = (EMBEDDING, ATTENTION, NORMS, ROUTER, EXPERT, SHARED_EXPERTS, DENSE_MLP, FINAL_NORM, HEAD)


@dataclass(frozen=True, kw_only=True, slots=True)
class Component:
    """One kind of component: its size, how often the model has it, and how often a token passes one."""

    name: str
    matrix_params: int
    vector_params: int
    count: int
    passes: int
    matrix_bytes: float  # of one of them
    vector_bytes: int  # of one of them

    @property
    def params(self) -> int:
        return self.matrix_params + self.vector_params

    @property
    def nbytes(self) -> int:
        """The whole bytes of one component of this kind."""
        return math.ceil(self.matrix_bytes) + self.vector_bytes

    @property
    def total_params(self) -> int:
        return self.count * self.params

    @property
    def total_bytes(self) -> int:
        return self.count * self.nbytes

    @property
    def active_params(self) -> int:
        return self.passes * self.params

    @property
    def flops_per_token(self) -> int:
        """The FLOPs of one token in all components of this kind that it passes."""
        return 2 * self.passes * self.matrix_params


@dataclass(frozen=True, slots=True)
class Counted:
    """A component before its bytes are known: parameters of one, how many there are, how many a token passes."""

    name: str
    matrix_params: int
    vector_params: int
    count: int
    passes: int


def sized(kinds: Iterable[Counted], weights: WeightFormat | None, dtype_bytes: int) -> Mapping[str, Component]:
    """Return the components by name, with matrices as wide as `weights` stores them and all else of `dtype_bytes`.

    Raises ConfigError where `weights` names an unknown component.
    """
    unknown = set(weights.components) - set(COMPONENT_NAMES) if weights else set()
    message = f"must be among {', '.join(COMPONENT_NAMES)}, got {', '.join(sorted(unknown))}"
    require(not unknown, "weights.components", message)
    table = {}
    for kind in kinds:
        width = weights.bytes_per_param if weights and kind.name in weights.components else dtype_bytes
        table[kind.name] = Component(
            **asdict(kind), matrix_bytes=kind.matrix_params * width, vector_bytes=kind.vector_params * dtype_bytes
        )
    return MappingProxyType(table)
