"""Measure what moving and computing an expert takes on the machine: T_io, T_gpu, T_attn and the CPU's line."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import cycle
from statistics import fmean, median
from typing import Any

import numpy as np

from harness.bench.fitting import Plane, fit_plane
from harness.bench.op_bench import OpBench, length_s
from harness.bench.shapes import Shape
from harness.engine.engine import Engine
from harness.engine.in_flight import InFlight
from harness.engine.ops.experts import Expert
from harness.engine.sequences import Sequence
from harness.machine.base import CPU, GPU, Ticket
from harness.memory.placed import PlacedPart
from strategies.expert_offload.pipeline import ExpertPipeline

_REPEATS = 3
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # of an expert, on either side; beyond, the lines go on
_LEAST_S = 1e-9  # a clock may stand still


@dataclass(frozen=True, kw_only=True)
class ExpertCosts:
    """Seconds: `io_s` (T_io) brings an expert, `cpu` and `gpu` compute one over a number of tokens. `attention_s`
    (T_attn) passes between two routers in decode, and `prefill_token_s` for each token of a prefill.

    PreScope's c(n) = alpha n + sigma is `cpu`: alpha is its weight, sigma its fixed part. Several experts cost the sum
    of theirs, as in the papers; in one op each takes somewhat less.
    """

    io_s: float
    cpu: Plane
    gpu: Plane
    attention_s: float
    prefill_token_s: float

    def cpu_s(self, tokens: float) -> float:
        return self.cpu.fixed + self.cpu.weights[0] * tokens

    def gpu_s(self, tokens: float) -> float:
        return self.gpu.fixed + self.gpu.weights[0] * tokens

    def between_routers_s(self, num_tokens: int, *, is_prefill: bool) -> float:
        return num_tokens * self.prefill_token_s if is_prefill else self.attention_s

    def as_record(self) -> dict[str, Any]:
        """Return T_io, T_gpu at one token, T_attn, alpha and sigma, in seconds."""
        return {
            "io_s": self.io_s, "gpu_s": self.gpu_s(1), "gpu_token_s": self.gpu.weights[0],
            "attention_s": self.attention_s, "prefill_token_s": self.prefill_token_s,
            "cpu_token_s": self.cpu.weights[0], "cpu_start_s": self.cpu.fixed,
        }  # fmt: skip


# Where there is no clock: an expert's transfer takes as long as 8 tokens of it on the CPU.
_WITHOUT_CLOCK = ExpertCosts(
    io_s=10e-3, cpu=Plane(fixed=2e-3, weights=(1e-3,)), gpu=Plane(fixed=1e-3, weights=(0.0,)),
    attention_s=2e-3, prefill_token_s=1e-4,
)  # fmt: skip


def measured_costs(pipeline: ExpertPipeline, *, batch_size: int) -> ExpertCosts:
    """Measure the ops of one layer on the pipeline's machine, in its own buffers, for batches of `batch_size`."""
    if pipeline.engine.machine.clock == "none":
        return _WITHOUT_CLOCK
    return _Measuring(pipeline).costs(batch_size, host_experts=pipeline.host_experts)


