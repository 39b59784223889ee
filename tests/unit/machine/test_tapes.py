"""A tape that is submitted again does what its ops do when each is submitted alone, to the last bit."""

from __future__ import annotations

import gc
import weakref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.machine import hazards
from harness.machine.base import CPU, D2H, GPU, H2D, LaneKind, Op, Work
from harness.machine.simulated import SimulatedMachine
from harness.machine.virtual.costs import LaneCost, Roofline
from tests.unit.machine.ops import FreeOp

LANES = (GPU, CPU, H2D, D2H)
KEYS = ("a", "b", "c", "d")
RATES = Roofline(
    lanes={kind: LaneCost(overhead_s=0.25, flops_s=2.0, host_bytes_s=4.0) for kind in LaneKind},
    ops={("gpu", "heavy"): LaneCost(overhead_s=1.0, flops_s=1.0)},
)


class Sized(Op):
    """Has as much to do as its `size` says when it begins, and notes how often it was asked."""

    def __init__(self, kind: str, size: list[float], **given) -> None:
        self.kind, self.size = kind, size
        self.times_asked = 0
        for name, value in given.items():
            setattr(self, name, value)

    def work(self) -> Work:
        self.times_asked += 1
        return Work(flops=self.size[0], host_bytes=self.size[0])


class Foreseeing(Sized):
    def foresee(self, world) -> None:
        self.size = [world.size]


class Bringing(Sized):
    def imagine(self, world):
        return self.size[0] * world.size


class World:
    """Says something else each time."""

    def __init__(self) -> None:
        self.times_asked = 0

    @property
    def size(self) -> float:
        self.times_asked += 1
        return 1.0 + self.times_asked % 5


class Measured:
    def seconds(self, lane, op, work):
        return 0.5 + work.flops / 4


def machine(*, measured: bool) -> SimulatedMachine:
    costs = Measured() if measured else RATES
    return SimulatedMachine(capacities_bytes={}, costs=costs, host_bytes_s=5.0, world=World(), submit_s=0.125)


@st.composite
def tapes(draw) -> list[dict]:
    """Describe ops: those with one `group` have one size, which may change from one time to the next."""
    keys, made = st.frozensets(st.sampled_from(KEYS), max_size=2), []
    for number in range(draw(st.integers(1, 10))):
        made.append(
            {
                "lane": draw(st.sampled_from(LANES)),
                "urgent": draw(st.sampled_from((False, False, True))),
                "after": tuple(draw(st.lists(st.integers(0, number - 1), max_size=2, unique=True))) if number else (),
                "group": draw(st.integers(-1, 2)),
                "what": draw(st.sampled_from((Sized, Sized, Foreseeing, Bringing))),
                "given": {
                    "reads": tuple(sorted(draw(keys))),
                    "writes": tuple(sorted(draw(keys))),
                    "packets": draw(st.sampled_from((1, 2, 6))),
                    "pieces": draw(st.sampled_from((1, 1, 2))),
                    "layer": draw(st.sampled_from((None, 4))),
                    "micro_batch": draw(st.sampled_from((None, 1))),
                },
            }
        )
        if made[-1]["given"]["packets"] % made[-1]["given"]["pieces"]:
            made[-1]["given"]["pieces"] = 1
        if made[-1]["what"] is Foreseeing:
            made[-1]["group"] = -1
    return made


def grouped(one: dict) -> tuple | None:
    """Whose work is the same: of one group, lane, kind and number of pieces."""
    return None if one["group"] < 0 else (one["group"], one["lane"], one["given"]["pieces"], one["what"])


class Player:
    """Submits a tape again and again, in one call or op by op, between ops of its own."""

    def __init__(self, described: list[dict], *, by_tape: bool, fixed: bool, measured: bool) -> None:
        self.machine = machine(measured=measured)
        self.sizes = {group: [float(group + 1)] for group in range(-1, 3)}
        self.ops, self.described, costs, entries, places = [], described, [], [], {}
        for number, one in enumerate(described):
            size = self.sizes[one["group"]] if one["group"] >= 0 else [number % 3 + 0.5]
            op = one["what"]("heavy" if one["what"] is Bringing else "light", size, **one["given"])
            self.ops.append(op)
            if (group := grouped(one)) is not None and group not in places:
                places[group] = len(costs)
                costs.append((op, fixed))
            entries.append((one["lane"], op, one["after"], one["urgent"], places.get(group, -1)))
        self._submit = self.machine.keep_tape(entries, costs) if by_tape else None
        self.tickets: list = []

    def submit(self) -> None:
        if self._submit is not None:
            self.tickets = self._submit()
            return
        self.tickets = []
        for op, one in zip(self.ops, self.described, strict=True):
            after = [self.tickets[place] for place in one["after"]]
            self.tickets.append(self.machine.submit(one["lane"], op, after=after, urgent=one["urgent"]))

    def play(self, steps: list[tuple], *, fixed: bool) -> tuple:
        seen: list = []
        for what, number in steps:
            if what == "again":
                if not fixed:  # what is under way would be asked anew
                    self.machine.drain()
                    for group, size in self.sizes.items():
                        size[0] = group + 1.0 + number
                self.submit()
            elif what == "other":
                key = KEYS[number] if number < len(KEYS) else f"new {number}"
                self.machine.submit(LANES[number % 4], Sized("light", [1.0], reads=(key,), writes=(key,)))
            elif what == "drain":
                self.machine.drain()
            elif what == "wait" and self.tickets:
                self.machine.wait_any([self.tickets[number % len(self.tickets)]])
            elif what == "cancel" and self.tickets:
                seen.append(self.machine.cancel(self.tickets[-1]))
        self.machine.drain()
        values = [(t.number, str(t.state), t.started_s, t.finished_s, t.value) for t in self.tickets]
        return seen, values, list(self.machine.spans), self.machine.totals(), self.machine.now()


