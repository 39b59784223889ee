"""Where routing is known beforehand and not even, experts cost what their own tokens cost."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from harness.plan.planning import make_plan
from harness.record.spans import Spans
from harness.routing.build import build_routing
from harness.routing.kinds.skewed import SkewedRouting
from tests.composing import composed

SMALL = ("model=mixtral-8x7b", "hardware=a40", "kv_cache_gb=1", "dataset.num_requests=3", "dataset.max_new_tokens=1")


def run(*overrides: str):
    return make_plan(composed("machine=simulated", *SMALL, *overrides))


def expert_flops(spans: Spans) -> Counter[tuple[int | None, float]]:
    """How often which FLOPs, by layer: one op an expert, in no particular order."""
    return Counter((span.layer, span.work.flops) for span in spans if span.kind == "experts")


@pytest.mark.parametrize("routing", ["skewed", "correlated"])
def test_every_expert_op_counts_its_own_tokens(routing):
    overrides = ("strategy=ondemand", f"routing={routing}", "routing.zipf_exponent=1.5")
    plan = run(*overrides)
    spec = plan.engine.spec
    values = composed("machine=simulated", *SMALL, *overrides)["routing"]
    source = build_routing(values, spec, plan.settings.seed)
    expected: Counter[tuple[int, float]] = Counter()
    for layer in range(spec.num_layers):
        counts = [0] * spec.num_experts
        for sequence in plan.engine.sequences:  # one prefill a request, token by token
            for position in range(sequence.prompt_len):
                ids = np.array([sequence.request.request_id]), np.array([position])
                for expert in source.experts(*ids, layer)[0]:
                    counts[expert] += 1
        expected.update((layer, 2.0 * count * spec.expert_params) for count in counts)
    assert expert_flops(plan.machine.spans) == expected
    assert len(expected) > spec.num_layers, "the test is worth nothing where all experts get the same"


def test_even_routing_keeps_the_expectation():
    plan = run("strategy=ondemand")
    tokens = sum(sequence.prompt_len for sequence in plan.engine.sequences)
    spec = plan.engine.spec
    each = 2.0 * tokens * spec.experts_per_token / spec.num_experts * spec.expert_params
    found = expert_flops(plan.machine.spans)
    assert all(flops == pytest.approx(each) for _, flops in found)
    assert sum(found.values()) == spec.num_layers * spec.num_experts


def test_all_experts_in_one_op_cost_the_same_tokens_and_fewer_weights():
    """Skew moves no token away, but it leaves experts without any, whose weights nobody reads."""
    few = ("strategy=moelens", "hardware.device_memory_gb=16", "dataset.lengths.mean=40", "dataset.lengths.max=41")
    totals = {}
    for routing in ("routing=uniform", "routing=skewed"):
        extra = ("routing.zipf_exponent=6",) if routing == "routing=skewed" else ()
        spans = [s for s in run(*few, routing, *extra).machine.spans if s.kind == "experts"]
        totals[routing] = sum(s.work.flops for s in spans), sum(s.work.device_bytes for s in spans)
    even, skewed = totals.values()
    assert skewed[0] == pytest.approx(even[0])
    assert skewed[1] < 0.8 * even[1]


def test_routing_is_drawn_once_for_a_micro_batch_and_layer(monkeypatch):
    asked: Counter[int] = Counter()
    draw = SkewedRouting.experts
    monkeypatch.setattr(SkewedRouting, "experts", lambda self, *of: (asked.update([of[-1]]), draw(self, *of))[1])
    plan = run("strategy=ondemand", "routing=skewed", "dataset.num_requests=1")
    assert set(asked.values()) == {1}
    assert len(asked) == plan.engine.spec.num_layers