class _Measuring:
    """Measures ops of the model's last layer with experts, each alone. Repetitions use different experts, so that
    caches do not keep them."""

    def __init__(self, pipeline: ExpertPipeline) -> None:
        self._engine, self._slots, acts = pipeline.engine, pipeline.residency.on_demand, pipeline.acts[0]
        self._acts, self._machine = acts, pipeline.engine.machine
        self._layer = self._engine.spec.moe_layers[-1]
        self._stored = self._engine.store.experts(self._layer)
        self._bench = OpBench(self._engine, _OnDevice(self._engine), [acts])
        self._turn = cycle(self._stored)

    def costs(self, batch_size: int, *, host_experts: bool) -> ExpertCosts:
        blocks, most = self._engine.kv.allocator, self._acts.max_tokens
        context = max(1, min(_mean_context(self._engine.sequences), most, blocks.num_free * blocks.block_size))
        it = self._bench.place(self._bench.batch(Shape(prompts=(context,)), blocks, on_device=True))
        prefill_s = self._to_router_s(it)
        sizes = [n for n in _ROWS if n <= most]
        gpu = self._expert(sizes, on_host=False)
        cpu = gpu
        if host_experts:
            self._bench.emit.experts_on_host(it, self._layer, [next(self._turn)])  # its rows come to the host
            cpu = self._expert(sizes, on_host=True)
        rows = min(batch_size, blocks.num_free, most)
        length = max(1, min(context, most // rows, blocks.num_free // rows * blocks.block_size))
        with self._bench.cached(Shape(contexts=(length,) * rows), self._layer) as decoding:
            attention_s = self._to_router_s(decoding)
        return ExpertCosts(
            io_s=median(self._bring_s() for _ in range(_REPEATS + 1)), cpu=cpu, gpu=gpu, attention_s=attention_s,
            prefill_token_s=prefill_s / context,
        )  # fmt: skip

    def _to_router_s(self, it: InFlight) -> float:
        """Time what lies between the experts of one layer and the router's answer in the next."""
        emit, part, layer = self._bench.emit, self._engine.resident.part, self._layer
        lengths = []
        emit.embed(it)
        for _ in range(_REPEATS + 1):
            tickets = [
                emit.attention_in(it, layer, part(layer, "attention_in")),
                emit.prefill_attention(it, layer),
                *emit.append_kv(it, layer),
                *emit.decode_attention(it, layer),
                emit.attention_out(it, layer, part(layer, "attention_out")),
                emit.route(it, layer),
            ]
            lengths.append(length_s(self._waited([ticket for ticket in tickets if ticket is not None])))
        return max(median(lengths[1:]), _LEAST_S)

    def _bring_s(self) -> float:
        expert = next(self._turn)
        self._slots.acquire(self._layer, expert)
        taken_s = length_s(self._waited(self._slots.tickets(self._layer, expert)))
        self._slots.release(self._layer, expert)
        self._slots.evict(self._layer, expert)
        return max(taken_s, _LEAST_S)

    def _expert(self, sizes: Seq[int], *, on_host: bool) -> Plane:
        """Fit a line through an expert's seconds over so many tokens."""
        acts, spec, engine, lane = self._acts, self._engine.spec, self._engine, CPU if on_host else GPU
        source, target = (acts.host_normed, acts.host_moe_out) if on_host else (acts.normed, acts.moe_out)
        points: dict[tuple[float, ...], float] = {}
        first = next(self._turn)
        there = self._slots.acquire(self._layer, first)
        for n in sizes:
            tokens, weights = np.arange(n), np.full(n, 1 / spec.experts_per_token, dtype=np.float32)

            def once(tokens: np.ndarray = tokens, weights: np.ndarray = weights) -> list[Ticket]:
                part = self._stored[next(self._turn)] if on_host else there
                op = Expert(
                    engine.family, spec, part, source, target, len(tokens), layer=self._layer, tokens=tokens,
                    weights=weights, on_host=on_host,
                )  # fmt: skip
                return [self._machine.submit(lane, op)]

            points[(float(n),)] = self._bench.timed(once, _REPEATS).median_s
        self._slots.release(self._layer, first)
        self._slots.evict(self._layer, first)
        return fit_plane(points)

    def _waited(self, tickets: list[Ticket]) -> list[Ticket]:
        for ticket in tickets:
            self._machine.wait(ticket)
        self._machine.now()
        return tickets


@dataclass(frozen=True)
class _OnDevice:
    """Gives the bench the layers' parts where they stay; it takes no experts."""

    engine: Engine

    def part(self, index: int, name: str, /) -> PlacedPart:
        return self.engine.resident.part(index, name)

    def experts(self, index: int) -> dict[int, PlacedPart]:
        return {}


def _mean_context(sequences: Seq[Sequence]) -> int:
    """Return the tokens of a mean context halfway through its generation."""
    return round(fmean([s.prompt_len + s.request.max_new_tokens / 2 for s in sequences] or [1]))
