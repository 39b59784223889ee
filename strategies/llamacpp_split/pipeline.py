"""Run micro-batches one after another through all layers, as llama.cpp's scheduler of splits does: nothing overlaps."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from math import inf

import numpy as np

from harness.engine.activations import Activations
from harness.engine.batch import PassPlan, assemble
from harness.engine.emitter import Emitter
from harness.engine.engine import Engine
from harness.engine.in_flight import InFlight
from harness.engine.sequences import State
from harness.engine.strategy import PassResult
from harness.machine.base import H2D
from harness.memory.occupancy import Places
from harness.memory.placed import PlacedPart
from harness.memory.tiers import DEVICE
from harness.memory.transfers import CopyWeights
from strategies.llamacpp_split.config import DeviceWeights
from strategies.llamacpp_split.planner import Policy


class SplitPipeline:
    """Keeps all weights on the device but the experts of the first `policy.cpu_moe_layers` layers.

    A micro-batch of fewer than `offload_min_tokens` tokens (None: any) has these experts computed by the CPU, where
    they lie. For a larger one, those that its tokens chose are copied to the device and computed there. The copies are
    dropped afterwards. Copies and computation are in one stream, and the CPU's part is waited for, so every op follows
    the one before it.
    """

    def __init__(self, engine: Engine, policy: Policy, *, offload_min_tokens: int | None, packet_bytes: int) -> None:
        self._engine, self._packet_bytes = engine, packet_bytes
        self._cpu_layers = range(policy.cpu_moe_layers)
        self._offload_min_tokens = inf if offload_min_tokens is None else offload_min_tokens
        self._emit = Emitter(engine, serial=True)
        _keep_all_but_experts_of(self._cpu_layers, engine)
        self._acts = Activations(
            engine.machine,
            engine.spec,
            max_tokens=policy.max_tokens,
            name="activations",
            host=False,
            host_experts=True,
            device_blocks=engine.kv.num_device_blocks,
        )
        self._num_copies = policy.copied_experts
        self._copies = Places[tuple[int, int]](engine.machine, DEVICE)  # of (layer, expert)
        copy_bytes = DeviceWeights(engine).copy_bytes
        self._copies.reserve("copies of experts", dict.fromkeys(range(policy.copied_experts), copy_bytes))

    def run(self, plan: PassPlan) -> PassResult:
        assert plan.micro_batches, "the scheduler cuts passes into micro-batches"
        in_flight = []
        for index, sequences in enumerate(plan.micro_batches):
            prefill = [s for s in sequences if s.state is State.PREFILL]
            decode = [s for s in sequences if s.state is State.DECODING]
            it = InFlight(assemble(index, prefill, decode, self._engine.kv.allocator), self._acts)
            self._emit.embed(it)
            for layer in range(self._engine.spec.num_layers):
                self._layer(it, layer)
            self._emit.head(it)
            in_flight.append(it)
        return PassResult(in_flight)

    def finish(self) -> None:
        """Do nothing: nothing was prefetched."""

    def _layer(self, it: InFlight, layer: int) -> None:
        emit, resident = self._emit, self._engine.resident
        emit.attention_in(it, layer, resident.part(layer, "attention_in"))
        emit.prefill_attention(it, layer)
        emit.append_kv(it, layer)
        emit.decode_attention(it, layer)
        emit.attention_out(it, layer, resident.part(layer, "attention_out"))
        stored = self._engine.store.experts(layer)
        if stored and layer in self._cpu_layers:
            self._experts_of_the_host(it, layer)
        else:
            emit.experts(it, layer, {e: resident.part(layer, part.layout.name) for e, part in stored.items()})
        emit.combine(it, layer)

    def _experts_of_the_host(self, it: InFlight, layer: int) -> None:
        emit = self._emit
        ids, _ = self._engine.machine.wait(emit.route(it, layer))
        chosen = np.unique(ids).tolist()
        if it.batch.num_tokens >= self._offload_min_tokens:
            for start in range(0, len(chosen), self._num_copies):
                self._copy_and_compute(it, layer, chosen[start : start + self._num_copies])
            return
        emit.add_common(it, layer)
        emit.experts_on_host(it, layer, chosen)
        emit.load_expert_sums(it, layer)

    def _copy_and_compute(self, it: InFlight, layer: int, experts: Seq[int]) -> None:
        copied = {expert: self._copy(layer, expert) for expert in experts}
        for expert, part in copied.items():
            self._emit.experts(it, layer, {expert: part})
            self._copies.leave((layer, expert))

    def _copy(self, layer: int, expert: int) -> PlacedPart:
        source = self._engine.store.experts(layer)[expert]
        target = self._copies.take((layer, expert))
        copy = CopyWeights(source, target, layer=layer, packet_bytes=self._packet_bytes)
        self._emit.tail = (self._copies.bring((layer, expert), H2D, copy, after=self._emit.tail),)
        return PlacedPart(source.layout, target, (target,))


def _keep_all_but_experts_of(layers: range, engine: Engine) -> None:
    dense, experts = [], []
    for layer, parts in enumerate(engine.store.layers):
        for name, part in parts.items():
            if part.layout.expert is None:
                dense.append((layer, name))
            elif layer not in layers:
                experts.append((layer, name))
    engine.resident.keep("all layers without experts", dense)
    engine.resident.keep("resident experts", experts)
