"""Stream weights in pages: each layer's streamed part is cut into equal byte ranges, which go pageable -> pinned ->
device.

Torch-free. MoE-Lightning §4.1 and A.1: small transfers slip in between pages, and a page is staged in pinned memory
while the one before it goes over the link. Layers form the endless cyclic stream of `WeightStream`: index = pass *
layers + layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import TypeVar

from harness.machine.base import Lane, LaneKind, Machine, Ticket
from harness.memory.occupancy import Places
from harness.memory.placed import PlacedPart
from harness.memory.tiers import PINNED, Buffer, device_tier
from harness.memory.transfers import CopyPage, StagePage
from harness.memory.weights import Resident, WeightStore
from harness.model.layout import ALIGNMENT_BYTES

_Page = tuple[int, int]  # (index in the stream, number within the layer)
_Piece = tuple[Buffer, int]  # memory, and how many of its first bytes
_SLOTS = 2  # each for a layer, on the device and in pinned memory: one is read while the other is written
_Asked = TypeVar("_Asked")
_Made = TypeVar("_Made")


class _WhenAsked(dict[_Asked, _Made]):
    """Makes each value when it is first asked for: a plan asks for few of a model's thousands of parts."""

    def __init__(self, make: Callable[[_Asked], _Made]) -> None:
        self._make = make

    def __missing__(self, key: _Asked) -> _Made:
        self[key] = made = self._make(key)
        return made


