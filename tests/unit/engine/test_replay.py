"""A replayed pass is the pass that would have been emitted: the same ops, at the same times, to the last bit."""

from __future__ import annotations

import pytest

from harness.engine import loop
from harness.engine.replay import Replay
from harness.plan.planning import draft_plan
from tests.composing import composed

COMMON = (
    *("machine=simulated", "strategy=moelens", "hardware=a40", "dataset=mtbench", "dataset.synthetic=lengths"),
    *("dataset.max_new_tokens=20", "dataset.num_requests=60", "strategy.packet_mb=100"),
)
RUNS = {  # some with passes of several shapes, some preempted, some alone
    "mixtral": ("model=mixtral-8x7b", "model.spec.num_layers=4", "kv_cache_gb=0.05"),
    "small cache": ("model=mixtral-8x7b", "model.spec.num_layers=4", "kv_cache_gb=0.02"),
    "an odd number of layers": ("model=mixtral-8x7b", "model.spec.num_layers=3", "kv_cache_gb=0.05"),
    "one request": ("model=mixtral-8x7b", "model.spec.num_layers=4", "kv_cache_gb=0.05", "dataset.num_requests=1"),
    "a dense layer and latents": ("model=deepseek-v2-lite", "model.spec.num_layers=4", "kv_cache_gb=0.05"),
    "windows": ("model=gpt-oss-120b", "model.spec.num_layers=4", "kv_cache_gb=0.05"),
    "routing": ("model=mixtral-8x7b", "model.spec.num_layers=4", "kv_cache_gb=0.05", "routing=skewed"),
    "slow submissions": ("model=mixtral-8x7b", "model.spec.num_layers=4", "kv_cache_gb=0.05", "machine.submit_us=9"),
    "no overlap": ("model=mixtral-8x7b", "model.spec.num_layers=4", "strategy.overlap_prefill_decode=false"),
}


def told(run):
    """Return all that a run did: its passes, its spans, and when each token was there."""
    plan, passes = draft_plan(composed(*COMMON, *RUNS[run])), []
    loop.run(plan.engine, plan.strategy, passes.append, check=True)
    return passes, list(plan.machine.spans), [s.token_times_s for s in plan.engine.sequences], plan.machine.now()


@pytest.mark.parametrize("run", RUNS)
def test_replayed_passes_are_those_that_would_have_been_emitted(run, monkeypatch):
    replayed, submit = [], Replay._submit
    monkeypatch.setattr(Replay, "_submit", lambda *given: replayed.append(submit(*given)))
    found = told(run)
    assert len(replayed) > len(found[0]) / 2 or run == "an odd number of layers"
    monkeypatch.setattr(Replay, "run", lambda self, batches, emit: emit())
    assert found == told(run)
