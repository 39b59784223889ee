"""Systems that place single experts give exact tokens where few experts fit, and count what a replay counts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from harness.bench.fitting import Plane
from harness.config import ConfigError
from harness.engine.limits import SLACK_BYTES
from harness.machine.base import CPU, H2D, LaneKind
from harness.machine.emulated import EmulatedMachine
from harness.machine.shuffled import ShuffledMachine
from harness.machine.simulated import SimulatedMachine
from harness.machine.threads.context import LaneRate
from harness.machine.virtual.costs import Roofline
from harness.machine.virtual.world import World
from harness.memory.expert_slots import expert_slot_bytes
from harness.memory.replacement import AdaptiveReplacement, FarthestNextUse, LeastFrequentlyUsed, LeastRecentlyUsed
from harness.model.planned import PlannedModel
from harness.routing.activations import read_routing
from harness.routing.trace_file import TraceHeader, TraceRow, TraceWriter
from harness.study.caches import belady_hits, hits
from strategies.expert_offload.costs import ExpertCosts
from strategies.expert_offload.deployment import Deployment, PlacementConfig
from strategies.expert_offload.policies import AbsentOnCpu
from strategies.expert_offload.residency import ExpertResidency
from strategies.fiddler import Fiddler
from strategies.hybrimoe import HybriMoE
from tests.contract.running import (
    CAPACITIES_BYTES,
    check_tokens,
    engine_on,
    requests,
    run_to_end,
    strategy_of,
)
from tests.contract.simulating import RATES, expert_bytes, simulated_engine
from tests.contract.test_simulated import planned
from tests.contract.test_strategies import YAMLS
from tests.fake_device import FakeDevice, cuda_machine
from tests.tiny_families import tiny_family
from tests.unit.strategies.views import view_of

SYSTEMS = ("expert_cache", "fiddler", "fate", "hybrimoe", "klotski")
SMALL = {"batch_size": 4, "max_pass_tokens": 64, "packet_mb": 0.004, "profile_tokens": 24}
ARC = lambda places, _: AdaptiveReplacement(places)  # noqa: E731
REPLAYED = {"lru": lambda *_: LeastRecentlyUsed(), "lfu": lambda *_: LeastFrequentlyUsed(), "arc": ARC}
SLOW = {LaneKind.H2D: LaneRate(bytes_s=2e7), LaneKind.CPU: LaneRate(flops_s=4e9, bytes_s=4e9)}
NUM_PLACES = 12  # of the experts of a tiny model
STATED = ExpertCosts(  # a transfer takes as long as nine tokens on the CPU
    io_s=10e-3, cpu=Plane(fixed=1e-3, weights=(1e-3,)), gpu=Plane(fixed=1e-3, weights=(0.0,)), attention_s=2e-3,
    prefill_token_s=1e-4,
)  # fmt: skip


def work_of(vocab_size: int):
    return requests(5, vocab_size=vocab_size, longest=40, max_new_tokens=5, seed=2)


def device_bytes(checkpoint, values, num_places: int) -> int:
    """Return device memory in which a strategy that fills it has room for so many experts."""
    machine = ShuffledMachine(capacities_bytes=CAPACITIES_BYTES, seed=0)
    engine = engine_on(machine, checkpoint, work_of(checkpoint.spec.vocab_size), kv_blocks=60, values=values)
    plan = strategy_of(engine, values).plan
    experts = plan["table_experts"] + plan["on_demand_slots"] + plan["prefetch_slots"]
    used = machine.tiers["device"].used_bytes - (experts - num_places) * expert_slot_bytes(engine.store)
    machine.close()
    return used + (1 << 16)


def run_small(machine_of, checkpoint, values):
    """Run where few experts fit; return the strategy and the sequences."""
    capacities = CAPACITIES_BYTES | {"device": device_bytes(checkpoint, values, NUM_PLACES)}
    built, work = [], work_of(checkpoint.spec.vocab_size)
    engine = engine_on(machine_of(capacities), checkpoint, work, kv_blocks=60, values=values)

    def build(on):
        built.append(strategy_of(on, values))
        return built[0]

    run_to_end(engine, build)
    report = check_tokens(checkpoint, engine.sequences)
    assert report.checked == len(work)
    assert report.ok, report.first_mismatch
    return built[0], engine


def shuffled_on(capacities):
    return ShuffledMachine(capacities_bytes=capacities, seed=3)


def slow_link_on(capacities):
    return EmulatedMachine(capacities_bytes=capacities, rates=SLOW, poison=True)


on_real_machines = pytest.mark.parametrize("machine_of", [shuffled_on, slow_link_on], ids=["shuffled", "emulated"])


@pytest.fixture
def stated_costs(monkeypatch):
    """Every machine is said to have the same costs, so that no clock decides where an expert runs."""
    monkeypatch.setattr("strategies.expert_offload.deployment.measured_costs", lambda *_, **sizes: STATED)


def used_ways(strategy) -> set[str]:
    return {way for way in ("resident", "prefetched", "cached", "on_demand", "cpu") if strategy.counted()[way]}


WAYS = {  # what each system must have used where the link is slow
    "expert_cache": {"cached", "on_demand"},
    "fiddler": {"resident", "cpu"},
    "fate": {"cached", "on_demand"},
    "hybrimoe": {"cached", "cpu"},
    "klotski": {"resident", "on_demand"},
}


@pytest.mark.parametrize("name", SYSTEMS)
def test_tokens_are_exact_where_few_experts_fit(tiny, name):
    strategy, _ = run_small(slow_link_on, tiny, YAMLS[name] | SMALL)
    assert used_ways(strategy) >= WAYS[name], strategy.counted()
    assert strategy.plan["costs"] if name != "expert_cache" else True
    assert bool(strategy.plan["decided_here"]) == (name != "expert_cache"), "a cache is no published system"


@pytest.mark.parametrize("name", SYSTEMS)
def test_tokens_are_exact_over_streams_where_few_experts_fit(tiny, stated_costs, name):
    device = FakeDevice(1)
    try:
        strategy, _ = run_small(lambda sizes: cuda_machine(sizes, device=device), tiny, YAMLS[name] | SMALL)
    finally:
        device.close()
    assert used_ways(strategy) >= WAYS[name], strategy.counted()


@pytest.mark.parametrize("name", SYSTEMS)
def test_tokens_of_many_experts_are_exact_in_any_order(name):
    strategy, _ = run_small(shuffled_on, tiny_family("deepseek_v2"), YAMLS[name] | SMALL)
    counted = strategy.counted()
    assert 0 < counted["hit_rate"] < 1, counted
    if name in ("fate", "hybrimoe", "klotski"):
        assert counted["issued"] > 0, counted


def trace_of(engine, path: Path) -> Path:
    """Write the routing that a run's sequences recorded."""
    spec = engine.spec
    layers, k = len(spec.moe_layers), spec.experts_per_token
    header = TraceHeader(
        model="tiny", layers=layers, experts=spec.num_experts, k=k, source="a test", first_layer=spec.moe_layers[0]
    )
    writer = TraceWriter(path, header)
    for sequence in engine.sequences:
        [life] = sequence.lives
        experts = np.concatenate(life.routing)
        writer.write(TraceRow(request=sequence.request.request_id, position=0, experts=experts))
    writer.close()
    return path


