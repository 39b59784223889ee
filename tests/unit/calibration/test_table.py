"""The calibration table: written and read back, asked for costs, and refused where it does not fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.calibration.costs import CalibratedCosts
from harness.calibration.table import ALONE, BESIDE_LINK, VERSION, CalibrationTable
from harness.machine.base import CPU, D2H, GPU, H2D, PIN, LaneKind, MachineError, Work
from harness.memory.placed import PlacedPart
from harness.model.layout import PartLayout
from tests.unit.calibration.measured import (
    AHEAD,
    LINE,
    LINK_BYTES_S,
    Free,
    Measured,
    MeasuredOtherwise,
    New,
    costs,
    longer,
    table,
)


def test_it_is_read_back_as_written(tmp_path):
    table(**AHEAD).write(tmp_path / "deep" / "table.json")
    assert CalibrationTable.read(tmp_path / "deep" / "table.json") == table(**AHEAD)
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["table.json"]


TORN = f'{{"version": {VERSION}, "meta": {{}}, "samples": []}}'


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"version": 99}', f'{{"version": {VERSION}}}', TORN])
def test_what_is_no_table_is_named(tmp_path, content):
    path = tmp_path / "table.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"table\.json"):
        CalibrationTable.read(path)


def test_costs_follow_the_measurements():
    op = Measured(4.0)
    assert costs().seconds(GPU, op, op.work()) == pytest.approx(0.4)


def test_ops_launched_ahead_cost_their_own_time_and_that_of_their_launching():
    """What the launching takes longer beside the strategy's thread is no more than that works on."""
    strategy = {"gpu: measured": longer(2)}  # alone the ops of LINE take half of this
    op, left_s = Measured(4.0), [0.0]
    asked = CalibratedCosts(
        table(**AHEAD, beside_strategy=strategy), LINK_BYTES_S, lambda kind: False, lambda: left_s[0]
    )
    assert asked.seconds(GPU, op, op.work()) == pytest.approx((0.2, 1.2))
    left_s[0] = 0.1
    assert asked.seconds(GPU, op, op.work()) == pytest.approx((0.2, 1.3))
    left_s[0] = 9.0
    assert asked.seconds(GPU, op, op.work()) == pytest.approx((0.2, 1.2 + 0.4))
    assert asked.seconds(CPU, op, op.work()) == pytest.approx(0.4 + 0.0), "it is launched by nobody"
    assert asked.seconds(GPU, MeasuredOtherwise(4.0), op.work()) > 0, "not measured ahead: one number"


def test_an_op_that_was_not_measured_ahead_costs_one_number_beside_the_strategy_too():
    """Two would be its own seconds and those of a launch."""
    key, given = f"gpu: {MeasuredOtherwise.cost_key}", table()
    samples = {**given.samples, ALONE: {**given.samples[ALONE], key: LINE}}
    works = {**given.works, key: given.works["gpu: measured"]}
    asked = CalibratedCosts(
        table(**AHEAD, samples=samples, works=works, beside_strategy={key: longer(2)}), LINK_BYTES_S,
        lambda kind: False, lambda: 9.0,
    )  # fmt: skip
    op = MeasuredOtherwise(4.0)
    assert asked.seconds(GPU, op, op.work()) == pytest.approx(0.4 + 0.4)


@pytest.mark.parametrize(
    ("lane", "busy", "expected"),
    [
        (GPU, (LaneKind.H2D,), 0.8),
        (GPU, (LaneKind.GPU, LaneKind.H2D), 0.8),  # the op itself keeps its lane busy
        (GPU, (LaneKind.CPU, LaneKind.D2H), 0.4),
        (CPU, (LaneKind.GPU,), 1.2),
        (CPU, (LaneKind.GPU, LaneKind.H2D), 1.6),
        (CPU, (LaneKind.H2D,), 0.4),  # not measured in that company: the nearest one with fewer lanes
    ],
)
def test_company_counts_as_it_was_measured(lane, busy, expected):
    op = Measured(4.0)
    assert costs(*busy).seconds(lane, op, op.work()) == pytest.approx(expected)


def test_a_link_takes_its_stated_rate_beside_what_was_measured():
    op = Measured(4.0, link_bytes=5e8)
    assert costs(LaneKind.GPU).seconds(H2D, op, op.work()) == pytest.approx(0.51)
    samples = {ALONE: {"d2h: measured": LINE, "pin: measured": LINE, "gpu: measured": LINE}}
    asked = CalibratedCosts(table(samples=samples), LINK_BYTES_S, lambda kind: False)
    found = [asked.seconds(lane, op, op.work()) for lane in (D2H, PIN, GPU)]
    assert found == pytest.approx([0.4 + 1.0, 0.4 + 0.25, 0.4]), "bytes between GPUs are part of what was measured"


