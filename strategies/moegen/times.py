"""Tell the time of passes under any policy, from few recorded ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, partial

from harness.engine.engine import Engine
from harness.engine.strategy import Pipeline
from harness.model.spec import ModelSpec
from strategies.common.workload_shape import WorkloadShape
from strategies.moegen.pass_time import Cost, PassTime, pass_time
from strategies.moegen.pipeline import ModuleBatching
from strategies.moegen.policy import Policy
from strategies.moegen.recorded import Batch, few_layers, most_tokens_of_expert, record, steady_layers

_FEW_EXPERTS = 8  # in a layer: a part of one still matters


@dataclass(eq=False, kw_only=True)
class PassTimes:
    """Tells the time of passes under any policy, and remembers what it has been asked."""

    engine: Engine
    shape: WorkloadShape
    cost: Cost
    packet_bytes: int
    num_recorded: int = 0

    def __post_init__(self) -> None:
        self._known: dict[object, PassTime] = {}
        self._most_tokens_of_expert = cache(most_tokens_of_expert)
        self._few_layers = cache(partial(few_layers, self.engine.spec))

    def of(self, policy: Policy, batch: Batch) -> PassTime:
        """Return the time of a pass. Of the experts that stay on the device each layer has as many; between two small
        whole numbers it is a straight line."""
        low, high, share = self._resident(policy)
        found = self._at(policy, batch, low)
        return found if low == high else _between(found, self._at(policy, batch, high), share)

    def is_whole(self, policy: Policy) -> bool:
        """Tell whether one number of experts that stay on the device stands for all layers, so that `sooner_s` is the
        time itself."""
        low, high, _ = self._resident(policy)
        return low == high

    def sooner_s(self, policy: Policy, batch: Batch) -> float:
        """Return the seconds of a pass with the upper one of the two whole numbers, from one recorded pass. With more
        experts on the device it hardly ever takes longer."""
        return self._at(policy, batch, self._resident(policy)[1]).seconds

    def _resident(self, policy: Policy) -> tuple[int, int, float]:
        """Return two whole numbers of experts that stay on the device in each layer, with the policy's place between
        them: from 0 to 1."""
        resident = policy.resident_experts / self.engine.spec.num_moe_layers
        low = int(resident) if resident < _FEW_EXPERTS else round(resident)
        if resident >= _FEW_EXPERTS or resident == low:
            return low, low, 0.0
        return low, low + 1, resident - low

    def _at(self, policy: Policy, batch: Batch, resident: int) -> PassTime:
        """Return the time with so many resident experts in each layer."""
        few = self._few_layers(policy.dense_slots, batch.num_sequences * batch.tokens_each)
        most_tokens = self._most_tokens_of_expert(few, batch, _with_experts(few))
        phase = policy.decode if batch.decodes else policy.prefill
        phase = replace(phase, expert_batch=min(phase.expert_batch, most_tokens))  # any more is the same slice
        policy = replace(policy, decode=phase) if batch.decodes else replace(policy, prefill=phase)
        return self._recorded(policy, batch, few, resident)

    def _recorded(self, policy: Policy, batch: Batch, few: ModelSpec, resident: int) -> PassTime:
        all_dense = policy.dense_slots >= self.engine.spec.num_layers
        dense_slots = few.num_layers if all_dense else policy.dense_slots
        policy = replace(policy, resident_experts=resident * few.num_moe_layers, dense_slots=dense_slots)
        phase = policy.decode if batch.decodes else policy.prefill
        key = (phase, batch, resident, policy.expert_slots, policy.dense_slots, policy.prefetch)
        if key not in self._known:
            self.num_recorded += 1
            recorded = record(
                self.engine, few, policy, self.shape, batch, self._pipeline, experts_in=_with_experts(few)
            )  # fmt: skip
            self._known[key] = pass_time(recorded, self.cost, self.engine.spec)
        return self._known[key]

    def _pipeline(self, engine: Engine, policy: Policy, shape: WorkloadShape) -> Pipeline:
        return ModuleBatching(engine, policy, shape, packet_bytes=self.packet_bytes)


def _with_experts(few: ModelSpec) -> tuple[int, ...]:
    """Return the layers whose experts are recorded: all but the model's last layer, where its time does not count."""
    last = few.num_layers - 1
    return few.moe_layers if last in steady_layers(few) else tuple(each for each in few.moe_layers if each != last)


def _between(low: PassTime, high: PassTime, share: float) -> PassTime:
    def at(first: float, second: float) -> float:
        return first + (second - first) * share

    return replace(
        low,
        seconds=at(low.seconds, high.seconds),
        moe_layer_s=at(low.moe_layer_s, high.moe_layer_s),
        dense_layer_s=at(low.dense_layer_s, high.dense_layer_s),
        ends_s=at(low.ends_s, high.ends_s),
        busy=_all_between(low.busy, high.busy, share),
    )


def _all_between(low: Mapping[str, float], high: Mapping[str, float], share: float) -> dict[str, float]:
    return {name: own_s + (high.get(name, 0.0) - own_s) * share for name, own_s in low.items()}
