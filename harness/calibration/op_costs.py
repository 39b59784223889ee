"""Measure the seconds of every kind of op over tokens and contexts: alone, and in the company that it has while lanes
overlap.

An op that is short against the machine's own fixed costs takes several times longer while other lanes work: threads
hand the interpreter to each other, and caches are swept. So each op is measured in each company of its lane that
matters: gpu ops alone and with a busy link; ops of all other lanes also with a busy gpu, and with both.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise, product
from threading import Event
from typing import ClassVar

import numpy as np

from harness.bench.shapes import Shape
from harness.calibration.background import Background, busy_lanes
from harness.calibration.joined import TOGETHER, features_of
from harness.calibration.probes import Chain, LayerProbes
from harness.calibration.table import (
    AGAIN,
    ALONE,
    AT_REST,
    BESIDE_GPU,
    BESIDE_GPU_AND_LINK,
    BESIDE_LINK,
    IN_CACHE,
    LINKS,
    Company,
    Points,
    table_key,
    weight_keys,
)
from harness.calibration.undisturbed import Undisturbed
from harness.engine.emitter import Emitter
from harness.engine.engine import Engine
from harness.engine.in_flight import InFlight
from harness.machine.base import CPU, D2H, GPU, Context, Lane, LaneKind, Op, Ticket, Work
from harness.memory.weights import WeightStream

_LAYERS_BESIDE_LINK = 3
_FEED_EVERY_S = 2e-3
_SHORT_TOKENS = 64  # a micro-batch of no more has short ops, which scatter
_SHORT_DRAWS = 2  # of its ops at rest and in company: a wait for a core counts for much in one
_FOUND_BESIDE = {CPU: AT_REST, GPU: None}  # where ops beside short ones of a lane find their weights, if they have any
_AT_ONCE = 8  # submissions between two looks at whether an op has run


class OpCosts:
    """Measures what ops take, alone and in company. `samples` has their seconds by company, `crowded` those beside a
    lane that runs one short op after another, each of `short_s` seconds by that lane, `beside_strategy` those beside a
    thread that submits, `works` their work. `between` has what lanes took from op to op meanwhile."""

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
        self.crowded: dict[Company, dict[str, Points]] = {ALONE: {}, BESIDE_LINK: {}}
        self.short_s: dict[LaneKind, list[float]] = {}
        self.beside_strategy: dict[str, Points] = {}
        self.between = BetweenOps()

    def measure(self, repeats: int, log: Callable[[str], None]) -> None:
        """Measure all shapes once, and then again: what changes with the time of day must not look like a difference of
        shapes."""
        for repeat in range(repeats):
            log(f"ops alone and in company: {repeat + 1} of {repeats}")
            for shape in self.shapes():
                self._in_all_companies(shape)
            for shape, lane, company in product(self._short_shapes(), (CPU, GPU), (ALONE, BESIDE_LINK)):
                measure = partial(self._beside_short_ones, shape, lane, company)
                name = f"ops beside short ones on {lane}, {_beside(company)}{shape}"
                self._add(self.crowded[company], self._undisturbed(name, measure), found=_FOUND_BESIDE[lane])
            for shape, lane in product(self._short_shapes(), (CPU, GPU)):
                name = f"ops on {'other lanes' if lane == GPU else GPU} beside submissions, {shape}"
                tickets = self._undisturbed(name, partial(self._beside_submissions, shape, lane))
                self._add(self.beside_strategy, tickets, found=_FOUND_BESIDE[lane])
        self._undisturbed.fill_gaps()

    def _in_all_companies(self, shape: Shape) -> None:
        """Measure the ops of a micro-batch alone, over weights that came before, and beside busy lanes."""
        self._keep(ALONE, self._undisturbed(f"ops alone, {shape}", partial(self._serial, shape)))
        tickets = self._undisturbed(f"gpu ops beside the link, {shape}", partial(self._overlapped, shape))
        self._keep(BESIDE_LINK, [t for t in tickets if t.lane == GPU])
        for _ in range(_SHORT_DRAWS if shape.num_tokens <= _SHORT_TOKENS else 1):
            for company in (ALONE, BESIDE_LINK):
                name = f"ops with weights that came before, {_beside(company)}{shape}"
                for found, tickets in self._undisturbed(name, partial(self._came_before, shape, company)).items():
                    self._keep(company, tickets, found=found)
            for company in (BESIDE_LINK, BESIDE_GPU, BESIDE_GPU_AND_LINK):
                name = f"ops beside {'+'.join(sorted(company))}, {shape}"
                self._keep(company, self._undisturbed(name, partial(self._host_side, shape, company)))

    def _keep(self, company: Company, tickets: list[Ticket], *, found: str | None = None) -> None:
        self._add(self.samples.setdefault(company, {}), tickets, found=found)

    def _add(self, table: dict[str, Points], tickets: list[Ticket], *, found: str | None = None) -> None:
        """Add the ops of one chain, as the mean over ops whose features agree to two digits. `found` says where they
        found their weights; without it, these have just come, and the second micro-batch finds those that the first
        has read. What stayed disturbed is kept apart."""
        points = self._undisturbed.place_in(table)

        def found_by(ticket: Ticket) -> str:
            return found if found is not None else AGAIN if ticket.op.micro_batch == 1 else ""

        for key, alike in alike_ops(tickets, found_by):
            features = mean(features_of(ticket.op) for ticket in alike)
            self.works.setdefault(key, {}).setdefault(features, Work(*mean(ticket.op.work() for ticket in alike)))
            seconds = float(np.mean([self._seconds(ticket) for ticket in alike]))
            points.setdefault(key, []).append((features, max(seconds, 0.0)))

    def _seconds(self, ticket: Ticket) -> float:
        """Return the seconds that an op took; on links whose rate is stated, those beyond the link's own time."""
        assert ticket.started_s is not None and ticket.finished_s is not None
        seconds, rate = ticket.finished_s - ticket.started_s, self._link_bytes_s.get(ticket.lane.kind)
        return seconds if rate is None else seconds - ticket.op.work().link_bytes / rate

    def shapes(self) -> Iterator[Shape]:
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

    def _short_shapes(self) -> Iterator[Shape]:
        """Yield small micro-batches, whose ops are short."""
        yield Shape.of_prompts(min(64, self._max_tokens), 64)
        block_size = self._engine.kv.allocator.block_size
        for count, context in ((4, 60), (16, 100)):
            if count * (context + block_size) <= self._max_context and count <= self._max_tokens:
                yield Shape(contexts=(context,) * count)

    # -- alone, and with a busy link ------------------------------------------------------------------------------

    def _serial(self, shape: Shape) -> list[Ticket]:
        """Run one layer's ops one after the other, whatever their lanes, with the experts in one op and apart. A dense
        layer's follow."""
        emit = Recording(self._engine, serial=True)
        its = self._probes.pair(shape)
        for first, apart in self._probes.chains:
            begun = len(emit.tickets)
            with self._held(emit):
                for it in its:
                    emit.embed(it)
                self._probes.serial(emit, its, first, experts_apart=apart)
                last = emit.head(its[0])
            self._engine.machine.wait(last)
            self._end()
            self.between.add(emit.tickets[begun:])
        return emit.tickets

    def _overlapped(self, shape: Shape) -> list[Ticket]:
        """Run some layers, whose ops wait only for their data, while weights stream. The first of them does not count:
        beside it the ops of all others are still submitted, which takes the interpreter."""
        emit, num_layers = Recording(self._engine), self._engine.spec.num_layers
        its = self._probes.pair(shape)
        counting: list[Ticket] = []
        for first, apart in self._probes.chains:
            before = (first - 1) % num_layers
            for it in its:
                emit.embed(it)
            index = first - 1 if first else num_layers - 1
            self._probes.overlapped(emit, its, index, _LAYERS_BESIDE_LINK, experts_apart=apart)
            self._engine.machine.wait(emit.head(its[0]))
            self._end()
            counting += [ticket for ticket in emit.tickets if before == first or ticket.op.layer != before]
            emit.tickets.clear()
        return counting

    def _came_before(self, shape: Shape, company: Company) -> dict[str, list[Ticket]]:
        """Run one micro-batch's ops on the gpu lane, with experts apart and then with some together. Each time that is
        over weights that the link has brought, past all caches, and once more over the same ones. Meanwhile the link is
        idle or not, as `company` says. The result is the ops by where they found their weights; those without any
        count the first time alone, since afterwards they find everything in caches."""
        probes, tickets = self._probes, defaultdict[str, list[Ticket]](list)
        it = probes.batch(0, shape)
        probes.ops.emit.embed(it)
        for chain in (probes.gpu_side, probes.gpu_side_together):
            emit = Recording(self._engine, serial=True)
            probes.stream.request_layer(probes.layer)
            self._engine.machine.drain()
            with busy_lanes(probes, link=LaneKind.H2D in company) as background:
                with self._held(emit):
                    self._behind_another(emit, it, chain)
                    first = len(emit.tickets)
                    chain(emit, it, probes.layer)
                self._fed(background, emit)
            self._end()
            is_first = chain == probes.gpu_side
            tickets[AT_REST] += [t for t in emit.tickets[:first] if is_first or weight_keys(t.op)]
            tickets[IN_CACHE] += [t for t in emit.tickets[first:] if weight_keys(t.op)]
        return tickets

    # -- what lanes other than the gpu's do, in company -----------------------------------------------------------

    def _host_side(self, shape: Shape, company: Company) -> list[Ticket]:
        """Run one micro-batch's ops on lanes other than the gpu's, one after the other. Meanwhile the gpu computes
        another micro-batch, or weights stream, or both, as `company` says."""
        probes = self._probes
        emit, it = Recording(self._engine, serial=True), probes.batch(0, shape)
        with busy_lanes(probes, gpu=LaneKind.GPU in company, link=LaneKind.H2D in company) as background:
            with self._held(emit):
                probes.host_side(emit, it, probes.layer)
            self._fed(background, emit)
        self._end()
        self.between.add(emit.tickets, beside=company)
        return emit.tickets

    def _beside_short_ones(self, shape: Shape, lane: Lane, company: Company) -> list[Ticket]:
        """Run a micro-batch's ops beside single experts on `lane`, with a busy link or an idle one, as `company` says.
        Threads then hand the interpreter to one another several times an op. Beside the cpu lane the ops are those of
        the gpu lane, beside that all others."""
        emit, submit = self._prepared(shape, lane)
        with busy_lanes(self._probes, short=lane, link=LaneKind.H2D in company) as background:
            with self._held(emit):
                submit()
            self._fed(background, emit)
        self._end()
        self.between.add(emit.tickets, beside=company | {lane.kind})
        self.short_s.setdefault(lane.kind, []).extend(self._seconds(ticket) for ticket in background.computed)
        return emit.tickets

    def _beside_submissions(self, shape: Shape, lane: Lane) -> list[Ticket]:
        """Run the ops that `_beside_short_ones` runs for this lane, while this thread submits experts that run after
        them, as a strategy's does."""
        emit, submit = self._prepared(shape, lane)
        if lane == GPU:
            self._probes.stream.request_layer(self._probes.layer)
            self._engine.machine.drain()
        with self._held(emit):
            submit()
        while not emit.tickets[-1].done:
            for _ in range(_AT_ONCE):
                self._engine.machine.submit(GPU, self._probes.expert_on_device(1), after=emit.tickets[-1:])
            self._engine.machine.now()
        self._end()
        return emit.tickets

    def _prepared(self, shape: Shape, beside: Lane) -> tuple[Recording, Callable[[], None]]:
        """Return an emitter and a function that submits a micro-batch's ops to it. Beside the cpu lane these are those
        of the gpu lane, whose weights lie on the device; beside the gpu lane all others."""
        probes, emit, it = self._probes, Recording(self._engine, serial=True), self._probes.batch(0, shape)
        if beside == CPU:
            probes.stream.request_layer(probes.layer)
            probes.ops.emit.embed(it)
            self._engine.machine.drain()
            return emit, lambda: self._behind_another(emit, it, probes.gpu_side)
        return emit, lambda: probes.host_side(emit, it, probes.layer)

    def _behind_another(self, emit: Recording, it: InFlight, chain: Chain) -> None:
        """Submit a chain of ops of the gpu lane behind one op that does not count. A lane's first op after a rest takes
        longer, and in a pass others come before a layer's."""
        emit.look_up(it)
        emit.tickets.clear()
        chain(emit, it, self._probes.layer)

    @contextmanager
    def _held(self, emit: Recording) -> Iterator[None]:
        """Let no op of a serial chain begin before all are submitted. The first ones would share the interpreter with
        the thread that submits the others."""
        gate = Gate()
        emit.tail = (self._engine.machine.submit(D2H, gate),)
        try:
            yield
        finally:
            gate.open()

    def _fed(self, background: Background, emit: Recording) -> None:
        """Keep the background supplied until all that was recorded has run."""
        while not all(ticket.done for ticket in emit.tail):
            background.feed()
            time.sleep(_FEED_EVERY_S)
            self._engine.machine.now()

    def _end(self) -> None:
        self._probes.stream.cancel_all()
        self._engine.machine.drain()
        self._engine.machine.now()


