"""Metrics against a time grid: with integer times, every quantity can be counted cell by cell."""

from dataclasses import asdict
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded import link_bound_run, span

from harness.machine.base import CPU, GPU, H2D, PIN, Lane, Work
from harness.machine.packed_spans import PackedSpans
from harness.record import metrics
from harness.record.activity import Activity, busy_s, moved_bytes, pass_activity
from harness.record.measured import Fold, Measured
from harness.record.meter import PassMeter
from harness.record.passes import PassRecord
from harness.record.spans import SpanTable

LANES = (GPU, CPU, H2D, Lane(GPU.kind, 1))
END = 24


@st.composite
def packets(draw):
    """Any packets, overlapping ones and ones without duration included."""
    found = []
    for _ in range(draw(st.integers(0, 14))):
        start = draw(st.integers(0, END))
        end = start + draw(st.integers(0, 6))
        work = Work(*(float(draw(st.integers(0, 60))) for _ in range(4)))
        cpu_s = draw(st.integers(0, 8)) / 4
        where = {"ticket": draw(st.integers(0, 5)), "cpu_s": cpu_s, "work": work}
        found.append(span(draw(st.sampled_from(LANES)), start, end, draw(st.sampled_from("ab")), **where))
    return found


windows = st.tuples(st.integers(0, END), st.integers(0, END)).map(lambda pair: (min(pair), max(pair)))


def cells(spans, window):
    """The whole seconds of the window in which any of the spans runs."""
    return {t for s in spans for t in range(window[0], window[1]) if s.start_s <= t < s.end_s}


def prorated(spans, window, amount):
    total = 0.0
    for s in spans:
        length = int(s.end_s - s.start_s)
        if length == 0:
            total += amount(s) if window[0] <= s.start_s < window[1] else 0.0
        total += sum(amount(s) / length for t in range(*window) if s.start_s <= t < s.end_s)
    return total


@given(packets(), windows)
@settings(max_examples=120)
def test_lane_metrics_equal_a_count_of_grid_cells(spans, window):
    length = window[1] - window[0]
    for lane in (*LANES, PIN):
        mine = [s for s in spans if s.lane == lane]
        assert busy_s(spans, lane, window) == pytest.approx(len(cells(mine, window)))
        did = Activity.of(spans, window).lanes.get(lane)
        assert (did.cpu_s if did else 0) == pytest.approx(prorated(mine, window, lambda s: s.cpu_s))
        tier = {"gpu": "device_bytes", "cpu": "host_bytes", "pin": "host_bytes"}.get(lane.kind.value, "link_bytes")
        moved = prorated(mine, window, lambda s, tier=tier: getattr(s.work, tier))
        assert moved_bytes(spans, lane, window) == pytest.approx(moved)
        rate = metrics.link_rate(Activity.of(spans, window), lane)
        assert rate.window_gb_s == pytest.approx(moved / 1e9 / length if length else 0.0)
        busy = len(cells(mine, window))
        assert rate.busy_gb_s == pytest.approx(moved / 1e9 / busy if busy else 0.0)


@given(packets(), windows)
@settings(max_examples=100)
def test_run_metrics_equal_a_count_of_grid_cells(spans, window):
    length = window[1] - window[0]
    busy = {lane: len(cells([s for s in spans if s.lane == lane], window)) for lane in LANES}
    table = SpanTable.of(spans)
    did = Activity.of(table, window)
    assert metrics.overlap_ratio(did) == pytest.approx(sum(busy.values()) / length if length else 0.0)
    if length:
        assert metrics.idle_share(did) == pytest.approx(1 - len(cells(spans, window)) / length)
    ranks = {s.lane.rank for s in spans} or {0}
    gpu = [busy.get(Lane(GPU.kind, rank), 0) / length if length else 0.0 for rank in ranks]
    assert metrics.utilization(Activity.of(table, window))["gpu"] == pytest.approx(sum(gpu) / len(ranks))
    assert metrics.utilization(Activity.of(table, window))["d2h"] == 0.0


@given(packets(), windows)
@settings(max_examples=100)
def test_kind_totals_equal_a_count_of_grid_cells(spans, window):
    totals = metrics.kind_totals(Activity.of(spans, window))
    for total in totals:
        per_lane = {}
        for s in spans:
            if s.lane.kind == total.lane and s.kind == total.kind:
                per_lane.setdefault(s.lane, []).append(s)
        mine = [s for group in per_lane.values() for s in group]
        assert total.busy_s == pytest.approx(sum(len(cells(group, window)) for group in per_lane.values()))
        assert total.flops == pytest.approx(prorated(mine, window, lambda s: s.work.flops))
        inside = [(s.lane, s.ticket) for s in mine if prorated([s], window, lambda s: 1.0) > 0]
        assert total.num_ops == len(set(inside))
    assert [t.busy_s for t in totals] == sorted((t.busy_s for t in totals), reverse=True)
    seen = {(s.lane.kind, s.kind) for s in spans if prorated([s], window, lambda s: 1.0) > 0}
    assert {(t.lane, t.kind) for t in totals} == seen


