"""Make random programs of ops, a log of how they ran, and a brute-force oracle of what had to come before what."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import product

from hypothesis import strategies as st

from harness.machine.base import CPU, D2H, GPU, H2D, Machine, Ticket, TicketState
from harness.memory.tiers import Buffer
from tests.unit.machine.ops import FreeOp

LANES = (GPU, CPU, H2D, D2H)


@dataclass(frozen=True)
class Cut:
    """Some bytes of one root, which were cut out of it for the `number`-th time; of these all, or what has a name."""

    begin: int
    end: int
    number: int = 0
    part: str | None = None

    @property
    def buffer(self) -> tuple[int, int, int]:
        return (self.begin, self.end, self.number)


KEYS = ("a", "b", Cut(0, 2), Cut(0, 2, 1), Cut(0, 3), Cut(2, 4), Cut(3, 5), Cut(1, 2, 0, "x"), Cut(1, 2, 0, "y"))
Key = str | Cut


@dataclass(frozen=True)
class Step:
    """Submit an op; where `cancels` is a number, try to cancel that earlier op right after it."""

    lane: int
    reads: frozenset[Key]
    writes: frozenset[Key]
    packets: int
    urgent: bool
    after: frozenset[int]
    cancels: int | None
    waits: bool


@dataclass(eq=False)
class Log:
    """A log of (op number, packet, "begin" or "end") in the order in which it happened; list.append is atomic."""

    events: list[tuple[int, int, str]] = field(default_factory=list)
    root: Buffer = field(default_factory=lambda: Buffer("device", "root", 5))
    buffers: dict[tuple[int, int, int], Buffer] = field(default_factory=dict)

    def machine_key(self, key: Key):
        """Return what an op declares for the key."""
        if isinstance(key, str):
            return key
        if key.buffer not in self.buffers:
            self.buffers[key.buffer] = self.root.sub(str(key), key.begin, key.end - key.begin)
        buffer = self.buffers[key.buffer]
        return (buffer, key.part) if key.part else buffer

    def position(self, number: int, packet: int, what: str) -> int:
        return self.events.index((number, packet, what))

    def first_packets(self, numbers: list[int]) -> list[int]:
        """Return those of `numbers` that ran, in the order of their starts."""
        return [n for n, packet, what in self.events if packet == 0 and what == "begin" and n in numbers]

    @property
    def ran(self) -> set[int]:
        return {number for number, _, _ in self.events}


class Recorded(FreeOp):
    """Logs its packets; sleeps between begin and end so that lanes overlap if nothing holds them back."""

    kind = "recorded"

    def __init__(self, log: Log, number: int, step: Step, sleep_s: float) -> None:
        self.log, self.number, self.sleep_s = log, number, sleep_s
        self.reads, self.writes = (tuple(map(log.machine_key, keys)) for keys in (step.reads, step.writes))
        self.packets = step.packets

    def run(self, ctx, packet):
        self.log.events.append((self.number, packet, "begin"))
        if self.sleep_s:
            time.sleep(self.sleep_s)
        self.log.events.append((self.number, packet, "end"))
        return self.number

    def imagine(self, world):
        return self.number


@st.composite
def programs(draw, max_size: int = 24) -> list[Step]:
    steps: list[Step] = []
    for number in range(draw(st.integers(1, max_size))):
        earlier = st.integers(0, number - 1) if number else st.nothing()
        keys = st.frozensets(st.sampled_from(KEYS), max_size=2)
        steps.append(
            Step(
                lane=draw(st.integers(0, len(LANES) - 1)),
                reads=draw(keys),
                writes=draw(keys),
                packets=draw(st.sampled_from((1, 1, 1, 3))),
                urgent=draw(st.sampled_from((False, False, True))),
                after=draw(st.frozensets(earlier, max_size=1)) if number else frozenset(),
                cancels=draw(st.one_of(st.none(), st.integers(max(0, number - 3), number))),
                waits=draw(st.sampled_from((False, False, False, True))),
            )
        )
    return steps


@dataclass(eq=False)
class Run:
    log: Log
    tickets: list[Ticket]
    cancelled: set[int]
    refused: list[tuple[int, bool, list[int]]]  # (op, had it started?, ops submitted and not cancelled by then)


def run_program(machine: Machine, steps: list[Step], sleep_s: float = 0.0) -> Run:
    run = Run(Log(), [], set(), [])
    for number, step in enumerate(steps):
        op = Recorded(run.log, number, step, sleep_s)
        after = [run.tickets[i] for i in step.after]
        run.tickets.append(machine.submit(LANES[step.lane], op, after=after, urgent=step.urgent))
        if step.cancels is not None and step.cancels not in run.cancelled:
            if machine.cancel(run.tickets[step.cancels]):
                run.cancelled.add(step.cancels)
            else:
                there = [n for n in range(number + 1) if n not in run.cancelled]
                state = run.tickets[step.cancels].state  # a lane's thread may have taken it and not come further yet
                run.refused.append((step.cancels, state is not TicketState.PENDING, there))
        if step.waits and number not in run.cancelled:
            assert machine.wait(run.tickets[number]) == number
    machine.drain()
    return run


def conflict(first: Step, second: Step) -> bool:
    pairs = [*product(first.writes, second.reads | second.writes), *product(first.reads, second.writes)]
    return any(same_memory(a, b) for a, b in pairs)


def same_memory(a: Key, b: Key) -> bool:
    """Tell whether there is a byte, or a name, that both stand for."""
    if isinstance(a, str) or isinstance(b, str) or a.buffer == b.buffer:
        return a == b
    return bool(set(range(a.begin, a.end)) & set(range(b.begin, b.end)))


def predecessors(steps: list[Step], cancelled: set[int]) -> list[set[int]]:
    """Return by op every op that must have finished before it starts. A cancelled op passes on its own predecessors."""
    result: list[set[int]] = []
    for number, step in enumerate(steps):
        direct = {i for i in range(number) if i in step.after or conflict(steps[i], step)}
        inherited = (result[i] for i in direct & cancelled)
        result.append((direct - cancelled).union(*inherited))
    return result


def check_order(steps: list[Step], run: Run) -> None:
    """Check that whatever ran, ran once, whole, and after everything the oracle puts before it."""
    kept = set(range(len(steps))) - run.cancelled
    assert run.log.ran == kept
    assert len(run.log.events) == sum(2 * steps[n].packets for n in kept)
    before = predecessors(steps, run.cancelled)
    for number in kept:
        start = run.log.position(number, 0, "begin")
        for first in before[number]:
            end = run.log.position(first, steps[first].packets - 1, "end")
            assert end < start, f"op {number} {steps[number]} started before op {first} {steps[first]} had ended"


def check_refusals(steps: list[Step], run: Run) -> None:
    """Check that a cancel is refused only where the op had started, or an op that was there by then had to follow
    it."""
    for number, started, there in run.refused:
        before = predecessors(steps, set(range(len(steps))) - set(there))
        assert started or any(number in before[later] for later in there), f"op {number} could have been cancelled"
