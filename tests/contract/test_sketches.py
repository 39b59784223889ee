"""Module-based batching and event-driven expert placement run exactly on the same core as VSLPipe."""

from __future__ import annotations

import numpy as np
import pytest

from harness.machine.base import CPU, GPU, H2D, LaneKind
from harness.machine.costs import LaneCost, Roofline
from harness.machine.simulated import SimulatedMachine
from harness.machine.simulation import World
from harness.model.planned import planned_model
from harness.routing.kinds.uniform import UniformRouting
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


def simulated_engine(model_name: str, num_requests: int, **more):
    """An engine on a simulated machine with room for all, whose routing is drawn evenly."""
    model = planned_model(parse_settings(composed(f"model={model_name}")).model)
    capacities = dict.fromkeys(("device", "pinned", "host"), 10**12)
    costs = Roofline(lanes=dict.fromkeys(LaneKind, RATES))
    machine = SimulatedMachine(capacities_bytes=capacities, costs=costs, host_bytes_s=1e11)
    routing = UniformRouting(model.spec.num_experts, model.spec.experts_per_token, seed=3)
    machine.world = World(routing, model.spec.num_experts)
    work = requests(num_requests, vocab_size=100, longest=12, max_new_tokens=3)
    return engine_on(machine, model, work, kv_blocks=200, **more), routing


@named
@pytest.mark.parametrize("model_name", ["mixtral-8x7b", "qwen3-30b-a3b"])
def test_sketch_runs_without_tensors(sketch, model_name):
    engine, _ = simulated_engine(model_name, 6)
    passes = run_to_end(engine, sketch.build)
    lanes = {span.lane for span in engine.machine.spans}
    assert {CPU, GPU, H2D} <= lanes and passes[-1].end_s > 0
    assert all(span.end_s > span.start_s for span in engine.machine.spans), "an op cost nothing"


@pytest.mark.parametrize("cpu_below", [0, 3, 1000])
def test_chosen_experts_are_charged_by_what_the_router_said(cpu_below):
    """Every lane's bytes are active experts times an expert's size, beside those of tokens: nothing is an average."""
    built, copies = [], []

    def build(engine):
        strategy = expert_placement.build(engine, cpu_below=cpu_below)
        pipeline, copy = strategy.pipeline, strategy.pipeline._copy
        pipeline._copy = lambda layer, expert, buffer: copies.append(copy(layer, expert, buffer)) or copies[-1]
        engine.machine.drain()  # the resident ones, which are loaded before the run
        built.append(pipeline)
        return strategy

    engine, routing = simulated_engine("qwen3-30b-a3b", 6)
    run_to_end(engine, build)
    spec, counts = engine.spec, built[0].counts
    expert_bytes = engine.store.experts(0)[0].layout.nbytes
    active, tokens = active_experts(engine, routing)
    on_gpu = counts["resident"] + counts["prefetched"] + counts["on demand"]
    assert on_gpu + counts["cpu"] == active
    gpu_row_bytes = (2 * spec.hidden_dim + 3 * spec.expert_dim) * spec.dtype_bytes
    cpu_row_bytes = spec.hidden_dim * (spec.dtype_bytes + 8)
    device_bytes = [s.work.device_bytes for s in engine.machine.spans if s.kind == "experts"]
    host_bytes = [s.work.host_bytes for s in engine.machine.spans if s.kind == "expert on host"]
    assert (len(device_bytes), len(host_bytes)) == (on_gpu, counts["cpu"])
    assert min(device_bytes + host_bytes) > expert_bytes, "an expert was charged for a part of its weights"
    gpu_tokens = (sum(device_bytes) - on_gpu * expert_bytes) / gpu_row_bytes
    cpu_tokens = (sum(host_bytes) - counts["cpu"] * expert_bytes) / cpu_row_bytes
    assert gpu_tokens + cpu_tokens == pytest.approx(tokens)
    moved = {}
    for span in engine.machine.spans:
        if span.kind == "weights":
            moved[span.ticket] = moved.get(span.ticket, 0) + span.work.link_bytes
    came = sum(round(nbytes) == expert_bytes for nbytes in moved.values())
    assert came == len(copies) - counts["cancelled"] >= counts["prefetched"] + counts["on demand"]


def active_experts(engine, routing) -> tuple[int, int]:
    """Count, from the routing alone, experts with a token over all passes and layers, and choices of tokens."""
    active = tokens = 0
    by_pass: dict[int, list[tuple[int, int]]] = {}
    for sequence in engine.sequences:
        at, prompt = sequence.request.request_id, len(sequence.request.prompt_ids)
        for number, first in enumerate(range(sequence.request.max_new_tokens)):
            positions = range(prompt) if not number else [prompt + first - 1]
            by_pass.setdefault(number, []).extend((at, position) for position in positions)
    for rows in by_pass.values():
        ids, positions = np.array(rows, dtype=np.int64).T
        for layer in range(engine.spec.num_layers):
            chosen = routing.experts(ids, positions, layer)
            active, tokens = active + len(np.unique(chosen)), tokens + chosen.size
    return active, tokens
