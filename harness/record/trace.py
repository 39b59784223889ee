"""Spans and passes as a Chrome trace that opens in Perfetto (ui.perfetto.dev), and back.

Times are kept to the nanosecond. A rank is a process and a lane a thread; passes and their counters have a process of
their own. Format: the Trace Event Format, JSON object form. A run with more slices than a browser draws keeps those of
some passes in its middle (`Excerpt`).
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from harness.machine.base import Lane, LaneKind, Span, Work
from harness.record.files import atomic_file, plain
from harness.record.passes import PassRecord
from harness.record.spans import SpanTable, Window, lane_order

_PASSES_PID = 1
_FIRST_RANK_PID = 10  # rank r is process 10 + r
_KINDS = tuple(LaneKind)
_EXCERPT = "excerpt"  # what the trace says of itself where it has not all slices
_WORK = ("flops", "device_bytes", "host_bytes", "link_bytes")


class TraceError(ValueError):
    """A file is not a trace that this module wrote, or not of the whole run where that is needed."""


@dataclass(frozen=True)
class Excerpt:
    """An excerpt of a run's slices has those that begin in the window, of passes `first` to `last`."""

    window: Window
    first: int
    last: int
    num_slices: int
    num_all: int

    @property
    def told(self) -> str:
        """Say what the trace shows, for labels."""
        passes = f"pass {self.first}" if self.first == self.last else f"passes {self.first} to {self.last}"
        return f"{self.num_slices:,} of {self.num_all:,} slices: {passes}"


def excerpt(spans: Sequence[Span], passes: Sequence[PassRecord], most: int | None) -> Excerpt | None:
    """Choose neighbouring passes in the middle of a run, as many as have `most` slices together; of a single pass with
    more, its beginning. None where all slices are few enough, or there is no pass."""
    if most is None or len(spans) <= most or not passes:
        return None
    table, ordered = SpanTable.of(spans), sorted(passes, key=lambda p: (p.start_s, p.index))
    starts_s = np.sort(np.concatenate([table.lane(lane).rows["start_s"] for lane in table.all_lanes()]))

    def num_slices(first: int, last: int) -> int:
        window = ordered[first].start_s, ordered[last].end_s
        return int(np.diff(np.searchsorted(starts_s, window))[0])

    first = last = middle = len(ordered) // 2
    while wider := [
        (start, end)
        for start, end in ((first, last + 1), (first - 1, last))
        if start >= 0 and end < len(ordered) and num_slices(start, end) <= most
    ]:
        first, last = wider[-1 if last - middle > middle - first else 0]
    start_s, end_s = ordered[first].start_s, ordered[last].end_s
    if num_slices(first, last) > most:
        end_s = float(starts_s[np.searchsorted(starts_s, start_s) + most])
    number = int(np.diff(np.searchsorted(starts_s, (start_s, end_s)))[0])  # slices that begin together stay together
    return Excerpt((start_s, end_s), ordered[first].index, ordered[last].index, number, len(spans))


def write_trace(
    path: Path,
    spans: Sequence[Span],
    passes: Sequence[PassRecord],
    *,
    label: str,
    meta: Mapping[str, Any] | None = None,
    only: Excerpt | None = None,
) -> None:
    """Write the trace, or an excerpt of it, whole or not at all. A path that ends in `.gz` is compressed (Perfetto
    reads both)."""
    other = {"label": label, **plain(meta or {})}
    if only is not None:
        other[_EXCERPT], label = only.told, f"{label}; {only.told}"
        start_s, end_s = only.window
        spans = [span for span in spans if start_s <= span.start_s < end_s]
    header = {"displayTimeUnit": "ms", "otherData": other}
    with atomic_file(path) as raw:
        if path.suffix == ".gz":
            with gzip.GzipFile(fileobj=raw, mode="wb", compresslevel=5, mtime=0) as packed:
                _write(packed, header, _events(spans, passes, label))
        else:
            _write(raw, header, _events(spans, passes, label))


def read_trace(path: Path, *, whole: bool = True) -> list[Span]:
    """Read the spans of a trace, in the order in which they were recorded. Raises TraceError naming the file, also for
    an excerpt where the `whole` run is asked for."""
    try:
        loaded = _load(path)
        if whole and (told := loaded.get("otherData", {}).get(_EXCERPT)):
            raise TraceError(f"{path}: has {told}; run again with trace_slices=null for all")
        events = loaded["traceEvents"]
        return [_span(event) for event in events if event["ph"] == "X" and event["pid"] >= _FIRST_RANK_PID]
    except TraceError:
        raise
    except (AttributeError, ValueError, KeyError, TypeError, EOFError, IndexError, gzip.BadGzipFile) as error:
        raise TraceError(f"{path}: not a readable trace ({type(error).__name__}: {error})") from error


def trace_label(path: Path) -> str:
    """Read the label (measured, emulated, simulated) that the trace carries."""
    return str(_load(path)["otherData"]["label"])


