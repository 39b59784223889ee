"""Module-based batching and event-driven expert placement run exactly on the same core as VSLPipe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from harness.engine.accumulated import AccumulatedBatch, AccumulatedMemory
from harness.engine.emitter import Emitter
from harness.machine.base import CPU, D2H, GPU, H2D, LaneKind
from harness.machine.simulated import SimulatedMachine
from harness.machine.virtual.costs import LaneCost, Roofline
from harness.machine.virtual.world import World
from harness.model.planned import planned_model
from harness.routing.kinds.uniform import UniformRouting
from harness.routing.predictors import StatedPredictor, StatedRates
from harness.settings import parse_settings
from tests.composing import composed
from tests.contract.running import CAPACITIES_BYTES, check_tokens, emulated, engine_on, requests, run_to_end, shuffled
from tests.contract.sketches import expert_placement, module_batching
from tests.fake_device import cuda_machine

SKETCHES = (module_batching, expert_placement)
RATES = LaneCost(overhead_s=1e-5, flops_s=1e12, device_bytes_s=1e11, host_bytes_s=2e10, link_bytes_s=1e10)


named = pytest.mark.parametrize("sketch", SKETCHES, ids=lambda m: m.__name__.rsplit(".", 1)[-1])


@named
@pytest.mark.parametrize(
    "make",
    [lambda: shuffled(0), lambda: shuffled(1), lambda: shuffled(2), emulated, lambda: cuda_machine(CAPACITIES_BYTES)],
    ids=["shuffled-0", "shuffled-1", "shuffled-2", "emulated", "cuda"],
)
def test_sketch_gives_the_same_tokens(tiny, sketch, make):
    machine = make()
    work = requests(8, vocab_size=tiny.spec.vocab_size)
    engine = engine_on(machine, tiny, work, kv_blocks=40)
    run_to_end(engine, sketch.build)
    report = check_tokens(tiny, engine.sequences)
    assert report.checked == len(work)
    assert report.ok, report.first_mismatch


@pytest.mark.parametrize(
    ("sketch", "owner", "step"),
    [
        (module_batching, AccumulatedBatch, "begin_experts"),
        (module_batching, AccumulatedBatch, "add"),
        (expert_placement, Emitter, "experts_on_host"),
    ],
)
def test_a_step_returns_the_ticket_of_all_that_it_submits(monkeypatch, sketch, owner, step):
    engine, _ = simulated_engine("deepseek-v2-lite", 2)
    submitted, of_steps, plain, submit = [], [], getattr(owner, step), engine.machine.submit

    def noted(*args, **how):
        submitted.append(submit(*args, **how))
        return submitted[-1]

    def checked(*args, **how):
        before = len(submitted)
        result = plain(*args, **how)
        tickets = result[1] if isinstance(result, tuple) else result
        assert (tickets if isinstance(tickets, list) else [tickets]) == submitted[before:]
        of_steps.extend(submitted[before:])
        return result

    engine.machine.submit = noted
    monkeypatch.setattr(owner, step, checked)
    run_to_end(engine, sketch.build)
    assert of_steps


def test_tokens_of_several_gpus_do_not_accumulate(tiny):
    engine = engine_on(shuffled(0), tiny, requests(2, vocab_size=tiny.spec.vocab_size), kv_blocks=40)
    memory = AccumulatedMemory.reserve(engine.machine, tiny.spec, max_tokens=8, slice_tokens=4)
    for several in (replace(engine, peers=(replace(engine, rank=1),)), replace(engine, rank=1)):
        with pytest.raises(AssertionError, match="one GPU"):
            AccumulatedBatch(several, Emitter(several), memory)


def test_sums_of_the_host_never_overwrite_those_of_the_device(tiny, monkeypatch):
    load = Emitter.load_expert_sums
    monkeypatch.setattr(Emitter, "load_expert_sums", lambda emit, it, layer, to: load(emit, it, layer))
    work = requests(2, vocab_size=tiny.spec.vocab_size)
    with pytest.raises(AssertionError, match="`moe_out` holds sums"):
        run_to_end(engine_on(shuffled(0), tiny, work, kv_blocks=40), expert_placement.build)


def test_placement_uses_every_way_to_run_an_expert(tiny):
    """On a slow link some wrong guesses are still queued when the gate's answer comes: those are cancelled."""
    built = []

    def build(engine):
        built.append(expert_placement.build(engine))
        return built[0]

    work = requests(8, vocab_size=tiny.spec.vocab_size)
    run_to_end(engine_on(emulated(h2d_gb_s=0.01), tiny, work, kv_blocks=40), build)
    counts = built[0].pipeline.counts
    assert all(counts[way] > 0 for way in ("resident", "prefetched", "on demand", "cpu", "cancelled")), counts


