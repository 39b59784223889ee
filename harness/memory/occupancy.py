"""Record who lies in which place of a memory, and when the place is free again. Torch-free."""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from itertools import filterfalse
from typing import Any, Generic, TypeVar

from harness.machine.base import Lane, LaneKind, Machine, Op, Ticket
from harness.memory.tiers import Buffer
from harness.memory.transfers import Poison, fetched, poison_lane

Key = TypeVar("Key", bound=Hashable)
Label = TypeVar("Label")


@dataclass(eq=False, slots=True)
class _Occupant:
    place: Buffer
    tickets: list[Ticket]  # of the transfers that bring it, in the order of their submission
    holds: int = 0


class _Idle(Set[Key]):
    """Looks at the occupants only as far as it is asked: thousands may be there, of whom one is evicted."""

    def __init__(self, occupants: Mapping[Any, _Occupant], held: Set[Any], but: Container[Key]) -> None:
        self._occupants, self._held, self._but = occupants, held, but

    def __contains__(self, key: object) -> bool:
        return key in self._occupants and key not in self._held and key not in self._but

    def __iter__(self) -> Iterator[Key]:
        idle = filterfalse(self._held.__contains__, self._occupants) if self._held else iter(self._occupants)
        return filterfalse(self._but.__contains__, idle) if self._but else idle

    def __len__(self) -> int:
        return sum(1 for _ in self) if self._but else len(self._occupants) - len(self._held)

    def __bool__(self) -> bool:
        return next(iter(self), None) is not None


class Places(Generic[Key]):
    """Cuts memory of one tier into places, each of which has at most one occupant at a time.

    An occupant has its place from `take` until it leaves or is withdrawn; no other one is given the place before. On
    machines that poison, the gpu lane of `rank` fills a place that was left with NaN. `Tier.check_integrity` covers the
    places of its memory.
    """

    def __init__(self, machine: Machine, tier: str, *, rank: int = 0) -> None:
        self._machine, self._tier = machine, machine.tiers[tier]
        self._gpu = Lane(LaneKind.GPU, rank)
        self._roots: list[Buffer] = []
        self._all: set[Buffer] = set()
        self._free: dict[Buffer, None] = {}
        self._occupants: dict[Key, _Occupant] = {}  # in the order in which they took their places
        self._held: set[Key] = set()
        self._tier.checks.append(self.check_integrity)

    def reserve(self, name: str, sizes_bytes: Mapping[Label, int]) -> dict[Label, Buffer]:
        """Reserve memory under `name` for free places of these sizes, one after another."""
        root = self._tier.reserve(name, sum(sizes_bytes.values()))
        found, offset_bytes = {}, 0
        for label, nbytes in sizes_bytes.items():
            found[label] = root.sub(str(label), offset_bytes, nbytes)
            offset_bytes += nbytes
        self._roots.append(root)
        self._all.update(found.values())
        self._free.update(dict.fromkeys(found.values()))
        return found

    @property
    def num_free(self) -> int:
        return len(self._free)

    def idle(self, but: Container[Key] = ()) -> Set[Key]:
        """Return a view of the occupants that nobody holds, without those in `but`, in the order in which they took
        their places."""
        return _Idle(self._occupants, self._held, but)

    def is_idle(self, key: Key) -> bool:
        return key in self._occupants and not self._occupants[key].holds

    def __contains__(self, key: Key) -> bool:
        return key in self._occupants

    def __getitem__(self, key: Key) -> Buffer:
        return self._occupants[key].place

    def tickets(self, key: Key) -> list[Ticket]:
        """Return the transfers that bring an occupant, in the order of their submission."""
        return self._occupants[key].tickets

    def all_tickets(self) -> list[list[Ticket]]:
        """Return the lists of all occupants' transfers, in the order in which they took their places."""
        return [occupant.tickets for occupant in self._occupants.values()]

    def take(self, key: Key, place: Buffer | None = None, *, tickets: Iterable[Ticket] = ()) -> Buffer:
        """Give a new occupant the free place that is named, or any free one where none is. `tickets` are its transfers
        so far."""
        assert key not in self._occupants, f"{key} has a place already"
        if place is None:
            place = next(reversed(self._free))
        elif place not in self._free:
            others = (other for other, occupant in self._occupants.items() if occupant.place is place)
            raise AssertionError(f"no place for {key}: {next(others, place)} was not released")
        del self._free[place]
        self._occupants[key] = _Occupant(place, list(tickets))
        return place

    def bring(self, key: Key, lane: Lane, op: Op, *, urgent: bool = False, after: Iterable[Ticket] = ()) -> Ticket:
        """Submit a transfer that brings an occupant."""
        ticket = self._machine.submit(lane, op, urgent=urgent, after=after)
        self._occupants[key].tickets.append(ticket)
        return ticket

    def hold(self, key: Key) -> None:
        """Keep an occupant from leaving until `let_go` has been called as often."""
        self._occupants[key].holds += 1
        self._held.add(key)

    def let_go(self, key: Key) -> None:
        occupant = self._occupants.get(key)
        assert occupant is not None and occupant.holds, f"{key} is not held"
        occupant.holds -= 1
        if not occupant.holds:
            self._held.remove(key)

    def leave(self, key: Key) -> None:
        """Free the place of an occupant whose last reader was submitted."""
        occupant = self._occupants.pop(key)
        assert not occupant.holds, f"{key} is held"
        if self._machine.poisons:
            lane = poison_lane(occupant.place, self._gpu)
            self._machine.submit(lane, Poison(occupant.place, (occupant.place, fetched(occupant.place))))
        self._free[occupant.place] = None

    def withdraw(self, key: Key) -> bool:
        """Free the place of an occupant whose transfer has not begun. False, with nothing changed, where it is too late
        or the occupant is held.

        An occupant has at most one transfer here: of several, the later ones may be taken back where the first has
        begun, and their occupant would never come.
        """
        occupant = self._occupants[key]
        assert len(occupant.tickets) <= 1, f"{key} is brought by several transfers"
        stays = occupant.holds or any(ticket.done for ticket in occupant.tickets)
        return not stays and self._take_back(key)

    def clear(self) -> None:
        """Withdraw the transfers that have not begun, the latest first, and free all places, those held as well."""
        for occupant in self._occupants.values():
            occupant.holds = 0
        self._held.clear()
        left = [key for key in reversed(list(self._occupants)) if not self._take_back(key)]
        for key in left:
            self.leave(key)

    def _take_back(self, key: Key) -> bool:
        """Cancel an occupant's transfers, the last one first, and free its place if none has begun."""
        tickets = self._occupants[key].tickets
        while tickets and self._machine.cancel(tickets[-1]):
            tickets.pop()
        if tickets:
            return False
        self._free[self._occupants.pop(key).place] = None
        return True

    def close(self) -> None:
        """Clear, wait, and give the memory back."""
        self.clear()
        self._machine.drain()
        for root in self._roots:
            self._tier.release(root)
        self._tier.checks.remove(self.check_integrity)

    def check_integrity(self) -> None:
        """Assert that every place is free or has one occupant."""
        taken = [occupant.place for occupant in self._occupants.values()]
        assert len(taken) + len(self._free) == len(self._all), "a place was lost, or given twice"
        assert {*taken, *self._free} == self._all, "a place was lost, or given twice"
        assert all(occupant.holds >= 0 for occupant in self._occupants.values())
        assert self._held == {key for key, occupant in self._occupants.items() if occupant.holds}