class Gate(Op):
    """Occupies its lane until it is opened."""

    kind: ClassVar[str] = "gate"

    def __init__(self) -> None:
        self._opened = Event()

    def open(self) -> None:
        self._opened.set()

    def work(self) -> Work:
        """Return no work: nobody measures it."""
        return Work()

    def run(self, ctx: Context, packet: int) -> None:
        self._opened.wait()


@dataclass
class BetweenOps:
    """Holds seconds from the end of an op until the one began that had waited for it alone.

    These are hand-overs to another lane, which had nothing to do, while no third lane works and while one does; and
    turns of a lane that computes, by kind. Links make up for their turns.
    """

    handovers_s: list[float] = field(default_factory=list)
    handovers_beside_s: list[float] = field(default_factory=list)
    turns_s: dict[LaneKind, list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(self, chain: Sequence[Ticket], *, beside: Company = ALONE) -> None:
        """Add a serial chain. The lanes `beside` it had other things to do, so that what began there says nothing."""
        for before, after in pairwise(chain):
            assert before.finished_s is not None and after.started_s is not None
            seconds, kind = after.started_s - before.finished_s, after.lane.kind
            if before.lane != after.lane and kind not in beside:
                (self.handovers_beside_s if beside else self.handovers_s).append(seconds)
            elif before.lane == after.lane and kind not in LINKS:
                self.turns_s[kind].append(seconds)


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


def _beside(company: Company) -> str:
    return "".join(f"beside {kind}, " for kind in sorted(company))


def alike_ops(
    tickets: Iterable[Ticket], found: Callable[[Ticket], str] = lambda ticket: ""
) -> Iterator[tuple[str, list[Ticket]]]:
    """Yield ops whose features agree to two digits, each time with their key in the table. `found` says where an op
    found its weights."""
    grouped: dict[tuple[str, tuple[float, ...]], list[Ticket]] = defaultdict(list)
    for ticket in tickets:
        key = table_key(ticket.lane, ticket.op, found=found(ticket)) + TOGETHER * (ticket.op.joined > 1)
        grouped[key, tuple(float(f"{feature:.2g}") for feature in features_of(ticket.op))].append(ticket)
    for (key, _), alike in grouped.items():
        yield key, alike


def mean(rows: Iterable[Sequence[float]]) -> tuple[float, ...]:
    """Return the mean of rows of numbers, column by column."""
    return tuple(float(each) for each in np.mean(list(rows), axis=0))