def test_a_link_without_a_stated_rate_takes_what_was_measured():
    """Staging copies on a real machine have none; what nobody has measured of it is then an error."""
    op = Measured(4.0, link_bytes=5e8)
    asked = CalibratedCosts(table(samples={ALONE: {"pin: measured": LINE}}), {}, lambda kind: False)
    assert asked.seconds(PIN, op, op.work()) == pytest.approx(0.4)
    with pytest.raises(MachineError, match="no measurement of 'measured'"):
        asked.seconds(H2D, op, op.work())


@pytest.mark.parametrize(("busy", "times"), [((), 1), ((LaneKind.H2D,), 2)])
def test_a_new_kind_of_op_takes_what_its_lane_takes_for_such_work(busy, times):
    """The gpu's ops take 0.01 s a FLOP, twice as much beside a busy link."""
    asked, op = costs(*busy), New(5.0)
    assert asked.seconds(GPU, op, op.work()) == pytest.approx(times * 0.5)
    assert asked.estimated_shares == {(LaneKind.GPU, "new"): 1.0}


def test_a_new_kind_of_op_on_a_link_takes_the_links_rate_too():
    op = New(4.0, link_bytes=1e9)
    assert costs().seconds(H2D, op, op.work()) == pytest.approx(1.0 + 0.01)
    assert costs().seconds(D2H, op, op.work()) == pytest.approx(2.0), "no op was measured there"


def test_nothing_is_free_but_what_is_no_work():
    with pytest.raises(MachineError, match="no measurement of 'new', and no op on that lane with such work"):
        costs().seconds(D2H, New(), New().work())
    with pytest.raises(MachineError, match="no measurement of 'new'"):
        costs().seconds(GPU, New(), Work(host_bytes=1.0))
    assert costs().seconds(D2H, Free(), Free().work()) == 0.0


def test_the_estimated_share_is_told_by_kind():
    """Ops of one kind may have been measured by one key and not by another."""
    asked = costs()
    for size in (2.0, 6.0):
        asked.seconds(GPU, Measured(size), Measured(size).work())
    assert asked.estimated_shares == {}
    other = MeasuredOtherwise(2.0)
    asked.seconds(GPU, other, other.work())
    assert asked.estimated_shares == {(LaneKind.GPU, "measured"): pytest.approx(0.2 / (0.2 + 0.6 + 0.2))}


class Weighted(Measured):
    """Uses weights that come over the link."""

    def __init__(self, *weights: str) -> None:
        super().__init__(4.0)
        self.weight_keys = weights


class Copied(Measured):
    def __init__(self, *weights: str) -> None:
        super().__init__(4.0, link_bytes=1.0)
        self.writes = weights


ROLES = {"gpu: measured, again": 0.25, "gpu: measured, in cache": 0.5, "gpu: measured, at rest": 0.75}


def told(**values) -> CalibratedCosts:
    samples = {**table().samples, BESIDE_LINK: {}}
    samples[ALONE] = {**samples[ALONE], **{key: longer(factor) for key, factor in ROLES.items()}}
    rates = {LaneKind.H2D: 1e9, LaneKind.D2H: 1e9}
    return CalibratedCosts(table(samples=samples, **values), rates, lambda kind: False)


def test_weights_are_cheaper_the_second_time():
    """Read once since they came over the link, they lie in a cache; new ones, or other ones, do not."""
    asked = told()

    def seconds(lane, op) -> float:
        return asked.seconds(lane, op, op.work())

    for name in "ab":
        seconds(H2D, Copied(name))
    assert [seconds(GPU, Weighted("a")), seconds(GPU, Weighted("a"))] == pytest.approx([0.4, 0.1])
    assert seconds(GPU, Weighted("a", "b")) == pytest.approx(0.4), "one of its weights is new"
    assert seconds(GPU, Weighted("a", "b")) == pytest.approx(0.1)
    seconds(H2D, Copied("a"))
    assert seconds(GPU, Weighted("a")) == pytest.approx(0.4), "came once more"
    assert seconds(GPU, Measured(4.0)) == pytest.approx(0.4), "no weights, no difference"