@given(packets(), windows)
@settings(max_examples=100)
def test_the_bottleneck_is_true_to_the_numbers(spans, window):
    length = window[1] - window[0]
    text = metrics.bottleneck(Activity.of(spans, window))
    share = {lane: len(cells([s for s in spans if s.lane == lane], window)) / max(1, length) for lane in LANES}
    highest = max(share.values())
    if highest == 0.0:
        assert text == "nothing ran in the steady window"
    elif highest < metrics.SATURATED:
        idle = 1 - len(cells(spans, window)) / length
        assert text.startswith("no lane is saturated")
        assert text.endswith(f"nothing at all runs {idle:.0%} of the time")
        named = next(lane for lane in LANES if f"({lane} lane " in text)
        assert share[named] == highest and f"({named} lane {highest:.0%} busy" in text
    else:
        assert not text.startswith("no lane")
        for lane in LANES:
            told = f"({lane} lane {share[lane]:.0%} busy" in text or f"{lane} lane also {share[lane]:.0%} busy" in text
            assert told == (share[lane] >= metrics.SATURATED)


def metered(spans, passes, recorded, *, clears=False, fold=None):
    """The meter's rows where every packet is recorded when it ends: what crosses a pass's end comes one pass late."""
    arriving, rows = sorted(spans, key=lambda s: s.end_s), []
    meter = PassMeter(recorded, clears=clears, fold=fold)
    for record in passes:
        while arriving and arriving[0].end_s <= record.end_s:
            recorded.append(arriving.pop(0))
        rows += meter.add(record)
    for late in arriving:
        recorded.append(late)
    rows += meter.finish()
    assert not (clears and passes) or len(recorded) == 0
    assert not passes or meter.num_spans == len(spans)
    return rows


@given(packets(), st.lists(st.integers(0, END), min_size=2, max_size=6, unique=True))
@settings(max_examples=100)
def test_the_live_meter_gives_what_the_whole_trace_gives(spans, edges):
    edges = sorted(edges)
    passes = [PassRecord(index=i, start_s=a, end_s=b) for i, (a, b) in enumerate(pairwise(edges))]
    rows = metered(spans, passes, [])
    for recorded, clears in (([], True), (PackedSpans(), False), (PackedSpans(), True)):
        assert metered(spans, passes, recorded, clears=clears) == rows
    assert [row["index"] for row in rows] == [record.index for record in passes]
    longest = max((s.end_s - s.start_s for s in spans), default=0)
    exact_expected = all(p.end_s - p.start_s >= longest for p in passes)
    for row, record in zip(rows, passes, strict=True):
        exact = pass_activity(spans, (record.start_s, record.end_s))["busy_s"]
        for lane in exact:
            told = row["busy_s"].get(lane, 0.0)
            assert told == pytest.approx(exact[lane]) if exact_expected else told <= exact[lane] + 1e-9


@st.composite
def passes_and_packets(draw):
    """Passes that may overlap or leave gaps, each longer than any packet, and ops of two packets."""
    starts, ends = [0], []
    for _ in range(draw(st.integers(0, 6))):
        ends.append(max(starts[-1] + 7, ends[-1] + 7 if ends else 0))
        starts.append(ends[-1] + draw(st.integers(-4, 3)))
    passes = [PassRecord(index=i, start_s=a, end_s=b) for i, (a, b) in enumerate(zip(starts, ends, strict=False))]
    found = []
    for number in range(draw(st.integers(0, 15))):
        start, lane = draw(st.integers(0, ends[-1] + 3 if ends else 3)), draw(st.sampled_from(LANES))
        for _ in range(2):
            work = Work(*(float(draw(st.integers(0, 60))) for _ in range(4)))
            where = {"ticket": number, "cpu_s": draw(st.integers(0, 8)) / 4, "work": work}
            end = start + draw(st.integers(0, 6))
            found.append(span(lane, start, end, "ab"[number % 2], **where))
            start = end
    return passes, found


@given(passes_and_packets())
@settings(max_examples=200)
def test_folding_pass_by_pass_gives_what_all_spans_give(run):
    passes, spans = run
    whole = Measured.of(spans, metrics.steady_window(passes))
    fold = Fold()
    rows = metered(spans, passes, [], clears=True, fold=fold)
    assert rows == metered(spans, passes, [])
    folded = fold.measured()
    if not passes:
        assert folded == Measured.of([], (0.0, 0.0))
        return
    assert (folded.num_spans, folded.gpu_flops, folded.gpu_s) == (whole.num_spans, whole.gpu_flops, whole.gpu_s)
    assert list(folded.steady.lanes) == list(whole.steady.lanes)
    assert folded.steady.length_s == pytest.approx(whole.steady.length_s)
    assert folded.steady.any_lane_s == pytest.approx(whole.steady.any_lane_s)
    for lane, did in whole.steady.lanes.items():
        other = folded.steady.lanes[lane]
        for name in ("busy_s", "ran_s", "cpu_s", "moved_bytes"):
            assert getattr(other, name) == pytest.approx(getattr(did, name)), name
        assert set(other.kinds) == set(did.kinds)
        for kind, total in did.kinds.items():
            assert asdict(other.kinds[kind]) == pytest.approx(asdict(total))


