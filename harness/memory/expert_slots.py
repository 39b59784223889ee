"""Device memory for single experts: slots by (layer, expert) that are fetched into, held, withdrawn and evicted.

Torch-free bookkeeping; the bytes move in ops. A strategy decides which expert is fetched when, a `Replacement` which
one gives its place up. Whoever is overwritten is so after its last submitted reader, by the order of keys; what is
acquired and not yet released is never chosen, so that a reader may still be submitted.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from harness.machine.base import Lane, LaneKind, Machine, Ticket
from harness.memory.ops import CopyWeights, Poison
from harness.memory.tiers import Buffer, device_tier
from harness.memory.weights import PlacedPart, WeightStore

Key = tuple[int, int]  # (layer, expert)


class Replacement(Protocol):
    """Chooses the expert that gives its slot up, from what it has been told of their use."""

    def used(self, key: Key) -> None:
        """Note that a strategy acquired or prefetched the expert."""

    def victim(self, candidates: Collection[Key]) -> Key:
        """Return one of the candidates, of which there is at least one; it is gone then."""


class ExpertSlots:
    """Slots for `num_slots` experts in the memory of GPU `rank`, each large enough for any expert of the model.

    `hits`, `misses`, `evictions` and `withdrawals` count since the start, for a strategy's records: a hit is an expert
    that is there, or on its way, when it is acquired.
    """

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
        self._machine, self._store, self._replacement = machine, store, replacement
        self._h2d, self._gpu = Lane(LaneKind.H2D, rank), Lane(LaneKind.GPU, rank)
        self._packet_bytes = packet_bytes
        size = expert_slot_bytes(store)
        self._tier = machine.tiers[device_tier(rank)]
        self._root = self._tier.reserve(name, num_slots * size)
        self._slots = [self._root.sub(str(slot), slot * size, size) for slot in range(num_slots)]
        self._free = list(reversed(self._slots))
        self._placed: dict[Key, tuple[Buffer, Ticket]] = {}  # the slot, and the transfer into it
        self._holds: dict[Key, int] = {}
        self.hits = self.misses = self.evictions = self.withdrawals = 0

    def __contains__(self, key: Key) -> bool:
        """Tell whether the expert is in a slot or on its way there."""
        return key in self._placed

    def arrived(self, key: Key) -> bool:
        """Tell whether the expert's transfer is over, as of the machine's last wait."""
        return key in self._placed and self._placed[key][1].done

    def acquire(self, layer: int, expert: int, *, urgent: bool = False) -> PlacedPart:
        """Return the expert on the device and hold it until `release`; it is fetched if it is not there.

        Ops that read its keys run after its transfer. AssertionError where every slot is held.
        """
        key = (layer, expert)
        if key in self._placed:
            self.hits += 1
        else:
            self.misses += 1
            self._fetch(key, self._vacated_slot(), urgent=urgent)
        self._replacement.used(key)
        self._holds[key] = self._holds.get(key, 0) + 1
        return self._part(key)

    def release(self, layer: int, expert: int) -> None:
        """Say that the last reader of an acquired expert was submitted. One that is never released stays for good."""
        key = (layer, expert)
        assert self._holds.get(key, 0) > 0, f"expert {expert} of layer {layer} is not held"
        self._holds[key] -= 1
        if not self._holds[key]:
            del self._holds[key]

    def prefetch(self, layer: int, expert: int, *, evict: bool = True) -> bool:
        """Bring an expert that may be wanted; True if it is there or on its way. False where no slot can be had: all
        are held, or, without `evict`, none is free."""
        key = (layer, expert)
        if key not in self._placed:
            if not self._free and not (evict and len(self._holds) < len(self._slots)):
                return False
            self._fetch(key, self._vacated_slot(), urgent=False)
        self._replacement.used(key)
        return True

    def withdraw(self, layer: int, expert: int) -> bool:
        """Take a prefetch back whose transfer has not begun; its slot is free again. False where it is too late, or the
        expert is held or not there."""
        key = (layer, expert)
        if key not in self._placed or key in self._holds or not self._machine.cancel(self._placed[key][1]):
            return False
        self.withdrawals += 1
        self._free.append(self._placed.pop(key)[0])
        return True

    def evict(self, layer: int, expert: int) -> None:
        """Free the slot of an expert that nobody holds."""
        key = (layer, expert)
        assert key in self._placed and key not in self._holds, f"expert {expert} of layer {layer} cannot be evicted"
        buffer, ticket = self._placed.pop(key)
        self._machine.cancel(ticket)
        if self._machine.poisons:
            self._machine.submit(self._gpu, Poison(buffer))
        self.evictions += 1
        self._free.append(buffer)

    def cancel_all(self) -> None:
        """Withdraw the transfers that have not begun: nothing more is wanted."""
        for key in reversed(list(self._placed)):
            self.withdraw(*key)

    def close(self) -> None:
        """Cancel, wait, and give the device memory back."""
        self.cancel_all()
        self._machine.drain()
        self._tier.release(self._root)

    def check_integrity(self) -> None:
        """Assert that each slot is free or holds one expert, and that what is held is there (tests, after passes)."""
        taken = [buffer for buffer, _ in self._placed.values()]
        assert len(taken) + len(self._free) == len(self._slots)
        assert {*taken, *self._free} == {*self._slots}, "a slot was lost, or given twice"
        assert self._holds.keys() <= self._placed.keys(), "an expert that is held has no slot"
        assert all(count > 0 for count in self._holds.values())

    def _vacated_slot(self) -> Buffer:
        if not self._free:
            candidates = [key for key in self._placed if key not in self._holds]
            assert candidates, f"all {len(self._slots)} expert slots are held"
            self.evict(*self._replacement.victim(candidates))
        return self._free.pop()

    def _fetch(self, key: Key, buffer: Buffer, *, urgent: bool) -> None:
        layer, expert = key
        copy = CopyWeights(self._store.experts(layer)[expert], buffer, layer=layer, packet_bytes=self._packet_bytes)
        self._placed[key] = (buffer, self._machine.submit(self._h2d, copy, urgent=urgent))

    def _part(self, key: Key) -> PlacedPart:
        layer, expert = key
        buffer = self._placed[key][0]
        return PlacedPart(self._store.experts(layer)[expert].layout, buffer, (buffer,))


def expert_slot_bytes(store: WeightStore) -> int:
    """Return the bytes of a slot that any expert of the model fits."""
    layers = range(len(store.layers))
    return max(part.layout.nbytes for layer in layers for part in store.experts(layer).values())


def num_slots_that_fit(store: WeightStore, free_bytes: int) -> int:
    """Return how many experts `free_bytes` hold: as many as the model has at the most."""
    num_experts = sum(len(store.experts(layer)) for layer in range(len(store.layers)))
    return min(num_experts, max(free_bytes, 0) // expert_slot_bytes(store))
