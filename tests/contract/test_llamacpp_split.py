"""llama.cpp's split at work: which lane computes which experts, what crosses the link, and that nothing overlaps."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest
import yaml

from harness.engine.batch import MicroBatch
from harness.engine.ops.experts import Experts
from harness.engine.sequences import State
from harness.machine.base import CPU, GPU, Lane, LaneKind
from harness.machine.shuffled import ShuffledMachine
from harness.machine.simulated import SimulatedMachine
from harness.memory.transfers import CopyWeights
from harness.plan.planning import make_plan
from tests.composing import composed
from tests.conftest import ROOT
from tests.contract.running import check_tokens, emulated, engine_on, requests, run_to_end, shuffled, strategy_of
from tests.contract.simulating import simulated_engine
from tests.contract.test_families import FAMILIES, check_run
from tests.tiny_families import runnable

VALUES = yaml.safe_load((ROOT / "conf/strategy/llamacpp_split.yaml").read_text())
SMALL = VALUES | {"packet_mb": 0.01, "slots": 3, "micro_batch_tokens": 24, "batch_tokens": 40}
LENGTHS = {"longest": 60, "max_new_tokens": 5}


@dataclass
class Step:
    """What a micro-batch submitted: experts by layer and lane, and copied experts by layer."""

    batch: MicroBatch
    computed: dict[Lane, dict[int, list[int]]] = field(default_factory=lambda: {CPU: {}, GPU: {}})
    copied: dict[int, list[int]] = field(default_factory=dict)


@pytest.fixture
def steps(monkeypatch) -> list[Step]:
    found: list[Step] = []

    def note(lane, op) -> None:
        batch = getattr(op, "batch", None)
        if batch is not None and (not found or found[-1].batch is not batch):
            found.append(Step(batch))
        if isinstance(op, Experts):
            found[-1].computed[lane].setdefault(op.layer, []).extend(op.experts)
        elif isinstance(op, CopyWeights) and op.layer is not None:
            found[-1].copied.setdefault(op.layer, []).append(op.source.layout.expert)

    for machine in (SimulatedMachine, ShuffledMachine):

        def noted(self, lane, op, submit=machine.submit, **options):
            note(lane, op)
            return submit(self, lane, op, **options)

        monkeypatch.setattr(machine, "submit", noted)
    return found


@pytest.mark.parametrize("variant", runnable())
def test_layers_of_both_kinds_give_the_same_tokens(steps, variant):
    """Experts of the first layers on the CPU and copied, of the others resident; a dense first layer, shared experts,
    biases."""
    check_run(shuffled(seed=len(variant)), variant, SMALL | {"cpu_moe_layers": 2, "offload_min_tokens": 8})
    for kind in (CPU, GPU):
        assert any(step.computed[kind] for step in steps)
    assert any(step.copied for step in steps)


@pytest.mark.parametrize("least", [1, None])
@pytest.mark.parametrize("variant", FAMILIES)
def test_all_layers_of_the_host_in_float16(steps, variant, least):
    """Every micro-batch has them copied, or none: then the CPU's kernels compute them."""
    check_run(shuffled(seed=1), variant, SMALL | {"cpu_moe_layers": 99, "offload_min_tokens": least}, "float16")
    assert [bool(step.computed[CPU]) for step in steps] == [least is None] * len(steps)
    assert [bool(step.copied) for step in steps] == [least is not None] * len(steps)


@pytest.mark.parametrize("layers", [0, 2, None])
def test_on_the_emulated_machine(tiny, layers):
    """The device holds all: null then leaves nothing to the host."""
    work = requests(8, vocab_size=tiny.spec.vocab_size, longest=40, max_new_tokens=4)
    engine = engine_on(emulated(), tiny, work, kv_blocks=40, values=VALUES)
    run_to_end(engine, lambda e: strategy_of(e, SMALL | {"cpu_moe_layers": layers, "offload_min_tokens": 12}))
    report = check_tokens(tiny, engine.sequences)
    assert report.checked == len(work)
    assert report.ok, report.first_mismatch
    spans = engine.machine.spans
    on_cpu = {span.layer for span in spans if span.lane.kind is LaneKind.CPU and span.kind != "poison"}
    copied = {span.layer for span in spans if span.kind == "weights"}
    assert on_cpu == copied == set(range(layers or 0))


