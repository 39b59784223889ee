"""The recording machine runs nothing and keeps what a pipeline submits, as a graph of ops and of what precedes each.

The graph is that of the very ops that run elsewhere, since the pipeline cannot tell machines apart. Its edges are the
dependencies that every machine derives, the order of each lane, and what the strategy waits for before it goes on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from harness.machine.base import Lane, Machine, Op, Ticket, TicketState
from harness.machine.hazards import Hazards
from harness.memory.tiers import Buffer, make_tiers

_NO_NODE = -1


@dataclass(frozen=True, kw_only=True)
class OpGraph:
    """Ops as nodes in the order of submission, by parallel lists: whatever precedes a node has a smaller number.

    A node without op and lane stands for the strategy's thread, which has gone on after it had waited: it takes no
    time, and what is submitted later follows it. `before` has by node the numbers of the nodes that end before it
    begins. Among these is the one before it in its class of its lane.
    """

    ops: Sequence[Op | None]
    lanes: Sequence[Lane | None]
    urgent: Sequence[bool]
    before: Sequence[Sequence[int]]

    def __len__(self) -> int:
        return len(self.ops)


class RecordingMachine(Machine):
    """The recording machine counts every op as over as soon as it is submitted, so nothing can be cancelled.

    Values come from the `world`, as on the simulated machine. Of several tickets that are awaited together
    (`wait_any`), the one submitted first counts as the first to end.

    What is submitted while it does not record (`records`) was over before all else: it is no node, and nothing waits
    for it.
    """

    label: ClassVar[str] = "none"
    name: ClassVar[str] = "recording"
    clock = "none"

    def __init__(self, *, capacities_bytes: dict[str, int], world: Any = None, records: bool = True) -> None:
        self.tiers = make_tiers(capacities_bytes)
        self.spans = []
        self.world = world
        self.records = records
        self._hazards = Hazards()
        self._ops: list[Op | None] = []
        self._lanes: list[Lane | None] = []
        self._urgent: list[bool] = []
        self._before: list[tuple[int, ...]] = []
        self._last: dict[tuple[str, int, bool], int] = {}  # node by lane and class
        self._thread: tuple[int, ...] = ()  # the node of the strategy's thread, once it has waited
        self._awaited: list[int] = []  # nodes, since then

    def submit(self, lane: Lane, op: Op, *, after: Iterable[Ticket] = (), urgent: bool = False) -> Ticket:
        if self.world is not None:
            op.foresee(self.world)
        if not self.records:
            over = Ticket(op, lane, _NO_NODE, urgent)
            over.state, over.done = TicketState.DONE, True
            return over
        self._go_on()
        queue = (lane.kind, lane.rank, urgent)  # a lane's own hash takes longer
        after = [ticket for ticket in after if ticket.number != _NO_NODE]
        first = (*self._thread, self._last.get(queue, -1))
        ticket, before = self._hazards.record(lane, op, len(self._ops), urgent=urgent, after=after, before=first)
        self._last[queue] = self._add(op, lane, urgent, before)
        return ticket

    def wait(self, ticket: Ticket) -> Any:
        if ticket.number != _NO_NODE:
            self._awaited.append(ticket.number)
        if ticket.value is None and self.world is not None:
            ticket.value = ticket.op.imagine(self.world)
        return ticket.value

    def wait_any(self, tickets: Sequence[Ticket]) -> list[Ticket]:
        assert tickets, "wait_any of nothing would never end"
        found = sorted(tickets, key=lambda ticket: ticket.number)
        self.wait(found[0])
        for ticket in found[1:]:
            ticket.value = ticket.op.imagine(self.world) if self.world is not None else None
        return found

    def cancel(self, ticket: Ticket) -> bool:
        return False

    def now(self) -> float:
        """Return 0, since there is no clock."""
        return 0.0

    def drain(self) -> None:
        self._awaited.extend(self._last.values())

    def back(self, buffer: Buffer) -> None:
        """Do nothing, since there are no tensors."""

    def unback(self, buffer: Buffer) -> None:
        """Do nothing, since there are no tensors."""

    def graph(self) -> OpGraph:
        """Return what was recorded until now."""
        return OpGraph(
            ops=tuple(self._ops), lanes=tuple(self._lanes), urgent=tuple(self._urgent), before=tuple(self._before)
        )

    def forget(self) -> None:
        """Forget what ties ops together, so that those that no graph has are gone. The machine is of no use then."""
        self._hazards.forget()

    def _go_on(self) -> None:
        if self._awaited:
            self._thread = (self._add(None, None, False, tuple(sorted({*self._awaited, *self._thread}))),)
            self._awaited.clear()

    def _add(self, op: Op | None, lane: Lane | None, urgent: bool, before: tuple[int, ...]) -> int:
        self._ops.append(op)
        self._lanes.append(lane)
        self._urgent.append(urgent)
        self._before.append(before)
        return len(self._ops) - 1