STEPS = st.lists(
    st.tuples(st.sampled_from(("again", "again", "other", "other", "drain", "wait", "cancel")), st.integers(0, 9)),
    min_size=3,
    max_size=12,
)


@settings(max_examples=200, deadline=None)
@given(tapes(), STEPS, st.booleans(), st.booleans(), st.booleans())
def test_a_tape_does_what_its_ops_do_alone(described, steps, fixed, measured, sweeps):
    with pytest.MonkeyPatch.context() as patch:
        if sweeps:  # keys are dropped whenever a new one comes
            patch.setattr(hazards, "_SWEEP_KEYS_FROM", 2)
        told = [
            Player(described, by_tape=by_tape, fixed=fixed, measured=measured).play(steps, fixed=fixed)
            for by_tape in (True, False)
        ]
    assert told[0] == told[1]


@pytest.mark.parametrize("by_tape", [True, False])
def test_keys_that_were_dropped_in_between_still_order_ops(monkeypatch, by_tape):
    monkeypatch.setattr(hazards, "_SWEEP_KEYS_FROM", 2)
    given = {"reads": (), "writes": ("a",), "packets": 1, "pieces": 1}
    one = {"lane": GPU, "urgent": False, "after": (), "group": -1, "what": Sized, "given": given}
    player = Player([one], by_tape=by_tape, fixed=False, measured=False)
    other, reader = Sized("light", [1.0], writes=("b", "c", "d")), Sized("light", [1.0], reads=("a",))
    player.submit()
    player.machine.drain()
    player.machine.submit(H2D, other)
    player.submit()
    ticket = player.machine.submit(CPU, reader)
    player.machine.drain()
    assert ticket.started_s >= player.tickets[0].finished_s


@pytest.mark.parametrize(("fixed", "measured", "times"), [(True, False, 1), (False, False, 3), (True, True, 6)])
def test_alike_ops_are_asked_once_where_rates_say_what_they_take(fixed, measured, times):
    on = machine(measured=measured)
    first, second = Sized("light", [1.0]), Sized("light", [1.0])
    submit = on.keep_tape([(GPU, first, (), False, 0), (GPU, second, (0,), False, 0)], [(first, fixed)])
    for _ in range(3):
        submit()
        on.drain()
    assert first.times_asked + second.times_asked == times


class Launches(Sized):
    launches = 2


def test_ops_of_several_launches_are_asked_each():
    on = machine(measured=False)
    ops = [Launches("light", [size]) for size in (1.0, 2.0)]
    submit = on.keep_tape([(GPU, op, (), False, 0) for op in ops], [(ops[0], True)])
    submit()
    on.drain()
    assert [span.work.flops for span in on.spans] == [1.0, 2.0]


@pytest.mark.parametrize(
    ("entry", "error"),
    [
        ((GPU, FreeOp(), (0,), False, -1), "follows earlier ones"),
        ((GPU, FreeOp(), (), False, 1), "no such cost"),
        ((GPU, Sized("light", [1.0], packets=0), (), False, -1), "packets >= 1"),
    ],
)
def test_a_wrong_tape_is_refused(entry, error):
    with pytest.raises(ValueError, match=error):
        machine(measured=False).keep_tape([entry], [(FreeOp(), False)])


def test_a_machine_whose_tape_knows_it_is_given_back():
    on = machine(measured=False)
    op = Sized("light", [1.0], reads=("a",))
    op.knows = on
    submit = on.keep_tape([(GPU, op, (), False, 0)], [(op, False)])
    submit()
    on.drain()
    alive = weakref.ref(op)
    del on, op, submit
    gc.collect()
    assert alive() is None