@on_real_machines
def test_caches_hit_as_often_as_a_replay_of_the_recorded_routing(tiny, tmp_path, machine_of):
    """The run counts what `harness.study` counts of its steps; nobody passes the bound, nor does the oracle."""
    values = YAMLS["expert_cache"] | SMALL | {"cache_slots": NUM_PLACES, "table": "random"}
    strategy, engine = run_small(machine_of, tiny, values)
    recorded = str(trace_of(engine, tmp_path / "routing.jsonl"))
    oracle, _ = run_small(machine_of, tiny, values | {"policy": "belady", "recorded": recorded})
    foresight = oracle.counted()["cached"]
    foreseen = oracle.pipeline.residency.on_demand._replacement._future.steps  # first what fills the cache
    warm, steps = foreseen[:NUM_PLACES], foreseen[NUM_PLACES:]
    assert foresight == hits(steps, NUM_PLACES, FarthestNextUse([*warm, *steps]), warm)
    bound = belady_hits(steps, NUM_PLACES)
    assert foresight <= bound
    for policy, make in REPLAYED.items():
        if policy != "lru":
            strategy, _ = run_small(machine_of, tiny, values | {"policy": policy})
        counted = strategy.counted()
        assert counted["cached"] == hits(steps, NUM_PLACES, make(NUM_PLACES, steps), list(reversed(warm)))
        assert counted["cached"] <= bound
        assert counted["cached"] + counted["on_demand"] == sum(map(len, steps))


