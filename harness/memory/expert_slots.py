"""Hold single experts in device memory, in slots by (layer, expert) that are fetched into, held, withdrawn and evicted.

Torch-free bookkeeping; the bytes move in ops. A strategy decides which expert is fetched when, and a `Replacement`
which one gives its place up. An expert is overwritten after its last submitted reader, by the order of keys. An expert
that is acquired and not yet released is never chosen, so that readers may still be submitted.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from harness.machine.base import Lane, LaneKind, Machine, Ticket
from harness.memory.occupancy import Places
from harness.memory.placed import PlacedPart
from harness.memory.tiers import Buffer, device_tier
from harness.memory.transfers import CopyWeights
from harness.memory.weights import WeightStore

Key = tuple[int, int]  # (layer, expert)


class Replacement(Protocol):
    """Chooses the expert that gives its slot up, from what it has been told of their use."""

    def used(self, key: Key) -> None:
        """Note that a strategy acquired or prefetched the expert."""

    def victim(self, candidates: Collection[Key], wanted: Key) -> Key:
        """Return one of the candidates, of which there is at least one; it is gone then. Its place is for `wanted`,
        which `used` is told next."""

    def lost(self, key: Key) -> None:
        """Note that an expert is gone that was not chosen."""


class ExpertSlots:
    """Holds `num_slots` slots in the memory of GPU `rank`, each large enough for any expert of the model.

    `hits`, `misses`, `evictions` and `withdrawals` count since the start, for a strategy's records: a hit is an expert
    that is there, or on its way, when it is acquired. A queued prefetch that is withdrawn because its expert has become
    urgent counts as a withdrawal, and the expert as a miss.
    """

    withdrawable = True  # whether a transfer that has not begun can be taken back

    def __init__(
        self,
        machine: Machine,
        store: WeightStore,
        *,
        num_slots: int,
        packet_bytes: int,
        replacement: Replacement,
        name: str = "expert slots",
        rank: int = 0,
    ) -> None:
        assert num_slots >= 1, "an expert needs a slot"
        self._store, self._replacement = store, replacement
        self._h2d = Lane(LaneKind.H2D, rank)
        self._packet_bytes, slot_bytes = packet_bytes, expert_slot_bytes(store)
        self.packet_share = min(1.0, packet_bytes / slot_bytes)  # the share of a slot that one packet fills
        self._places = Places[Key](machine, device_tier(rank), rank=rank)
        self._places.reserve(name, dict.fromkeys(range(num_slots), slot_bytes))
        self.num_slots = num_slots
        self.hits = self.misses = self.evictions = self.withdrawals = 0
        self.spared: Collection[Key] = ()  # experts that lose their slot to none that is prefetched, and to others last

    @property
    def num_free(self) -> int:
        """The slots that have no expert."""
        return self._places.num_free

    def __contains__(self, key: Key) -> bool:
        """Tell whether the expert is in a slot or on its way there."""
        return key in self._places

    def arrived(self, key: Key) -> bool:
        """Tell whether the expert's transfer is over, as of the machine's last wait."""
        return key in self._places and self._places.tickets(key)[-1].done

    def tickets(self, layer: int, expert: int) -> list[Ticket]:
        """Return the transfers that bring an expert that is there or on its way, in their order."""
        return self._places.tickets((layer, expert))

    def acquire(self, layer: int, expert: int, *, urgent: bool = False) -> PlacedPart:
        """Return the expert on the device and hold it until `release`; it is fetched if it is not there.

        An `urgent` expert overtakes what is queued on the link, even where its own prefetch stands in the queue. Ops
        that read its keys run after its transfer. AssertionError where every slot is held.
        """
        key = (layer, expert)
        if urgent and key in self._places and not self._places.tickets(key)[0].urgent:
            self.withdraw(*key)  # it has not begun: fetched again below, ahead of what is queued
        if key in self._places:
            self.hits += 1
        else:
            self.misses += 1
            self._fetch(key, urgent=urgent)
        self._replacement.used(key)
        self._places.hold(key)
        buffer = self._places[key]
        return PlacedPart(self._store.experts(layer)[expert].layout, buffer, (buffer,))

    def release(self, layer: int, expert: int) -> None:
        """Say that the last reader of an acquired expert was submitted. An expert that is never released stays for
        good."""
        self._places.let_go((layer, expert))

    def prefetch(self, layer: int, expert: int, *, evict: bool = True, urgent: bool = False) -> bool:
        """Bring an expert that may be wanted, and return True if it is there or on its way. The result is False where
        no slot can be had: all are held, or, without `evict`, none is free. An `urgent` one overtakes what is queued
        on the link."""
        key = (layer, expert)
        if key not in self._places:
            if not self._places.num_free and not (evict and self._places.idle(but=self.spared)):
                return False
            self._fetch(key, urgent=urgent)
        self._replacement.used(key)
        return True

    def withdraw(self, layer: int, expert: int) -> bool:
        """Take a prefetch back whose transfer has not begun; its slot is free again. False where it is too late, or the
        expert is held or not there."""
        key = (layer, expert)
        withdrawn = self.withdrawable and key in self._places and self._places.withdraw(key)
        self.withdrawals += withdrawn
        if withdrawn:
            self._replacement.lost(key)
        return withdrawn

    def evict(self, layer: int, expert: int) -> None:
        """Free the slot of an expert that nobody holds."""
        self._leave((layer, expert))
        self._replacement.lost((layer, expert))

    def evict_idle(self) -> None:
        """Free the slots of all experts that nobody holds."""
        for key in list(self._places.idle()):
            self.evict(*key)

    def cancel_all(self) -> None:
        """Withdraw the transfers that have not begun: nothing more is wanted."""
        for key in reversed(list(self._places.idle())):
            self.withdraw(*key)

    def close(self) -> None:
        """Cancel, wait, and give the device memory back."""
        self._places.close()

    def _fetch(self, key: Key, *, urgent: bool) -> None:
        """Bring an expert into a free slot, or into that of a victim."""
        layer, expert = key
        if not self._places.num_free:
            candidates = self._places.idle(but=self.spared) or self._places.idle()
            assert candidates, f"all {self.num_slots} expert slots are held"
            self._leave(self._replacement.victim(candidates, key))
        self._bring(key, self._store.experts(layer)[expert], self._places.take(key), urgent=urgent)

    def _leave(self, key: Key) -> None:
        assert self._places.is_idle(key), f"expert {key[1]} of layer {key[0]} cannot be evicted"
        if not (self.withdrawable and self._places.withdraw(key)):
            self._places.leave(key)
        self.evictions += 1

    def _bring(self, key: Key, source: PlacedPart, target: Buffer, *, urgent: bool) -> None:
        """Submit an expert's transfer."""
        copy = CopyWeights(source, target, layer=key[0], packet_bytes=self._packet_bytes)
        self._places.bring(key, self._h2d, copy, urgent=urgent)


def expert_slot_bytes(store: WeightStore) -> int:
    """Return the bytes of a slot that any expert of the model fits. ValueError where no layer has experts."""
    layers = range(len(store.layers))
    sizes = [part.layout.nbytes for layer in layers for part in store.experts(layer).values()]
    if not sizes:
        raise ValueError("expert slots need a model with routed experts; every layer of this one is dense")
    return max(sizes)


def num_slots_that_fit(store: WeightStore, free_bytes: int) -> int:
    """Return how many experts fit in `free_bytes`, at most as many as the model has."""
    num_experts = sum(len(store.experts(layer)) for layer in range(len(store.layers)))
    return min(num_experts, max(free_bytes, 0) // expert_slot_bytes(store))
