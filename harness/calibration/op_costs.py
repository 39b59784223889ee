"""Measure the seconds of every kind of op over tokens and contexts: alone, and in the company that it has while lanes
overlap.

An op that is short against the machine's own fixed costs takes several times longer while other lanes work: threads
hand the interpreter to each other, and caches are swept. So each op is measured in each company of its lane that
matters: gpu ops alone and with a busy link; ops of all other lanes also with a busy gpu, and with both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise

import numpy as np

from harness.bench.shapes import Shape
from harness.calibration.probes import LayerProbes
from harness.calibration.table import (
    ALONE,
    BESIDE_GPU,
    BESIDE_GPU_AND_LINK,
    BESIDE_LINK,
    LINKS,
    Company,
    Points,
    table_key,
)
from harness.calibration.undisturbed import Undisturbed
from harness.engine.emitter import Emitter
from harness.engine.engine import Engine
from harness.machine.base import GPU, Lane, LaneKind, Op, Ticket, Work
from harness.memory.weights import WeightStream

_LAYERS_BESIDE_LINK = 3
_FEED_EVERY_S = 2e-3


class OpCosts:
    """Measures what ops take, alone and in company. `samples` has their seconds by company, `works` their work.
    `handovers_s` has the seconds from the end of an op until another one, which had waited for it on an idle lane,
    began."""

    def __init__(
        self, engine: Engine, probes: LayerProbes, *, link_bytes_s: dict[LaneKind, float], undisturbed: Undisturbed,
        max_tokens: int, max_context: int,
    ) -> None:  # fmt: skip
        self._engine, self._probes = engine, probes
        self._link_bytes_s = link_bytes_s
        self._undisturbed = undisturbed
        self._max_tokens, self._max_context = max_tokens, max_context
        self.samples: dict[Company, dict[str, Points]] = {ALONE: {}}
        self.works: dict[str, dict[tuple[float, ...], Work]] = {}
        self._spare: dict[Company, dict[str, Points]] = {}
        self.handovers_s: list[float] = []

    def measure(self, repeats: int, log: Callable[[str], None]) -> None:
        """Measure all shapes once, and then again: what changes with the time of day must not look like a difference of
        shapes."""
        for repeat in range(repeats):
            log(f"ops alone and in company: {repeat + 1} of {repeats}")
            for shape in self._shapes():
                self._keep(ALONE, self._undisturbed(f"ops alone, {shape}", partial(self._serial, shape)))
                tickets = self._undisturbed(f"gpu ops beside the link, {shape}", partial(self._overlapped, shape))
                self._keep(BESIDE_LINK, [t for t in tickets if t.lane == GPU])
                for company in (BESIDE_LINK, BESIDE_GPU, BESIDE_GPU_AND_LINK):
                    name = f"ops beside {'+'.join(sorted(company))}, {shape}"
                    self._keep(company, self._undisturbed(name, partial(self._host_side, shape, company)))
        self._fill_gaps()

    def _keep(self, company: Company, tickets: list[Ticket]) -> None:
        """Add the ops of one chain to the samples, as the mean over ops that are alike. Where each expert is an op of
        its own, some get many tokens and some none, and what a pass takes is the mean. What stayed disturbed is kept
        apart."""
        grouped: dict[tuple[str, tuple[float, ...]], list[float]] = {}
        for ticket in tickets:
            key = table_key(ticket.lane, ticket.op, again=ticket.op.micro_batch == 1)
            grouped.setdefault((key, ticket.op.cost_features()), []).append(self._seconds(ticket))
            self.works.setdefault(key, {}).setdefault(ticket.op.cost_features(), ticket.op.work())
        kept = self._spare if self._undisturbed.was_disturbed else self.samples
        points = kept.setdefault(company, {})
        for (key, features), seconds in grouped.items():
            points.setdefault(key, []).append((features, max(float(np.mean(seconds)), 0.0)))

    def _fill_gaps(self) -> None:
        """Let disturbed measurements count where there is no other."""
        for company, by_key in self._spare.items():
            for key, points in by_key.items():
                clean = self.samples.setdefault(company, {}).setdefault(key, [])
                known = {features for features, _ in clean}
                clean.extend(point for point in points if point[0] not in known)

    def _seconds(self, ticket: Ticket) -> float:
        """Return the seconds that an op took; on links, those beyond the link's own time."""
        assert ticket.started_s is not None and ticket.finished_s is not None
        seconds = ticket.finished_s - ticket.started_s
        if ticket.lane.kind in LINKS:
            seconds -= ticket.op.work().link_bytes / self._link_bytes_s[ticket.lane.kind]
        return seconds

    def _shapes(self) -> Iterator[Shape]:
        """Yield shapes of prefill, of decode and of both, up to what micro-batches and the KV cache can hold."""
        for tokens in (8, 32, 96, 192, 384, 768, 1200, 1800):
            if tokens <= self._max_tokens:
                yield Shape.of_prompts(tokens, 100)
        for length in (30, 300, 450):
            if 2 * length <= self._max_tokens:
                yield Shape(prompts=(length,) * max(2, min(600, self._max_tokens) // length))
        block_size = self._engine.kv.allocator.block_size
        for count, context in ((1, 100), (4, 60), (16, 100), (16, 400), (48, 120), (96, 60), (96, 160), (200, 110)):
            if count * (context + block_size) <= self._max_context and count <= self._max_tokens:
                yield Shape(contexts=(context,) * count)
        if self._max_context > 32 * 120 and self._max_tokens >= 232:
            yield Shape(prompts=(100, 100), contexts=(100,) * 32)

    # -- alone, and with a busy link ------------------------------------------------------------------------------

    def _serial(self, shape: Shape) -> list[Ticket]:
        """Run one layer's ops one after the other, whatever their lanes, with the experts in one op and apart. A dense
        layer's follow."""
        emit = Recording(self._engine, serial=True)
        its = self._probes.pair(shape)
        for first, apart in self._probes.chains:
            for it in its:
                emit.embed(it)
            self._probes.serial(emit, its, first, experts_apart=apart)
            self._engine.machine.wait(emit.head(its[0]))
        self._end()
        self.handovers_s += [_gap_s(a, b) for a, b in pairwise(emit.tickets) if a.lane != b.lane]
        return emit.tickets

    def _overlapped(self, shape: Shape) -> list[Ticket]:
        """Run some layers, whose ops wait only for their data, while weights stream."""
        emit = Recording(self._engine)
        its = self._probes.pair(shape)
        for first, apart in self._probes.chains:
            for it in its:
                emit.embed(it)
            self._probes.overlapped(emit, its, first, _LAYERS_BESIDE_LINK, experts_apart=apart)
            self._engine.machine.wait(emit.head(its[0]))
            self._end()
        return emit.tickets

    # -- what lanes other than the gpu's do, in company -----------------------------------------------------------

    def _host_side(self, shape: Shape, company: Company) -> list[Ticket]:
        """Run one micro-batch's ops on lanes other than the gpu's, one after the other. Meanwhile the gpu computes
        another micro-batch, or weights stream, or both, as `company` says."""
        machine, probes = self._engine.machine, self._probes
        with probes.background(gpu=LaneKind.GPU in company, link=LaneKind.H2D in company) as background:
            emit = Recording(self._engine, serial=True)
            probes.host_side(emit, probes.batch(0, shape), probes.layer)
            while not emit.tickets[-1].done:
                background.feed()
                time.sleep(_FEED_EVERY_S)
                machine.now()
        self._end()
        return emit.tickets

    def _end(self) -> None:
        self._probes.stream.cancel_all()
        self._engine.machine.drain()
        self._engine.machine.now()


class Recording(Emitter):
    """Keeps the tickets of what it submits."""

    def __init__(self, engine: Engine, *, serial: bool = False) -> None:
        super().__init__(engine, serial=serial)
        self.tickets: list[Ticket] = []

    def submit(self, lane: Lane, op: Op, *, urgent: bool = False) -> Ticket:
        ticket = super().submit(lane, op, urgent=urgent)
        self.tickets.append(ticket)
        return ticket

    def load(self, stream: WeightStream | list[WeightStream], index: int, part_name: str) -> Ticket:
        ticket = super().load(stream, index, part_name)
        self.tickets.append(ticket)
        return ticket


def _gap_s(before: Ticket, after: Ticket) -> float:
    assert before.finished_s is not None and after.started_s is not None
    return after.started_s - before.finished_s
