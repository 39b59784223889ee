"""PreScope where times are modelled: nothing is free, nothing is foreseen but what is stated, wrong guesses cost."""

from __future__ import annotations

import pytest

from harness.machine.base import CPU, GPU, H2D, LaneKind
from harness.machine.simulated import SimulatedMachine
from harness.machine.virtual.costs import LaneCost, Roofline
from harness.machine.virtual.world import World
from harness.model.planned import planned_model
from harness.routing.build import build_predictor, build_routing
from harness.settings import load_strategy, parse_settings
from tests.composing import composed
from tests.contract.running import check_tokens, emulated, engine_on, requests, run_to_end
from tests.contract.test_sketches import expert_bytes, tokens_by_expert, tokens_of

RATES = LaneCost(overhead_s=1e-5, flops_s=1e12, device_bytes_s=1e11, host_bytes_s=6e9, link_bytes_s=1e10)
SLOW_GPU = LaneCost(overhead_s=7e-4, flops_s=1e12, device_bytes_s=1e11)  # the link idles while it attends
NO_TABLE = {"table": "none", "profile_tokens": 64}


def simulated(
    hit_rate: float | None = None, *, rates: LaneCost = RATES, gpu: LaneCost = RATES, num_requests: int = 4, **changes
):
    """Run PreScope with Qwen3's small experts, 5 layers of them, on a machine whose link beats its CPU by a little.

    Returns the engine, its routing and what was counted.
    """
    stated = [] if hit_rate is None else [f"routing.hit_rates=[[{hit_rate}],[{hit_rate}]]"]
    values = composed("model=qwen3-30b-a3b", "model.spec.num_layers=5", "strategy=prescope", "routing=skewed", *stated)
    model = planned_model(parse_settings(values).model)
    machine = SimulatedMachine(
        capacities_bytes=dict.fromkeys(("device", "pinned", "host"), 10**12),
        costs=Roofline(lanes=dict.fromkeys(LaneKind, rates) | {LaneKind.GPU: gpu}),
        host_bytes_s=1e12,
    )
    routing = build_routing(values["routing"], model.spec, 3)
    machine.world = World(routing, model.spec.num_experts, build_predictor(values["routing"], routing, model.spec, 3))
    work = requests(num_requests, vocab_size=100, longest=4, max_new_tokens=12)
    config = values["strategy"] | NO_TABLE | changes
    engine = engine_on(machine, model, work, kv_blocks=100, values=config)
    built = []

    def build(on):
        built.append(load_strategy(config).build(on))
        on.machine.drain()
        return built[0]

    passes = run_to_end(engine, build)
    return engine, routing, built[0].counted() | {"seconds": passes[-1].end_s - passes[0].start_s}


def test_every_expert_costs_the_tokens_and_bytes_that_the_router_gave_it():
    engine, routing, counted = simulated(0.5)
    routed = tokens_by_expert(engine, routing)
    on_gpu = sum(counted[way] for way in ("resident", "prefetched", "cached", "on_demand"))
    device, host = expert_bytes(engine, GPU), expert_bytes(engine, CPU)
    assert (len(device), len(host)) == (on_gpu, counted["cpu"])
    assert counted["active"] == on_gpu + counted["cpu"] == sum((each > 0).sum() for each in routed)
    assert sum(map(tokens_of(engine), device + host)) == pytest.approx(sum(each.sum() for each in routed))
    assert min(counted["cpu"], counted["on_demand"], counted["prefetched"]) > 0, counted


def test_a_worse_prediction_makes_it_slower():
    """Throughput and hits fall as the stated hit rate falls. Wrong guesses are counted; where all are wrong, the
    predictor's validation says so, and none is made."""
    found = [simulated(rate, gpu=SLOW_GPU, predictor="stated")[2] for rate in (1.0, 0.6, 0.0)]
    seconds, hits = [f["seconds"] for f in found], [f["prefetched"] for f in found]
    assert seconds[0] < seconds[1] < seconds[2], seconds
    assert hits[0] > hits[1] > hits[2], hits
    assert found[0]["wasted_bytes"] == 0 < found[1]["wasted_bytes"]
    none = simulated(None, gpu=SLOW_GPU, predictor="none")[2]
    assert none["prefetched"] == none["issued"] == found[2]["issued"] == 0
    assert seconds[2] == pytest.approx(none["seconds"], rel=1e-3)


def test_a_slower_link_gives_the_cpu_more():
    slow = LaneCost(overhead_s=1e-5, flops_s=1e12, device_bytes_s=1e11, host_bytes_s=6e9, link_bytes_s=1e9)
    assert simulated(0.9, rates=slow)[2]["cpu"] > simulated(0.9)[2]["cpu"] > 0


def test_native_copies_move_the_same_bytes_in_more_ops():
    by_copies = {}
    for copies in ("async", "native"):
        engine, _, counted = simulated(None, predictor="none", copies=copies)
        spans = [s for s in engine.machine.spans if s.kind == "weights" and s.lane == H2D]
        nbytes = sum(s.work.link_bytes for s in spans)
        by_copies[copies] = (nbytes / counted["on_demand"], counted["seconds"])
        pinned = [s for s in engine.machine.spans if s.kind == "weights to pinned"]
        assert bool(pinned) == (copies == "native")
    (asynchronous, fast_s), (native, slow_s) = by_copies["async"], by_copies["native"]
    assert asynchronous == pytest.approx(native, rel=0.02)
    assert slow_s > fast_s


def test_wrong_guesses_that_are_still_queued_are_taken_back(tiny):
    """On a slow link the router answers before the last prefetches have begun; tokens are exact all the same."""
    values = composed("strategy=prescope")["strategy"] | {
        "schedule": "fixed", "prefetch_slots": 4, "batch_size": 3, "packet_mb": 0.004, **NO_TABLE,
        "profile_tokens": 8,
    }  # fmt: skip
    work, built = requests(5, vocab_size=tiny.spec.vocab_size), []
    engine = engine_on(emulated(h2d_gb_s=0.01), tiny, work, kv_blocks=40, values=values)

    def build(on):
        built.append(load_strategy(values).build(on))
        return built[0]

    run_to_end(engine, build)
    assert check_tokens(tiny, engine.sequences).ok
    counted = built[0].counted()
    assert counted["withdrawn"] > 0 and counted["issued"] >= counted["withdrawn"] + counted["wasted"], counted
