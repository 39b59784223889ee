"""The trace file: what Perfetto needs to draw it, and that nothing is lost on the way back."""

import gzip
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded import link_bound_run, span

from harness.machine.base import GPU, H2D, Lane, LaneKind, Work
from harness.record import metrics
from harness.record.activity import Activity
from harness.record.passes import PassRecord
from harness.record.trace import TraceError, excerpt, read_trace, trace_label, write_trace


def events_of(path):
    return json.loads(path.read_text(encoding="utf-8"))["traceEvents"]


numbers = st.floats(0, 1e15, allow_nan=False)


@st.composite
def any_span(draw):
    num_packets = draw(st.integers(1, 9))
    start_ns = draw(st.integers(0, 10**15))
    return span(
        Lane(draw(st.sampled_from(list(LaneKind))), draw(st.integers(0, 3))),
        start_ns / 1e9,
        (start_ns + draw(st.integers(0, 10**10))) / 1e9,
        draw(st.text(min_size=1, max_size=8)),
        layer=draw(st.none() | st.integers(0, 90)),
        micro_batch=draw(st.none() | st.integers(0, 90)),
        ticket=draw(st.integers(0, 10**9)),
        packet=draw(st.integers(0, num_packets - 1)),
        num_packets=num_packets,
        urgent=draw(st.booleans()),
        cpu_s=draw(st.integers(0, 10**10)) / 1e9,
        work=Work(draw(numbers), draw(numbers), draw(numbers), draw(numbers)),
    )


@given(st.lists(any_span(), max_size=6), st.sampled_from(["trace.json", "trace.json.gz"]))
@settings(max_examples=60)
def test_spans_come_back_as_they_were(tmp_path_factory, spans, name):
    path = tmp_path_factory.mktemp("trace") / name
    write_trace(path, spans, [], label="measured")
    assert read_trace(path) == spans
    assert trace_label(path) == "measured"


def test_metrics_of_the_file_are_those_of_the_run(tmp_path):
    spans, passes = link_bound_run()
    write_trace(tmp_path / "trace.json", spans, passes, label="emulated")
    window = metrics.steady_window(passes)
    again = read_trace(tmp_path / "trace.json")
    assert metrics.utilization(Activity.of(again, window)) == pytest.approx(
        metrics.utilization(Activity.of(spans, window)), abs=1e-7
    )
    assert metrics.bottleneck(Activity.of(again, window)) == metrics.bottleneck(Activity.of(spans, window))


def test_one_row_a_lane_in_order_and_one_for_passes(tmp_path):
    spans, passes = link_bound_run()
    spans.append(span(Lane(LaneKind.GPU, 1), 100.0, 101.0))
    write_trace(tmp_path / "trace.json", spans, passes, label="emulated", meta={"run_id": "x-1"})
    events = events_of(tmp_path / "trace.json")
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert list(processes.values()) == ["passes (emulated)", "rank 0 (emulated)", "rank 1 (emulated)"]
    rank0 = next(pid for pid, name in processes.items() if name.startswith("rank 0"))
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == rank0}
    order = {
        e["tid"]: e["args"]["sort_index"] for e in events if e["name"] == "thread_sort_index" and e["pid"] == rank0
    }
    assert [names[tid] for tid in sorted(order, key=order.__getitem__)] == ["gpu", "cpu", "h2d", "d2h", "pin"]
    whole = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))
    assert whole["otherData"] == {"label": "emulated", "run_id": "x-1"}
    expert = next(e for e in events if e.get("cat") == "experts")
    assert expert["name"] == "experts L0 µb1" and names[expert["tid"]] == "gpu"
    assert expert["args"]["cpu_ms"] == pytest.approx(400.0)
    assert (expert["ts"], expert["dur"]) == (100e6, 0.5e6)
    packet = [e for e in events if e.get("cat") == "weights"][1]
    assert packet["args"]["packet"] == "2/4" and packet["args"]["link_bytes"] == 120_000_000


def test_counters_follow_the_passes(tmp_path):
    spans, passes = link_bound_run(3)
    write_trace(tmp_path / "trace.json", spans, passes, label="emulated")
    counters = [e for e in events_of(tmp_path / "trace.json") if e["ph"] == "C"]
    blocks = [(e["ts"] / 1e6, e["args"]["blocks"]) for e in counters if e["name"] == "KV blocks used"]
    assert blocks == [(100.0, 0), (101.0, 3), (102.0, 6), (103.0, 6)]
    prefill = [e["args"]["tokens"] for e in counters if e["name"] == "prefill tokens"]
    assert prefill == [90, 90, 90, 0]