def simulated_engine(model_name: str, num_requests: int, *, hit_rate: float | None = None, **lengths: int):
    """An engine on a simulated machine with room for all, whose routing is drawn evenly, and foreseen at a rate."""
    model = planned_model(parse_settings(composed(f"model={model_name}", "model.spec.num_layers=8")).model)
    capacities = dict.fromkeys(("device", "pinned", "host"), 10**12)
    costs = Roofline(lanes=dict.fromkeys(LaneKind, RATES))
    machine = SimulatedMachine(capacities_bytes=capacities, costs=costs, host_bytes_s=1e11)
    routing = UniformRouting(model.spec.num_experts, model.spec.experts_per_token, seed=3)
    predictor = None
    if hit_rate is not None:
        predictor = StatedPredictor(routing, StatedRates.alike(((hit_rate,),), model.spec), model.spec, seed=3)
    machine.world = World(routing, model.spec.num_experts, predictor)
    work = requests(num_requests, vocab_size=100, **{"longest": 12, "max_new_tokens": 3, **lengths})
    return engine_on(machine, model, work, kv_blocks=200), routing


@named
@pytest.mark.parametrize("model_name", ["mixtral-8x7b", "qwen3-30b-a3b"])
def test_sketch_runs_without_tensors(sketch, model_name):
    engine, _ = simulated_engine(model_name, 2)
    passes = run_to_end(engine, sketch.build)
    lanes = {span.lane for span in engine.machine.spans}
    assert {CPU, GPU, H2D} <= lanes and passes[-1].end_s > 0
    assert all(span.end_s > span.start_s for span in engine.machine.spans), "an op cost nothing"


@pytest.mark.parametrize("cpu_below", [0, 3, 1000])
def test_chosen_experts_are_charged_by_what_the_router_said(cpu_below):
    """Every lane's bytes are active experts times an expert's size, beside those of tokens: nothing is an average."""
    built = []

    def build(engine):
        strategy = expert_placement.build(engine, cpu_below=cpu_below)
        engine.machine.drain()  # the resident ones, which are loaded before the run
        fetch, slots = strategy.pipeline.slots._fetch, strategy.pipeline.slots
        slots._fetch = lambda *key, **how: copies.append(key) or fetch(*key, **how)
        built.append(strategy.pipeline)
        return strategy

    copies: list[tuple] = []
    engine, routing = simulated_engine("qwen3-30b-a3b", 6)
    run_to_end(engine, build)
    counts, slots = built[0].counts, built[0].slots
    routed = tokens_by_expert(engine, routing)
    on_gpu = counts["resident"] + counts["prefetched"] + counts["on demand"]
    assert on_gpu + counts["cpu"] == sum((each > 0).sum() for each in routed)
    device, host = expert_bytes(engine, GPU), expert_bytes(engine, CPU)
    assert (len(device), len(host)) == (on_gpu, counts["cpu"])
    assert sum(map(tokens_of(engine), device + host)) == pytest.approx(sum(each.sum() for each in routed))
    assert min(counts["cpu"], 1) == min(cpu_below, 1) and min(on_gpu, 1) == (cpu_below < 1000 or counts["resident"] > 0)
    loads = link_bytes(engine, "weights", H2D)
    came = sum(round(nbytes) == engine.store.experts(0)[0].layout.nbytes for nbytes in loads)
    assert came == len(copies) - slots.withdrawals >= counts["on demand"]


