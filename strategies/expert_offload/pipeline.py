"""Take a pass through the model: after each router, run the layer's active experts where the placer puts them."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from harness.engine.activations import Activations
from harness.engine.batch import PassPlan, assemble
from harness.engine.emitter import Emitter
from harness.engine.engine import Engine
from harness.engine.in_flight import InFlight
from harness.engine.sequences import Sequence, State
from harness.engine.strategy import PassResult
from harness.memory.tiers import DEVICE, Buffer
from strategies.common.predictors import Prediction, Predictor
from strategies.expert_offload.placement import Forecast, LayerView, Placement, Placer
from strategies.expert_offload.residency import ExpertResidency

Routes = Seq[np.ndarray]  # of each micro-batch: its tokens by expert


class ExpertPipeline:
    """Takes micro-batches of at most `max_tokens` tokens through the layers, `num_micro_batches` at a time.

    All but the routed experts lies on the device, where `Deployment` puts it, and so does the KV cache. `placer` may be
    exchanged between passes. With `host_experts` there are buffers for experts on the CPU. Experts that have arrived on
    the device run in one op, unless they are not to run `experts_together`.
    """

    placer: Placer

    def __init__(
        self, engine: Engine, residency: ExpertResidency, *, max_tokens: int, num_micro_batches: int = 1,
        host_experts: bool = True, predictor: Predictor | None = None, experts_together: bool = True,
    ) -> None:  # fmt: skip
        machine, spec = engine.machine, engine.spec
        self.engine, self.residency, self.predictor = engine, residency, predictor
        self._emit, self.host_experts, self._together = Emitter(engine), host_experts, experts_together
        num_predicted = predictor.num_predicted if predictor else 0
        self.acts = [
            Activations(
                machine, spec, max_tokens=max_tokens, name=f"activations {number}", host=False,
                host_experts=host_experts, device_blocks=engine.kv.num_device_blocks, num_predicted=num_predicted,
            )
            for number in range(num_micro_batches)
        ]  # fmt: skip
        self._sums: list[Buffer] = []
        if host_experts:
            nbytes = max_tokens * spec.hidden_dim * 4
            reserve = machine.tiers[DEVICE].reserve
            self._sums = [reserve("sums of the host's experts", nbytes) for _ in self.acts]

    def run(self, plan: PassPlan) -> PassResult:
        groups = plan.micro_batches or [plan.sequences]
        in_flight = [self._begin(number, group) for number, group in enumerate(groups)]
        for layer in range(self.engine.spec.num_layers):
            for it in in_flight:
                self._attention(it, layer)
            if self.engine.spec.is_dense(layer):
                for it in in_flight:
                    self._emit.combine(it, layer)
            else:
                self._experts(in_flight, layer, is_prefill=bool(plan.prefill))
        for it in in_flight:
            self._emit.head(it)
        return PassResult(in_flight)

    def finish(self) -> None:
        self.residency.cancel_all()

    def _begin(self, number: int, sequences: Seq[Sequence]) -> InFlight:
        prefill = [s for s in sequences if s.state is State.PREFILL]
        decode = [s for s in sequences if s.state is State.DECODING]
        it = InFlight(assemble(number, prefill, decode, self.engine.kv.allocator), self.acts[number])
        self._emit.embed(it)
        return it

    def _attention(self, it: InFlight, layer: int) -> None:
        emit, resident = self._emit, self.engine.resident
        emit.attention_in(it, layer, resident.part(layer, "attention_in"))
        emit.prefill_attention(it, layer)
        emit.append_kv(it, layer)
        emit.decode_attention(it, layer)
        emit.attention_out(it, layer, resident.part(layer, "attention_out"))

    def _experts(self, in_flight: Seq[InFlight], layer: int, *, is_prefill: bool) -> None:
        """Ask the routers and the placer, then submit the layer's experts and the prefetches."""
        tickets = [self._emit.route(it, layer) for it in in_flight]
        asked = self._predictions(in_flight, layer)
        routes = [self.engine.machine.wait(ticket) for ticket in tickets]
        num_experts = self.engine.spec.num_experts
        tokens = [np.bincount(ids.ravel(), minlength=num_experts) for ids, _ in routes]
        active = set(np.flatnonzero(sum(tokens)).tolist())
        view = self._view(layer, routes, asked, active, is_prefill=is_prefill)
        placement = self.placer.place(view)
        _require_whole(placement, view)
        for it, routed in zip(in_flight, tokens, strict=True):
            self._emit.experts_on_host(it, layer, [e for e in placement.on_cpu if routed[e]])
        self._on_gpu(in_flight, tokens, view, placement.on_gpu)
        for expert in placement.on_cpu:
            self.residency.on_cpu(layer, expert)
        for it, routed in zip(in_flight, tokens, strict=True):
            self._combine(it, layer, on_host=any(routed[e] for e in placement.on_cpu))
        for key in placement.prefetch:
            self.residency.prefetch(key)
        if self.predictor is not None:
            self.predictor.observe(self._emit, in_flight[0], layer, view.ids)

    def _predictions(self, in_flight: Seq[InFlight], layer: int) -> dict[int, list[Prediction]]:
        """Ask for predictions of later layers, as far as the placer looks ahead; by layer, one for each micro-batch."""
        asked: dict[int, list[Prediction]] = {}
        for distance in range(1, self.placer.looks_ahead + 1 if self.predictor else 1):
            assert self.predictor is not None
            made = [self.predictor.request(self._emit, it, layer, distance=distance) for it in in_flight]
            if all(made):
                asked[layer + distance] = [each for each in made if each is not None]
        return asked

    def _view(
        self, layer: int, routes: Seq[tuple[np.ndarray, np.ndarray]], asked: dict[int, list[Prediction]],
        active: set[int], *, is_prefill: bool,
    ) -> LayerView:  # fmt: skip
        spec, ahead = self.engine.spec, {}
        for later, predictions in asked.items():
            ids, chances = (np.concatenate(arrays) for arrays in zip(*(p.result() for p in predictions), strict=True))
            if ids.size:
                ahead[later] = Forecast(ids, chances, spec.num_experts)
        ids, weights = (np.concatenate(arrays) for arrays in zip(*routes, strict=True))
        return LayerView(
            layer=layer, num_layers=spec.num_layers, num_experts=spec.num_experts, is_prefill=is_prefill, ids=ids,
            weights=weights, there=self.residency.settle(layer, active), ahead=ahead,
            holds=self.residency.holds, link_busy_s=self.residency.link_busy_s, num_queued=self.residency.num_queued,
        )  # fmt: skip

    def _on_gpu(self, in_flight: Seq[InFlight], tokens: Routes, view: LayerView, experts: Seq[int]) -> None:
        """Run experts on the device: those that have arrived, and each of the others as it comes. Each micro-batch that
        has tokens for them has ops of its own. What is there is held first, so that nothing that is brought takes its
        place."""
        residency, layer = self.residency, view.layer
        held = {expert: residency.take(layer, expert) for expert in experts if expert in view.there}
        arrived = sorted(expert for expert in held if view.there[expert]) if self._together else []
        others = [[expert] for expert in experts if not (self._together and view.there.get(expert))]
        for group in [arrived, *others] if arrived else others:
            parts = {expert: held[expert] if expert in held else residency.take(layer, expert) for expert in group}
            for it, routed in zip(in_flight, tokens, strict=True):
                self._emit.experts(it, layer, {expert: part for expert, part in parts.items() if routed[expert]})
            for expert in group:
                residency.done(layer, expert)

    def _combine(self, it: InFlight, layer: int, *, on_host: bool) -> None:
        if not on_host:
            self._emit.combine(it, layer)
            return
        sums = self._sums[it.batch.index]
        self._emit.load_expert_sums(it, layer, sums, urgent=True)  # behind experts on demand, ahead of prefetches
        self._emit.combine(it, layer, extra=(sums,))


def _require_whole(placement: Placement, view: LayerView) -> None:
    """Assert that every active expert runs, and on one side only."""
    placed = sorted((*placement.on_gpu, *placement.on_cpu))
    assert placed == view.active, f"layer {view.layer}: active experts are {view.active}, placed were {placed}"
