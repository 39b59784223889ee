"""Keep the whole model in a host store, and stream its layers in a cycle through device slots.

Torch-free bookkeeping; the bytes move in ops. The host store lays all layers out one after another, parts in the order
of first use, so that the parts behind attention of layer i and those in front of it of layer i+1 are contiguous.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property

from harness.machine.base import H2D, Lane, LaneKind, Machine, Ticket
from harness.memory.occupancy import Places
from harness.memory.placed import ModelParts, PartSource, PlacedPart
from harness.memory.tiers import PAGEABLE, PINNED, Buffer, device_tier
from harness.memory.transfers import CopyShare, CopyWeights, ReadPart, share_of
from harness.model.layout import PartLayout


def attention_parts(source: ModelParts) -> list[PartLayout | None]:
    """Return by layer the weights that attention itself uses, which every device keeps."""
    return [source.family.attention_part(source.spec, layer) for layer in range(source.spec.num_layers)]


def stored_bytes(source: ModelParts, *, layers: bool = True, ends: bool = True) -> int:
    """Return the bytes of all that a `WeightStore` holds, or of its layers alone, or of its ends (embedding and head)
    alone."""
    spec, family = source.spec, source.family
    inner = _layouts(source) if layers else []
    inner += [(part,) for part in attention_parts(source) if part and layers]
    outer = (family.embedding_part(spec), family.head_part(spec)) if ends else ()
    return sum(part.nbytes for parts in (*inner, outer) for part in parts)


def slot_sizes(layers: Iterable[Iterable[PartLayout]]) -> dict[str, int]:
    """Return, by part name, the largest size in any layer: what a device slot needs so that every layer fits."""
    sizes: dict[str, int] = {}
    for parts in layers:
        for part in parts:
            sizes[part.name] = max(sizes.get(part.name, 0), part.nbytes)
    return sizes


def layer_slots(model: ModelParts, num_layers: int, *, experts: bool = True) -> dict[str, int]:
    """Return the bytes of the slots in which a `WeightStream` holds so many layers, by the name that messages give
    them."""
    parts = [[part for part in layer if experts or part.expert is None] for layer in _layouts(model)]
    name = f"{num_layers} layers of weights" + ("" if experts else " without experts")
    return {name: num_layers * sum(slot_sizes(parts).values())}


def expert_slots(model: ModelParts, num_experts: int) -> dict[str, int]:
    """Return the bytes of slots for so many experts, each as large as the largest, by the name that messages give
    them."""
    sizes = [part.nbytes for layer in _layouts(model) for part in layer if part.expert is not None]
    return {f"{num_experts} experts": num_experts * max(sizes, default=0)}


def part_slot(model: ModelParts) -> dict[str, int]:
    """Return the bytes of the place in which a `WeightStream` holds one part at a time, by the name that messages give
    it."""
    return {"the largest part of a layer": max(part.nbytes for layer in _layouts(model) for part in layer)}


def _layouts(model: ModelParts) -> list[tuple[PartLayout, ...]]:
    return [model.family.layer_parts(model.spec, layer) for layer in range(model.spec.num_layers)]


EXPERTS = "experts"  # the part that a layer's experts are together


def _joint(parts: list[PlacedPart]) -> PlacedPart:
    """Return parts that lie one after another as a single one."""
    first, nbytes = parts[0].buffer, sum(part.layout.nbytes for part in parts)
    assert parts[-1].buffer.offset_bytes + parts[-1].layout.nbytes == first.offset_bytes + nbytes, "parts lie together"
    buffer = first.root.sub(f"{first.name} and others", first.offset_bytes, nbytes)
    return PlacedPart(PartLayout(EXPERTS, (), nbytes), buffer, (buffer,))


class WeightStore:
    """Keeps the whole model in one host region: `layers[i][part name]`, `embedding`, `head`. The links read pinned
    memory; what lies in the pageable tier goes through pinned memory first (except what is loaded once, at the start).

    A store of a further GPU's share of the layers takes embedding and head, which are not divided, from the `first`
    store.
    """

    def __init__(
        self, machine: Machine, source: PartSource, *, tier: str = PINNED, first: WeightStore | None = None
    ) -> None:
        spec, family = source.spec, source.family
        layouts = _layouts(source)
        ends = () if first else (family.embedding_part(spec), family.head_part(spec))
        own = attention_parts(source)
        total_bytes = sum(part.nbytes for parts in (*layouts, ends, own) for part in parts if part)
        self.is_pageable = tier == PAGEABLE
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
        self._experts = [
            {part.layout.expert: part for part in parts.values() if part.layout.expert is not None}
            for parts in self.layers
        ]
        self.attention = [place(layer, part) if part else None for layer, part in enumerate(own)]
        if first is None:
            self.embedding, self.head = (place(None, end) for end in ends)
        else:
            self.embedding, self.head = first.embedding, first.head
        machine.drain()

    def part_names(self, layer: int) -> tuple[str, ...]:
        """Return the names of a layer's parts in transfer order; a layer without experts has fewer."""
        return tuple(self.layers[layer])

    def dense(self, layer: int) -> dict[str, PlacedPart]:
        """Return a layer's parts that every token uses, where the host keeps them, in transfer order."""
        return {name: part for name, part in self.layers[layer].items() if part.layout.expert is None}

    def experts(self, layer: int) -> Mapping[int, PlacedPart]:
        """Return a layer's routed experts where the host keeps them, by number; none of a dense layer."""
        return self._experts[layer]

    @cached_property
    def slot_bytes(self) -> dict[str, int]:
        """The bytes of a device slot, by part name: see `slot_sizes`."""
        return slot_sizes([part.layout for part in parts.values()] for parts in self.layers)

    @property
    def layer_bytes(self) -> int:
        """Device memory of one layer's slot."""
        return sum(self.slot_bytes.values())


