"""A fake checkpoint whose bytes say which layer and part they are, and an op that reads a part's bytes."""

from __future__ import annotations

from types import SimpleNamespace

from harness.machine.base import GPU, Machine, Ticket
from harness.machine.shuffled import ShuffledMachine
from harness.memory.placed import PlacedPart
from harness.model.layout import PartLayout, TensorSource, lay_out
from tests.unit.machine.ops import FreeOp

NUM_LAYERS = 3
PARTS = {"attention_in": 70, "attention_out": 40, "expert.0": 130, "expert.1": 130, "expert.10": 130}


class FakeFamily:
    """Parts of layer 1 are larger than those of the others: slots must hold the largest of each."""

    @staticmethod
    def layer_parts(spec, layer: int) -> tuple[PartLayout, ...]:
        extra = 33 if layer == 1 else 0
        return tuple(part(name, size + extra) for name, size in PARTS.items())

    @staticmethod
    def embedding_part(spec) -> PartLayout:
        return part("embedding", 50)

    @staticmethod
    def attention_part(spec, layer) -> None:
        """Return no part, since attention has no weights of its own here."""

    @staticmethod
    def head_part(spec) -> PartLayout:
        return part("head", 90)


class FakeSource:
    spec = SimpleNamespace(num_layers=NUM_LAYERS)
    family = FakeFamily

    def __init__(self) -> None:
        self.parts_read: list[tuple[int | None, str]] = []

    def read_part(self, layer, layout, out) -> None:
        self.parts_read.append((layer, layout.name))
        out.fill_(content(layer, layout.name))


def part(name: str, size: int) -> PartLayout:
    number = name.removeprefix("expert.") if name.startswith("expert.") else None
    return lay_out(
        name, "float32", [TensorSource("w", (size,), (name,))], expert=None if number is None else int(number)
    )


def content(layer: int | None, name: str) -> int:
    """Return one byte that identifies a part; never 0xFF, which is poison."""
    names = [*PARTS, "embedding", "head"]
    return 16 * (layer if layer is not None else 9) + names.index(name)


class ReadBytes(FreeOp):
    """Value: the distinct bytes of a part, [one] where all of it is there."""

    kind = "read bytes"

    def __init__(self, placed: PlacedPart) -> None:
        self.placed, self.reads = placed, placed.keys

    def run(self, ctx, packet):
        return sorted(set(ctx.tensor(self.placed.buffer, (self.placed.layout.nbytes,), "uint8").tolist()))


def read_bytes(machine: Machine, placed: PlacedPart) -> Ticket:
    return machine.submit(GPU, ReadBytes(placed))


def machine(seed: int = 0, device_bytes: int = 1 << 20, *, poison: bool = True) -> ShuffledMachine:
    capacities = {"device": device_bytes, "pinned": 1 << 20, "host": 1 << 20}
    return ShuffledMachine(capacities_bytes=capacities, seed=seed, poison=poison, eager=0.3)