@pytest.mark.parametrize("layers", [0, 5, 8])
@pytest.mark.parametrize("model_name", ["mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v2-lite"])
def test_the_cpu_computes_small_batches_and_large_ones_cross_the_link_once(steps, model_name, layers):
    engine, routing = simulated_engine(model_name, 12, **LENGTHS)
    run_to_end(engine, lambda e: strategy_of(e, VALUES | {"cpu_moe_layers": layers, "slots": 5}))
    of_host = [layer for layer in engine.spec.moe_layers if layer < layers]
    cpu_bytes, num_small = 0.0, 0
    for step in steps:
        at = (step.batch.request_ids, step.batch.positions)
        chosen = {layer: np.bincount(routing.experts(*at, layer).ravel()) for layer in of_host}
        active = {layer: np.flatnonzero(counts).tolist() for layer, counts in chosen.items()}
        resident = {layer for layer in engine.spec.moe_layers if layer >= layers}
        if step.batch.num_tokens < 32:
            num_small += 1
            assert not step.copied
            assert step.computed[CPU] == active
            assert step.computed[GPU].keys() == resident
            cpu_bytes += sum(bytes_on_cpu(engine.spec, counts) for counts in chosen.values())
        else:
            assert step.copied == active, "each chosen expert once, and no other"
            assert not step.computed[CPU]
            assert {layer: numbers for layer, numbers in step.computed[GPU].items() if layer < layers} == active
    assert 0 < num_small < len(steps)
    spans = [s for s in engine.machine.spans if s.lane == CPU]
    assert sum(s.work.host_bytes for s in spans) == pytest.approx(cpu_bytes)
    assert {s.layer for s in spans} == set(of_host)


def bytes_on_cpu(spec, counts: np.ndarray) -> float:
    """Weights of the chosen experts, and for each of their tokens its row, the results and what is between."""
    expert_bytes = 3 * spec.hidden_dim * spec.expert_dim * 2
    return np.count_nonzero(counts) * expert_bytes + counts.sum() * (2 * spec.hidden_dim + 3 * spec.expert_dim) * 2


@pytest.mark.parametrize(("least", "copies"), [(10**6, False), (None, False), (1, True)])
def test_the_threshold_is_a_setting(steps, least, copies):
    engine, _ = simulated_engine("mixtral-8x7b", 6, **LENGTHS)
    run_to_end(engine, lambda e: strategy_of(e, VALUES | {"cpu_moe_layers": 3, "offload_min_tokens": least}))
    assert [bool(step.copied) for step in steps] == [copies] * len(steps)
    assert [bool(step.computed[CPU]) for step in steps] == [not copies] * len(steps)


@pytest.mark.parametrize("more", [0, 1])
def test_a_batch_of_just_so_many_tokens_is_copied(steps, more):
    first, _ = simulated_engine("mixtral-8x7b", 6, **LENGTHS)
    run_to_end(first, lambda e: strategy_of(e, VALUES | {"cpu_moe_layers": 3}))
    size = steps[0].batch.num_tokens
    steps.clear()
    engine, _ = simulated_engine("mixtral-8x7b", 6, **LENGTHS)
    run_to_end(engine, lambda e: strategy_of(e, VALUES | {"cpu_moe_layers": 3, "offload_min_tokens": size + more}))
    assert steps[0].batch.num_tokens == size
    assert bool(steps[0].copied) is (more == 0)


def test_nothing_overlaps():
    engine, _ = simulated_engine("mixtral-8x7b", 6, **LENGTHS)
    run_to_end(engine, lambda e: strategy_of(e, VALUES | {"cpu_moe_layers": 4}))
    spans = sorted(engine.machine.spans, key=lambda span: (span.start_s, span.end_s))
    assert {CPU, GPU} < {span.lane for span in spans}
    for one, following in pairwise(spans):
        assert following.start_s >= one.end_s - 1e-12, f"{following.kind} began during {one.kind}"


@pytest.mark.parametrize("hardware", ["a5000", "a6000"])
@pytest.mark.parametrize("model", ["mixtral-8x7b", "qwen3-30b-a3b"])
def test_the_device_is_filled_and_never_more(model, hardware):
    """The larger device leaves fewer layers to the host."""
    found = {}
    for gb in (None, 12):
        size = [] if gb is None else [f"hardware.device_memory_gb={gb}"]
        plan = make_plan(
            composed(
                "strategy=llamacpp_split", f"model={model}", f"hardware={hardware}", "machine=simulated", *size,
                "dataset.num_requests=6", "dataset.max_new_tokens=3",
            )
        )  # fmt: skip
        device, layers = plan.machine.tiers["device"], plan.strategy.plan["cpu_moe_layers"]
        one_layer = sum(part.layout.nbytes for part in plan.engine.store.experts(0).values())
        assert device.peak_bytes <= device.capacity_bytes
        assert not layers or device.free_bytes < one_layer
        found[gb] = layers
    assert found[12] > found[None]


def test_a_request_waits_for_a_slot_or_is_rejected(tiny):
    work = requests(10, vocab_size=tiny.spec.vocab_size, longest=20, max_new_tokens=6)
    long = type(work[0])(request_id=99, prompt_ids=(5,) * 70, max_new_tokens=4, text=None)
    engine = engine_on(shuffled(0), tiny, [long, *work], kv_blocks=40, values=VALUES)
    passes = run_to_end(engine, lambda e: strategy_of(e, SMALL | {"context_tokens": 64}))
    (rejected,) = [s for s in engine.sequences if s.state is State.REJECTED]
    assert (rejected.request.request_id, rejected.reject_reason) == (99, "needs 19 KV blocks, the cache has 16")
    assert max(p.num_sequences for p in passes) == 3
    assert max(p.num_waiting for p in passes) >= 6
    assert {p.mode for p in passes} == {"prefill", "mixed", "decode"}
    assert check_tokens(tiny, engine.sequences).ok