def run_simulated(checkpoint, values, recorded: Path):
    """Run the same requests without tensors, by recorded routing, in the same memory; return the strategy."""
    machine = SimulatedMachine(
        capacities_bytes=CAPACITIES_BYTES | {"device": device_bytes(checkpoint, values, NUM_PLACES)},
        costs=Roofline(lanes=dict.fromkeys(LaneKind, RATES)),
        host_bytes_s=1e11,
        world=World(read_routing(recorded, checkpoint.spec), checkpoint.spec.num_experts),
    )
    work, built = work_of(checkpoint.spec.vocab_size), []
    engine = engine_on(machine, PlannedModel(checkpoint.spec), work, kv_blocks=60, values=values)
    run_to_end(engine, lambda on: built.append(strategy_of(on, values)) or built[0])
    return built[0]


@on_real_machines
def test_the_simulator_counts_the_hits_of_a_run_with_tensors(tiny, tmp_path, machine_of):
    """The same requests, places and routing give the same hits and loads, whatever the policy."""
    values = YAMLS["expert_cache"] | SMALL | {"cache_slots": NUM_PLACES, "table": "random"}
    _, engine = run_small(shuffled_on, tiny, values)
    recorded = trace_of(engine, tmp_path / "routing.jsonl")
    found = set()
    for policy in (*REPLAYED, "belady"):
        chosen = values | {"policy": policy} | ({"recorded": str(recorded)} if policy == "belady" else {})
        with_tensors, _ = run_small(machine_of, tiny, chosen)
        expected = with_tensors.counted()
        assert expected["cached"] > 0 and expected["on_demand"] > 0
        assert run_simulated(tiny, chosen, recorded).counted() == expected, policy
        found.add(expected["cached"])
    assert len(found) > 2, "the policies can be told apart"


@on_real_machines
@pytest.mark.parametrize("name", ["fiddler", "fate", "hybrimoe", "klotski"])
def test_the_simulator_counts_what_each_system_counts_with_tensors(
    tiny, tmp_path, monkeypatch, stated_costs, machine_of, name
):
    """What is not decided by routing is the same on both sides: costs are stated, nothing is prefetched by a gate, and
    HybriMoE's scores count a token's experts alike, since simulated runs know no gate weights. Klotski's prefetches
    follow its profile run, whose routing differs: what lies in its table is compared alone."""
    place = HybriMoE.place
    monkeypatch.setattr(
        HybriMoE, "place", lambda self, view: place(self, replace(view, weights=np.ones(view.ids.shape, np.float32)))
    )
    none = {} if name in ("fiddler", "klotski") else {"predictor": "none"}
    values = YAMLS[name] | SMALL | {"table": "random"} | none
    with_tensors, engine = run_small(machine_of, tiny, values)
    recorded = trace_of(engine, tmp_path / "routing.jsonl")
    without = run_simulated(tiny, values, recorded)
    for places in ("table_experts", "on_demand_slots", "batch_size"):
        assert without.plan[places] == with_tensors.plan[places], places
    counted, expected = without.counted(), with_tensors.counted()
    assert used_ways(with_tensors) >= WAYS[name] and 0 < expected["hit_rate"] < 1
    for each in ("resident", "active") if name == "klotski" else expected:
        assert counted[each] == expected[each], each


