"""The shuffled machine: any op that is ready, in a seeded random legal order, one packet at a time.

Lane order is ignored on purpose: correctness must follow from declared reads and writes alone. Together with poisoned
buffers it turns a missing dependency into wrong tokens within milliseconds.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import torch

from harness.config import config
from harness.hardware.profile import HardwareConfig
from harness.machine.base import Lane, Machine, MachineError, Op, Span, Ticket, TicketState
from harness.machine.queues import Board
from harness.machine.threads.arenas import Arenas
from harness.machine.threads.context import HostContext
from harness.memory.tiers import Buffer
from harness.model.spec import ModelSpec


class ShuffledMachine(Machine):
    """The shuffled machine is deterministic for a seed. `now` counts packets: there is no time here, so its numbers
    carry no label."""

    label: ClassVar[str] = "none"
    name: ClassVar[str] = "shuffled"
    clock = "none"

    def __init__(self, *, capacities_bytes: dict[str, int], seed: int, poison: bool = True, eager: float = 0.5) -> None:
        torch.set_num_threads(1)
        self.poisons = poison
        self._arenas = Arenas(poison)
        self.tiers = self._arenas.tiers(capacities_bytes)
        self.spans: list[Span] = []
        self._random = random.Random(seed)
        self._eager = eager  # chance that a submit also runs something: ops may start before the strategy waits
        self._board = Board()
        self._runnable: list[Ticket] = []
        self._num_packets_run = 0
        self._contexts: dict[Lane, HostContext] = {}
        self._failure: tuple[str, BaseException] | None = None

    def submit(self, lane: Lane, op: Op, *, after: Iterable[Ticket] = (), urgent: bool = False) -> Ticket:
        self._raise_failure()
        ticket = self._board.submit(lane, op, after, urgent)
        if ticket.ready:
            self._runnable.append(ticket)
        if self._runnable and self._random.random() < self._eager:
            self._step()
        return ticket

    def wait(self, ticket: Ticket) -> Any:
        self._step_until(lambda: ticket.settled)
        if ticket.state is TicketState.CANCELLED:
            raise MachineError(f"waited for {ticket}, which was cancelled")
        return ticket.value

    def wait_any(self, tickets: Sequence[Ticket]) -> list[Ticket]:
        assert tickets, "wait_any of nothing would never end"
        self._step_until(lambda: any(t.settled for t in tickets))
        return sorted((t for t in tickets if t.settled), key=lambda t: (t.finished_s or 0.0, t.number))

    def cancel(self, ticket: Ticket) -> bool:
        cancelled = self._board.cancel(ticket)
        if cancelled and ticket in self._runnable:
            self._runnable.remove(ticket)
        return cancelled

    def now(self) -> float:
        self._raise_failure()
        self._board.show_events()
        return float(self._num_packets_run)

    def drain(self) -> None:
        self._step_until(lambda: self._board.num_settled == self._board.num_submitted)

    def close(self) -> None:
        """Give memory back; nothing runs between calls."""
        self._arenas.close()

    def back(self, buffer: Buffer) -> None:
        self._arenas.back(buffer)

    def unback(self, buffer: Buffer) -> None:
        self._arenas.unback(buffer)

    def _step_until(self, condition: Callable[[], bool]) -> None:
        self._raise_failure()
        while not condition():
            self._step()
        self._board.show_events()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            text, cause = self._failure
            raise MachineError(text) from cause

    def _step(self) -> None:
        """Run one packet of one ready op, chosen at random."""
        if not self._runnable:
            raise MachineError(f"deadlock: no op is ready.\n{self._board.dump()}")
        index = self._random.randrange(len(self._runnable))
        ticket = self._runnable[index]
        if ticket.state is TicketState.PENDING:
            self._board.start(ticket, float(self._num_packets_run))
        value = self._run_packet(ticket)
        ticket.packets_run += 1
        self._num_packets_run += 1
        if ticket.packets_run == ticket.op.packets:
            ticket.value = value
            self._runnable[index] = self._runnable[-1]
            self._runnable.pop()
            self._runnable.extend(self._board.finish(ticket, float(self._num_packets_run)))

    def _run_packet(self, ticket: Ticket) -> Any:
        if ticket.lane not in self._contexts:
            self._contexts[ticket.lane] = HostContext(ticket.lane, self._arenas)
        try:
            return self._execute(ticket.op, self._contexts[ticket.lane], ticket.packets_run)
        except BaseException as error:
            self._failure = (f"{ticket} failed: {type(error).__name__}: {error}", error)
            if not isinstance(error, Exception):
                raise  # ops run in the strategy's own thread, so this is the user's Ctrl-C
            raise MachineError(self._failure[0]) from error

    def _execute(self, op: Op, ctx: HostContext, packet: int) -> Any:
        """Run the packet. Tests that watch an op at its work override this."""
        return op.run_packet(ctx, packet)


@config
class Config:
    """The configuration's group `machine` has these settings where it is `shuffled`."""

    has_tensors: ClassVar[bool] = True

    seed: int = 0
    poison: bool = True


def build(config: Config, hardware: HardwareConfig, spec: ModelSpec) -> ShuffledMachine:
    """Build the shuffled machine with the profile's capacities."""
    return ShuffledMachine(capacities_bytes=hardware.capacities_bytes, seed=config.seed, poison=config.poison)