def test_parts_that_share_a_page_are_read_each_for_itself():
    """A page has the weights of several ops, and comes as a whole. What one of them has read is not there for others:
    neither its neighbours in the page nor an op that read another tensor of the part."""
    asked = told(near_bytes=5, cache_bytes=10)

    class Other(Weighted):
        kind, cost_key = "other", Weighted.kind

    def seconds(*parts: PlacedPart, op_class: type[Weighted] = Weighted) -> float:
        op = op_class("page")
        op.parts = parts
        return asked.seconds(GPU, op, Work(device_bytes=3))

    one, two = (PlacedPart(PartLayout(name, (), 1), None, ("page",)) for name in ("one", "two"))
    asked.seconds(H2D, Copied("page"), Work(link_bytes=1.0))
    assert [seconds(one), seconds(two), seconds(one), seconds(two)] == pytest.approx([0.4, 0.4, 0.1, 0.1])
    assert seconds(one, two) == pytest.approx(0.1)
    assert [seconds(one, op_class=Other), seconds(one, op_class=Other)] == pytest.approx([0.4, 0.1])
    assert seconds(two) == pytest.approx(0.2), "nine bytes ago"
    asked.seconds(H2D, Copied("page"), Work(link_bytes=1.0))
    assert [seconds(two), seconds(one)] == pytest.approx([0.4, 0.4]), "came once more"


def test_weights_that_a_cache_has_lost_lie_in_the_next_one_or_at_rest():
    """Between two uses ops may take as many bytes as a cache has, ten the last one and three the core's own. Weights
    that nobody brought rest where they are."""
    asked = told(near_bytes=3, cache_bytes=10)

    def seconds(op, nbytes: float) -> float:
        return asked.seconds(GPU, op, Work(device_bytes=nbytes))

    assert seconds(Weighted("a"), 5) == pytest.approx(0.3)
    assert seconds(Weighted("b"), 10) == pytest.approx(0.3)
    assert seconds(Weighted("a"), 5) == pytest.approx(0.2)
    assert seconds(Weighted("b"), 6) == pytest.approx(0.2)
    assert seconds(Weighted("c"), 5) == pytest.approx(0.3)
    assert seconds(Weighted("a"), 5) == pytest.approx(0.3), "eleven bytes ago"
    seconds(Weighted("d"), 3)
    assert seconds(Weighted("a"), 4) == pytest.approx(0.1)
    assert seconds(Weighted("d"), 5) == pytest.approx(0.2), "four bytes ago"


def test_what_was_never_measured_again_costs_as_the_first_time():
    asked = CalibratedCosts(table(), {LaneKind.H2D: 1e9, LaneKind.D2H: 1e9}, lambda kind: kind is LaneKind.H2D)
    op = Weighted("resident")
    assert asked.seconds(GPU, op, op.work()) == pytest.approx(0.8)


def test_an_op_takes_longer_beside_short_ones():
    """By as much as it did on average over all shapes when it was measured beside them; beside longer ones by less."""
    crowded = {ALONE: {"gpu: measured": [((2.0,), 0.3), ((4.0,), 0.6)]}}
    cpu = {"cpu: measured": [((4.0,), 0.5e-3), ((8.0,), 2.0)]}
    samples = {ALONE: {**table().samples[ALONE], **cpu}}
    is_busy = {LaneKind.CPU}
    given = table(samples=samples, crowded=crowded, short_s={"cpu": 1e-3})
    asked = CalibratedCosts(given, {}, is_busy.__contains__)
    op = Measured(4.0)
    assert asked.seconds(GPU, op, op.work()) == pytest.approx(0.4), "the cpu lane has begun nothing yet"
    asked.seconds(CPU, op, op.work())
    assert asked.seconds(GPU, op, op.work()) == pytest.approx(0.4 + (0.1 + 0.2) / 2)
    op.launches = 3
    assert asked.seconds(GPU, op, op.work()) == pytest.approx(3 * 0.4 + (0.1 + 0.2) / 2), "it is one op"
    op.launches = 1
    asked.seconds(CPU, Measured(8.0), op.work())
    assert asked.seconds(GPU, op, op.work()) == pytest.approx(0.4 + 0.15 * 1e-3 / 2.0), "two seconds, not a thousandth"
    many = Measured(4.0)
    many.launches = 4000
    asked.seconds(CPU, many, many.work())
    assert asked.seconds(GPU, op, op.work()) == pytest.approx(0.4 + 0.15 * 1e-3 / 2.0), "joined ops are one call"
    asked.seconds(CPU, op, op.work())
    is_busy.clear()
    assert asked.seconds(GPU, op, op.work()) == pytest.approx(0.4), "the cpu lane has nothing more to do"


