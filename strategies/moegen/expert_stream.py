"""Bring experts one after another, in the order in which they run, across layers and passes."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from harness.memory.expert_slots import ExpertSlots, Key
from harness.memory.placed import PlacedPart
from harness.memory.weights import Resident, WeightStore


class NoReplacement:
    """Chooses no victim: the stream gives each slot up by itself, behind the expert's last reader."""

    def used(self, key: Key) -> None:
        """Do nothing, since no choice follows."""

    def victim(self, candidates: Collection[Key], wanted: Key) -> Key:
        raise AssertionError(f"nothing is evicted for another expert, asked among {candidates}")

    def lost(self, key: Key) -> None:
        """Do nothing, as in `used`."""


class ExpertStream:
    """Streams experts through slots, in an endless cycle of layers: index = pass * num_layers + layer.

    Whenever a slot is free, the next expert in the order of use is requested into it: of the current layer those that
    have tokens, of later layers all, as long as it is `ahead`. Otherwise nothing is requested before the router has
    chosen, and then ahead of what else is queued. In a layer: `begin` once the routing is known, then `take` and `done`
    for each expert that has tokens, ascending. Resident experts are taken where they lie. `slots` is None where no
    expert is streamed.
    """

    def __init__(self, store: WeightStore, resident: Resident, slots: ExpertSlots | None) -> None:
        self._resident, self._slots = resident, slots
        self._num_layers = len(store.layers)
        self._names = [
            {number: part.layout.name for number, part in store.experts(layer).items()}
            for layer in range(self._num_layers)
        ]
        self._streamed = [
            [number for number, name in names.items() if (layer, name) not in resident]
            for layer, names in enumerate(self._names)
        ]
        self._index = -1  # of the layer whose routing was seen last
        self._wanted: Sequence[int] = ()  # experts of that layer to bring
        self._next = (0, 0)  # index of a layer, and which of its experts to request next
        self._ahead = True

    def look_ahead(self, ahead: bool) -> None:
        """Say, at a pass's start, whether experts are requested before their layer's routing is known."""
        self._ahead = ahead
        self._fill()

    def begin(self, index: int, with_tokens: Sequence[int]) -> None:
        """Take note of the experts that have tokens in the layer at `index`. Prefetches of its others are withdrawn, or
        dropped where they have begun."""
        layer = index % self._num_layers
        at, position = self._next if self._next[0] >= index else (index, 0)
        brought = self._streamed[layer] if at > index else self._streamed[layer][:position]
        wanted = set(with_tokens)
        if self._slots is not None:
            for expert in brought:
                if expert not in wanted and (layer, expert) in self._slots:
                    self._slots.evict(layer, expert)
        self._index, self._wanted = index, [e for e in self._streamed[layer][len(brought) :] if e in wanted]
        if at == index:
            self._next = (index, 0)
        self._fill()

    def take(self, expert: int) -> PlacedPart:
        """Return an expert of the current layer on the device, and hold it."""
        layer = self._index % self._num_layers
        name = self._names[layer][expert]
        if (layer, name) in self._resident:
            return self._resident.part(layer, name)
        assert self._slots is not None and (layer, expert) in self._slots, f"expert {expert} was not requested in time"
        return self._slots.acquire(layer, expert)

    def done(self, expert: int) -> None:
        """Say that the last reader of an expert was submitted: its slot goes to the next one."""
        layer = self._index % self._num_layers
        if self._slots is not None and (layer, self._names[layer][expert]) not in self._resident:
            self._slots.release(layer, expert)
            self._slots.evict(layer, expert)
            self._fill()

    def cancel_all(self) -> None:
        """Withdraw the transfers that have not begun: nothing more is wanted."""
        if self._slots is not None:
            self._slots.cancel_all()

    def _fill(self) -> None:
        """Request experts into free slots."""
        if self._slots is None:
            return
        while self._slots.num_free and (key := self._wants()) is not None and key not in self._slots:
            if not self._slots.prefetch(*key, evict=False, urgent=not self._ahead):
                return
            self._next = (self._next[0], self._next[1] + 1)

    def _wants(self) -> Key | None:
        """Return the next expert to request; None where its layer's routing has to be known first."""
        index, position = self._next
        for _ in range(self._num_layers + 1):
            layer = index % self._num_layers
            experts = self._wanted if index == self._index else self._streamed[layer]
            if index != self._index and not self._ahead:
                return None
            if position < len(experts):
                self._next = (index, position)
                return layer, experts[position]
            index, position = index + 1, 0
        return None