def test_a_packet_counts_in_each_pass_that_it_crosses():
    """The link's first packet has 4 s in either of two passes, its second one 1 s in either; each is recorded once."""
    recorded: list = [span(GPU, 1, 3)]
    meter = PassMeter(recorded)
    passes = [PassRecord(index=i, start_s=a, end_s=b) for i, (a, b) in enumerate([(0, 10), (10, 15), (15, 30)])]
    rows = meter.add(passes[0])
    recorded += [span(H2D, 6, 14), span(CPU, 9, 10)]
    rows += meter.add(passes[1])
    recorded += [span(H2D, 14, 16), span(GPU, 12, 14)]
    rows += meter.add(passes[2])
    recorded += [span(H2D, 16, 17)]
    rows += meter.finish()
    assert [row["busy_s"].get("h2d", 0.0) for row in rows] == [4, 5, 2]
    assert [row["busy_s"].get("gpu", 0.0) for row in rows] == [2, 2, 0]


def test_steady_window_leaves_the_first_and_last_pass_out():
    passes = [PassRecord(index=i, start_s=10 * i, end_s=10 * i + 9) for i in range(5)]
    assert metrics.steady_window(passes) == (10, 39)
    assert metrics.steady_window(passes[:4]) == (10, 29)
    assert metrics.steady_window(passes[:3]) == (0, 29)
    assert metrics.steady_window(passes[:1]) == (0, 9)
    assert metrics.steady_window([]) == (0.0, 0.0)


def test_stolen_cores_show_as_missing_processor_time():
    spans = [span(GPU, 0, 4, cpu_s=3.0), span(GPU, 4, 8, cpu_s=4.0), span(CPU, 0, 8, cpu_s=0.0)]
    assert metrics.stolen_core_share(Activity.of(spans, (0, 8))) == pytest.approx(1 / 8)
    assert metrics.stolen_core_share(Activity.of(spans, (0, 4))) == pytest.approx(1 / 4)
    assert metrics.stolen_core_share(Activity.of([span(GPU, 0, 4)], (0, 4))) is None  # no processor time recorded


def test_a_long_packet_counts_behind_short_ones_that_began_after_it():
    spans = [span(GPU, 0, 20), span(GPU, 1, 2), span(GPU, 3, 4)]
    assert busy_s(spans, GPU, (10, 12)) == 2


def test_shares_by_kind_are_the_mean_over_ranks():
    spans = [span(GPU, 0, 4, "experts"), span(Lane(GPU.kind, 1), 0, 2, "experts")]
    (total,) = metrics.kind_totals(Activity.of(spans, (0, 8)))
    assert (total.busy_s, total.share, total.num_ops) == (6, 6 / 16, 2)
    assert metrics.utilization(Activity.of(spans, (0, 8)))["gpu"] == total.share


def test_the_host_is_one_however_many_gpus_there_are():
    spans = [span(GPU, 0, 4), span(Lane(GPU.kind, 1), 0, 4), span(CPU, 0, 8, "decode attention")]
    shares = metrics.utilization(Activity.of(spans, (0, 8)))
    assert (shares["gpu"], shares["cpu"], shares["pin"]) == (0.5, 1.0, 0.0)
    assert {t.kind: t.share for t in metrics.kind_totals(Activity.of(spans, (0, 8)))}["decode attention"] == 1.0


def test_a_saturated_link_is_named_with_its_rate_and_ceiling():
    spans, passes = link_bound_run()
    text = metrics.bottleneck(Activity.of(spans, metrics.steady_window(passes)), {"h2d": 0.5})
    assert text == "transfer to the device (h2d lane 96% busy, 0.48 of 0.50 GB/s, most of it weights 96%)"
    slow = metrics.bottleneck(Activity.of(spans, metrics.steady_window(passes)), {"h2d": 1.0})
    assert "0.48 of 1.00 GB/s, only 0.50 GB/s while busy" in slow


def test_a_short_window_of_a_long_run_reads_few_packets():
    """What keeps thousands of passes over a million packets fast; counted, as clocks lie on a busy machine."""
    spans = [span((GPU, H2D)[i % 2], i * 1e-3, i * 1e-3 + 9e-4, ticket=i) for i in range(20_000)]
    table = SpanTable.of(spans)
    assert len(table.lane(GPU).within((5.0, 5.2)).rows) <= 102
    assert busy_s(table, GPU, (5.0, 5.2)) == pytest.approx(0.09, abs=1e-3)
    assert metrics.utilization(Activity.of(table, (0.0, 20.0)))["gpu"] == pytest.approx(0.45, abs=1e-3)
