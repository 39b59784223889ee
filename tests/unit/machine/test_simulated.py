"""The simulated machine against closed forms: durations, fair sharing, packets, host time, determinism."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.machine.base import CPU, D2H, GPU, H2D, LaneKind, MachineError, Op, Ticket, Work
from harness.machine.simulated import SimulatedMachine
from harness.machine.virtual.costs import LaneCost, Roofline


class Unit(Op):
    """Costs `seconds` alone on any lane; `host` bytes per second while it runs at full speed."""

    kind = "unit"

    def __init__(self, seconds: float, *, reads=(), writes=(), packets=1, pieces=1, host=0.0) -> None:
        self.seconds, self.host = seconds, host
        self.reads, self.writes, self.packets, self.pieces = tuple(reads), tuple(writes), packets * pieces, pieces

    def work(self) -> Work:
        return Work(flops=self.seconds * self.pieces, host_bytes=self.seconds * self.host * self.pieces)

    def imagine(self, world):
        return world


COSTS = Roofline(lanes={kind: LaneCost(flops_s=1.0) for kind in LaneKind})


def machine(host_bytes_s: float = 1e9, **times: float) -> SimulatedMachine:
    return SimulatedMachine(capacities_bytes={"device": 100}, costs=COSTS, host_bytes_s=host_bytes_s, world=7, **times)


def test_lanes_run_side_by_side_and_data_orders_them():
    m = machine()
    first = m.submit(H2D, Unit(2.0, writes=["w"]))
    beside = m.submit(CPU, Unit(3.0))
    after = m.submit(GPU, Unit(1.0, reads=["w"]))
    assert m.wait(after) == 7
    assert (first.finished_s, after.started_s, after.finished_s) == (2.0, 2.0, 3.0)
    m.wait(beside)
    assert beside.finished_s == 3.0


def test_each_launch_costs_what_an_op_of_its_own_would():
    """One is limited by arithmetic and one by memory: they follow each other, and neither hides the other."""
    cost = LaneCost(overhead_s=0.5, flops_s=1.0, host_bytes_s=1.0)
    works = [Work(flops=2.0, host_bytes=1.0), Work(flops=1.0, host_bytes=3.0)]
    m = SimulatedMachine(
        capacities_bytes={"device": 100}, costs=Roofline(lanes=dict.fromkeys(LaneKind, cost)), host_bytes_s=1e9
    )
    op = Unit(3.0, host=4 / 3)
    op.launches, op.launch_works = 2, lambda: works
    ticket = m.submit(CPU, op)
    m.drain()
    assert ticket.finished_s == sum(map(cost.seconds, works)) == 2 * 0.5 + 2.0 + 3.0


def test_what_an_urgent_op_of_pieces_interrupts_goes_on_behind_it():
    m = machine(submit_s=0.5)
    interrupted = m.submit(H2D, Unit(4.0, packets=4))
    op, asked = Unit(1.0, pieces=2), []
    work = op.work
    op.work = lambda: asked.append(1) or work()
    urgent = m.submit(H2D, op, urgent=True)
    m.drain()
    assert len(asked) == 1, "its pieces are alike"
    assert (urgent.started_s, urgent.finished_s, interrupted.finished_s) == (1.5, 3.5, 6.5)


@pytest.mark.parametrize("wrong", [{"launches": 0}, {"launches": -1}, {"launches": 2, "pieces": 2}])
def test_launches_are_counted_and_no_pieces(wrong):
    op = Unit(1.0, pieces=wrong.get("pieces", 1))
    op.launches = wrong["launches"]
    m = machine()
    m.submit(CPU, op)
    with pytest.raises(MachineError, match="an op has pieces, or launches >= 1"):
        m.drain()


def test_host_memory_is_shared_max_min():
    """Demands 10 and 2 under a capacity of 6: the small one is served, the large one gets 4 until it is alone."""
    m = machine(host_bytes_s=6.0)
    large = m.submit(CPU, Unit(1.0, host=10.0))
    small = m.submit(H2D, Unit(1.0, host=2.0))
    m.drain()
    assert small.finished_s == pytest.approx(1.0)
    assert large.finished_s == pytest.approx(1.0 + (1.0 - 0.4) / 0.6)


def test_an_urgent_op_takes_the_lane_at_the_next_packet_boundary():
    m = machine()
    big = m.submit(H2D, Unit(10.0, packets=5))
    m.submit(GPU, Unit(3.0, writes=["x"]))
    urgent = m.submit(H2D, Unit(1.0, reads=["x"]), urgent=True)
    m.drain()
    assert (urgent.started_s, urgent.finished_s, big.finished_s) == (4.0, 5.0, 11.0)
    spans = [(s.start_s, s.end_s, s.packet) for s in m.spans if s.ticket == big.number]
    assert spans == [(0.0, 4.0, 0), (5.0, 11.0, 2)]


def test_one_packet_is_never_interrupted():
    m = machine()
    m.submit(H2D, Unit(10.0))
    m.submit(GPU, Unit(3.0, writes=["x"]))
    urgent = m.submit(H2D, Unit(1.0, reads=["x"]), urgent=True)
    m.drain()
    assert urgent.started_s == 10.0


def test_submissions_and_wake_ups_cost_host_time():
    m = machine(submit_s=0.5, wake_s=0.25)
    first = m.submit(GPU, Unit(1.0))
    second = m.submit(CPU, Unit(1.0))
    m.drain()
    assert (first.started_s, second.started_s) == (0.5, 1.0)
    assert m.now() == pytest.approx(2.25)


def test_time_stands_still_without_waiting():
    m = machine()
    ticket = m.submit(GPU, Unit(1.0))
    assert m.now() == 0.0
    assert not ticket.done
    with pytest.raises(MachineError, match="polling"):
        while True:
            m.now()


def test_wait_any_returns_at_the_first_completion():
    m = machine()
    slow, fast = m.submit(GPU, Unit(5.0)), m.submit(CPU, Unit(2.0))
    assert m.wait_any([slow, fast]) == [fast]
    assert m.now() == 2.0
    assert not slow.done


def test_cancelled_ops_never_run():
    m = machine()
    running = m.submit(H2D, Unit(2.0))
    waiting = m.submit(H2D, Unit(2.0))
    m.wait(m.submit(GPU, Unit(1.0)))
    assert not m.cancel(running)
    assert m.cancel(waiting)
    m.drain()
    assert running.finished_s == 2.0
    assert waiting.finished_s is None


def test_a_deadlock_is_told_at_once():
    m = machine()
    foreign = Ticket(op=Unit(1.0), lane=GPU, number=77, urgent=False)  # nothing can ever free who waits for it
    m.submit(GPU, Unit(1.0), after=[foreign])
    with pytest.raises(MachineError, match="deadlock"):
        m.drain()


@settings(max_examples=40)
@given(st.data())
def test_same_program_same_trace_and_the_critical_path_bounds_it(data):
    steps = data.draw(
        st.lists(
            st.tuples(
                st.sampled_from([GPU, CPU, H2D, D2H]),
                st.floats(0.1, 2.0),
                st.integers(1, 4),
                st.booleans(),
                st.lists(st.integers(0, 3), max_size=2),
                st.lists(st.integers(0, 3), max_size=2),
                st.sampled_from([0.0, 3.0]),
            ),
            min_size=1,
            max_size=25,
        )
    )

    def run():
        m = machine(host_bytes_s=4.0)
        for lane, seconds, packets, urgent, reads, writes, host in steps:
            m.submit(lane, Unit(seconds, reads=reads, writes=writes, packets=packets, host=host), urgent=urgent)
        m.drain()
        return m

    one, two = run(), run()
    assert one.spans == two.spans
    length_s = max(s.end_s for s in one.spans)
    assert length_s <= sum(step[1] * (2.0 if step[6] else 1.0) for step in steps) + 1e-6
    for lane in (GPU, CPU, H2D, D2H):
        spans = sorted((s for s in one.spans if s.lane == lane), key=lambda s: s.start_s)
        assert all(a.end_s <= b.start_s + 1e-9 for a, b in itertools.pairwise(spans)), "a lane is serial"
        assert sum(s.work.flops for s in spans) == pytest.approx(sum(step[1] for step in steps if step[0] == lane))


class Failing(Unit):
    """Raises `error` where `what` is asked."""

    kind = "failing"
    layer = 3

    def __init__(self, what: str, error: BaseException) -> None:
        super().__init__(1.0)
        self.what, self.error = what, error

    def work(self) -> Work:
        if self.what == "work":
            raise self.error
        return super().work()

    def imagine(self, world):
        raise self.error


@pytest.mark.parametrize("what", ["work", "imagine"])
def test_an_op_that_fails_is_named_and_ends_the_run(what):
    m = machine()
    before = m.submit(CPU, Unit(0.5))
    m.submit(GPU, Failing(what, ValueError("no experts")))
    behind = m.submit(GPU, Unit(1.0))
    for _ in range(2):
        with pytest.raises(MachineError, match="#1 failing layer 3 on gpu failed: ValueError: no experts"):
            m.wait(behind)
    assert not behind.done
    assert before.done == (what == "imagine"), "what ended before is told"


def test_an_interruption_goes_through_as_it_is():
    m = machine()
    m.submit(GPU, Failing("work", KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        m.drain()


@pytest.mark.parametrize(
    ("costs", "match"),
    [
        (lambda: -1.0, "costs -1.0 s, which no clock can show"),
        (lambda: float("nan"), "costs nan s"),
        (lambda: "long", "TypeError"),
    ],
)
def test_costs_that_are_none_are_refused(costs, match):
    class Wrong:
        def seconds(self, lane, op, work):
            return costs()

    m = SimulatedMachine(capacities_bytes={}, costs=Wrong(), host_bytes_s=1e9)
    m.submit(GPU, Unit(1.0))
    with pytest.raises(MachineError, match=match):
        m.drain()


def test_what_is_no_ticket_or_no_work_is_refused():
    class Wordy(Unit):
        def work(self):
            return (1.0, 2.0)

    m = machine()
    with pytest.raises(TypeError, match="tickets"):
        m.wait("ticket")
    with pytest.raises(ValueError, match="packets >= 1"):
        m.submit(GPU, Unit(1.0, packets=0))
    m.submit(GPU, Wordy(1.0))
    with pytest.raises(MachineError, match=r"work\(\) must be a Work"):
        m.drain()


def test_a_roofline_is_the_overhead_and_the_longest_of_its_limits():
    cost = LaneCost(overhead_s=0.5, flops_s=2.0, device_bytes_s=4.0, host_bytes_s=8.0, link_bytes_s=16.0)
    for work, seconds in [
        (Work(), 0.5),
        (Work(flops=3.0, device_bytes=4.0), 2.0),
        (Work(flops=1.0, device_bytes=8.0, host_bytes=8.0), 2.5),
        (Work(host_bytes=32.0, link_bytes=16.0), 4.5),
        (Work(host_bytes=8.0, link_bytes=48.0), 3.5),
    ]:
        op = Unit(1.0)
        op.work = lambda work=work: work  # type: ignore[method-assign]
        m = SimulatedMachine(capacities_bytes={}, costs=Roofline(lanes={LaneKind.GPU: cost}), host_bytes_s=1e9)
        ticket = m.submit(GPU, op)
        m.drain()
        assert ticket.finished_s == seconds
    with pytest.raises(ValueError, match="no costs are known for lanes of kind cpu"):
        m.submit(CPU, Unit(1.0))


small = st.integers(1, 4)
transfers = st.tuples(st.just(H2D), small, small, small, small)  # seconds, packets, pieces, demand of host memory
others = st.tuples(st.sampled_from((GPU, CPU)), small, st.just(1), st.just(1), small)
urgent = st.tuples(st.just("urgent"), small, st.just(1), st.just(1), small)


@settings(max_examples=200)
@given(
    program=st.lists(st.one_of(transfers, others, urgent), min_size=1, max_size=14),
    host_bytes_s=st.sampled_from((2, 5, 99)),
    after=st.randoms(use_true_random=False),
)
def test_pieces_run_as_ops_of_their_own_would(program, host_bytes_s, after):
    """Other ops need all pieces of some transfers before them, and transfers need those ops: all times agree, bit for
    bit."""
    reads = [tuple(sorted(after.sample(range(n), min(n, 2)))) for n in range(len(program))]
    found = []
    for apart in (False, True):
        m = machine(host_bytes_s=float(host_bytes_s), submit_s=1e-3)
        for n, (lane, seconds, packets, pieces, host) in enumerate(program):
            keys = [(before, k) for before in reads[n] for k in range(program[before][3])]
            options = {"reads": keys, "packets": packets, "host": float(host)}
            for k in range(pieces if apart else 1):
                writes = [(n, k)] if apart else [(n, each) for each in range(pieces)]
                op = Unit(seconds / 3, writes=writes, pieces=1 if apart else pieces, **options)
                m.submit(H2D if lane == "urgent" else lane, op, urgent=lane == "urgent")
        m.drain()
        spans = sorted((str(s.lane), s.start_s, s.end_s) for s in m.spans)
        totals = {key: values[1:] for key, values in m.totals().items()}
        found.append((spans, totals, sum(values.num_ops for values in m.totals().values())))
    assert found[0][:2] == found[1][:2]
    assert (found[0][2], found[1][2]) == (len(program), sum(pieces for _, _, _, pieces, _ in program))


def test_totals_count_what_is_done_of_ops_that_run():
    m = machine()
    half = m.submit(GPU, Unit(4.0, packets=4))
    m.submit(H2D, Unit(1.0))
    m.wait(m.submit(CPU, Unit(1.0)))
    assert half.started_s == 0.0 and not half.done
    totals = m.totals()
    assert totals[GPU, "unit"] == (0, 1.0, pytest.approx(1.0), 0.0, 0.0, 0.0)
    assert totals[H2D, "unit"].num_ops == totals[CPU, "unit"].num_ops == 1
    m.spans.clear()
    assert m.totals().keys() == {(GPU, "unit")}


def test_a_deadlock_shows_what_is_paused_and_what_waits_for_what():
    m = machine()
    foreign = Ticket(op=Unit(1.0), lane=GPU, number=77, urgent=False)
    m.submit(H2D, Unit(4.0, packets=4))
    m.submit(H2D, Unit(2.0, writes=["w"]), after=[foreign])
    m.submit(CPU, Unit(1.0, reads=["w"]))
    with pytest.raises(MachineError) as error:
        m.drain()
    text = str(error.value)
    assert "#1 unit on h2d waits for #77 unit on gpu" in text
    assert "#2 unit on cpu waits for #1 unit on h2d" in text
