"""Measure how many times longer each lane's long ops take while other lanes work, for every pair and every triple."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from itertools import combinations

import numpy as np

from harness.bench.shapes import Shape
from harness.calibration.probes import LayerProbes
from harness.calibration.table import LINKS
from harness.calibration.undisturbed import Undisturbed
from harness.engine.engine import Engine
from harness.engine.in_flight import InFlight
from harness.machine.base import CPU, D2H, GPU, H2D, PIN, Lane, Span, Ticket

_STREAM_S = 0.2  # how long lanes are watched together
_MOST_S = 30.0  # at most, while not every lane has ended an op
_POLL_S = 1e-3
_AHEAD = {GPU: 3, CPU: 6, H2D: 3, D2H: 8, PIN: 3}  # ops that are always queued
_KINDS = {GPU: "experts", CPU: "decode attention", H2D: "weights", D2H: "offload qkv", PIN: "weights to pinned"}


class Together:
    """Streams ops of one kind on each lane of a group, and compares them with the lane alone. The pin lane takes part
    where the machine has pageable memory for it."""

    def __init__(self, engine: Engine, probes: LayerProbes, undisturbed: Undisturbed, max_context: int) -> None:
        self._engine, self._probes, self._undisturbed = engine, probes, undisturbed
        self._max_context = max_context
        self.lanes = (CPU, D2H, GPU, H2D) if probes.staged is None else (CPU, D2H, GPU, H2D, PIN)

    def measure(self, repeats: int, log: Callable[[str], None]) -> dict[str, dict[str, float]]:
        """Measure each lane's op while other lanes work, relative to its time alone. The result is by the names of the
        lanes that work together, then by lane."""
        groups = [group for size in (1, 2, 3) for group in combinations(self.lanes, size)]
        seen: dict[tuple[Lane, ...], list[dict[Lane, float]]] = {group: [] for group in groups}
        for repeat in range(repeats):
            log(f"lanes together: {repeat + 1} of {repeats}")
            for group in groups:
                seen[group].append(self._undisturbed(f"lanes together, {_name(group)}", partial(self._streams, group)))
        alone = {lane: _median(seen[lane,], lane) for lane in self.lanes}
        return {
            _name(group): {str(lane.kind): _median(runs, lane) / alone[lane] for lane in group}
            for group, runs in seen.items()
            if len(group) > 1
        }

    def _streams(self, group: tuple[Lane, ...]) -> dict[Lane, float]:
        """Return the median seconds of a packet of each lane's op. Packets count that end while all lanes of the group
        have work."""
        machine = self._engine.machine
        gpu, cpu = self._prepared()
        machine.spans.clear()
        streams = {lane: self._stream(lane, gpu, cpu) for lane in group}
        begun_s = end_s = time.monotonic()

        def goes_on() -> bool:
            seconds = end_s - begun_s
            return seconds < _STREAM_S or (seconds < _MOST_S and not all(self._spans(lane, end_s) for lane in group))

        while goes_on():
            for stream in streams.values():
                stream()
            time.sleep(_POLL_S)
            machine.now()
            end_s = time.monotonic()
        machine.drain()
        self._probes.stream.cancel_all()
        return {lane: self._median_s(lane, end_s) for lane in group}

    def _prepared(self) -> tuple[InFlight, InFlight]:
        """Prepare a micro-batch for the gpu and one for the cpu, with a layer's weights on the device."""
        probes, acts = self._probes, self._probes.acts[0]
        gpu = probes.batch(0, Shape(prompts=(100,) * max(1, min(400, acts.max_tokens) // 100)))
        contexts = min(48, self._max_context // (128 + self._engine.kv.allocator.block_size), acts.max_tokens)
        cpu = probes.batch(1, Shape(contexts=(128,) * max(1, contexts)))
        prepare, part, layer = probes.ops.emit, probes.stream.part, probes.layer
        probes.stream.request_layer(layer)
        for it in (gpu, cpu):
            prepare.embed(it)
            prepare.attention_in(it, layer, part(layer, "attention_in"))
            prepare.attention_out(it, layer, part(layer, "attention_out"))
            prepare.offload_qkv(it, layer)
        self._engine.machine.drain()
        return gpu, cpu

    def _stream(self, lane: Lane, gpu: InFlight, cpu: InFlight) -> Callable[[], None]:
        """Return a function that keeps `lane` supplied when called often."""
        probes, layer = self._probes, self._probes.layer
        emit, stream = probes.ops.emit, probes.stream
        open_: list[Ticket] = []
        transferred: list[Lane] = []  # not empty once a layer was requested
        steps: dict[Lane, Callable[[], Ticket | None]] = {
            GPU: lambda: emit.experts(gpu, layer, stream.experts(layer)),
            CPU: lambda: emit.attend_on_host(cpu, layer),
            D2H: lambda: emit.offload_qkv(gpu, layer),
            PIN: lambda: emit.submit(PIN, probes.stage()),
        }

        def submit() -> list[Ticket]:
            if lane in steps:
                ticket = steps[lane]()
                assert ticket is not None, "the probed layer has experts, and the micro-batches are there for these ops"
                return [ticket]
            for name in stream.part_names(probes.beside) if transferred else ():
                stream.release(probes.beside, name)
            transferred.append(lane)
            return stream.request_layer(probes.beside)

        def supply() -> None:
            open_[:] = [t for t in open_ if not t.done]
            while len(open_) < _AHEAD[lane]:
                open_.extend(submit())

        return supply

    def _median_s(self, lane: Lane, end_s: float) -> float:
        """Return the median seconds of the lane's packets, on links per byte. There one packet of each size counts: a
        window may hold more of one size or of another."""
        spans = self._spans(lane, end_s)
        assert spans, f"lane {lane} ended nothing in {_MOST_S:g} s"
        by_size: dict[float, list[float]] = defaultdict(list)
        for span in spans:
            by_size[span.work.link_bytes if lane.kind in LINKS else 1.0].append(span.end_s - span.start_s)
        return float(sum(np.median(alike) for alike in by_size.values())) / sum(by_size)

    def _spans(self, lane: Lane, end_s: float) -> list[Span]:
        """Return the spans of the lane's op that ended by `end_s`."""
        spans = self._engine.machine.spans
        return [s for s in list(spans) if s.lane == lane and s.kind == _KINDS[lane] and s.end_s <= end_s]


def _median(runs: list[dict[Lane, float]], lane: Lane) -> float:
    return float(np.median([run[lane] for run in runs]))


def _name(group: tuple[Lane, ...]) -> str:
    return "+".join(sorted(str(lane.kind) for lane in group))
