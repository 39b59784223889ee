"""FlexGen as built: one thread copies pageable weights and keys and values, and launches what the GPU computes."""

from __future__ import annotations

from collections import defaultdict

import pytest

from harness.machine.base import GPU, H2D, PIN
from harness.plan.planning import make_plan
from tests.composing import composed

SMALL = (
    *("model=mixtral-8x7b", "hardware=l4", "kv_cache_gb=8", "strategy.packet_mb=1000", "dataset.num_requests=60"),
    *("dataset=mtbench_lightning", "dataset.synthetic=lengths", "dataset.max_new_tokens=4"),
    *("strategy.policy.batch_size=60", "strategy.policy.micro_batch_size=12", "strategy.planning=as_built"),
)


@pytest.fixture(scope="module", params=["flexgen", "flexgen_c"])
def run(request):
    return request.param, make_plan(composed("machine=simulated", f"strategy={request.param}", *SMALL))


def busy(spans) -> list[tuple[float, float]]:
    return sorted((span.start_s, span.end_s) for span in spans)


def overlap_s(some: list[tuple[float, float]], others: list[tuple[float, float]]) -> float:
    return sum(max(0.0, min(end, stop) - max(start, begin)) for start, end in some for begin, stop in others)


def test_the_gpu_waits_while_the_thread_copies(run):
    """No copy into pinned memory is made while the GPU works."""
    _, plan = run
    lanes = defaultdict(list)
    for span in plan.machine.spans:
        lanes[span.lane].append(span)
    copies, work = busy(lanes[PIN]), busy(lanes[GPU])
    total_s = sum(end - start for start, end in copies)
    assert total_s > 1.0 and overlap_s(copies, work) < 0.01 * total_s


def test_keys_and_values_are_copied_like_weights(run):
    name, plan = run
    moved = defaultdict(float)
    for span in plan.machine.spans:
        moved[span.lane, span.kind] += span.work.link_bytes
    assert (
        moved[PIN, "weights to pinned"] == pytest.approx(moved[H2D, "weights"], rel=0.02) and moved[H2D, "weights"] > 0
    )
    assert moved[PIN, "kv to pinned"] == moved[H2D, "load kv"]
    assert (moved[H2D, "load kv"] > 0) == (name == "flexgen")
    copied = [s for s in plan.machine.spans if s.lane == PIN]
    rate = sum(s.work.link_bytes for s in copied) / sum(s.end_s - s.start_s for s in copied)
    assert rate == pytest.approx(5.4299 * 2**30, rel=0.02)


def test_a_step_takes_the_sum_of_copies_and_work(run):
    name, plan = run
    prediction = plan.strategy.prediction
    assert "copies, gpu and cpu in turn" in prediction.model
    assert prediction.throughput_tok_s == pytest.approx(plan.summary["throughput_tok_s"], rel=0.05)
    best = make_plan(composed("machine=simulated", f"strategy={name}", *SMALL[:-1], "strategy.staging=true"))
    assert best.summary["throughput_tok_s"] > 1.3 * plan.summary["throughput_tok_s"]