class Resident:
    """Keeps parts in the memory of GPU `rank` for the whole run, by (layer, name).

    The embedding and the head (layer None) are among them where they are asked for. Of the layers it keeps what a
    strategy wants, and what attention itself uses: that is in `attention` by layer, too, with None where the family has
    none.
    """

    def __init__(
        self,
        machine: Machine,
        store: WeightStore,
        *,
        rank: int = 0,
        embedding: bool = True,
        head: bool = True,
        packet_bytes: int = 1 << 22,
    ) -> None:
        self._machine, self._store, self._packet_bytes = machine, store, packet_bytes
        self._tier, self._h2d = machine.tiers[device_tier(rank)], Lane(LaneKind.H2D, rank)
        self._roots: list[Buffer] = []
        self._parts: dict[tuple[int | None, str], tuple[PlacedPart, Ticket]] = {}
        for name, end, wanted in (("embedding", store.embedding, embedding), ("head", store.head, head)):
            if wanted:
                self._load(name, {(None, name): end})
        own: dict[tuple[int | None, str], PlacedPart] = {}
        own |= {(layer, "attention"): part for layer, part in enumerate(store.attention) if part}
        self._load("weights of attention itself", own)
        self.attention = [self.part(i, "attention") if part else None for i, part in enumerate(store.attention)]
        machine.drain()

    def keep(self, account: str, keys: Iterable[tuple[int, str]]) -> Buffer | None:
        """Load those of these parts that are not there yet, into memory that is reserved under the name `account`.
        Return this memory, for `give_back`; None where all were there.

        Raises MemoryCapacityError.
        """
        stored = {(layer, name): self._store.layers[layer][name] for layer, name in keys}
        root = self._load(account, {key: part for key, part in stored.items() if key not in self})
        self._machine.drain()
        return root

    def give_back(self, kept: Buffer | None) -> None:
        """Give back the memory that `keep` returned, with the parts in it. No op may use them from then on, and no
        stream that was made meanwhile."""
        if kept is not None:
            self._parts = {key: found for key, found in self._parts.items() if found[0].buffer.root is not kept}
            self._roots.remove(kept)
            self._tier.release(kept)

    def _load(self, account: str, stored: Mapping[tuple[int | None, str], PlacedPart]) -> Buffer | None:
        if not stored:
            return None
        root, offset_bytes = self._tier.reserve(account, sum(part.layout.nbytes for part in stored.values())), 0
        self._roots.append(root)
        for (layer, name), part in stored.items():
            target = root.sub(name if layer is None else f"layer {layer} {name}", offset_bytes, part.layout.nbytes)
            offset_bytes += target.nbytes
            copy = CopyWeights(part, target, layer=None, packet_bytes=self._packet_bytes)
            ticket = self._machine.submit(self._h2d, copy)
            self._parts[layer, name] = PlacedPart(part.layout, target, (target,)), ticket
        return root

    def __contains__(self, key: tuple[int | None, str]) -> bool:
        return key in self._parts

    def part(self, layer: int | None, name: str) -> PlacedPart:
        return self._parts[layer, name][0]

    @property
    def parts(self) -> list[PlacedPart]:
        return [part for part, _ in self._parts.values()]

    def ticket(self, layer: int, name: str) -> Ticket:
        """Return the transfer that brought a part, which is over."""
        return self._parts[layer, name][1]

    @property
    def embedding(self) -> PlacedPart:
        assert (None, "embedding") in self, "the embedding is on another GPU"
        return self.part(None, "embedding")

    @property
    def head(self) -> PlacedPart:
        assert (None, "head") in self, "the head is on another GPU"
        return self.part(None, "head")

    def close(self) -> None:
        """Give the device memory back."""
        for root in self._roots:
            self._tier.release(root)


