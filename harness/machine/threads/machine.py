"""Give machines made of host threads what they have in common: a worker thread a lane, one lock, waiting, failing,
watchdog."""

from __future__ import annotations

import sys
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch

from harness.machine.base import Lane, LaneKind, Machine, MachineError, Op, Span, Ticket, TicketState, Work
from harness.machine.packed_spans import PackedSpans
from harness.machine.queues import Board
from harness.machine.threads.arenas import Arenas
from harness.machine.threads.context import HostContext
from harness.machine.threads.signal import Signal
from harness.memory.tiers import Buffer
from harness.model.linear import cpu_products

_SWITCH_INTERVAL_S = 1e-4  # a lane must not wait Python's default 5 ms while the strategy's thread emits a pass
CLOSE_TIMEOUT_S = 10.0
_COMPUTE_LANES = (LaneKind.GPU, LaneKind.CPU)
T = TypeVar("T")


class ThreadedMachine(Machine):
    """A threaded machine has real tensors, real threads and real time.

    One lock guards all bookkeeping; it is released while an op's packet runs. The first error of any lane stops every
    lane and is raised, with the op's name, from whatever the strategy calls next.
    """

    def __init__(
        self,
        *,
        arenas: Arenas,
        capacities_bytes: dict[str, int],
        board: Board,
        watchdog_s: float,
        lock: threading.Lock | None = None,
    ) -> None:
        self.poisons = arenas.poisons
        self._arenas = arenas
        self.tiers = arenas.tiers(capacities_bytes)
        self.spans = PackedSpans()
        self._watchdog_s = watchdog_s
        self._board = board
        self._lock = lock or threading.Lock()
        self._progress = Signal()  # the strategy's thread waits here
        self._wake: dict[Lane, threading.Condition] = {}
        self._workers: list[threading.Thread] = []
        self._idle_s = 0.0  # how long the strategy has waited, this process running, without a packet's end
        self._failure: tuple[str, BaseException] | None = None
        self._closing = False
        sys.setswitchinterval(_SWITCH_INTERVAL_S)

    @abstractmethod
    def _host_context(self, lane: Lane) -> HostContext:
        """Return what ops of a lane see that runs on a host thread."""

    # -- the strategy's side ------------------------------------------------------------------------------------

    @property
    def facts(self) -> dict[str, str]:
        return {"CPU kernels": cpu_products()}

    def submit(self, lane: Lane, op: Op, *, after: Iterable[Ticket] = (), urgent: bool = False) -> Ticket:
        with self._lock:
            self._raise_failure()
            if self._closing:
                raise MachineError(f"{op} was submitted to a closed machine")
            if lane not in self._wake:
                self._start_lane(lane)
            ticket = self._board.submit(lane, op, after, urgent)
            if ticket.ready:
                self._freed(ticket, time.monotonic())
            return ticket

    def wait(self, ticket: Ticket) -> Any:
        self._wait_until(lambda: ticket.settled)
        if ticket.state is TicketState.CANCELLED:
            raise MachineError(f"waited for {ticket}, which was cancelled")
        return ticket.value

    def wait_any(self, tickets: Sequence[Ticket]) -> list[Ticket]:
        assert tickets, "wait_any of nothing would never end"
        settled = self._wait_until(lambda: [t for t in tickets if t.settled])
        return sorted(settled, key=lambda t: (t.finished_s or 0.0, t.number))

    def cancel(self, ticket: Ticket) -> bool:
        with self._lock:
            cancelled = self._board.cancel(ticket)
            if cancelled and (head := self._board.lanes[ticket.lane].ready()) is not None:
                self._freed(head, time.monotonic())
            return cancelled

    def now(self) -> float:
        with self._lock:
            self._raise_failure()
            self._board.show_events()
        return time.monotonic()

    def drain(self) -> None:
        self._wait_until(lambda: self._board.num_settled == self._board.num_submitted)

    def close(self) -> None:
        """Stop running ops at their next packet boundary, and give memory back. A packet that does not end is given up
        after 10 s."""
        with self._lock:
            self._closing = True
            self._wake_all()
        deadline_s = time.monotonic() + CLOSE_TIMEOUT_S
        for worker in self._workers:
            worker.join(timeout=max(0.0, deadline_s - time.monotonic()))
        self._give_memory_back()

    def _give_memory_back(self) -> None:
        """Give memory back at once, not only when this object goes: cycles of machine, engine and strategy live until
        Python looks for them."""
        self._arenas.close()

    def back(self, buffer: Buffer) -> None:
        self._arenas.back(buffer)

    def unback(self, buffer: Buffer) -> None:
        self._arenas.unback(buffer)

    # -- waiting ------------------------------------------------------------------------------------------------

    def _wait_until(self, condition: Callable[[], T]) -> T:
        """Return what `condition` gives, asked with the lock held, as soon as that is true."""
        self._idle_s, period_s = 0.0, min(1.0, self._watchdog_s / 4)
        while True:
            with self._lock:
                self._raise_failure()
                if found := condition():
                    self._board.show_events()
                    return found
                self._check_alive()
            before_s = time.monotonic()
            self._progress.wait(period_s)
            # A process that was stopped, or had no processor, wakes up late: its lanes had no time either.
            self._idle_s += min(time.monotonic() - before_s, period_s)

    def _check_alive(self) -> None:
        if self._closing:
            raise MachineError(f"the machine was closed before its ops had run.\n{self._board.dump()}")
        stuck = not self._board.running and not any(queue.ready() for queue in self._board.lanes.values())
        if stuck:
            raise MachineError(f"deadlock: nothing runs and no op is ready.\n{self._board.dump()}")
        if self._idle_s > self._watchdog_s:
            raise MachineError(f"watchdog: no packet finished for {self._idle_s:.0f} s.\n{self._board.dump()}")

    def _raise_failure(self) -> None:
        if self._failure is not None:
            text, cause = self._failure
            raise MachineError(text) from cause

    # -- the lanes' side ----------------------------------------------------------------------------------------

    def _start_lane(self, lane: Lane) -> None:
        self._wake[lane] = threading.Condition(self._lock)
        self._board.lane(lane)
        self._start_thread(lambda: self._serve(lane), f"lane {lane}")

    def _start_thread(self, serve: Callable[[], None], name: str) -> None:
        """Start a thread that calls `serve` with the lock held; whatever it raises ends the run."""

        def work() -> None:
            with self._lock:
                try:
                    self._enter_thread()
                    serve()
                except BaseException as error:  # the strategy must never wait for a lane that is gone
                    self._fail(name, error)

        worker = threading.Thread(target=work, name=name, daemon=True)
        try:
            worker.start()
        except RuntimeError as error:  # the system gives no more threads; one that never started cannot be joined
            self._fail(name, error)
            self._raise_failure()
        self._workers.append(worker)

    def _enter_thread(self) -> None:
        """Do what every thread of the machine does first."""
        torch.set_num_threads(1)

    def _serve(self, lane: Lane) -> None:
        """Run the lane's ops in this thread until the machine stops."""
        context, queue = self._host_context(lane), self._board.lanes[lane]
        while not self._stopped:
            ticket = queue.ready()
            if ticket is None:
                self._wake[lane].wait()
                continue
            queue.pop(ticket)
            context.resume(ticket.place)
            self._execute(ticket, context)

    @property
    def _stopped(self) -> bool:
        return self._closing or self._failure is not None

    def _execute(self, ticket: Ticket, context: HostContext) -> None:
        """Run all packets; between two of them, any urgent op that is ready. The lock is held on entry and exit."""
        queue = self._board.lanes[ticket.lane]
        end_s: float | None = None
        for packet in range(ticket.op.packets):
            while packet and not ticket.urgent and not self._stopped and (urgent := queue.ready_urgent()) is not None:
                queue.pop(urgent)
                self._execute(urgent, context)
            end_s = None if self._stopped else self._run_packet(ticket, packet, context)
            if end_s is None:
                return
        assert end_s is not None, "an op has at least one packet"
        for freed in self._board.finish(ticket, end_s):
            self._freed(freed, end_s)
        self._progress.set()

    def _freed(self, ticket: Ticket, time_s: float) -> None:
        """Note that the ticket's lane may run it from `time_s` on."""
        ticket.place = time_s
        self._wake[ticket.lane].notify_all()  # a device's lane has a thread for each of its streams

    def _run_packet(self, ticket: Ticket, packet: int, context: HostContext) -> float | None:
        """Run a packet with the lock released, and return when it ended, or None if it failed."""
        op = ticket.op
        start_s, cpu_start_s = time.monotonic(), time.thread_time()
        if packet == 0:
            self._board.start(ticket, start_s)
        error: BaseException | None = None
        self._lock.release()
        try:
            value = op.run_packet(context, packet)
            share = packet_work(op.work(), op.packets)  # asked now, since an op may learn its work as it runs
            if ticket.lane.kind in _COMPUTE_LANES:
                context.pace_compute((share,) if op.launches == 1 else op.launch_works(), start_s)
        except BaseException as caught:
            error = caught
        end_s, cpu_s = time.monotonic(), time.thread_time() - cpu_start_s
        self._lock.acquire()
        self._idle_s = 0.0
        if error is not None:
            self._fail(str(ticket), error)
            return None
        ticket.packets_run += 1
        ticket.value = value
        self.spans.append(
            Span(
                ticket.lane, op.kind, op.layer, op.micro_batch, ticket.number, packet, op.packets, ticket.urgent,
                start_s, end_s, cpu_s, share,
            )
        )  # fmt: skip
        return end_s

    def _fail(self, what: str, error: BaseException) -> None:
        if self._failure is None:
            self._failure = (f"{what} failed: {type(error).__name__}: {error}", error)
        self._wake_all()
        self._progress.set()

    def _wake_all(self) -> None:
        """Wake whatever sleeps, to look whether the machine has stopped."""
        for condition in self._wake.values():
            condition.notify_all()


def packet_work(work: Work, packets: int) -> Work:
    """Return the work of one packet."""
    if packets == 1:
        return work
    return Work(work.flops / packets, work.device_bytes / packets, work.host_bytes / packets, work.link_bytes / packets)