def test_the_oracle_refuses_the_routing_of_another_run(tiny, tmp_path):
    values = YAMLS["expert_cache"] | SMALL
    _, engine = run_small(shuffled_on, tiny, values)
    for sequence in engine.sequences:
        [life] = sequence.lives
        life.routing = [(experts + 1) % engine.spec.num_experts for experts in life.routing]
    recorded = str(trace_of(engine, tmp_path / "routing.jsonl"))
    with pytest.raises(ConfigError, match="strategy.recorded: the routing of step"):
        run_small(shuffled_on, tiny, values | {"policy": "belady", "recorded": recorded})


def simulated(build):
    """Run a placement on the simulated machine, and return it with its spans."""
    engine, _ = simulated_engine("qwen3-30b-a3b", 3)
    built = []

    def once(on):
        built.append(build(on))
        return built[0]

    run_to_end(engine, once)
    spans = [(str(s.lane), s.kind, s.layer, s.start_s, s.end_s) for s in engine.machine.spans]
    return built[0], engine, spans


def test_fiddler_without_a_table_is_the_cpu_alone_where_the_link_is_slow():
    def placed_by(placer_of):
        def build(on):
            deployment = Deployment.of(PlacementConfig(table="none", profile_tokens=24), on)
            return deployment.strategy(placer_of(deployment.measured()))

        return simulated(build)

    fiddler, engine, spans = placed_by(lambda costs: Fiddler(replace(costs, io_s=1e3)))
    _, _, alone = placed_by(lambda costs: AbsentOnCpu())
    assert spans == alone
    counted = fiddler.counted()
    host = expert_bytes(engine, CPU)
    assert counted["cpu"] == counted["active"] > len(host) > 0, "those of a layer run in one op"
    assert not [span for span in engine.machine.spans if span.lane == H2D and span.kind == "weights"]


def test_fiddler_brings_an_expert_from_as_many_tokens_as_the_line_says():
    engine, _ = simulated_engine("qwen3-30b-a3b", 3)
    deployment = Deployment.of(PlacementConfig(table="none", profile_tokens=24), engine)
    costs = deployment.measured()
    engine.machine.close()
    even = (costs.io_s + costs.gpu_s(1) - costs.cpu.fixed) / costs.cpu.weights[0]
    below, above = max(1, int(0.9 * even)), int(1.1 * even) + 2
    placed = Fiddler(costs).place(view_of({0: below, 1: above, 2: above + 1, 3: 1}, there=[3]))
    assert list(placed.on_cpu) == [0] and list(placed.on_gpu) == [3, 2, 1] and not placed.prefetch


def test_no_prefetch_of_hybrimoe_is_evicted_before_its_layer(monkeypatch):
    """HybriMoE keeps what it has prefetched where the gate is right in half of the cases and few experts fit."""
    lost, seen, settle = [], [], ExpertResidency.settle

    def judged(self, layer, active):
        mine = [key for key in self._guesses if key[0] == layer]
        seen.extend(mine)
        lost.extend(key for key in mine if key not in self.on_demand)
        return settle(self, layer, active)

    monkeypatch.setattr(ExpertResidency, "settle", judged)
    stated = (
        "routing=skewed",
        "routing.hit_rates=[[0.5],[0.5],[0.5]]",
        "hardware.h2d_gb_s=40",
        "hardware.device_memory_gb=6",
    )
    plan = planned("strategy=hybrimoe", "model=deepseek-v2-lite", "model.spec.num_layers=12", "hardware=v100-32g",
                   "kv_cache_gb=4", "dataset.max_new_tokens=6", *stated)  # fmt: skip
    assert len(seen) > 100 and not lost, f"{len(lost)} of {len(seen)}"
    assert plan.summary["counted"]["prefetched"] > 0


