"""Keeps lanes busy beside what is measured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from harness.bench.shapes import Shape
from harness.calibration.probes import LayerProbes
from harness.engine.in_flight import InFlight
from harness.machine.base import GPU, Lane, Ticket


class Background:
    """Keeps lanes busy: the gpu with layer after layer of a second micro-batch, the link with weights. The layer that
    the gpu uses lies in one slot of the stream, what the link brings goes to the other."""

    TOKENS = 200
    AHEAD = 10  # ops that are always queued
    SHORT_ROWS = 2  # of an expert in a short op

    def __init__(self, probes: LayerProbes, *, gpu: bool, link: bool, short: Lane | None) -> None:
        self._probes, self._link, self._short = probes, link, short
        self._computing: list[Ticket] = []
        self.computed: list[Ticket] = []  # that have ended
        self._transfer: list[Ticket] = []
        self._it: InFlight | None = None
        if short == GPU:
            probes.stream.request_layer(probes.layer)
            probes.engine.machine.drain()
        if gpu:
            tokens = min(self.TOKENS, probes.acts[1].max_tokens)
            self._it = probes.batch(1, Shape(prompts=(min(100, tokens),) * max(1, tokens // 100)))
            probes.stream.request_layer(probes.layer)
            probes.ops.emit.embed(self._it)
            probes.engine.machine.drain()
        self.feed()

    def feed(self) -> None:
        """Submit more work; this must be called more often than what is queued lasts."""
        self.computed += [t for t in self._computing if t.done]
        self._computing = [t for t in self._computing if not t.done]
        while self._it is not None and len(self._computing) < self.AHEAD:
            self._computing += self._probes.ops.layer(self._it, self._probes.layer)
        while self._short is not None and len(self._computing) < self.AHEAD:
            probes, rows = self._probes, min(self.SHORT_ROWS, self._probes.acts[0].max_tokens)
            op = probes.expert_on_device(rows) if self._short == GPU else probes.expert_on_host(rows)
            self._computing.append(probes.engine.machine.submit(self._short, op))
        if self._link and sum(not t.done for t in self._transfer) < 3:
            self._settle()
            self._transfer = self._probes.stream.request_layer(self._probes.beside)

    def end(self) -> None:
        self._settle()
        self._probes.stream.cancel_all()
        self._probes.engine.machine.drain()

    def _settle(self) -> None:
        for ticket in self._transfer:
            self._probes.engine.machine.wait(ticket)
        if self._transfer:
            for name in self._probes.stream.part_names(self._probes.beside):
                self._probes.stream.release(self._probes.beside, name)
        self._transfer = []


@contextmanager
def busy_lanes(
    probes: LayerProbes, *, gpu: bool = False, link: bool = False, short: Lane | None = None
) -> Iterator[Background]:
    """Give some lanes work for as long as it is fed, and drain it at the end. These are the gpu lane, the link, or
    lane `short`, with one short op after another."""
    work = Background(probes, gpu=gpu, link=link, short=short)
    try:
        yield work
    finally:
        work.end()
