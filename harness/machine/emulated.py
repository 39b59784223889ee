"""The emulated machine: a worker thread a lane, a separate device arena, links and cpu lane held to stated rates."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from harness.config import config, require
from harness.hardware.profile import HardwareConfig
from harness.machine.arenas import Arenas
from harness.machine.base import Lane, LaneKind, Machine, MachineError, Op, Span, Ticket, TicketState, Work
from harness.machine.host_context import HostContext, LaneRate
from harness.machine.queues import Board
from harness.memory.tiers import Buffer

_SWITCH_INTERVAL_S = 1e-4  # a lane must not wait Python's default 5 ms while the strategy's thread emits a pass
_COMPUTE_LANES = (LaneKind.GPU, LaneKind.CPU)


class EmulatedMachine(Machine):
    """Real tensors, real threads, real time; only the speed ratios are chosen.

    One lock guards all bookkeeping; it is released while an op's packet runs. The first error of any lane stops every
    lane and is raised, with the op's name, from whatever the strategy calls next.
    """

    label: ClassVar[str] = "emulated"
    name: ClassVar[str] = "emulated"

    def __init__(
        self,
        *,
        capacities_bytes: dict[str, int],
        rates: Mapping[LaneKind, LaneRate],
        poison: bool = False,
        watchdog_s: float = 120.0,
    ) -> None:
        self.poisons = poison
        self._arenas = Arenas(poison)
        self.tiers = self._arenas.tiers(capacities_bytes)
        self.spans: list[Span] = []
        self._rates = dict(rates)
        self._watchdog_s = watchdog_s
        self._board = Board()
        self._lock = threading.Lock()
        self._progress = threading.Condition(self._lock)  # the strategy's thread waits here
        self._wake: dict[Lane, threading.Condition] = {}
        self._workers: list[threading.Thread] = []
        self._last_progress_s = time.monotonic()
        self._failure: tuple[str, BaseException] | None = None
        self._closing = False
        torch.set_num_threads(1)  # one core a lane; must precede the workers
        sys.setswitchinterval(_SWITCH_INTERVAL_S)

    # -- the strategy's side ------------------------------------------------------------------------------------

    def submit(self, lane: Lane, op: Op, *, after: Iterable[Ticket] = (), urgent: bool = False) -> Ticket:
        with self._lock:
            self._raise_failure()
            if self._closing:
                raise MachineError(f"{op} was submitted to a closed machine")
            if lane not in self._wake:
                self._start_lane(lane)
            ticket = self._board.submit(lane, op, after, urgent)
            if ticket.ready:
                self._wake[lane].notify()
            return ticket

    def wait(self, ticket: Ticket) -> Any:
        with self._lock:
            self._wait_until(lambda: ticket.settled)
            if ticket.state is TicketState.CANCELLED:
                raise MachineError(f"waited for {ticket}, which was cancelled")
            return ticket.value

    def wait_any(self, tickets: Sequence[Ticket]) -> list[Ticket]:
        assert tickets, "wait_any of nothing would never end"
        with self._lock:
            self._wait_until(lambda: any(t.settled for t in tickets))
            return sorted((t for t in tickets if t.settled), key=lambda t: (t.finished_s or 0.0, t.number))

    def cancel(self, ticket: Ticket) -> bool:
        with self._lock:
            cancelled = self._board.cancel(ticket)
            if cancelled:
                self._wake[ticket.lane].notify()  # its lane's next op may have become the head
            return cancelled

    def now(self) -> float:
        with self._lock:
            self._board.show_events()
        return time.monotonic()

    def drain(self) -> None:
        with self._lock:
            self._wait_until(lambda: self._board.num_settled == self._board.num_submitted)

    def close(self) -> None:
        """Running ops stop at their next packet boundary; a packet that does not end is given up after 10 s."""
        with self._lock:
            self._closing = True
            for condition in self._wake.values():
                condition.notify()
        deadline_s = time.monotonic() + 10.0
        for worker in self._workers:
            worker.join(timeout=max(0.0, deadline_s - time.monotonic()))

    def back(self, buffer: Buffer) -> None:
        self._arenas.back(buffer)

    def unback(self, buffer: Buffer) -> None:
        self._arenas.unback(buffer)

    # -- waiting ------------------------------------------------------------------------------------------------

    def _wait_until(self, condition: Any) -> None:
        self._last_progress_s = time.monotonic()
        while True:
            self._raise_failure()
            if condition():
                break
            self._check_alive()
            self._progress.wait(timeout=min(1.0, self._watchdog_s / 4))
        self._board.show_events()

    def _check_alive(self) -> None:
        if self._closing:
            raise MachineError(f"the machine was closed before its ops had run.\n{self._board.dump()}")
        stuck = not self._board.running and not any(queue.ready() for queue in self._board.lanes.values())
        idle_s = time.monotonic() - self._last_progress_s
        if stuck:
            raise MachineError(f"deadlock: nothing runs and no op is ready.\n{self._board.dump()}")
        if idle_s > self._watchdog_s:
            raise MachineError(f"watchdog: no packet finished for {idle_s:.0f} s.\n{self._board.dump()}")

    def _raise_failure(self) -> None:
        if self._failure is not None:
            text, cause = self._failure
            raise MachineError(text) from cause

    # -- the lanes' side ----------------------------------------------------------------------------------------

    def _start_lane(self, lane: Lane) -> None:
        self._wake[lane] = threading.Condition(self._lock)
        self._board.lane(lane)
        worker = threading.Thread(target=self._work, args=(lane,), name=f"lane-{lane}", daemon=True)
        self._workers.append(worker)
        worker.start()

    def _work(self, lane: Lane) -> None:
        torch.set_num_threads(1)
        context = HostContext(lane, self._arenas, self._rates.get(lane.kind))
        queue = self._board.lanes[lane]
        with self._lock:
            try:
                while not self._stopped:
                    ticket = queue.ready()
                    if ticket is None:
                        self._wake[lane].wait()
                        context.idled()
                        continue
                    queue.pop(ticket)
                    self._execute(ticket, context)
            except BaseException as error:  # the strategy must never wait for a lane that is gone
                self._fail(f"lane {lane}", error)

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
            self._wake[freed.lane].notify()
        self._progress.notify_all()

    def _run_packet(self, ticket: Ticket, packet: int, context: HostContext) -> float | None:
        """The lock is released while the packet runs. When it ended, or None if it failed."""
        op = ticket.op
        start_s, cpu_start_s = time.monotonic(), time.thread_time()
        if packet == 0:
            self._board.start(ticket, start_s)
        error: BaseException | None = None
        self._lock.release()
        try:
            share = _share(op.work(), op.packets)
            value = op.run(context, packet)
            if ticket.lane.kind in _COMPUTE_LANES:
                context.pace_compute(share, start_s)
        except BaseException as caught:
            error = caught
        end_s, cpu_s = time.monotonic(), time.thread_time() - cpu_start_s
        self._lock.acquire()
        self._last_progress_s = end_s
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
        for condition in self._wake.values():
            condition.notify()
        self._progress.notify_all()


def _share(work: Work, packets: int) -> Work:
    if packets == 1:
        return work
    return Work(work.flops / packets, work.device_bytes / packets, work.host_bytes / packets, work.link_bytes / packets)


@config
class Config:
    """Settings under `machine` in the configuration."""

    watchdog_s: float = 120.0
    poison: bool = False

    def __post_init__(self) -> None:
        require(self.watchdog_s > 0, "watchdog_s", f"must be > 0, got {self.watchdog_s}")


def build(config: Config, hardware: HardwareConfig) -> EmulatedMachine:
    """The emulated machine with the profile's capacities and rates; profiles of real GPUs are for planning."""
    real = f"'{hardware.name}' is a real machine, which cannot be emulated; use hardware=laptop or a profile like it"
    require(hardware.gpu is None, "hardware", real)

    def rate(flops: float | None, gb_s: float | None) -> LaneRate:
        return LaneRate(flops and flops * 1e9, gb_s and gb_s * 1e9)

    return EmulatedMachine(
        capacities_bytes=hardware.capacities_bytes,
        rates={
            LaneKind.GPU: rate(hardware.gpu_gflop_s, None),
            LaneKind.CPU: rate(hardware.cpu_gflop_s, hardware.cpu_gb_s),
            LaneKind.H2D: rate(None, hardware.h2d_gb_s),
            LaneKind.D2H: rate(None, hardware.d2h_gb_s),
            LaneKind.PIN: rate(None, hardware.pin_gb_s),
        },
        poison=config.poison,
        watchdog_s=config.watchdog_s,
    )
