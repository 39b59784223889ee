"""Keep track of experts on the device: a table of hot ones, slots for those on demand, and slots for prefetches."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field

from harness.engine.engine import Engine
from harness.machine.base import Ticket, TicketState
from harness.memory.expert_slots import ExpertSlots, Key, Replacement
from harness.memory.native_slots import NativeExpertSlots, staging_buffer
from harness.memory.placed import PlacedPart
from harness.memory.tiers import DEVICE

_ON_DEMAND = "experts on demand"


class OldestFirst:
    """Evicts the expert that came first: two slots that alternate, or a ring of more."""

    def __init__(self) -> None:
        self._order: dict[Key, None] = {}

    def used(self, key: Key) -> None:
        self._order[key] = None

    def victim(self, candidates: Collection[Key], wanted: Key) -> Key:
        chosen = next(key for key in self._order if key in candidates)
        del self._order[chosen]
        return chosen

    def lost(self, key: Key) -> None:
        self._order.pop(key, None)


@dataclass(kw_only=True)
class Counts:
    """Counts experts by the way they ran, and prefetches that came to nothing.

    `cached` experts were found in slots for experts on demand. `withdrawn` prefetches never began; `wasted` ones did,
    for experts that got no token, ran on the CPU or had lost their slot by then, and `wasted_bytes` is what they moved.
    """

    resident: int = 0
    prefetched: int = 0
    cached: int = 0
    on_demand: int = 0
    cpu: int = 0
    issued: int = 0
    withdrawn: int = 0
    wasted: int = 0
    wasted_bytes: int = 0

    def as_record(self) -> dict[str, float]:
        """Return the counts, and the share of active experts that were on the device when the router chose them."""
        active = self.resident + self.prefetched + self.cached + self.on_demand + self.cpu
        there = self.resident + self.prefetched + self.cached
        return asdict(self) | {"active": active, "hit_rate": there / active if active else 0.0}


@dataclass(eq=False)
class ExpertResidency:
    """Knows where on the device each expert is.

    The table has experts that stay for good (`keep`). `on_demand` slots take experts that the router has chosen; with
    many slots and a replacement policy they are a cache. Prefetches have slots of their own, from which experts go once
    they have run or the router has not chosen them; without such slots (None) they share those of `on_demand`, and
    stay.
    """

    engine: Engine
    on_demand: ExpertSlots
    make_slots: Callable[[str, int, Replacement], ExpertSlots]  # by name, number and policy
    prefetched: ExpertSlots | None = None
    counts: Counts = field(default_factory=Counts)
    _table: set[Key] = field(default_factory=set)
    _guesses: dict[Key, Ticket] = field(default_factory=dict)  # prefetches that no router has judged yet
    _right: dict[Key, Ticket] = field(default_factory=dict)  # those that the last router wants
    _wrong: list[Ticket] = field(default_factory=list)  # those that no router wanted, while they may still move

    @classmethod
    def reserve(
        cls, engine: Engine, *, on_demand: int, prefetched: int, packet_bytes: int,
        replacement: Replacement | None = None,
    ) -> ExpertResidency:  # fmt: skip
        """Reserve so many slots of either kind. `replacement` is the policy of those for experts on demand. Experts in
        pageable memory come tensor by tensor, through one staging buffer."""
        machine, store = engine.machine, engine.store
        staging = staging_buffer(machine, store) if store.is_pageable else None

        def slots(name: str, number: int, policy: Replacement) -> ExpertSlots:
            if staging is not None:
                return NativeExpertSlots(
                    machine, store, staging=staging, num_slots=number, replacement=policy, name=name
                )
            return ExpertSlots(
                machine, store, num_slots=number, packet_bytes=packet_bytes, replacement=policy, name=name
            )

        ahead = slots("prefetched experts", prefetched, OldestFirst()) if prefetched else None
        return cls(engine, slots(_ON_DEMAND, on_demand, replacement or OldestFirst()), slots, ahead)

    def make_cache(
        self, num_slots: int, replacement: Replacement, warm: Sequence[Key], *, spares_prefetches: bool = False
    ) -> None:
        """Put a cache into the place of the slots for experts on demand, which nobody holds, and bring `warm` to it,
        the first one last. What was prefetched is spared, if asked for, until its layer is over."""
        assert self.prefetched is None, "prefetches share the cache"
        self.on_demand.close()
        self.on_demand = self.make_slots(_ON_DEMAND, num_slots, replacement)
        if spares_prefetches:
            self.on_demand.spared = ChainMap(self._guesses, self._right)
        for key in reversed(warm):
            self.on_demand.prefetch(*key, evict=False)

    def keep(self, hottest: Iterable[Key]) -> list[Key]:
        """Keep experts in all device memory that is left, in the order given; one that is too large for what is left
        is passed over. Return those that are kept."""
        left_bytes, chosen = self.engine.machine.tiers[DEVICE].free_bytes, []
        for layer, expert in hottest:
            nbytes = self._stored(layer, expert).layout.nbytes
            if nbytes <= left_bytes:
                left_bytes -= nbytes
                chosen.append((layer, expert))
        self.engine.resident.keep("hot-expert table", [(key[0], self._name(key)) for key in chosen])
        self._table.update(chosen)
        return chosen

    def is_resident(self, key: Key) -> bool:
        return key in self._table

    def holds(self, key: Key) -> bool:
        """Tell whether an expert is on the device or on its way."""
        return self.is_resident(key) or key in self.on_demand or key in self._ahead

    def settle(self, layer: int, active: Collection[int]) -> dict[int, bool]:
        """Take prefetches for the layer back that have not begun, and drop the others that nobody wants. Return the
        active experts that are there (True) or on their way (False)."""
        self._right.clear()
        for key in [key for key in self._guesses if key[0] == layer]:
            ticket = self._guesses.pop(key)
            if self._ahead.withdraw(*key):
                self.counts.withdrawn += 1
            elif key[1] in active and key in self._ahead:
                self._right[key] = ticket
            else:
                self._unused(key, ticket)
                self._drop(key)
        return {expert: self._has_arrived((layer, expert)) for expert in active if self.holds((layer, expert))}

    def link_busy_s(self, expert_s: float) -> float:
        """Return how long prefetches that have begun delay experts on demand, where an expert takes `expert_s` on the
        link. One that the last router wants delays them until it is there, any other until its packet is there."""
        if self.engine.machine.clock == "none":
            return 0.0
        now_s = self.engine.machine.now()
        self._wrong = [ticket for ticket in self._wrong if not ticket.done]
        packet_s = expert_s * self.on_demand.packet_share

        def left_s(ticket: Ticket, most_s: float) -> float:
            begun = ticket.started_s is not None and not ticket.done
            return min(max(expert_s - (now_s - (ticket.started_s or 0.0)), 0.0), most_s) if begun else 0.0

        wanted_s = sum(left_s(ticket, expert_s) for ticket in self._right.values())
        others = [*self._wrong, *self._guesses.values()]
        return wanted_s + max((left_s(ticket, packet_s) for ticket in others), default=0.0)

    def take(self, layer: int, expert: int) -> PlacedPart:
        """Return an active expert on the device and hold it; one that is not there is brought ahead of all that is
        queued."""
        key = (layer, expert)
        if self.is_resident(key):
            self.counts.resident += 1
            return self.engine.resident.part(layer, self._name(key))
        if key in self._right:
            if key in self._ahead:
                self.counts.prefetched += 1
                return self._ahead.acquire(layer, expert)
            self._unused(key, self._right.pop(key))  # another expert of the layer has taken its place in the cache
        if key in self.on_demand:
            self.counts.cached += 1
        else:
            self.counts.on_demand += 1
        return self.on_demand.acquire(layer, expert, urgent=True)

    def done(self, layer: int, expert: int) -> None:
        """Say that the last reader of a taken expert was submitted."""
        key = (layer, expert)
        if self.is_resident(key):
            return
        slots = self._ahead if key in self._right else self.on_demand
        slots.release(layer, expert)
        if key in self._right:
            self._drop(key)

    def on_cpu(self, layer: int, expert: int) -> None:
        """Say that an active expert runs on the CPU; the device needs it no longer if it was prefetched."""
        key = (layer, expert)
        self.counts.cpu += 1
        if key in self._right:
            self._drop(key)
            self._unused(key, self._right.pop(key))

    def prefetch(self, key: Key) -> bool:
        """Bring an expert of a later layer that is not there. False where it is, or where no slot is free for it."""
        if self.holds(key) or not self._ahead.prefetch(*key, evict=self.prefetched is None):
            return False
        self.counts.issued += 1
        if key in self._guesses:
            self._unused(key, self._guesses[key])  # it had lost its place
        self._guesses[key] = self._ahead.tickets(*key)[-1]
        return True

    def num_queued(self) -> int:
        """Return how many prefetches have not begun."""
        return sum(ticket.state is TicketState.PENDING for ticket in self._guesses.values())

    def forget(self) -> None:
        """Free all slots and count from 0 again; nothing is held and no prefetch is under way."""
        for slots in (self.on_demand, self._ahead):
            slots.evict_idle()
        self._guesses.clear()
        self.counts = Counts()

    def cancel_all(self) -> None:
        """Withdraw all transfers that have not begun; no router will want what was prefetched last."""
        for slots in (self.on_demand, self._ahead):
            slots.cancel_all()
        for key, ticket in self._guesses.items():
            self._unused(key, ticket)
        self._guesses.clear()

    @property
    def _ahead(self) -> ExpertSlots:
        return self.on_demand if self.prefetched is None else self.prefetched

    def _unused(self, key: Key, ticket: Ticket) -> None:
        """Count a prefetch that nobody uses; one whose place was taken before it began has moved nothing."""
        if ticket.state is TicketState.CANCELLED:
            self.counts.withdrawn += 1
            return
        self.counts.wasted += 1
        self.counts.wasted_bytes += self._stored(*key).layout.nbytes
        self._wrong.append(ticket)

    def _drop(self, key: Key) -> None:
        """Free the slot of a prefetched expert where such have slots of their own."""
        if self.prefetched is not None and key in self.prefetched:
            self.prefetched.evict(*key)

    def _has_arrived(self, key: Key) -> bool:
        return self.is_resident(key) or self.on_demand.arrived(key) or self._ahead.arrived(key)

    def _stored(self, layer: int, expert: int) -> PlacedPart:
        return self.engine.store.experts(layer)[expert]

    def _name(self, key: Key) -> str:
        return self._stored(*key).layout.name
