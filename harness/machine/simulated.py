"""The simulated machine: a virtual clock, lanes that cost what a cost model says, and one shared host memory.

No tensors: ops are never run, only asked for their work and for the value they would bring to the host. While several
lanes are active together they share host-memory bandwidth max-min fairly, so that a transfer slows down beside decode
attention by itself (MoE-Lens §8.2). Same configuration and seed, same schedule, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from harness.machine.base import Lane, Machine, MachineError, Op, Span, Ticket, TicketState, Work
from harness.machine.queues import Board, LaneQueue
from harness.memory.tiers import Buffer, Tier

_MAX_IDLE_POLLS = 10_000
_EPSILON_S = 1e-12


class Costs(Protocol):
    """Where durations come from: measured tables or cited constants, never a strategy's own model."""

    def seconds(self, lane: Lane, op: Op, work: Work) -> float:
        """The whole op alone on its lane, overheads included."""


@dataclass(eq=False, slots=True)
class _Running:
    """An op on a lane. `left_s` is what remains of its lone duration, consumed at `speed` <= 1."""

    ticket: Ticket
    work: Work
    alone_s: float
    left_s: float
    demand: float  # host bytes per second at full speed
    speed: float
    since_s: float  # start of the current span
    done_packets: int  # when the current span began


class SimulatedMachine(Machine):
    """`submit_s` and `wake_s` are host time: an op cannot start before it was submitted, and a wait that ends costs the
    strategy a wake-up. Virtual time moves only inside `wait`, `wait_any`, `now` and `drain`.
    """

    label: ClassVar[str] = "simulated"
    name: ClassVar[str] = "simulated"

    def __init__(
        self,
        *,
        capacities_bytes: dict[str, int],
        costs: Costs,
        host_bytes_s: float,
        world: Any,
        submit_s: float = 0.0,
        wake_s: float = 0.0,
    ) -> None:
        assert host_bytes_s > 0, "host memory needs a bandwidth"
        self.tiers = {name: Tier(name, size) for name, size in capacities_bytes.items()}
        self.spans: list[Span] = []
        self._costs, self._host_bytes_s, self._world = costs, host_bytes_s, world
        self._submit_s, self._wake_s = submit_s, wake_s
        self._board = Board()
        self._submitted_s: dict[Ticket, float] = {}
        self._lanes: list[tuple[Lane, LaneQueue]] = []
        self._running: dict[Lane, _Running] = {}
        self._paused: dict[Lane, _Running] = {}  # interrupted at a packet boundary by an urgent op
        self._clock_s = 0.0  # of the lanes
        self._host_s = 0.0  # of the strategy; never behind what it has seen of the lanes
        self._num_idle_polls = 0

    # -- the strategy's side ------------------------------------------------------------------------------------

    def submit(self, lane: Lane, op: Op, *, after: Iterable[Ticket] = (), urgent: bool = False) -> Ticket:
        self._host_s += self._submit_s
        if lane not in self._board.lanes:
            self._lanes = sorted([*self._lanes, (lane, self._board.lane(lane))])
        ticket = self._board.submit(lane, op, after, urgent)
        self._submitted_s[ticket] = self._host_s
        self._num_idle_polls = 0
        return ticket

    def wait(self, ticket: Ticket) -> Any:
        while not ticket.settled:
            self._step(until_s=None)
        self._wake()
        if ticket.state is TicketState.CANCELLED:
            raise MachineError(f"waited for {ticket}, which was cancelled")
        return ticket.value

    def wait_any(self, tickets: Sequence[Ticket]) -> list[Ticket]:
        assert tickets, "wait_any of nothing would never end"
        while not any(t.settled for t in tickets):
            self._step(until_s=None)
        self._wake()
        return sorted((t for t in tickets if t.settled), key=lambda t: (t.finished_s or 0.0, t.number))

    def cancel(self, ticket: Ticket) -> bool:
        self._catch_up()
        cancelled = self._board.cancel(ticket)
        if cancelled:
            del self._submitted_s[ticket]
        return cancelled

    def now(self) -> float:
        self._num_idle_polls += 1
        if self._num_idle_polls > _MAX_IDLE_POLLS:
            raise MachineError("polling: the clock stands still until something is awaited; use wait or wait_any")
        self._catch_up()
        return self._host_s

    def drain(self) -> None:
        while self._board.num_settled < self._board.num_submitted:
            self._step(until_s=None)
        self._wake()

    def close(self) -> None:
        """Nothing runs between calls."""

    def back(self, buffer: Buffer) -> None:
        """There are no tensors."""

    def unback(self, buffer: Buffer) -> None:
        """There are no tensors."""

    # -- the clock ----------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        self._num_idle_polls = 0
        self._host_s = max(self._host_s, self._clock_s) + self._wake_s
        self._board.show_events()

    def _catch_up(self) -> None:
        """Let the lanes do what they have done by the strategy's time."""
        while self._clock_s < self._host_s:
            self._step(until_s=self._host_s)
        self._board.show_events()

    def _step(self, until_s: float | None) -> None:
        """Start what can start, then go to the next event, or to `until_s` if that comes first."""
        if self._start_ready():
            self._share_host_memory()
        next_s = self._next_event_s()
        if next_s is None and until_s is None:
            raise MachineError(f"deadlock: nothing runs and no op is ready.\n{self._board.dump()}")
        if next_s is None or (until_s is not None and until_s < next_s):
            assert until_s is not None
            self._advance(until_s)
            return
        self._advance(next_s)
        changed = False
        for lane, _ in self._lanes:
            running = self._running.get(lane)
            if running is not None and running.left_s <= _EPSILON_S:
                self._finish(lane, running)
                changed = True
            elif running is not None and self._at_boundary(lane, running):
                self._record(running, self._packets_done(running))
                self._paused[lane] = self._running.pop(lane)
                changed = True
        if changed and self._running:
            self._share_host_memory()

    def _start_ready(self) -> bool:
        started = False
        for lane, queue in self._lanes:
            if lane in self._running:
                continue
            ticket = queue.ready_urgent()
            if ticket is None or self._submitted_s[ticket] > self._clock_s:
                paused = self._paused.pop(lane, None)
                if paused is not None:
                    paused.since_s, paused.done_packets = self._clock_s, self._packets_done(paused)
                    self._running[lane] = paused
                    started = True
                    continue
                ticket = queue.ready_normal()
            if ticket is not None and self._submitted_s[ticket] <= self._clock_s:
                queue.pop(ticket)
                self._begin(lane, ticket)
                started = True
        return started

    def _begin(self, lane: Lane, ticket: Ticket) -> None:
        work = ticket.op.work()
        alone_s = max(self._costs.seconds(lane, ticket.op, work), _EPSILON_S)
        self._board.start(ticket, self._clock_s)
        del self._submitted_s[ticket]
        demand = work.host_bytes / alone_s
        self._running[lane] = _Running(ticket, work, alone_s, alone_s, demand, 1.0, self._clock_s, 0)

    def _finish(self, lane: Lane, running: _Running) -> None:
        ticket = running.ticket
        del self._running[lane]
        self._record(running, ticket.op.packets)
        ticket.value = ticket.op.imagine(self._world)
        self._board.finish(ticket, self._clock_s)

    def _record(self, running: _Running, packets_done: int) -> None:
        """One span for each uninterrupted run of packets."""
        ticket, count = running.ticket, packets_done - running.done_packets
        if count == 0:
            return  # an urgent op took the lane before the first packet
        share = running.work
        if count < ticket.op.packets:
            part = count / ticket.op.packets
            share = Work(
                share.flops * part, share.device_bytes * part, share.host_bytes * part, share.link_bytes * part
            )
        op, busy_s = ticket.op, self._clock_s - running.since_s
        self.spans.append(
            Span(
                ticket.lane, op.kind, op.layer, op.micro_batch, ticket.number, running.done_packets, op.packets,
                ticket.urgent, running.since_s, self._clock_s, busy_s, share,
            )
        )  # fmt: skip

    # -- events -------------------------------------------------------------------------------------------------

    def _next_event_s(self) -> float | None:
        """The earliest completion, packet boundary at which an urgent op takes over, or submission of a ready head."""
        best: float | None = None
        for lane, queue in self._lanes:
            running = self._running.get(lane)
            if running is None:
                heads = (queue.ready_urgent(), queue.ready_normal())
                event_s = min((self._submitted_s[t] for t in heads if t is not None), default=None)
            else:
                event_s = self._clock_s + self._until_s(lane, queue, running) / running.speed
            if event_s is not None and (best is None or event_s < best):
                best = event_s
        return best

    def _until_s(self, lane: Lane, queue: LaneQueue, running: _Running) -> float:
        """Lone seconds to the end, or to the packet boundary at which a ready urgent op takes the lane."""
        ticket = running.ticket
        if ticket.op.packets == 1 or ticket.urgent:
            return running.left_s
        urgent = queue.ready_urgent()
        if urgent is None:
            return running.left_s
        packet_s = running.alone_s / ticket.op.packets
        to_submission_s = max(0.0, self._submitted_s[urgent] - self._clock_s) * running.speed
        done_s = running.alone_s - running.left_s + to_submission_s
        boundary_s = -(-(done_s - _EPSILON_S) // packet_s) * packet_s
        return min(running.left_s, max(boundary_s - (running.alone_s - running.left_s), 0.0))

    def _at_boundary(self, lane: Lane, running: _Running) -> bool:
        ticket = running.ticket
        if ticket.op.packets == 1 or ticket.urgent:
            return False
        urgent = self._board.lanes[lane].ready_urgent()
        if urgent is None or self._submitted_s[urgent] > self._clock_s:
            return False
        packet_s = running.alone_s / ticket.op.packets
        done_s = running.alone_s - running.left_s
        return abs(done_s - round(done_s / packet_s) * packet_s) <= 1e-9 * running.alone_s + _EPSILON_S

    def _packets_done(self, running: _Running) -> int:
        return round((running.alone_s - running.left_s) / running.alone_s * running.ticket.op.packets)

    def _advance(self, to_s: float) -> None:
        passed_s = to_s - self._clock_s
        if passed_s > 0:
            for running in self._running.values():
                running.left_s -= passed_s * running.speed
            self._clock_s = to_s

    def _share_host_memory(self) -> None:
        """Max-min fair shares: whoever asks for less than an equal share gets it; the others split the rest evenly."""
        users = [r for r in self._running.values() if r.demand > 0]
        for running in self._running.values():
            running.speed = 1.0
        if sum(r.demand for r in users) <= self._host_bytes_s:
            return
        left, waiting = self._host_bytes_s, sorted(users, key=lambda r: r.demand)
        for number, running in enumerate(waiting):
            share = min(running.demand, left / (len(waiting) - number))
            running.speed = share / running.demand
            left -= share
