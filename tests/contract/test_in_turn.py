"""FlexGen as built: each GPU's one thread copies pageable weights, keys and values, and launches the GPU's work."""

from __future__ import annotations

from collections import defaultdict

import pytest

from harness.machine.base import LaneKind
from harness.plan.planning import Plan, make_plan
from tests.composing import composed

GPU, H2D, PIN = LaneKind.GPU, LaneKind.H2D, LaneKind.PIN
SMALL = (
    *("model=mixtral-8x7b", "hardware=l4", "kv_cache_gb=8", "strategy.packet_mb=1000", "dataset.num_requests=60"),
    *("dataset=mtbench_lightning", "dataset.synthetic=lengths", "dataset.max_new_tokens=4"),
    *("strategy.policy.micro_batch_size=12", "strategy.planning=as_built"),
)

ALIKE = ("dataset.lengths.mean=418", "dataset.lengths.shape=constant", "dataset.max_new_tokens=5")


@pytest.fixture(scope="module", params=[("flexgen", 1), ("flexgen_c", 1), ("flexgen", 2), ("flexgen_c", 2)])
def run(request):
    name, num_gpus = request.param
    size = f"strategy.policy.batch_size={60 // num_gpus}"
    return name, num_gpus, make_plan(composed("machine=simulated", f"strategy={name}", *SMALL, size, *gpus(num_gpus)))


def gpus(number: int) -> tuple[str, ...]:
    """Return the overrides for so many GPUs, each with the link and the room that the profile gives to one."""
    several = ("hardware.p2p_gb_s=9.7", "hardware.p2p_peak_gb_s=15.75") if number > 1 else ()
    return (f"hardware.num_gpus={number}", "hardware.host_gb_s=1000", "hardware.host_peak_gb_s=1000", *several)


def busy(spans) -> list[tuple[float, float]]:
    return sorted((span.start_s, span.end_s) for span in spans)


def overlap_s(some: list[tuple[float, float]], others: list[tuple[float, float]]) -> float:
    return sum(max(0.0, min(end, stop) - max(start, begin)) for start, end in some for begin, stop in others)


def test_each_gpu_waits_while_its_thread_copies(run):
    """No copy into pinned memory is made while the GPU works for which it is made."""
    _, num_gpus, plan = run
    lanes = defaultdict(list)
    for span in plan.machine.spans:
        lanes[span.lane.kind, span.lane.rank].append(span)
    for rank in range(num_gpus):
        copies, work = busy(lanes[PIN, rank]), busy(lanes[GPU, rank])
        total_s = sum(end - start for start, end in copies)
        assert total_s > 1.0 and overlap_s(copies, work) < 0.01 * total_s
        for other in set(range(num_gpus)) - {rank}:  # threads do not wait for one another
            assert overlap_s(copies, busy(lanes[PIN, other])) > 0.5 * total_s


def test_keys_and_values_are_copied_like_weights(run):
    """Every GPU's link brings what its thread has copied: its own layers, once for each pass, and their cache."""
    name, num_gpus, plan = run
    moved = defaultdict(float)
    for span in plan.machine.spans:
        moved[span.lane.kind, span.lane.rank, span.kind] += span.work.link_bytes
    layer, num_layers = plan.engine.store.layer_bytes, plan.engine.spec.num_layers
    for rank in range(num_gpus):
        weights, kv = moved[H2D, rank, "weights"], moved[H2D, rank, "load kv"]
        assert moved[PIN, rank, "weights to pinned"] == pytest.approx(weights, rel=0.02)
        passes = num_gpus * 4  # of all batches
        assert weights == pytest.approx(passes * num_layers / num_gpus * layer * (1 - kept(plan)), rel=0.04)
        assert moved[PIN, rank, "kv to pinned"] == kv == moved[H2D, 0, "load kv"]
        assert (kv > 0) == (name == "flexgen")
    copied = [s for s in plan.machine.spans if s.lane.kind is PIN]
    rate = sum(s.work.link_bytes for s in copied) / sum(s.end_s - s.start_s for s in copied)
    assert rate == pytest.approx(5.4299 * 2**30, rel=0.02)


@pytest.mark.parametrize("name", ["flexgen", "flexgen_c"])
@pytest.mark.parametrize("num_gpus", [2, 4])
def test_stages_overlap_where_there_are_as_many_batches(name, num_gpus):
    """Batches by turns through one GPU take g times as long as in flight on g GPUs, but for filling the pipeline. One
    batch alone takes as long as on one GPU: its stages wait for each other."""

    def seconds(batches: int, size: int, on: int) -> float:
        policy = (f"strategy.policy.batch_size={size}", f"strategy.policy.micro_batch_size={min(3, size)}")
        values = (*ALIKE, *policy, f"dataset.num_requests={batches * size}", *gpus(on))
        plan = make_plan(composed("machine=simulated", f"strategy={name}", *SMALL, *values))
        assert plan.strategy.passes_in_flight == on
        return plan.machine.now() - min(span.start_s for span in plan.machine.spans)  # without probing

    filling = (num_gpus - 1) / (5 * num_gpus)  # of the passes, of which a batch has five
    wanted_s = seconds(num_gpus, 12, 1) * (1 + filling) / num_gpus
    assert seconds(num_gpus, 12, num_gpus) == pytest.approx(wanted_s, rel=0.03)
    assert seconds(1, 1, num_gpus) > (1 - num_gpus / 32) * seconds(1, 1, 1), "each stage has one layer of 32 ready"


def kept(plan: Plan) -> float:
    return plan.strategy.plan["resident_weights"]


def test_a_step_takes_the_sum_of_copies_and_work(run):
    name, num_gpus, plan = run
    prediction = plan.strategy.prediction
    assert "bound by pin" in prediction.model
    passes = num_gpus * 4
    filled = passes / (passes + num_gpus - 1)  # the model knows nothing of filling a pipeline
    assert filled * prediction.throughput_tok_s == pytest.approx(plan.summary["throughput_tok_s"], rel=0.05)
    if num_gpus == 1:
        values = (*SMALL[:-1], "strategy.policy.batch_size=60", "strategy.staging=true")
        best = make_plan(composed("machine=simulated", f"strategy={name}", *values))
        assert best.summary["throughput_tok_s"] > 1.3 * plan.summary["throughput_tok_s"]