def _load(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    loaded = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    return loaded if isinstance(loaded, dict) else {}


def _write(file: IO[bytes] | gzip.GzipFile, header: dict[str, Any], events: Iterable[dict[str, Any]]) -> None:
    encode = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode
    file.write((encode(header)[:-1] + ',"traceEvents":[\n').encode())
    separator = ""
    for event in events:
        file.write(f"{separator}{encode(event)}".encode())
        separator = ",\n"
    file.write(b"\n]}\n")


def _events(spans: Sequence[Span], passes: Sequence[PassRecord], label: str) -> Iterator[dict[str, Any]]:
    ranks = sorted({span.lane.rank for span in spans}) or [0]
    yield from _name(_PASSES_PID, f"passes ({label})", 0)
    for rank in ranks:
        yield from _name(_FIRST_RANK_PID + rank, f"rank {rank} ({label})", 1 + rank)
        for lane in (Lane(kind, rank) for kind in _KINDS):
            yield from _name(_FIRST_RANK_PID + rank, str(lane.kind), lane_order(lane)[1], 1 + lane_order(lane)[1])
    yield from _pass_events(sorted(passes, key=lambda p: (p.start_s, p.index)))
    for span in spans:
        yield _span_event(span)


def _name(pid: int, name: str, sort_index: int, tid: int | None = None) -> Iterator[dict[str, Any]]:
    what = "process" if tid is None else "thread"
    for suffix, args in (("name", {"name": name}), ("sort_index", {"sort_index": sort_index})):
        yield {"ph": "M", "name": f"{what}_{suffix}", "pid": pid, "tid": tid or 0, "args": args}


def _span_event(span: Span) -> dict[str, Any]:
    layer = "" if span.layer is None else f" L{span.layer}"
    batch = "" if span.micro_batch is None else f" µb{span.micro_batch}"
    args: dict[str, Any] = {"ticket": span.ticket}
    if span.layer is not None:
        args["layer"] = span.layer
    if span.micro_batch is not None:
        args["micro_batch"] = span.micro_batch
    if span.num_packets > 1:
        args["packet"] = f"{span.packet + 1}/{span.num_packets}"
    if span.urgent:
        args["urgent"] = True
    if span.cpu_s:
        args["cpu_ms"] = _ns(span.cpu_s) / 1e6
    args |= {name: _integral(getattr(span.work, name)) for name in _WORK if getattr(span.work, name)}
    return {
        "name": f"{span.kind}{layer}{batch}",
        "cat": span.kind,
        "ph": "X",
        "pid": _FIRST_RANK_PID + span.lane.rank,
        "tid": 1 + _KINDS.index(span.lane.kind),
        **_times(span.start_s, span.end_s),
        "args": args,
    }


def _span(event: dict[str, Any]) -> Span:
    args, start_ns = event["args"], round(event["ts"] * 1e3)
    packet, _, num_packets = args.get("packet", "1/1").partition("/")
    return Span(
        lane=Lane(_KINDS[event["tid"] - 1], event["pid"] - _FIRST_RANK_PID),
        kind=event["cat"],
        layer=args.get("layer"),
        micro_batch=args.get("micro_batch"),
        ticket=args["ticket"],
        packet=int(packet) - 1,
        num_packets=int(num_packets),
        urgent=args.get("urgent", False),
        start_s=start_ns / 1e9,
        end_s=(start_ns + round(event["dur"] * 1e3)) / 1e9,
        cpu_s=round(args.get("cpu_ms", 0.0) * 1e6) / 1e9,
        work=Work(**{name: float(args.get(name, 0.0)) for name in _WORK}),
    )


def _pass_events(passes: Sequence[PassRecord]) -> Iterator[dict[str, Any]]:
    row_ends: list[float] = []  # overlapping passes take a row each: slices of one row must nest
    for record in passes:
        row = next((i for i, end_s in enumerate(row_ends) if end_s <= record.start_s), len(row_ends))
        if row == len(row_ends):
            row_ends.append(record.end_s)
            yield from _name(_PASSES_PID, "passes" if row == 0 else f"passes {row + 1}", row, 1 + row)
        row_ends[row] = record.end_s
        args = {k: v for k, v in plain(record).items() if k not in ("start_s", "end_s")}
        times = _times(record.start_s, record.end_s)
        name = f"pass {record.index}" if record.mode == "normal" else f"pass {record.index} ({record.mode})"
        yield {"name": name, "cat": "pass", "ph": "X", "pid": _PASSES_PID, "tid": 1 + row, **times, "args": args}
        yield from _counters(record.start_s, record.kv_blocks_used, record.num_prefill_tokens, record.num_decode_tokens)
    if passes:
        yield from _counters(max(p.end_s for p in passes), passes[-1].kv_blocks_used, 0, 0)


def _counters(time_s: float, blocks: int, prefill: int, decode: int) -> Iterator[dict[str, Any]]:
    for name, unit, value in (
        ("KV blocks used", "blocks", blocks),
        ("prefill tokens", "tokens", prefill),
        ("decode tokens", "tokens", decode),
    ):
        yield {"name": name, "ph": "C", "pid": _PASSES_PID, "ts": _ns(time_s) / 1e3, "args": {unit: value}}


def _times(start_s: float, end_s: float) -> dict[str, float]:
    """Round start and end before they are subtracted, so that packets that touch still touch."""
    return {"ts": _ns(start_s) / 1e3, "dur": (_ns(end_s) - _ns(start_s)) / 1e3}


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _integral(value: float) -> float | int:
    return int(value) if value == int(value) else value