class WeightStream:
    """Streams layers in one endless cycle: index = pass * num_layers + layer, so prefetch never drains at a pass's end.

    `depth` device slots; index i lives in slot i % depth. A part may be requested when the part of index i - depth in
    its place has been released. `release` says, in program order, that the last op reading a part was submitted.

    Without `experts` the stream has every layer's other parts only, for strategies that move single experts. With
    `one_part` it has a single place, large enough for any part: each is requested when the one before it was released.
    As one of `num_shares` the stream of GPU `rank` brings its share of each part only: see `AllGather`.

    Parts that are `resident` when the stream is made have no slot. They are requested and released as all others are,
    and nothing is transferred.

    With `experts_together` the experts of a layer are one part, `EXPERTS`, for pipelines in which nothing depends on a
    single one: it crosses as the experts would one by one, in one op. Where some are resident, or of other sizes than
    their neighbours, they are parts as always.
    """

    def __init__(
        self,
        machine: Machine,
        store: WeightStore,
        *,
        depth: int,
        packet_bytes: int,
        name: str = "weight buffer",
        rank: int = 0,
        num_shares: int = 1,
        experts: bool = True,
        one_part: bool = False,
        resident: Resident | None = None,
        experts_together: bool = False,
    ) -> None:
        assert depth == 1 if one_part else depth >= 1, "a stream needs a slot, and one where it has a part at a time"
        self._rank, self._num_shares = rank, num_shares
        self._h2d = Lane(LaneKind.H2D, rank)
        self._store = store
        self._has_experts = experts
        self._layers = store.layers if experts else [store.dense(layer) for layer in range(len(store.layers))]
        self._part_names = [tuple(parts) for parts in self._layers]  # asked for with every transfer
        self.depth = depth
        self.packet_bytes = packet_bytes
        self._places = Places[tuple[int, str]](machine, device_tier(rank), rank=rank)  # of (index, part name)
        # The parts that are resident now, by (layer, name).
        self._resident: dict[tuple[int, str], tuple[PlacedPart, Ticket]] = {
            (layer, name): (resident.part(layer, name), resident.ticket(layer, name))
            for layer, names in enumerate(self._part_names if resident else ())
            for name in names
            if resident and (layer, name) in resident
        }
        if experts_together:
            assert experts and num_shares == 1, "experts of which each GPU brings a share come one by one"
            self._layers = self._with_experts_together()
            self._part_names = [tuple(parts) for parts in self._layers]
        self._experts_in: dict[tuple[int, Buffer], dict[int, PlacedPart]] = {}  # a place, by the layer that is there
        sizes_bytes = slot_sizes(
            [part.layout for name, part in parts.items() if not self.is_resident(layer, name)]
            for layer, parts in enumerate(self._layers)
        )
        if one_part:
            (place,) = self._places.reserve(name, {"part": max(sizes_bytes.values(), default=0)}).values()
            self._slots = [dict.fromkeys(sizes_bytes, place)]
        else:
            self._slots = [self._places.reserve(f"{name} {slot}", sizes_bytes) for slot in range(depth)]

    def layer(self, index: int) -> int:
        return index % len(self._layers)

    def part_names(self, index: int) -> tuple[str, ...]:
        """Return the names of the parts of the layer at `index`, in transfer order."""
        return self._part_names[self.layer(index)]

    def is_resident(self, index: int, part_name: str) -> bool:
        return (self.layer(index), part_name) in self._resident

    def request_layer(self, index: int) -> list[Ticket]:
        """Request all parts of a layer, in transfer order."""
        return [self.request(index, name) for name in self.part_names(index)]

    def request(self, index: int, part_name: str, *, urgent: bool = False, after: Iterable[Ticket] = ()) -> Ticket:
        """Submit the transfer of one part. For a part that is resident, return the transfer that brought it."""
        if self.is_resident(index, part_name):
            return self._resident[self.layer(index), part_name][1]
        key = (index, part_name)
        target = self._places.take(key, self._slots[index % self.depth][part_name])
        op = self._copy(target, part_name, self.layer(index))
        return self._places.bring(key, self._h2d, op, urgent=urgent, after=after)

    def _copy(self, target: Buffer, part_name: str, layer: int) -> CopyWeights:
        source, packet_bytes = self._layers[layer][part_name], self.packet_bytes
        if self._num_shares == 1:
            pieces = len(self._store.experts(layer)) if part_name == EXPERTS else 1
            return CopyWeights(source, target, layer=layer, packet_bytes=packet_bytes, pieces=pieces)
        share = share_of(source.layout.nbytes, self._rank, self._num_shares)
        return CopyShare(source, target, share=share, layer=layer, packet_bytes=packet_bytes)

    def experts(self, index: int) -> dict[int, PlacedPart]:
        """Return all experts of a requested layer, by number; none for a dense layer."""
        layer = self.layer(index)
        if EXPERTS in self._layers[layer]:
            return self._experts_together(layer, self._places[self._requested(index, EXPERTS)])
        stored = self._store.experts(layer) if self._has_experts else {}
        return {number: self.part(index, part.layout.name) for number, part in stored.items()}

    def _with_experts_together(self) -> list[dict[str, PlacedPart]]:
        """Return the layers' parts, with the experts of each layer as one where that can be."""
        experts = [list(self._store.experts(layer).values()) for layer in range(len(self._layers))]
        sizes = [{part.layout.nbytes for part in parts} for parts in experts]
        kept = [part.layout.name for layer, parts in enumerate(experts) for part in parts
                if self.is_resident(layer, part.layout.name)]  # fmt: skip
        if kept or max(map(len, sizes)) > 1:
            return self._layers
        joint = [{EXPERTS: _joint(parts)} if parts else {} for parts in experts]
        return [self._store.dense(layer) | its for layer, its in enumerate(joint)]

    def _experts_together(self, layer: int, place: Buffer) -> dict[int, PlacedPart]:
        """Return a layer's experts that lie one after another in a place, and have its key."""
        if (found := self._experts_in.get((layer, place))) is None:
            found, at = {}, 0
            for number, stored in self._store.experts(layer).items():
                own = place.sub(stored.layout.name, at, stored.layout.nbytes)
                found[number] = PlacedPart(stored.layout, own, (place,))
                at += own.nbytes
            self._experts_in[layer, place] = found
        return found

    def part(self, index: int, part_name: str) -> PlacedPart:
        """Return the requested part in its device slot; ops that read its keys run after its transfer."""
        if self.is_resident(index, part_name):
            return self._resident[self.layer(index), part_name][0]
        target = self._places[self._requested(index, part_name)]
        return PlacedPart(self._layers[self.layer(index)][part_name].layout, target, (target,))

    def release(self, index: int, part_name: str) -> None:
        """Note that the last reader of this part has been submitted; its place may be requested again."""
        if not self.is_resident(index, part_name):
            self._places.leave(self._requested(index, part_name))

    def _requested(self, index: int, part_name: str) -> tuple[int, str]:
        assert (index, part_name) in self._places, f"{part_name} of {index} is not in the stream"
        return index, part_name

    def advance(self, index: int, part_name: str) -> None:
        """Release a part and request its successor into the same place. With a layer's last part, parts that only the
        successor has are requested as well (a dense layer is followed by one with experts)."""
        self.release(index, part_name)
        successor = index + self.depth
        here, there = self._layers[self.layer(index)], self._layers[self.layer(successor)]
        wanted = [part_name] if part_name in there else []
        if part_name == self.part_names(index)[-1]:
            wanted += [name for name in there if name not in here]
        for name in wanted:
            self.request(successor, name)

    def under_way(self) -> list[list[Ticket]]:
        """Return the stream's own lists of the tickets of each part that is there or on its way, in their order."""
        return self._places.all_tickets()

    def cancel_all(self) -> None:
        """Withdraw transfers that have not started and forget the rest: the stream is empty again."""
        self._places.clear()

    def close(self) -> None:
        """Cancel, wait, and give the device memory back."""
        self._places.close()