@pytest.mark.parametrize(("slice_tokens", "cpu_below"), [(1000, 0), (2, 0), (2, 3), (1, 1000)])
def test_slices_of_an_accumulated_batch_are_charged_by_what_the_router_said(slice_tokens, cpu_below):
    """Every slice reads its expert once, and every row crosses the link twice; an expert comes once, however many
    slices and micro-batches it has."""
    engine, routing = simulated_engine("qwen3-30b-a3b", 6)
    run_to_end(engine, lambda on: module_batching.build(on, expert_batch=slice_tokens, cpu_below=cpu_below))
    routed = np.concatenate(tokens_by_expert(engine, routing))
    on_gpu, on_cpu = routed[routed >= max(cpu_below, 1)], routed[(routed > 0) & (routed < cpu_below)]
    assert len(on_gpu) or cpu_below == 1000
    slices = [min(slice_tokens, n - at) for n in on_gpu.tolist() for at in range(0, n, slice_tokens)]
    tokens = tokens_of(engine)
    assert sorted(map(tokens, expert_bytes(engine, GPU))) == pytest.approx(sorted(slices))
    assert sorted(map(tokens, expert_bytes(engine, CPU))) == pytest.approx(sorted(on_cpu.tolist()))
    spec, size = engine.spec, engine.store.experts(0)[0].layout.nbytes
    loads = [nbytes for nbytes in link_bytes(engine, "weights", H2D) if round(nbytes) == size]
    assert len(loads) == len(on_gpu), "an expert came more than once, or one without tokens did"
    row_bytes = spec.hidden_dim * spec.dtype_bytes
    assert sum(link_bytes(engine, "load rows", H2D)) == pytest.approx(sum(slices) * row_bytes)
    assert sum(link_bytes(engine, "offload results", D2H)) == pytest.approx(sum(slices) * spec.hidden_dim * 4)
    all_tokens = routed.sum() / spec.experts_per_token
    assert sum(link_bytes(engine, "offload rows", D2H)) == pytest.approx(all_tokens * row_bytes)


def test_a_better_prediction_finds_more_experts_there():
    """A stated predictor is all that a strategy has to go by: an oracle's guesses are all wanted, and none that errs
    always is."""
    found = [prefetched(rate) for rate in (None, 0.0, 0.5, 1.0)]
    assert found[0] == 0, "nothing was predicted, and something was prefetched"
    assert found[1] <= 0.1 * found[3] < found[2] < 0.9 * found[3], found


def prefetched(hit_rate: float | None) -> int:
    """How many experts were on the device when the router chose them, beside the resident ones."""
    engine, _ = simulated_engine("qwen3-30b-a3b", 1, hit_rate=hit_rate)
    strategy = expert_placement.build(engine, 0, predictor="gate")
    run_to_end(engine, lambda _: strategy)
    return strategy.pipeline.counts["prefetched"]


def expert_bytes(engine, lane) -> list[float]:
    """Bytes of the lane's memory that each op of experts moves; none of them reads a part of an expert."""
    spans = [s for s in engine.machine.spans if s.kind == "experts" and s.lane == lane]
    found = [s.work.device_bytes if lane == GPU else s.work.host_bytes for s in spans]
    assert min(found, default=10**12) > engine.store.experts(0)[0].layout.nbytes
    return found


def tokens_of(engine) -> Callable[[float], float]:
    """How many tokens an expert had that moved so many bytes."""
    spec, size = engine.spec, engine.store.experts(0)[0].layout.nbytes
    return lambda nbytes: (nbytes - size) / ((2 * spec.hidden_dim + 3 * spec.expert_dim) * spec.dtype_bytes)


def link_bytes(engine, kind: str, lane) -> list[float]:
    """By op, whatever packets it came in."""
    moved: dict[int, float] = {}
    for span in engine.machine.spans:
        if span.kind == kind and span.lane == lane:
            moved[span.ticket] = moved.get(span.ticket, 0.0) + span.work.link_bytes
    return list(moved.values())


def tokens_by_expert(engine, routing) -> list[np.ndarray]:
    """int64 [num_experts] for each pass and layer, from the routing alone."""
    by_pass: dict[int, list[tuple[int, int]]] = {}
    for sequence in engine.sequences:
        at, prompt = sequence.request.request_id, len(sequence.request.prompt_ids)
        for number, first in enumerate(range(sequence.request.max_new_tokens)):
            positions = range(prompt) if not number else [prompt + first - 1]
            by_pass.setdefault(number, []).extend((at, position) for position in positions)
    return [
        np.bincount(
            routing.experts(*np.array(rows, dtype=np.int64).T, layer).ravel(), minlength=engine.spec.num_experts
        )
        for rows in by_pass.values()
        for layer in range(engine.spec.num_layers)
    ]
