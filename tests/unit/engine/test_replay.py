"""A replayed pass is the pass that would have been emitted: the same ops, at the same times, to the last bit."""

from __future__ import annotations

import pytest

from harness.engine import loop
from harness.engine.replay import Replay
from harness.plan.planning import draft_plan
from tests.composing import composed

COMMON = (
    *("machine=simulated", "hardware=a40", "dataset=mtbench", "dataset.synthetic=lengths", "model=mixtral-8x7b"),
    *("model.spec.num_layers=4", "kv_cache_gb=0.05", "dataset.max_new_tokens=20", "dataset.num_requests=60"),
)
LENS = "strategy=moelens"
ODD = "an odd number of layers"
RUNS = {  # some with passes of several shapes, some preempted, some alone
    "mixtral": (LENS,),
    "small cache": (LENS, "kv_cache_gb=0.02"),
    ODD: (LENS, "model.spec.num_layers=3"),
    "one request": (LENS, "dataset.num_requests=1"),
    "a dense layer and latents": (LENS, "model=deepseek-v2-lite"),
    "windows": (LENS, "model=gpt-oss-120b"),
    "routing": (LENS, "routing=skewed"),
    "slow submissions": (LENS, "machine.submit_us=9"),
    "no overlap": (LENS, "strategy.overlap_prefill_decode=false"),
    "layer by layer": ("strategy=vllm_offload", "strategy.continuous_batching=true"),
    "layer by layer in batches": ("strategy=deepspeed_zero", "strategy.batch_size=8"),
    "part by part": ("strategy=ondemand", "model.spec.num_layers=3"),
    "part by part with routing": ("strategy=ondemand", "routing=skewed", "model=deepseek-v2-lite"),
}


def told(run):
    """Return all that a run did: its passes, its spans, and when each token was there."""
    chosen = {one.partition("=")[0]: one for one in (*COMMON, *RUNS[run])}
    plan, passes = draft_plan(composed(*chosen.values())), []
    loop.run(plan.engine, plan.strategy, passes.append, check=True)
    return passes, list(plan.machine.spans), [s.token_times_s for s in plan.engine.sequences], plan.machine.now()


@pytest.mark.parametrize("run", RUNS)
def test_replayed_passes_are_those_that_would_have_been_emitted(run, monkeypatch):
    replayed, submit = [], Replay._submit
    monkeypatch.setattr(Replay, "_submit", lambda *given: replayed.append(submit(*given)))
    found = told(run)
    assert (len(replayed) > len(found[0]) / 2) == (run != ODD)
    monkeypatch.setattr(Replay, "run", lambda self, batches, emit: emit())
    assert found == told(run)