def test_slices_of_one_row_never_overlap(tmp_path):
    """Perfetto drops slices of one thread that overlap without nesting."""
    step_s = 1e-3 + 0.6e-9  # durations that round up: rounded on their own, they would run into the next packet
    spans = [span(H2D, i * step_s, (i + 1) * step_s) for i in range(3000)]
    passes = [PassRecord(index=i, start_s=i, end_s=i + 1.5) for i in range(20)]
    write_trace(tmp_path / "trace.json", spans, passes, label="emulated")
    ends = {}
    for event in events_of(tmp_path / "trace.json"):
        if event["ph"] == "X":
            row, start_ns = (event["pid"], event["tid"]), round(event["ts"] * 1000)
            assert start_ns >= ends.get(row, 0)
            ends[row] = start_ns + round(event["dur"] * 1000)
    assert len(ends) == 3  # the link, and two rows of passes


def test_a_write_that_fails_leaves_the_old_trace_and_no_rubbish(tmp_path):
    path = tmp_path / "trace.json"
    write_trace(path, [span(GPU, 0.0, 1.0)], [], label="emulated")
    with pytest.raises(TypeError):
        write_trace(path, [span(GPU, 0.0, 1.0), span(GPU, 1.0, 2.0, ticket=object())], [], label="emulated")
    assert len(read_trace(path)) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["trace.json"]


@pytest.mark.parametrize("content", [b"", b"[1, 2]", b"{", b'{"traceEvents": [{"ph": "X"}]}', b"\xff\xfe"])
def test_a_file_that_is_no_trace_is_named(tmp_path, content):
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=r"trace\.json"):
        read_trace(path)


def test_a_cut_off_compressed_trace_is_named(tmp_path):
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(b'{"traceEvents": []}')[:-9])
    with pytest.raises(TraceError, match=r"trace\.json\.gz"):
        read_trace(path)


@given(counts=st.lists(st.integers(0, 9), min_size=1, max_size=9), most=st.integers(1, 40))
def test_an_excerpt_is_of_as_many_passes_in_the_middle_as_fit(counts, most):
    """Pass p lasts from second p to p + 1; its slices begin evenly in it, on two lanes."""
    spans = [
        span(GPU if n % 2 else H2D, p + n / (count + 1), p + 1.5)
        for p, count in enumerate(counts)
        for n in range(count)
    ]
    passes = [PassRecord(index=p, start_s=float(p), end_s=p + 1.0) for p in range(len(counts))]
    found, middle = excerpt(spans, passes, most), len(counts) // 2
    if sum(counts) <= most:
        assert found is None
        return
    assert found is not None and found.first <= middle <= found.last and found.num_all == len(spans)
    inside = [s for s in spans if found.window[0] <= s.start_s < found.window[1]]
    assert len(inside) == found.num_slices <= most
    if counts[middle] > most:
        assert (found.first, found.last, found.num_slices) == (middle, middle, most)
        return
    assert found.num_slices == sum(counts[found.first : found.last + 1])
    for more in ([found.first - 1] if found.first else []) + [found.last + 1]:
        assert found.num_slices + sum(counts[more : more + 1]) > most or more == len(counts), "a pass more would fit"


def test_an_excerpt_says_so_and_passes_for_no_whole_run(tmp_path):
    spans, passes = link_bound_run()
    path, only = tmp_path / "trace.json", excerpt(spans, passes, len(spans) // 2)
    assert only is not None
    write_trace(path, spans, passes, label="emulated", only=only)
    inside = [s for s in spans if only.window[0] <= s.start_s < only.window[1]]
    told = [(s.ticket, s.packet) for s in read_trace(path, whole=False)]
    assert told == [(s.ticket, s.packet) for s in inside] and 0 < len(inside) <= len(spans) // 2
    with pytest.raises(TraceError, match=r"trace.json: has .* slices: pass.* trace_slices=null"):
        read_trace(path)
    assert trace_label(path) == "emulated"
    assert only.told in str(events_of(path)[0]), "the name of the passes' row"