class PagedWeights:
    """Streams layers through slots on the device, in `num_pages` pages a layer.

    Parts that are `resident` when the stream is made are not streamed. To these it adds, until it is closed, of every
    layer whole parts worth at most `resident_share` of its bytes: the last ones (experts), so that {norm, QKV} lies in
    the earliest pages and a layer can be begun before its last page has landed. A `PlacedPart` reads the keys of all
    pages that it lies in. Without `experts` a layer is all but its experts: for passes in which these are computed on
    the host. `prefix` begins the names under which memory is reserved.

    All layers share one page size, which the largest layer decides: a smaller layer has fewer pages. Pages go in order,
    and each once: `stage` and `load` request what is missing up to the page they name. Nothing is staged where the
    store itself is pinned. `release` says, in program order, that the last op reading a layer has been submitted. The
    device is that of GPU `rank`, whose stream has only the given `layers` where it is one stage of several.
    """

    def __init__(
        self,
        machine: Machine,
        store: WeightStore,
        resident: Resident,
        *,
        num_pages: int,
        packet_bytes: int,
        resident_share: float = 0.0,
        rank: int = 0,
        layers: range | None = None,
        experts: bool = True,
        prefix: str = "",
    ) -> None:
        assert num_pages >= 1, "a layer has at least one page"
        self._store, self._resident = store, resident
        self._tier = device_tier(rank)
        self._h2d, self._pin = Lane(LaneKind.H2D, rank), Lane(LaneKind.PIN, rank)
        self.num_pages, self._packet_bytes = num_pages, packet_bytes
        self._layers = layers = range(len(store.layers)) if layers is None else layers
        self._names = {layer: part_names(store, layer, experts=experts) for layer in layers}
        wanted = {layer: streamed_parts(store, layer, resident_share, experts=experts) for layer in layers}
        kept = [(layer, name) for layer, names in self._names.items() for name in names if name not in wanted[layer]]
        self._added = resident.keep("resident layer weights", kept)
        self._streamed = {i: [name for name in names if (i, name) not in resident] for i, names in wanted.items()}
        self.slot_bytes = max(self._bytes(layer) for layer in layers)
        self.page_bytes = page_bytes(self.slot_bytes, num_pages)
        self._sources = _WhenAsked(self._cut)
        sizes_bytes = dict.fromkeys(range(-(-self.slot_bytes // self.page_bytes)), self.page_bytes)
        self._device = Places[_Page](machine, self._tier, rank=rank)
        self._device_pages = [self._device.reserve(f"{prefix}weight pages {n}", sizes_bytes) for n in range(_SLOTS)]
        self._staging = Places[_Page](machine, PINNED, rank=rank) if store.is_pageable else None
        self._staging_pages = [
            self._staging.reserve(f"{prefix}staged pages {n}", sizes_bytes) for n in range(_SLOTS) if self._staging
        ]
        self._parts = _WhenAsked[tuple[int, int], dict[str, tuple[PlacedPart, int]]](lambda key: self._place(*key))
        self._experts: dict[tuple[int, int], tuple[dict[int, PlacedPart], int]] = {}  # by slot and layer; the last page
        # Pages of each layer in the stream, by its index, until its release.
        self._num_staged, self._num_loaded = Counter[int](), Counter[int]()

    @property
    def resident_bytes(self) -> int:
        """The bytes of the parts that are not streamed, of all layers together."""
        parts = self._store.layers
        return sum(
            parts[layer][name].layout.nbytes
            for layer, names in self._names.items()
            for name in names
            if name not in self._streamed[layer]
        )

    def num_pages_of(self, index: int) -> int:
        return len(self._sources[self._layer(index)])

    def stage(self, index: int, page: int, *, after: Iterable[Ticket] = ()) -> list[Ticket]:
        """Stage the pages up to this one, from pageable to pinned memory (CGOPipe's W_CtoPin), behind what is named.

        Returns the tickets of what is submitted for that."""
        tickets: list[Ticket] = []
        if self._staging is not None and page >= self._num_staged[index]:
            for number in self._missing(self._num_staged, index, page):
                key = (index, number)
                self._staging.take(key, self._staging_pages[index % _SLOTS][number])
                tickets += self._bring(self._staging, key, self._pin, StagePage, self._pieces(key), after)
        return tickets

    def load(self, index: int, page: int) -> None:
        """Load the pages up to this one, from pinned memory to the device (CGOPipe's W_PinToG)."""
        if page < self._num_loaded[index]:
            return
        self.stage(index, page)
        for number in self._missing(self._num_loaded, index, page):
            key = (index, number)
            staged = self._staging.tickets(key) if self._staging else ()
            self._device.take(key, self._device_pages[index % _SLOTS][number], tickets=staged)
            pieces = self._pieces(key)
            if self._staging:
                pieces = [(self._staging[key], sum(nbytes for _, nbytes in pieces))]
            self._bring(self._device, key, self._h2d, CopyPage, pieces)
            if self._staging:
                self._staging.leave(key)

    def _missing(self, requested: Counter[int], index: int, page: int) -> range:
        """Return the pages up to this one that were not requested yet, and record them as requested."""
        first, stop = requested[index], min(page + 1, self.num_pages_of(index))
        requested[index] = max(first, stop)
        return range(first, stop)

    def part(self, index: int, name: str) -> PlacedPart:
        """Return a part on the device, resident or in its slot. Its pages are requested now if they were not yet."""
        layer = self._layer(index)
        places = self._parts[index % _SLOTS, layer]
        if name not in places:
            return self._resident.part(layer, name)
        placed, last_page = places[name]
        self.load(index, last_page)
        return placed

    def experts(self, index: int) -> dict[int, PlacedPart]:
        """Return all experts of a layer, by number; none for a dense layer. Who gets them does not change them."""
        slot, layer = index % _SLOTS, self._layer(index)
        if (found := self._experts.get((slot, layer))) is None:
            names = {number: part.layout.name for number, part in self._store.experts(layer).items()}
            places = self._parts[slot, layer]
            pages = [places[name][1] for name in names.values() if name in places]
            parts = {number: self.part(index, name) for number, name in names.items()}
            found = self._experts[slot, layer] = parts, max(pages, default=-1)
        parts, last_page = found
        self.load(index, last_page)
        return parts

    def release(self, index: int) -> None:
        """Note that the last reader of this layer has been submitted; its place may be written again."""
        pages = range(self.num_pages_of(index))
        self._num_staged.pop(index, None)
        loaded = self._num_loaded.pop(index, 0)
        assert loaded == len(pages), f"layer {index} of the stream was not loaded to its end"
        for number in pages:
            self._device.leave((index, number))

    def cancel_all(self) -> None:
        """Withdraw transfers that have not started and forget the rest: the stream is empty again."""
        for places in filter(None, (self._staging, self._device)):  # what was loaded follows what was staged
            places.clear()
        self._num_staged.clear()
        self._num_loaded.clear()

    def close(self) -> None:
        """Cancel, wait, and give all memory back, that of the parts that it made resident as well."""
        self.cancel_all()
        for places in filter(None, (self._staging, self._device)):
            places.close()
        self._resident.give_back(self._added)

    def _layer(self, index: int) -> int:
        return self._layers[index % len(self._layers)]

    def _pieces(self, key: _Page) -> list[_Piece]:
        index, number = key
        return self._sources[self._layer(index)][number]

    def _bring(
        self,
        places: Places[_Page],
        key: _Page,
        lane: Lane,
        kind: type[CopyPage],
        pieces: list[_Piece],
        after: Iterable[Ticket] = (),
    ) -> list[Ticket]:
        """Submit the transfers of a page's pieces, one after another into its place."""
        page, at, tickets = places[key], 0, []
        for source, nbytes in pieces:
            target = page if len(pieces) == 1 else page.sub(f"from byte {at}", at, nbytes)
            op = kind(source, target, nbytes=nbytes, layer=self._layer(key[0]), packet_bytes=self._packet_bytes)
            tickets.append(places.bring(key, lane, op, after=after))
            at += nbytes
        return tickets

    def _bytes(self, layer: int) -> int:
        return sum(self._store.layers[layer][name].layout.nbytes for name in self._streamed[layer])

    def _cut(self, layer: int) -> list[list[_Piece]]:
        """Return the layer's pages in the store. Parts lie one after another there, so that a page is one piece, but
        for those that resident parts lie amid."""
        pages: list[list[_Piece]] = []
        room_bytes = 0  # in the last page
        for run in self._runs(layer):
            start, stop = run.offset_bytes, run.offset_bytes + run.nbytes
            while start < stop:
                if not room_bytes:
                    pages.append([])
                    room_bytes = self.page_bytes
                nbytes = min(room_bytes, stop - start)
                pages[-1].append((run.root.sub(f"layer {layer} from byte {start}", start, nbytes), nbytes))
                start, room_bytes = start + nbytes, room_bytes - nbytes
        return pages

    def _runs(self, layer: int) -> list[Buffer]:
        """Return the streamed parts of a layer in the store; those that lie next to each other are one buffer."""
        runs: list[Buffer] = []
        for name in self._streamed[layer]:
            part = self._store.layers[layer][name].buffer
            last = runs[-1] if runs else None
            if last is not None and last.offset_bytes + last.nbytes == part.offset_bytes:
                start, nbytes = last.offset_bytes, last.nbytes + part.nbytes
                runs[-1] = part.root.sub(f"layer {layer} from byte {start}", start, nbytes)
            else:
                runs.append(part)
        return runs

    def _place(self, slot: int, layer: int) -> dict[str, tuple[PlacedPart, int]]:
        """Return a layer's page table: where each streamed part lies in a slot, and the last page of each."""
        placed, offset_bytes, pages = {}, 0, self._device_pages[slot]
        for name in self._streamed[layer]:
            layout = self._store.layers[layer][name].layout
            first, last = offset_bytes // self.page_bytes, (offset_bytes + layout.nbytes - 1) // self.page_bytes
            buffer = Buffer(self._tier, f"{name} of layer {layer}", layout.nbytes, pages[0].root, offset_bytes)
            placed[name] = (PlacedPart(layout, buffer, tuple(pages[number] for number in range(first, last + 1))), last)
            offset_bytes += layout.nbytes
        return placed


def part_names(store: WeightStore, layer: int, *, experts: bool = True) -> list[str]:
    """Return the names of a layer's parts in transfer order; without `experts` those of the other parts only, which
    come first."""
    return list(store.part_names(layer) if experts else store.dense(layer))


def streamed_parts(store: WeightStore, layer: int, resident_share: float, *, experts: bool = True) -> tuple[str, ...]:
    """Return all parts of a layer except those at its end that fit in `resident_share` of its bytes."""
    names, parts = part_names(store, layer, experts=experts), store.layers[layer]
    allowed_bytes = resident_share * sum(parts[name].layout.nbytes for name in names)
    while names and parts[names[-1]].layout.nbytes <= allowed_bytes:
        allowed_bytes -= parts[names.pop()].layout.nbytes
    return tuple(names)


def kept_share(store: WeightStore, resident_share: float, *, experts: bool = True) -> float:
    """Return the share of a layer's bytes that really stays on the device, in whole parts. `resident_share` may be no
    sum of whole parts. The result is that of the layer that keeps the least."""

    def kept(layer: int) -> float:
        sizes = {name: store.layers[layer][name].layout.nbytes for name in part_names(store, layer, experts=experts)}
        streamed = sum(sizes[name] for name in streamed_parts(store, layer, resident_share, experts=experts))
        return 1 - streamed / sum(sizes.values())

    return min(kept(layer) for layer in range(len(store.layers)))


def page_bytes(slot_bytes: int, num_pages: int) -> int:
    """Return the bytes of a page, where pages are equal and rounded up to whole cache lines."""
    return max(1, -(-slot_bytes // (num_pages * ALIGNMENT_BYTES))) * ALIGNMENT_BYTES
