"""The streams of a device's lanes: what is under way on each, and what is launched there next."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import Any

from harness.machine.base import Ticket, Work
from harness.machine.device.clock import Mark
from harness.machine.device.context import DeviceContext
from harness.machine.device.runtime import DeviceRuntime
from harness.machine.device.staging import Slot, StagingRing
from harness.machine.queues import LaneQueue


@dataclass(frozen=True)
class Depth:
    """The distance by which the launching thread runs ahead: fewer than `launches` are under way on a stream when the
    next one comes.

    Urgent work cannot overtake what is launched. A launch takes the host some 0.1 ms, so packets of one op are launched
    together up to `nbytes` on the link.
    """

    launches: int
    nbytes: int = 0

    def packets(self, share: Work) -> int:
        """Return how many packets of so much work go together."""
        return max(1, int(self.nbytes / share.link_bytes)) if share.link_bytes else 1


@dataclass(eq=False, slots=True)
class Launched:
    """The packets of one op, from number `packet` on, that stand in a stream between two events."""

    ticket: Ticket
    packet: int
    count: int
    first: Any  # event in front of it
    last: Any  # event behind it
    mark: Mark  # of the clock, when it was launched
    context: DeviceContext
    result: list[Any]  # what the op returned, once it did
    work: Work  # of these packets


class DeviceStream:
    """A stream with the packets that are under way on it, and events and staging memory that are used again and again.

    The machine's lock guards everything but the events' own calls.
    """

    def __init__(self, runtime: DeviceRuntime, lock: threading.Lock, depth: Depth, *, urgent: bool = False) -> None:
        self.handle = runtime.stream(urgent=urgent)
        self.changed = threading.Condition(lock)  # something was launched, or came to its end
        self.under_way: deque[Launched] = deque()
        self.ring: StagingRing | None = None
        self.ended_s = 0.0  # of the packet that ended last
        self.launching = False  # packets are being put into it: they may reach the device before they are under way
        self.depth = depth
        self._runtime = runtime
        self._spare_events: list[Any] = []

    @property
    def has_room(self) -> bool:
        return len(self.under_way) < self.depth.launches

    @property
    def is_copying_much(self) -> bool:
        """Tell whether a large copy has begun and not ended."""
        return any(each.context.copies_much and self._runtime.query(each.first) for each in self.under_way)

    def event(self) -> Any:
        return self._spare_events.pop() if self._spare_events else self._runtime.event()

    def add(self, launched: Launched) -> None:
        self.under_way.append(launched)
        self.changed.notify_all()

    def remove(self, launched: Launched) -> None:
        """Remove the oldest packet, which has ended; only streams that were told to before still wait for its
        events."""
        assert self.under_way[0] is launched, "packets of a stream end in their order"
        self.under_way.popleft()
        self._spare_events += (launched.first, launched.last)
        for staged in launched.context.staged:
            self._return(staged.slot)
        self.changed.notify_all()

    def _return(self, slot: Slot) -> None:
        assert self.ring is not None, "slots come from the ring"
        self.ring.give_back(slot)

    def give_back(self, slot: Slot) -> None:
        """Give back the oldest slot that is taken, by the packets that are being launched: no others are under way."""
        with self.changed:
            self._return(slot)

    def take_slot(self, nbytes: int) -> Slot | None:
        """Take room in the staging ring, waiting for packets that are under way; None where that brings none."""
        with self.changed:
            while self.ring is not None and nbytes <= self.ring.capacity_bytes:
                slot = self.ring.take(nbytes)
                if slot is not None or not self.under_way:
                    return slot
                self.changed.wait()
        return None


class DeviceQueue:
    """The part of a lane that goes to one stream: one or both of the FIFO classes of `queues.py`, packet by packet.

    A copy engine serves a stream for as long as that has copies: on an H200 a large urgent copy waited until twelve
    others of 59 MB had come, most of them launched after it. So nothing is launched here while a large copy of `first`
    is under way, the lane's stream of urgent work.
    """

    def __init__(
        self, queue: LaneQueue, stream: DeviceStream, *, classes: tuple[bool, ...], first: DeviceStream | None = None
    ) -> None:
        """Take `classes` by their urgency, those that go first in front."""
        self.stream, self._first = stream, None if first is stream else first
        self._queue, self._classes = queue, classes
        self._open: dict[bool, tuple[Ticket, int] | None] = dict.fromkeys(classes)  # op and next packet

    def next(self) -> tuple[Ticket, int] | None:
        """Return the packet from which to launch now, if any: urgent ops first, and only where the stream has room."""
        if not self.stream.has_room or (self._first is not None and self._first.is_copying_much):
            return None
        for urgent in self._classes:
            if (found := self._open[urgent]) is not None:
                return found
            ticket = self._queue.ready_urgent() if urgent else self._queue.ready_normal()
            if ticket is not None:
                return ticket, 0
        return None

    def begin(self, ticket: Ticket) -> None:
        """Note that the ticket's first packet is launched now."""
        self._queue.pop(ticket)

    def go_on(self, ticket: Ticket, packet: int) -> None:
        """Note that the ticket's packets before number `packet` stand in their stream."""
        self._open[ticket.urgent] = (ticket, packet) if packet < ticket.op.packets else None