def test_an_op_that_finds_nothing_to_do_is_crowded_as_such_ops_were():
    crowded = {ALONE: {"gpu: measured": [((0.0,), 0.35), ((4.0,), 0.9)]}}
    asked = CalibratedCosts(table(crowded=crowded, short_s={"cpu": 9.0}), {}, lambda kind: kind is LaneKind.CPU)
    asked.seconds(CPU, Measured(4.0), Work())
    empty, full = Measured(0.0), Measured(4.0)
    assert asked.seconds(GPU, empty, empty.work()) == pytest.approx(0.35)
    assert asked.seconds(GPU, full, full.work()) == pytest.approx(0.9)


def test_an_op_beside_short_ones_and_a_busy_link_takes_what_it_took_so():
    crowded = {ALONE: {"gpu: measured": [((4.0,), 0.9)]}, BESIDE_LINK: {"gpu: measured": [((4.0,), 1.4)]}}
    is_busy = {LaneKind.CPU, LaneKind.H2D}
    asked = CalibratedCosts(table(crowded=crowded, short_s={"cpu": 9.0}), {}, is_busy.__contains__)
    op = Measured(4.0)
    asked.seconds(CPU, op, op.work())
    assert asked.seconds(GPU, op, op.work()) == pytest.approx(1.4)
    is_busy.remove(LaneKind.H2D)
    assert asked.seconds(GPU, op, op.work()) == pytest.approx(0.9)


def test_an_op_begins_later_while_the_strategy_works_and_by_no_more_than_it_still_does():
    beside = {"gpu: measured": [((2.0,), 0.3), ((4.0,), 0.6)]}
    crowded = {ALONE: {"gpu: measured": [((4.0,), 0.9)]}}
    left_s = [7.0]
    given = table(crowded=crowded, beside_strategy=beside, short_s={"cpu": 9.0})
    asked = CalibratedCosts(given, {}, lambda kind: kind is LaneKind.CPU, lambda: left_s[0])
    op = Measured(4.0)
    assert asked.seconds(GPU, op, op.work()) == pytest.approx((0.4, (0.1 + 0.2) / 2))
    op.launches = 3
    assert asked.seconds(GPU, op, op.work()) == pytest.approx((3 * 0.4, (0.1 + 0.2) / 2)), "it is one op"
    op.launches = 1
    asked.seconds(CPU, op, op.work())
    assert asked.seconds(GPU, op, op.work()) == pytest.approx((0.4 + 0.5, 0.15)), "both at once"
    left_s[0] = 0.01
    assert asked.seconds(GPU, op, op.work()) == pytest.approx((0.9, 0.01))
    left_s[0] = 0.0
    assert asked.seconds(GPU, op, op.work()) == pytest.approx(0.9)


def test_slowdowns_hold_nothing_that_the_samples_hold():
    found = table().slowdowns()
    assert found["cpu+gpu"] == {"cpu": 1.0, "gpu": 1.2}
    assert found["gpu+h2d"] == {"gpu": 1.0, "h2d": 1.1}
    assert found["cpu+h2d"] == {"cpu": 1.05, "h2d": 1.0}
    assert found["cpu+gpu+h2d"] == {"cpu": 1.0, "gpu": pytest.approx(2.0 / 1.25), "h2d": 1.2}


def test_merging_keeps_all_samples_and_every_disturbance():
    slower = table(
        samples={company: {key: longer(3) for key in by_key} for company, by_key in table().samples.items()},
        together={group: {lane: f + 1 for lane, f in factors.items()} for group, factors in table().together.items()},
        meta={"disturbed": ["ops alone"]},
    )
    slower = replace(slower, **{name: {"gpu: measured": longer(7)} for name in AHEAD}, near_bytes=5, cache_bytes=70)
    merged = CalibrationTable.merged([table(**AHEAD, near_bytes=5, cache_bytes=90), slower])
    assert (merged.near_bytes, merged.cache_bytes) == (5, 80)
    assert merged.ahead["gpu: measured"] == [*longer(0.5), *longer(7)]
    assert merged.launching["gpu: measured"] == [*longer(3), *longer(7)]
    assert merged.samples[BESIDE_LINK]["gpu: measured"] == [*longer(2), *longer(3)]
    assert merged.together["cpu+gpu"]["gpu"] == pytest.approx(1.7)
    assert merged.meta["disturbed"] == ["ops alone"] and merged.meta["merged"] == 2
    assert table().samples[ALONE]["gpu: measured"] == LINE, "the merged ones stay as they were"


def test_fits_and_spreads_are_told_by_op():
    assert table().worst_fit()["gpu: measured"] == pytest.approx(0.0)
    assert set(table().spread()) == set(table().samples[ALONE])
