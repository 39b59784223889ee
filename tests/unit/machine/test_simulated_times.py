"""The simulated machine's times between ops and of the strategy's thread, as a calibration gives them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import ClassVar

import pytest

from harness.machine.base import CPU, D2H, GPU, H2D, Work
from harness.machine.simulated import SimulatedMachine
from tests.unit.machine.test_simulated import Unit, machine


class Given:
    """Costs what ops say."""

    estimated_shares: ClassVar = {}

    def seconds(self, lane, op, work) -> float:
        return op.seconds


def calibrated(costs=None, **times) -> SimulatedMachine:
    """A machine with measured costs, on which nothing else takes time but what `times` says."""
    names = ("submit_s", "wake_s", "pass_s", "sequence_s", "handover_s", "handover_beside_s")
    m, host = machine(), SimpleNamespace(**(dict.fromkeys(names, 0.0) | {"turns_s": {}} | times))
    m.calibrate(costs or Given(), {}, host)
    return m


def test_an_idle_lane_begins_after_a_hand_over_and_a_busy_one_at_once():
    m = calibrated(handover_s=0.125, handover_beside_s=0.25)
    first = m.submit(H2D, Unit(2.0, writes=["w"]))
    idle = m.submit(GPU, Unit(1.0, reads=["w"], writes=["v"]))
    busy = m.submit(CPU, Unit(3.0))
    behind = m.submit(CPU, Unit(1.0, reads=["w"]))
    last = m.submit(D2H, Unit(1.0, reads=["v"]))
    m.drain()
    assert first.started_s == 0.0
    assert (idle.started_s, idle.finished_s) == (2.25, 3.25)
    assert behind.started_s == busy.finished_s == 3.0
    assert last.started_s == 3.5, "the cpu lane was still at work"
    m.wait(m.submit(GPU, Unit(1.0, writes=["u"])))
    alone = m.submit(H2D, Unit(1.0, reads=["u"], writes=["t"]))
    after = m.submit(D2H, Unit(1.0, reads=["t"]))
    m.drain()
    assert after.started_s == alone.finished_s + 0.125


def test_a_lane_goes_from_op_to_op_in_one_turn_whether_they_wait_for_each_other_or_not():
    """Nobody has to wake a lane that has just ended an op, so there is no hand-over."""
    m = calibrated(handover_s=5.0, handover_beside_s=5.0, turns_s={"gpu": 0.25})
    chain = [m.submit(GPU, Unit(1.0, writes=["sums"])) for _ in range(2)] + [m.submit(GPU, Unit(1.0))]
    other = [m.submit(CPU, Unit(1.0, writes=["other"])) for _ in range(2)]
    m.drain()
    assert [t.started_s for t in chain] == [0.0, 1.25, 2.5]
    assert [t.started_s for t in other] == [0.0, 1.0]


def test_lanes_that_end_in_one_instant_need_no_hand_over_whatever_their_order():
    m = calibrated(handover_s=5.0, handover_beside_s=5.0)
    for lane in (CPU, GPU):
        m.submit(lane, Unit(1.0, writes=[str(lane)]))
    crossed = [m.submit(lane, Unit(1.0, reads=[str(other)])) for lane, other in ((CPU, GPU), (GPU, CPU))]
    m.drain()
    assert [t.started_s for t in crossed] == [1.0, 1.0]


def test_the_strategy_works_while_it_submits_and_not_while_it_wakes_up():
    seen: dict[str, float] = {}

    class Asking(Given):
        def seconds(self, lane, op, work) -> float:
            seen[op.name] = m.strategy_left_s()
            return op.seconds

    class Named(Unit):
        def __init__(self, name: str, **kwargs) -> None:
            super().__init__(1.0, **kwargs)
            self.name = name

    m = calibrated(Asking(), submit_s=0.25, wake_s=1.5)
    m.submit(GPU, Named("first"))
    m.wait(m.submit(CPU, Named("beside")))  # at 1.5; the strategy is back at 3.0
    m.submit(GPU, Named("unheard", writes=["x"]))
    m.submit(CPU, Named("last"))
    m.drain()
    assert seen == {"first": 0.25, "beside": 0.0, "unheard": 0.25, "last": 0.0}
    m.submit(GPU, Named("one"))  # at 5.75 + 0.25
    m.submit(D2H, Named("two", reads=["y"]))
    woken = m.submit(H2D, Named("three", writes=["z"]))
    m.submit(CPU, Named("follows", reads=["z"]))
    m.wait(woken)
    m.drain()
    assert seen["one"] and not seen["follows"], "it is waiting, or has been told and not woken"


def test_a_calibrated_strategy_spends_time_on_a_pass_and_on_each_of_its_sequences():
    m = calibrated(pass_s=2.0, sequence_s=0.5)
    assert m.now() == 0.0
    m.spend_host_time(4)
    assert m.now() == 4.0
    late = m.submit(GPU, Unit(1.0))
    m.drain()
    assert late.started_s == 4.0, "what is submitted behind it starts behind it"


def test_each_piece_is_asked_for_its_own_cost_where_costs_are_measured():
    asked = []

    def seconds(lane, op, work):
        asked.append(work)
        return float(len(asked))

    m = calibrated(SimpleNamespace(seconds=seconds, estimated_shares={}))
    op = m.submit(H2D, Unit(2.0, packets=2, pieces=3))
    m.drain()
    assert asked == [Work(flops=2.0)] * 3
    assert [(s.start_s, s.end_s, s.packet, s.num_packets) for s in m.spans] == [
        (0, 1, 0, 6),
        (1, 3, 2, 6),
        (3, 6, 4, 6),
    ]
    assert (op.started_s, op.finished_s) == (0.0, 6.0)
    assert sum(s.work.flops for s in m.spans) == 6.0
    with pytest.raises(ValueError, match="equally many packets: 3 in 2"):
        bad = Unit(1.0, packets=3)
        bad.pieces = 2
        m.submit(H2D, bad)
