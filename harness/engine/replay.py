"""Submit the ops of a pass again for other sequences, where emitting them anew would give the same ops. Torch-free.

Most of the time of a simulated pass goes into emitting: into parts, keys and ops that are those of the pass before.
Replayed ops are submitted like all others, so that dependencies and the order on lanes are found as always; ops that
are known to do the same are asked once what that is.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from harness.engine.batch import MicroBatch
from harness.engine.in_flight import InFlight
from harness.engine.ops.alike import alike
from harness.machine.base import Machine, Op, Ticket
from harness.machine.simulated import SimulatedMachine


@dataclass(frozen=True, slots=True)
class _Tape:
    """The submissions of a pass in their order. Tickets are named by their places in it."""

    submit: Callable[[], list[Ticket]]
    of_batches: list[list[Any]]  # the ops of each micro-batch
    kv: list[list[int]]  # by micro-batch, as in `PassTickets`
    sampled: list[int]
    under_way: list[int]


class _Costs:
    """Groups the ops of a pass whose work is the same, for `SimulatedMachine.keep_tape`."""

    def __init__(self, batches: Sequence[MicroBatch]) -> None:
        self._numbers = {id(batch): number for number, batch in enumerate(batches)}
        self._places: dict[Hashable, int] = {}
        self.found: list[tuple[Op, bool]] = []

    def place(self, ticket: Ticket) -> int:
        op = ticket.op
        key, batch = alike(op), self._numbers.get(id(getattr(op, "batch", None)))
        is_known = op.has_fixed_work or (key is not None and batch is not None)
        if not is_known:
            return -1
        mine = (ticket.lane, op) if op.has_fixed_work else (ticket.lane, op.kind, op.pieces, batch, key)
        if mine not in self._places:
            self._places[mine] = len(self.found)
            self.found.append((op, op.has_fixed_work))
        return self._places[mine]


class Replay:
    """Keeps the ops of a pass of each shape, and submits them again for the next pass of this shape.

    It is for a pipeline whose ops follow from the shape of a pass alone, on one GPU, and which is behind each pass as
    it was before it, but for the tickets of transfers for the next one. `under_way` gives the lists in which these are
    kept, in the order of their submission. Where this does not `apply` to a pipeline, or the machine is a real one,
    each pass is emitted.
    """

    def __init__(self, machine: Machine, under_way: Callable[[], Sequence[list[Ticket]]], *, applies: bool) -> None:
        self._machine, self._under_way, self._applies = machine, under_way, applies
        self._tapes: dict[Hashable, _Tape] = {}

    def run(self, batches: Sequence[InFlight], emit: Callable[[], None]) -> None:
        """Submit a pass of these micro-batches, as the last one of their shape was; `emit` submits the first."""
        applies = self._applies and isinstance(self._machine, SimulatedMachine)
        shape = _shape([it.batch for it in batches]) if applies else None
        if shape is None:
            emit()
        elif (tape := self._tapes.get(shape)) is not None:
            self._submit(tape, batches)
        else:
            assert isinstance(self._machine, SimulatedMachine)
            with self._machine.noted() as noted:
                emit()
            self._tapes[shape] = self._tape_of(noted, batches)

    def _tape_of(self, noted: list[tuple[Ticket, tuple[Ticket, ...]]], batches: Sequence[InFlight]) -> _Tape:
        tickets = [ticket for ticket, _ in noted]
        place = {ticket: at for at, ticket in enumerate(tickets)}
        assert all(one.done or one in place for _, after in noted for one in after), "what it follows is not over"
        assert isinstance(self._machine, SimulatedMachine)
        costs = _Costs([it.batch for it in batches])
        ops = [
            (of.lane, of.op, tuple(place[one] for one in after if one in place), of.urgent, costs.place(of))
            for of, after in noted
        ]
        return _Tape(
            submit=self._machine.keep_tape(ops, costs.found),
            of_batches=[[t.op for t in tickets if getattr(t.op, "batch", None) is it.batch] for it in batches],
            kv=[[place[ticket] for ticket in it.tickets.kv] for it in batches],
            sampled=[place[ticket] for it in batches if (ticket := it.tickets.sampled)],
            under_way=[place[ticket] for (ticket,) in self._under_way()],
        )

    def _submit(self, tape: _Tape, batches: Sequence[InFlight]) -> None:
        for it, ops in zip(batches, tape.of_batches, strict=True):
            assert it.batch.num_tokens <= it.acts.max_tokens, f"{it.batch.num_tokens} tokens do not fit"
            for op in ops:
                op.batch = it.batch
        tickets = tape.submit()
        for it, kv, sampled in zip(batches, tape.kv, tape.sampled, strict=True):
            it.tickets.kv, it.tickets.sampled = [tickets[at] for at in kv], tickets[sampled]
        for kept, at in zip(self._under_way(), tape.under_way, strict=True):
            kept[:] = [tickets[at]]


def _shape(batches: Sequence[MicroBatch]) -> Hashable:
    """Return all that decides which ops a pass has and what they touch; None where that is more than its shape."""
    if any(batch.records_routing for batch in batches):
        return None
    return tuple(
        (batch.partitions, *(bool(count) for side in (batch.on_host, batch.on_device)
                             for count in (side.num_tokens, side.num_decode)), bool(batch.prefill))
        for batch in batches
    )  # fmt: skip
