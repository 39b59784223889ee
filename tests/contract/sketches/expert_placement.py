"""Sketch the event-driven placement of single experts after PreScope.

After each gate the active experts are spread over what is on the device, what is loaded on demand, and the CPU; the
next layer's experts are prefetched by a prediction and withdrawn when the gate says otherwise.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from harness.engine.activations import Activations
from harness.engine.batch import PassPlan, assemble
from harness.engine.emitter import Emitter
from harness.engine.engine import Engine
from harness.engine.in_flight import InFlight
from harness.engine.strategy import PassResult, Strategy
from harness.machine.base import Ticket
from harness.memory.expert_slots import ExpertSlots, Key
from harness.memory.weights import WeightStream
from strategies.common.predictors import Kind, Prediction, PredictorConfig, build_predictor
from strategies.common.static_batches import StaticBatches

_DENSE = ("attention_in", "attention_out")
_ON_DEMAND, _PREFETCHED = 2, 2  # experts beside the resident ones, which are expert 0 of each layer


class LongestThere:
    """The policy evicts the expert that came first."""

    def __init__(self) -> None:
        self._order: dict[Key, None] = {}

    def used(self, key: Key) -> None:
        self._order[key] = None

    def victim(self, candidates: Collection[Key], wanted: Key) -> Key:
        chosen = next(key for key in self._order if key in candidates)
        del self._order[chosen]
        return chosen


class ExpertPlacement:
    """The strategy runs active experts of fewer tokens than `cpu_below` that are not on the device on the CPU.

    A predictor says one layer before which experts a layer will need. Without one, what is hot here is thought to be
    hot there.
    """

    def __init__(self, engine: Engine, *, max_tokens: int, cpu_below: int, predictor: PredictorConfig) -> None:
        machine, spec = engine.machine, engine.spec
        self._engine, self._emit, self._cpu_below = engine, Emitter(engine), cpu_below
        self._predictor = build_predictor(predictor, engine)
        self._dense = WeightStream(
            machine, engine.store, depth=1, packet_bytes=4096, experts=False, resident=engine.resident
        )
        num_predicted = self._predictor.num_predicted if self._predictor else 0
        self._acts = Activations(
            machine, spec, max_tokens=max_tokens, name="batch", host_experts=True, num_predicted=num_predicted
        )
        self._host_sums = machine.tiers["device"].reserve(
            "sums of the host's experts", max_tokens * spec.hidden_dim * 4
        )
        num_slots = spec.num_layers + _ON_DEMAND + _PREFETCHED
        self.slots = ExpertSlots(
            machine, engine.store, num_slots=num_slots, packet_bytes=4096, replacement=LongestThere()
        )
        for layer in spec.moe_layers:
            self.slots.acquire(layer, 0)  # for good
        self._guessed: set[Key] = set()
        self._index = 0
        self.counts = {"resident": 0, "prefetched": 0, "on demand": 0, "cpu": 0, "cancelled": 0}

    def run(self, plan: PassPlan) -> PassResult:
        it = InFlight(assemble(0, plan.prefill, plan.decode, self._engine.kv.allocator), self._acts)
        self._emit.embed(it)
        for layer in range(self._engine.spec.num_layers):
            self._layer(it, layer)
            self._index += 1
        self._emit.head(it)
        return PassResult([it])

    def finish(self) -> None:
        self.slots.cancel_all()
        self._dense.cancel_all()

    def _layer(self, it: InFlight, layer: int) -> None:
        emit, dense, i = self._emit, self._dense, self._index
        for name in _DENSE:
            dense.request(i, name, urgent=True)  # ahead of prefetches that were only guessed
        emit.attention_in(it, layer, dense.part(i, "attention_in"))
        emit.prefill_attention(it, layer)
        emit.offload_qkv(it, layer)
        emit.append_kv(it, layer)
        emit.decode_attention(it, layer)
        emit.attention_out(it, layer, dense.part(i, "attention_out"))
        for name in _DENSE:
            dense.release(i, name)
        if self._engine.spec.is_dense(layer):
            emit.combine(it, layer)
            return
        predicted = self._predictor.request(emit, it, layer) if self._predictor else None
        ids, _ = self._engine.machine.wait(emit.route(it, layer))
        routed = np.bincount(ids.ravel(), minlength=self._engine.spec.num_experts)
        if self._predictor:
            self._predictor.observe(layer, ids)
        sums = (self._host_sums,) if self._place(it, layer, routed) else ()
        if sums:
            emit.load_expert_sums(it, layer, *sums)
        emit.combine(it, layer, extra=sums)
        self._prefetch(layer, predicted, routed)

    def _place(self, it: InFlight, layer: int, routed: np.ndarray) -> bool:
        """Run the layer's active experts, the rare ones first; return whether any of them runs on the CPU."""
        active = [e for e in np.argsort(routed).tolist() if routed[e]]
        for key in self._guessed - {(layer, expert) for expert in active}:
            self.counts["cancelled"] += self.slots.withdraw(*key)  # one that has started is kept
        self._guessed.clear()
        there = [e for e in active if (layer, e) in self.slots]
        on_host = [e for e in active if e not in there and routed[e] < self._cpu_below]
        self._emit.experts_on_host(it, layer, on_host)
        for expert in there:
            self.counts["prefetched" if expert else "resident"] += 1
            self._run(it, layer, expert)
            self.slots.release(layer, expert)
        running: dict[Ticket, int] = {}
        for expert in (e for e in active if e not in there and e not in on_host):
            if len(running) == _ON_DEMAND:  # react to whichever finishes first
                self.slots.release(layer, running.pop(self._engine.machine.wait_any(list(running))[0]))
            running[self._run(it, layer, expert)] = expert
        for expert in running.values():
            self.slots.release(layer, expert)
        self.counts["on demand"] += len(active) - len(there) - len(on_host)
        self.counts["cpu"] += len(on_host)
        return bool(on_host)

    def _run(self, it: InFlight, layer: int, expert: int) -> Ticket:
        part = self.slots.acquire(layer, expert, urgent=True)
        ticket = self._emit.experts(it, layer, {expert: part})
        assert ticket is not None
        return ticket

    def _prefetch(self, layer: int, predicted: Prediction | None, routed: np.ndarray) -> None:
        following, likely = (layer + 1) % self._engine.spec.num_layers, routed.astype(float)
        if self._engine.spec.is_dense(following) or (self._predictor and predicted is None):
            return
        if predicted is not None:
            likely = predicted.expected_tokens()
        for expert in [e for e in np.argsort(-likely).tolist() if e and likely[e]][:_PREFETCHED]:
            if (following, expert) not in self.slots and self.slots.prefetch(following, expert):
                self._guessed.add((following, expert))


def build(engine: Engine, cpu_below: int = 4, *, predictor: Kind = "none", path: str | None = None) -> Strategy:
    scheduler = StaticBatches(engine.sequences, engine.kv.allocator, max_pass_tokens=512)
    predicting = PredictorConfig(predictor=predictor, predictor_path=path)
    pipeline = ExpertPlacement(engine, max_tokens=512, cpu_below=cpu_below, predictor=predicting)
    return Strategy(scheduler=scheduler, pipeline=pipeline)