@pytest.mark.parametrize("num_batches", [None, 4])
def test_klotski_plans_no_more_batches_than_memory_holds(num_batches):
    """The planner would have four batches of two, since the link decides; memory holds three sequences."""
    values = YAMLS["klotski"] | {"batch_size": 2, "num_batches": num_batches, "table": "none"}
    values |= {"max_pass_tokens": 1, "profile_tokens": 8}

    def planned_in(device_bytes: int | None):
        engine, _ = simulated_engine("qwen3-30b-a3b", 8)
        device = engine.machine.tiers["device"]
        device.capacity_bytes = device_bytes or device.capacity_bytes
        plan = strategy_of(engine, values).plan
        engine.machine.close()
        return plan, device.used_bytes, device.holders()["kv cache"] // 8

    plan, used_bytes, sequence_bytes = planned_in(None)
    assert (plan["num_batches"], plan["batch_size"]) == (4, 8)
    plan, *_ = planned_in(used_bytes + SLACK_BYTES - int(4.5 * sequence_bytes))
    assert plan["batch_size"] == 3
    assert plan["num_batches"] == (2 if num_batches is None else 3), "none is dealt out without a sequence"


def test_klotski_takes_fewer_batches_where_their_activations_do_not_fit():
    """Activations of four batches leave room for one of eight requests, those of one batch for all. A planner that may
    choose takes one batch; a number that is given is kept."""
    values = YAMLS["klotski"] | {"batch_size": 1, "max_pass_tokens": 1, "profile_tokens": 8, "table": "none"}

    def planned(device_bytes: int | None, **more):
        engine, _ = simulated_engine("qwen3-30b-a3b", 8)
        device = engine.machine.tiers["device"]
        device.capacity_bytes = device_bytes or device.capacity_bytes
        try:
            return strategy_of(engine, values | more).plan, device.used_bytes + SLACK_BYTES
        finally:
            engine.machine.close()

    _, enough_bytes = planned(None, num_batches=1)
    fewer, _ = planned(enough_bytes, num_batches=None, max_batches=4)
    assert fewer["num_batches"] == fewer["batch_size"] == 1
    given, _ = planned(enough_bytes, num_batches=4)
    assert given["num_batches"] == 4 and given["max_tokens"] < fewer["max_tokens"]


EXPERTS = {"hot-expert table", "experts on demand", "prefetched experts"}
SUMS = {"sums of the host's experts"}
PREDICTED = {"activations 0 predicted ids", "activations 0 predicted chances"}
MORE = {  # what each system holds beside the holders that all have
    "expert_cache": set(),
    "fiddler": SUMS,
    "fate": PREDICTED,
    "hybrimoe": SUMS | PREDICTED,
    "prescope": SUMS | PREDICTED,
    "klotski": "activations 1",  # all of a second batch
}


def test_all_systems_are_given_the_same_memory():
    """What is no expert takes the same bytes under the same names, and no room for an expert is left."""
    held = {}
    for name in MORE:
        engine, _ = simulated_engine("qwen3-30b-a3b", 3)
        device = engine.machine.tiers["device"]
        device.capacity_bytes = 6 * 10**9
        batch_size = 1 if name == "klotski" else 2  # it has two batches: the same sequences
        strategy_of(engine, YAMLS[name] | {"batch_size": batch_size, "profile_tokens": 24, "max_pass_tokens": 64})
        engine.machine.drain()
        held[name] = {holder: nbytes for holder, nbytes in device.holders().items() if holder not in EXPERTS}
        held[name]["all layers without experts"] += held[name].pop("routers", 0)  # apart where routers predict
        assert device.free_bytes < expert_slot_bytes(engine.store), name
        engine.machine.close()
    same = held["expert_cache"]
    assert {"embedding", "head", "kv cache", "activations 0 hidden"} < same.keys()
    second = {holder: nbytes for holder, nbytes in held["klotski"].items() if holder.startswith(MORE["klotski"])}
    assert second == {holder.replace(" 0 ", " 1 "): n for holder, n in same.items() if "activations 0" in holder}
    for name, own in held.items():
        more = set(second) if name == "klotski" else MORE[name]
        assert own.keys() - same.keys() == more, name
        assert {holder: nbytes for holder, nbytes in own.items() if holder not in more} == same, name
