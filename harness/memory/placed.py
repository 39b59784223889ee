"""Define a placed part of the weights, and the source that parts are read from. Torch-free."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from harness.memory.tiers import Buffer

if TYPE_CHECKING:
    from harness.model.layout import PartLayout
    from harness.model.spec import ModelSpec


@dataclass(frozen=True, slots=True, eq=False)
class PlacedPart:
    """A part's tensors in a buffer; an op that uses them reads `keys`."""

    layout: PartLayout
    buffer: Buffer
    keys: tuple[Hashable, ...]


class ModelParts(Protocol):
    """Says which parts a model has: `family` lays them out for `spec`. Sources of weights and engines both do."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def family(self) -> Any: ...


class PartSource(ModelParts, Protocol):
    """Provides what the weight store reads: the parts of a checkpoint."""

    def read_part(self, layer: int | None, part: PartLayout, out: Any) -> None: ...


class ShardedSource(PartSource, Protocol):
    """A source of which several GPUs can have a share each."""

    def shard(self, rank: int, num_ranks: int) -> PartSource: ...
