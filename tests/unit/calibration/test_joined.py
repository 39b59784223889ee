"""Ops that do the work of several cost what such ops were seen to cost."""

from __future__ import annotations

import pytest

from harness.calibration.costs import CalibratedCosts
from harness.calibration.joined import TOGETHER
from harness.calibration.table import AGAIN, ALONE, AT_REST, IN_CACHE
from harness.machine.base import CPU, GPU, LaneKind
from tests.unit.calibration.measured import AHEAD, LINE, LINK_BYTES_S, Measured, costs, table


def test_launches_of_one_op_cost_what_such_ops_were_seen_to_cost():
    """A fixed 0.1, 0.05 a launch and 0.04 for each of all their features; apart, if no such op was measured."""
    op = Measured(4.0)
    op.launches = 3
    assert costs().seconds(GPU, op, op.work()) == pytest.approx(3 * 0.4)
    seen = [((at, n), 0.1 + 0.05 * n + 0.04 * n * at) for at, n in ((4.0, 2.0), (2.0, 4.0), (4.0, 8.0), (1.0, 8.0))]
    together = {f"gpu: measured{TOGETHER}": seen}
    asked = CalibratedCosts(
        table(samples={ALONE: {"gpu: measured": LINE, **together}}), LINK_BYTES_S, lambda kind: False
    )
    assert asked.seconds(GPU, op, op.work()) == pytest.approx(0.1 + 3 * 0.05 + 12 * 0.04)
    op.launches = 1
    assert asked.seconds(GPU, op, op.work()) == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("missing", "expected"),
    [
        ((), {"": 9.0, AGAIN: 5.0, IN_CACHE: 5.0, AT_REST: 9.0}),
        ((IN_CACHE,), dict.fromkeys(("", AGAIN, IN_CACHE), 9.0)),
    ],
)
def test_ops_joined_of_several_cost_what_they_do_where_weights_are_found(missing, expected):
    """Joined ops were measured in the last cache (5 s) and at rest (9 s), which stands for weights that just came."""
    shapes = ((4.0, 2.0), (2.0, 4.0), (4.0, 8.0), (1.0, 8.0))
    samples = {f"gpu: measured{found}": LINE for found in ("", AGAIN, IN_CACHE, AT_REST)}
    for found, seconds in {IN_CACHE: 5.0, AT_REST: 9.0}.items():
        if found not in missing:
            samples[f"gpu: measured{found}{TOGETHER}"] = [(shape, seconds) for shape in shapes]
    op = Measured(4.0)
    op.weight_keys, op.launches = ("weights",), 3
    given = table(samples={ALONE: samples})
    assert {found: given.seconds(GPU, op, found=found) for found in expected} == pytest.approx(expected)


def test_an_op_joined_of_several_is_launched_in_the_time_that_such_ops_were_seen_to_take():
    """Own 0.1, 0.05 an op and 0.04 of all their features; launching 1.5 and 0.01 an op; three apart without those."""
    op, shapes = Measured(4.0), ((4.0, 2.0), (2.0, 4.0), (4.0, 8.0), (1.0, 8.0))
    op.launches = 3
    assert table(**AHEAD).launched_s(GPU, op) == pytest.approx((3 * 0.2, 3 * 1.2))
    seen = {
        "ahead": [((at, n), 0.1 + 0.05 * n + 0.04 * n * at) for at, n in shapes],
        "launching": [((at, n), 1.5 + 0.01 * n) for at, n in shapes],
    }
    measured = {name: {**AHEAD[name], f"gpu: measured{TOGETHER}": points} for name, points in seen.items()}
    assert table(**measured).launched_s(GPU, op) == pytest.approx((0.1 + 3 * 0.05 + 12 * 0.04, 1.5 + 3 * 0.01))
    op.launches = 1
    assert table(**measured).launched_s(GPU, op) == pytest.approx((0.2, 1.2))


def test_an_op_joined_of_several_takes_as_much_longer_beside_others_as_a_single_one():
    """Joined ops take 0.1, 0.05 an op and 0.04 of all their features alone; what few took in company does not count."""
    shapes = ((4.0, 2.0), (2.0, 4.0), (4.0, 8.0), (1.0, 8.0))
    joint = [((at, n), 0.1 + 0.05 * n + 0.04 * n * at) for at, n in shapes]
    key = f"gpu: measured{AT_REST}"
    samples = {ALONE: {**table().samples[ALONE], key: LINE, key + TOGETHER: joint}}
    crowded = {key: [((4.0,), 0.9)], key + TOGETHER: [(at, 100 * seconds) for at, seconds in joint]}
    given = table(samples=samples, crowded={ALONE: crowded}, short_s={"cpu": 9.0}, beside_strategy=crowded)
    asked = CalibratedCosts(given, {}, lambda kind: kind is LaneKind.CPU, lambda: 7.0)
    op = Measured(4.0)
    op.weight_keys, op.launches = ("weights",), 3
    joined_s = 0.1 + 3 * 0.05 + 12 * 0.04
    assert asked.seconds(GPU, op, op.work()) == pytest.approx((joined_s, 0.5)), "beside the strategy alone"
    asked.seconds(CPU, op, op.work())
    assert asked.seconds(GPU, op, op.work()) == pytest.approx((joined_s + 0.5, 0.5)), "and beside the cpu lane"


class Unseen(Measured):
    """Stands for eight launches of which two have anything to do."""

    launches = 8
    joined = 2


def test_joined_ops_crowd_others_as_one_of_their_length():
    """Two that have anything to do take 0.4 each in one call, eight times what ops were crowded beside."""
    crowded = {ALONE: {"gpu: measured": [((4.0,), 0.9)]}}
    asked = CalibratedCosts(table(crowded=crowded, short_s={"cpu": 0.1}), {}, lambda kind: kind is LaneKind.CPU)
    beside, op = Unseen(4.0), Measured(4.0)
    assert asked.seconds(CPU, beside, beside.work()) == pytest.approx(2 * 0.4)
    assert asked.seconds(GPU, op, op.work()) == pytest.approx(0.4 + 0.5 / 8)
