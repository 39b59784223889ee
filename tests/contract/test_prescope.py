"""PreScope where times are modelled: nothing is free, nothing is foreseen but what is stated, wrong guesses cost."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from harness.machine.base import CPU, GPU, H2D, LaneKind
from harness.machine.simulated import SimulatedMachine
from harness.machine.virtual.costs import LaneCost, Roofline
from harness.machine.virtual.world import World
from harness.model.planned import planned_model
from harness.routing.build import build_predictor, build_routing
from harness.settings import load_strategy, parse_settings
from strategies.common import predictors
from tests.composing import composed
from tests.contract.running import check_tokens, emulated, engine_on, requests, run_to_end
from tests.contract.simulating import expert_bytes, tokens_by_expert, tokens_of

RATES = LaneCost(overhead_s=1e-5, flops_s=1e12, device_bytes_s=1e11, host_bytes_s=6e9, link_bytes_s=1e10)
NO_TABLE = {"table": "none", "profile_tokens": 64}


def simulated(
    hit_rate: float | None = None, *, rates: LaneCost = RATES, gpu: LaneCost = RATES, name: str = "qwen3-30b-a3b",
    **changes,
):  # fmt: skip
    """Run PreScope with five layers of a model, Qwen3's of small experts, where the link beats the CPU by a little.

    Returns the engine, its routing and what was counted.
    """
    stated = [] if hit_rate is None else [f"routing.hit_rates=[[{hit_rate}],[{hit_rate}]]"]
    values = composed(f"model={name}", "model.spec.num_layers=5", "strategy=prescope", "routing=skewed", *stated)
    model = planned_model(parse_settings(values).model)
    machine = SimulatedMachine(
        capacities_bytes=dict.fromkeys(("device", "pinned", "host"), 10**12),
        costs=Roofline(lanes=dict.fromkeys(LaneKind, rates) | {LaneKind.GPU: gpu}),
        host_bytes_s=1e12,
    )
    routing = build_routing(values["routing"], model.spec, 3)
    machine.world = World(routing, model.spec.num_experts, build_predictor(values["routing"], routing, model.spec, 3))
    work = requests(4, vocab_size=100, longest=4, max_new_tokens=12)
    config = values["strategy"] | NO_TABLE | changes
    engine = engine_on(machine, model, work, kv_blocks=100, values=config)
    built = []

    def build(on):
        built.append(load_strategy(config).build(on))
        on.machine.drain()
        return built[0]

    passes = run_to_end(engine, build)
    seconds = passes[-1].end_s - passes[0].start_s
    transfers = [s for s in engine.machine.spans if s.lane == H2D and s.start_s >= passes[0].start_s]
    link_busy = sum(s.end_s - s.start_s for s in transfers) / seconds
    return engine, routing, built[0].counted() | {"seconds": seconds, "link_busy": link_busy}


def test_every_expert_costs_the_tokens_and_bytes_that_the_router_gave_it():
    engine, routing, counted = simulated(0.5)
    routed = tokens_by_expert(engine, routing)
    on_gpu = sum(counted[way] for way in ("resident", "prefetched", "cached", "on_demand"))
    device, host = expert_bytes(engine, GPU), expert_bytes(engine, CPU)
    assert len(host) <= len(routed), "those of a layer on the host run in one op"
    assert len(device) < on_gpu, "and so do those that had arrived on the device"
    assert counted["active"] == on_gpu + counted["cpu"] == sum((each > 0).sum() for each in routed)
    tokens = tokens_of(engine, device + host, on_gpu + counted["cpu"])
    assert tokens == pytest.approx(sum(each.sum() for each in routed))
    assert min(counted["cpu"], counted["on_demand"], counted["prefetched"]) > 0, counted


# Two machines on which a right prediction must pay. While the GPU attends, the link has nothing to do but prefetch: for
# longer than an expert's transfer takes (0.7 and 14 ms at 25 GB/s), as an op of the GPU costs 0.3 or 5 ms. What it
# brings in that time spares the CPU an expert, at twice the transfer's time, or the link one that the router would wait
# for. So each right guess shortens its layer, and a wrong one only takes room and time of another. On a link that is
# busy all the time that does not hold: there a prefetch takes the place of a load on demand, and nothing is gained.
WHERE_IT_PAYS = {
    "deepseek-v2-lite": {"gpu": LaneCost(overhead_s=3e-4, flops_s=1e12, device_bytes_s=1e11)},
    "mixtral-8x7b": {"gpu": LaneCost(overhead_s=5e-3, flops_s=1e12, device_bytes_s=1e11)},
}
SLOW_CPU = LaneCost(overhead_s=1e-5, flops_s=1e12, device_bytes_s=1e11, host_bytes_s=1.2e10, link_bytes_s=2.5e10)
STATED = (1.0, 0.6, 0.4, 0.0)  # so far apart that it does not matter which experts were drawn


def by_hit_rate(name: str, hit_rates=STATED) -> list[dict[str, float]]:
    return [simulated(r, name=name, rates=SLOW_CPU, predictor="stated", **WHERE_IT_PAYS[name])[2] for r in hit_rates]


def require_worse_is_slower(found: list[dict[str, float]]) -> None:
    """Throughput and hits fall from each stated rate to the next."""
    seconds, hits = [f["seconds"] for f in found], [f["hit_rate"] for f in found]
    assert all(better < worse for better, worse in pairwise(seconds)), seconds
    assert all(better > worse for better, worse in pairwise(hits)), hits
    assert seconds[-1] > 1.03 * seconds[0], seconds


@pytest.mark.parametrize("name", WHERE_IT_PAYS)
def test_a_worse_prediction_makes_it_slower(name):
    """Wrong guesses are counted; where all are wrong, the predictor's validation says so, and none is made."""
    found = by_hit_rate(name)
    require_worse_is_slower(found)
    assert found[0]["wasted_bytes"] == 0 < found[2]["wasted_bytes"]
    none = simulated(None, name=name, rates=SLOW_CPU, predictor="none", **WHERE_IT_PAYS[name])[2]
    assert none["link_busy"] < 0.8, "the link is not saturated"
    assert none["prefetched"] == none["issued"] == found[-1]["issued"] == 0
    assert found[-1]["seconds"] == pytest.approx(none["seconds"], rel=0.01)


@pytest.mark.parametrize("fault", ["ignored", "true routing"])
def test_a_prediction_that_is_ignored_or_looks_ahead_is_found_out(monkeypatch, fault):
    """The test above can fail: without predictions all rates are alike, and so they are with the routing itself."""

    def request(predictor, emit, it, layer, *, distance=1):
        engine = predictor._engine
        if fault == "ignored" or not predictors.has_router(engine, layer + distance):
            return None
        ids = engine.machine.world.routing(it.batch, layer + distance)
        return predictors.Prediction(engine, known=(ids, np.ones(ids.shape, dtype=np.float32)))

    monkeypatch.setattr(predictors.StatedPredictor, "request", request)
    with pytest.raises(AssertionError):
        require_worse_is_slower(by_hit_rate("deepseek-v2-lite", (1.0, 0.4)))


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
