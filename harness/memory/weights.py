"""Weights: the host store that holds the whole model, and the cyclic stream of layers through device slots.

Torch-free bookkeeping; the bytes move in ops. The host store lays all layers out one after another, parts in the order
of first use, so that the parts behind attention of layer i and those in front of it of layer i+1 are contiguous.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from harness.machine.base import GPU, H2D, Machine, Ticket
from harness.memory.ops import CopyWeights, Poison, ReadPart
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


class PartSource(Protocol):
    """What the store reads from: a checkpoint."""

    spec: ModelSpec
    family: Any

    def read_part(self, layer: int | None, part: PartLayout, out: Any) -> None: ...


class WeightStore:
    """The whole model in one host region: `layers[i][part name]`, `embedding`, `head`."""

    def __init__(self, machine: Machine, source: PartSource, *, tier: str = "pinned") -> None:
        spec, family = source.spec, source.family
        layouts = [family.layer_parts(spec, layer) for layer in range(spec.num_layers)]
        ends = (family.embedding_part(spec), family.head_part(spec))
        total_bytes = sum(part.nbytes for parts in (*layouts, ends) for part in parts)
        root = machine.tiers[tier].reserve("weights", total_bytes)
        offset_bytes = 0

        def place(layer: int | None, layout: PartLayout) -> PlacedPart:
            nonlocal offset_bytes
            name = layout.name if layer is None else f"layer {layer} {layout.name}"
            buffer = root.sub(name, offset_bytes, layout.nbytes)
            offset_bytes += layout.nbytes
            machine.submit(H2D, ReadPart(source, layer, layout, buffer))
            return PlacedPart(layout, buffer, (buffer,))

        self.layers = [{p.name: place(layer, p) for p in parts} for layer, parts in enumerate(layouts)]
        self.embedding, self.head = place(None, ends[0]), place(None, ends[1])
        machine.drain()

    @property
    def part_names(self) -> tuple[str, ...]:
        """Parts of a layer in transfer order."""
        return tuple(self.layers[0])

    @property
    def layer_bytes(self) -> int:
        return max(sum(p.layout.nbytes for p in parts.values()) for parts in self.layers)


class Resident:
    """Parts that stay in device memory for the whole run."""

    def __init__(self, machine: Machine, store: WeightStore) -> None:
        self.embedding = self._load(machine, store.embedding)
        self.head = self._load(machine, store.head)
        machine.drain()

    @staticmethod
    def _load(machine: Machine, source: PlacedPart) -> PlacedPart:
        buffer = machine.tiers["device"].reserve(source.layout.name, source.layout.nbytes)
        machine.submit(H2D, CopyWeights(source, buffer, layer=None, packet_bytes=1 << 22))
        return PlacedPart(source.layout, buffer, (buffer,))


class WeightStream:
    """Layers as one endless cyclic stream: index = pass * num_layers + layer, so prefetch never drains at a pass's end.

    `depth` device slots; index i lives in slot i % depth. A part may be requested when the part of index i - depth in
    its place has been released. `release` says, in program order, that the last op reading a part was submitted.
    """

    def __init__(
        self, machine: Machine, store: WeightStore, *, depth: int, packet_bytes: int, name: str = "weight buffer"
    ) -> None:
        assert depth >= 1, "a stream needs a slot"
        self._machine = machine
        self._store = store
        self.depth = depth
        self.packet_bytes = packet_bytes
        self._occupant: dict[tuple[int, str], tuple[int, Ticket]] = {}  # (slot, part) -> (index, its transfer)
        self._slots = [self._reserve_slot(f"{name} {slot}") for slot in range(depth)]

    def _reserve_slot(self, name: str) -> dict[str, Buffer]:
        sizes: dict[str, int] = {}
        for parts in self._store.layers:
            for part_name, part in parts.items():
                sizes[part_name] = max(sizes.get(part_name, 0), part.layout.nbytes)
        root = self._machine.tiers["device"].reserve(name, sum(sizes.values()))
        slot, offset_bytes = {}, 0
        for part_name, nbytes in sizes.items():
            slot[part_name] = root.sub(part_name, offset_bytes, nbytes)
            offset_bytes += nbytes
        return slot

    def layer(self, index: int) -> int:
        return index % len(self._store.layers)

    def request(self, index: int, part_name: str, *, urgent: bool = False, after: Iterable[Ticket] = ()) -> Ticket:
        """Submit the transfer of one part."""
        place = (index % self.depth, part_name)
        assert place not in self._occupant, f"{part_name} of {self._occupant[place][0]} was not released"
        layer = self.layer(index)
        target = self._slots[place[0]][part_name]
        op = CopyWeights(self._store.layers[layer][part_name], target, layer=layer, packet_bytes=self.packet_bytes)
        ticket = self._machine.submit(H2D, op, urgent=urgent, after=after)
        self._occupant[place] = (index, ticket)
        return ticket

    def experts(self, index: int) -> dict[int, PlacedPart]:
        """All experts of a requested layer, by number."""
        names = [name for name in self._store.part_names if name.startswith("expert.")]
        return {int(name.split(".")[1]): self.part(index, name) for name in names}

    def part(self, index: int, part_name: str) -> PlacedPart:
        """The requested part in its device slot; ops that read its keys run after its transfer."""
        target = self._slots[self._place(index, part_name)[0]][part_name]
        return PlacedPart(self._store.layers[self.layer(index)][part_name].layout, target, (target,))

    def release(self, index: int, part_name: str) -> None:
        """The last reader of this part has been submitted; its place may be requested again."""
        place = self._place(index, part_name)
        del self._occupant[place]
        if self._machine.poisons:
            self._machine.submit(GPU, Poison(self._slots[place[0]][part_name]))

    def _place(self, index: int, part_name: str) -> tuple[int, str]:
        """Where a requested part lies: (slot, part)."""
        place = (index % self.depth, part_name)
        occupant = self._occupant.get(place)
        assert occupant is not None and occupant[0] == index, f"{part_name} of {index} is not in the stream"
        return place

    def advance(self, index: int, part_name: str) -> Ticket:
        """Release a part and request its successor into the same place."""
        self.release(index, part_name)
        return self.request(index + self.depth, part_name)

    def cancel_all(self) -> None:
        """Withdraw transfers that have not started and forget the rest: the stream is empty again."""
        for _, ticket in reversed(self._occupant.values()):
            self._machine.cancel(ticket)
        self._occupant.clear()

    def close(self) -> None:
        """Cancel, wait, and give the device memory back."""
        self.cancel_all()
        self._machine.drain()
        for slot in self._slots:
            self._machine.tiers["device"].release(next(iter(slot.values())).root)
        self._slots.clear()
