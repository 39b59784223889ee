"""Sketch module-based batching after MoE-Gen.

Attention runs in small micro-batches, tokens accumulate in host memory, then the experts run one after another, each
over all of its tokens, in slices of their own.
"""

from __future__ import annotations

import numpy as np

from harness.engine.accumulated import AccumulatedBatch, AccumulatedMemory
from harness.engine.activations import Activations
from harness.engine.batch import PassPlan, assemble
from harness.engine.emitter import Emitter
from harness.engine.engine import Engine
from harness.engine.in_flight import InFlight
from harness.engine.strategy import PassResult, Strategy
from harness.memory.weights import WeightStream
from strategies.common.static_batches import StaticBatches

_DENSE = ("attention_in", "attention_out")


class ModuleBatching:
    """The strategy takes `attention_batch` micro-batches through attention, and `expert_batch` tokens at a time through
    an expert. Experts of fewer tokens than `cpu_below` run on the CPU, where they lie."""

    def __init__(
        self, engine: Engine, *, attention_batch: int, expert_batch: int, max_tokens: int, cpu_below: int
    ) -> None:
        machine, spec = engine.machine, engine.spec
        self._engine, self._emit = engine, Emitter(engine)
        self._attention_batch, self._cpu_below = attention_batch, cpu_below
        self._stream = WeightStream(machine, engine.store, depth=1, packet_bytes=4096)
        self._acts = [Activations(machine, spec, max_tokens=max_tokens, name=f"mb {i}") for i in range(attention_batch)]
        memory = AccumulatedMemory.reserve(machine, spec, max_tokens=max_tokens, slice_tokens=expert_batch)
        self._tokens = AccumulatedBatch(engine, self._emit, memory)
        self._index = 0

    def run(self, plan: PassPlan) -> PassResult:
        size = -(-len(plan.sequences) // self._attention_batch)
        groups = [plan.sequences[i : i + size] for i in range(0, len(plan.sequences), size)]
        its = []
        for i, group in enumerate(groups):
            prefill = [s for s in group if s in plan.prefill]
            decode = [s for s in group if s not in plan.prefill]
            its.append(InFlight(assemble(i, prefill, decode, self._engine.kv.allocator), self._acts[i]))
            self._emit.embed(its[-1])
        for layer in range(self._engine.spec.num_layers):
            self._layer(its, layer)
            self._index += 1
        for it in its:
            self._emit.head(it)
        return PassResult(its)

    def finish(self) -> None:
        self._stream.cancel_all()

    def _layer(self, its: list[InFlight], layer: int) -> None:
        machine, emit, stream, i = self._engine.machine, self._emit, self._stream, self._index
        for name in _DENSE:
            emit.load(stream, i, name)
        self._tokens.begin(layer)
        rows, routes = [], []
        for it in its:
            emit.attention_in(it, layer, stream.part(i, "attention_in"))
            emit.prefill_attention(it, layer)
            emit.offload_qkv(it, layer)
            emit.append_kv(it, layer)
            emit.decode_attention(it, layer)
            emit.attention_out(it, layer, stream.part(i, "attention_out"))
            rows.append(self._tokens.add(it)[0])
            routes.append(emit.route(it, layer))
        for name in _DENSE:
            stream.release(i, name)
        self._tokens.begin_experts()
        ids, weights = (np.concatenate(values) for values in zip(*map(machine.wait, routes), strict=True))
        for expert, stored in self._engine.store.experts(layer).items():
            tokens, slots = np.nonzero(ids == expert)
            if len(tokens) >= max(self._cpu_below, 1):
                emit.load(stream, i, stored.layout.name)
                self._tokens.expert(stream.part(i, stored.layout.name), tokens, weights[tokens, slots])
                stream.release(i, stored.layout.name)
            elif len(tokens):
                self._tokens.expert_on_host(stored, tokens, weights[tokens, slots])
        for it, mine in zip(its, rows, strict=True):
            self._tokens.take_sums(it, mine)
            emit.combine(it, layer)


def build(engine: Engine, *, expert_batch: int = 16, cpu_below: int = 3) -> Strategy:
    max_tokens = 512
    scheduler = StaticBatches(engine.sequences, engine.kv.allocator, max_pass_tokens=max_tokens)
    pipeline = ModuleBatching(
        engine, attention_batch=3, expert_batch=expert_batch, max_tokens=max_tokens, cpu_below=cpu_below
    )
    return Strategy(scheduler=scheduler, pipeline=pipeline)
