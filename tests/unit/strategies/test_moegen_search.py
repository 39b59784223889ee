"""MoE-Gen's search: its costs are measured, its time is that of the ops that the pipeline submits, its policies fit."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from math import ceil

import pytest

from harness.config import ConfigError
from harness.engine import loop
from harness.engine.engine import Engine
from harness.engine.sequences import Sequence
from harness.engine.strategy import Strategy
from harness.machine.base import Op
from harness.machine.virtual.world import World
from harness.memory.tiers import DEVICE, PINNED, Tier
from harness.plan.planning import draft_plan
from harness.run.session import Session
from paper_figures.moegen.regret import enumerated
from paper_figures.support import model_spec
from strategies.common.workload_shape import WorkloadShape
from strategies.moegen import Config, build
from strategies.moegen import search as moegen_search
from strategies.moegen.buffers import PhaseBuffers
from strategies.moegen.expert_stream import ExpertStream
from strategies.moegen.memory import WeightSizes, phases
from strategies.moegen.pipeline import ModuleBatching
from strategies.moegen.planner import Deployment, complete_by_memory
from strategies.moegen.policy import GivenPolicy, Policy
from strategies.moegen.prediction import predict
from strategies.moegen.profile import Profile, measured
from strategies.moegen.recorded import HashedRouting, record
from strategies.moegen.scheduler import AccumulatedBatches
from strategies.moegen.search import Candidate, Found, Search
from strategies.moegen.times import PassTimes
from tests.composing import composed

PACKET_BYTES = 1_000_000
SMALL = {"cpu_attention": 0.5, "attention_batch": 8, "expert_batch": 8, "prefill_batch_size": 4}


def engine_of(*overrides: str) -> Engine:
    """An A5000 of 4 GB with a model of eight layers, each of which has eight experts of 35 MB."""
    values = composed(
        *("machine=simulated", "strategy=moegen_h", "model=mixtral-8x7b", "hardware=a5000", "dataset=mtbench"),
        *("model.spec.num_layers=8", "model.spec.hidden_dim=2048", "model.spec.expert_dim=2816", "kv_cache_gb=2"),
        *("hardware.device_memory_gb=2", "dataset.num_requests=40", "dataset.max_new_tokens=16", *overrides),
    )
    session = Session.of(values)
    session.load_model()
    session.load_workload()
    session.build_machine()
    session.queue_requests()
    return session.build_engine()


def prepared(given: GivenPolicy | None = None, *overrides: str) -> tuple[Engine, Search, Policy, Profile]:
    engine, given = engine_of(*overrides), given or GivenPolicy()
    deployment = Deployment.of(engine)
    profile = measured(engine, deployment.shape, packet_bytes=PACKET_BYTES)
    assert profile is not None
    times = PassTimes(engine=engine, shape=deployment.shape, cost=profile.costs.seconds, packet_bytes=PACKET_BYTES)
    return engine, Search(deployment, times, given), complete_by_memory(given, deployment), profile


def found_on(given: GivenPolicy | None = None, *overrides: str) -> Found:
    _, search, start, _ = prepared(given, *overrides)
    return search.around(start)


def touched(op: Op, lane, urgent: bool) -> tuple:
    return (op.kind, str(lane), op.layer, op.micro_batch, urgent, op.work())


def pipeline_of(engine: Engine, policy: Policy, shape) -> ModuleBatching:
    return ModuleBatching(engine, policy, shape, packet_bytes=PACKET_BYTES)


@pytest.mark.parametrize("on_device", [True, False])
def test_recorded_ops_are_those_that_a_pass_submits(on_device):
    given = GivenPolicy(**SMALL, on_device=on_device, resident_experts=6, expert_slots=3)
    engine = engine_of("model.spec.num_layers=3")
    request = engine.sequences[0].request
    engine.sequences[:] = [Sequence(replace(request, request_id=number, max_new_tokens=3)) for number in range(10)]
    engine.machine.world = World(HashedRouting(engine.spec), engine.spec.num_experts)
    deployment = Deployment.of(engine)
    policy = complete_by_memory(given, deployment)
    policy = replace(policy, prefill=replace(policy.prefill, batch_size=10))
    passes = [submitted_in(engine, record_of(engine, deployment, policy, decodes)) for decodes in (False, True)]
    ran_in_passes: list[list[tuple]] = []
    submit = engine.machine.submit

    def noted(lane, op, *, after=(), urgent=False):
        ran_in_passes[-1].append((op, lane, urgent))
        return submit(lane, op, after=after, urgent=urgent)

    prefill, _ = phases(policy, deployment.shape)
    pipeline = pipeline_of(engine, policy, deployment.shape)
    run = pipeline.run
    pipeline.run = lambda plan: ran_in_passes.append([]) or run(plan)
    engine.machine.submit = noted
    scheduler = AccumulatedBatches(engine.sequences, engine.kv.allocator, policy, prefill)
    loop.run(engine, Strategy(scheduler=scheduler, pipeline=pipeline), lambda record: None)
    assert len(ran_in_passes) == 3
    slots = policy.expert_slots + 2 * policy.dense_slots  # a recorded pass fills them; a prefill has, for decode
    for recorded, ran, num_filled in zip(passes, ran_in_passes, (0, slots), strict=False):
        assert on_lanes(recorded) == on_lanes(ran)
        assert weights_in(recorded)[num_filled:] == weights_in(ran)


def on_lanes(ops) -> dict[str, list[tuple]]:
    """The ops of each lane in the order in which they were submitted, but those that bring weights."""
    found = defaultdict(list)
    for op, lane, urgent in ops:
        if op.kind != "weights":
            found[str(lane)].append(touched(op, lane, urgent))
    return found


def weights_in(ops) -> list[tuple]:
    return [(op.layer, op.source.layout.name, str(lane), urgent) for op, lane, urgent in ops if op.kind == "weights"]


def record_of(engine, deployment, policy, decodes):
    search = Search(deployment, None, GivenPolicy())
    batch = search.decode_batch(10) if decodes else search.prefill_batch(10)
    if decodes:
        batch = replace(batch, tokens=engine.sequences[0].prompt_len)
    return record(engine, engine.spec, policy, deployment.shape, batch, pipeline_of)


def submitted_in(engine, recorded) -> list[tuple]:
    graph = recorded.graph
    rows = zip(graph.ops, graph.lanes, graph.urgent, strict=True)
    return [(op, lane, urgent) for op, lane, urgent in rows if op is not None]


def test_the_experts_of_one_token_are_drawn_in_many_layers():
    """A quarter of the experts lies on the device, so a quarter of those that a token chooses does: of one layer's two,
    that would be none, half or all."""
    _, search, start, _ = prepared(None, "model.spec.num_layers=32", "kv_cache_gb=1", "hardware.device_memory_gb=6")
    link_s = {}
    for resident in (0, 2, 8):  # of each layer
        policy = replace(start, resident_experts=32 * resident)
        link_s[resident] = search.times.of(policy, search.decode_batch(1)).busy["h2d"]
    assert (link_s[0] - link_s[2]) / (link_s[0] - link_s[8]) == pytest.approx(0.25, abs=0.15)


@pytest.mark.parametrize(("num_sequences", "decides"), [(12, "lane"), (40, "path")])
def test_a_prediction_says_whether_a_path_or_a_lane_decided_it(num_sequences, decides):
    """More slots than a layer has experts bring some of them while the recorded pipeline fills."""
    room = ("hardware.device_memory_gb=6", f"dataset.num_requests={num_sequences}")
    _, search, policy, _ = prepared(GivenPolicy(**SMALL, resident_experts=0, expert_slots=10), *room)
    times = search.times.of(policy, search.decode_batch(num_sequences))
    assert times.decided_by == decides
    assert (sum(times.bound.values()) == times.moe_layer_s) == (decides == "lane")
    told = predict(search, policy).model
    assert ("decode by the sum of the busiest lane" in told) == (decides == "lane")
    assert ("decode by their critical path" in told) == (decides == "path")


UNIFORM = ("dataset.lengths.mean=200", "dataset.lengths.max=200", "dataset.max_new_tokens=3")


def predicted_and_simulated(given: GivenPolicy, *overrides: str) -> tuple[tuple[float, float], tuple[float, float]]:
    """The seconds of a prefill pass and of a decode pass, as the search predicts and as the simulator finds them."""
    engine, search, policy, _ = prepared(given, *UNIFORM, *overrides)
    batches = search.prefill_batch(policy.prefill.batch_size), search.decode_batch(policy.decode.batch_size)
    predicted = tuple(search.times.of(policy, batch).seconds for batch in batches)
    scheduler = AccumulatedBatches(
        engine.sequences, engine.kv.allocator, policy, phases(policy, search.deployment.shape)[0]
    )
    pipeline = pipeline_of(engine, policy, search.deployment.shape)
    engine.machine.drain()
    passes = []
    loop.run(engine, Strategy(scheduler=scheduler, pipeline=pipeline), passes.append)
    found = {each.mode: each.end_s - each.start_s for each in passes}  # the last of each
    return predicted, (found["prefill"], found["decode"])


@pytest.mark.parametrize(
    ("prompts", "slower"),
    [
        (4, 1.0),  # so few that the link is busy all the time either way
        (60, 1.18),  # experts hide the transfer, but nothing hides that of a layer's first one
        (100, 1.05),  # the same, beside more of everything else
    ],
)
def test_deleting_the_prefetch_of_experts_slows_both_prediction_and_simulation(prompts, slower, monkeypatch):
    given = GivenPolicy(prefill_batch_size=prompts, resident_experts=0)
    room = ("hardware.device_memory_gb=6", "kv_cache_gb=6", f"dataset.num_requests={2 * prompts}")
    told, took = predicted_and_simulated(given, *room)
    look_ahead = ExpertStream.look_ahead
    monkeypatch.setattr(ExpertStream, "look_ahead", lambda stream, ahead: look_ahead(stream, False))
    told_without, took_without = predicted_and_simulated(given, *room)
    assert took_without[0] / took[0] == pytest.approx(slower, abs=0.02)
    assert told_without[0] / told[0] == pytest.approx(took_without[0] / took[0], abs=0.01)
    assert told[0] == pytest.approx(took[0], rel=0.02) and told_without[0] == pytest.approx(took_without[0], rel=0.02)


def test_loading_no_keys_and_values_ahead_slows_both_prediction_and_simulation(monkeypatch):
    given = GivenPolicy(cpu_attention=0.0, attention_batch=4)
    room = "hardware.device_memory_gb=10"  # for all weights
    told, took = predicted_and_simulated(given, room)
    both = PhaseBuffers.kv_staging
    monkeypatch.setattr(PhaseBuffers, "kv_staging", property(lambda buffers: both.fget(buffers)[:1]))
    told_without, took_without = predicted_and_simulated(given, room)
    assert took_without[1] / took[1] == pytest.approx(1.10, abs=0.02)
    assert told_without[1] / told[1] == pytest.approx(took_without[1] / took[1], abs=0.02)


def test_what_is_given_stays():
    given = GivenPolicy(cpu_attention=0.3, attention_batch=5, expert_batch=50, expert_slots=3, on_device=False)
    best = found_on(given).best.policy
    assert (best.decode.cpu_attention, best.decode.attention_batch, best.decode.expert_batch) == (0.3, 5, 50)
    assert best.expert_slots == 3 and not best.decode.on_device and not best.prefill.on_device


@pytest.mark.parametrize("size", [7, 64, 500])
def test_a_given_micro_batch_of_prefill_stays_however_large(size):
    """Other sizes give way; it is refused by its name where nothing fits beside it."""
    given = GivenPolicy(prefill_attention_batch=size)
    room = ("dataset.num_requests=600", "kv_cache_gb=30")
    if size == 500:
        with pytest.raises(ConfigError, match=r"strategy.policy.prefill_attention_batch: must be small enough"):
            prepared(given, *room)
        return
    _, search, start, _ = prepared(given, *room)
    best = search.around(start).best.policy
    assert start.prefill.attention_batch == best.prefill.attention_batch == size <= best.prefill.batch_size


def test_a_given_batch_is_no_larger_than_the_cache():
    """Eq. 2 holds for what is given, too."""
    _, search, start, _ = prepared(GivenPolicy(batch_size=30), *UNIFORM[:2], "kv_cache_gb=0.2")
    assert start.decode.batch_size == search.deployment.kv_sequences < 30


def completed(given: GivenPolicy, free_gb: float) -> Policy:
    """Complete a policy for Mixtral-8x7B with so many GB of each tier free."""
    spec = model_spec("mixtral-8x7b")
    shape = WorkloadShape.of_lengths(100, 20, longest_prompt=100, num_requests=500, block_tokens=16)
    tier = Tier("device", 10**12)
    limits = {name: tier for name in (DEVICE, PINNED)}
    return complete_by_memory(
        given,
        Deployment(
            spec=spec, shape=shape, free_bytes=dict.fromkeys(limits, int(free_gb * 1e9)), limits=limits,
            weights=WeightSizes(expert_bytes=352_321_536, dense_bytes=83_000_000, num_experts=256), kv_sequences=400,
        ),
    )  # fmt: skip


def test_the_least_memory_holds_one_slot_and_a_small_batch():
    """What is free gives way before memory is called too small: a slot, then sequences of the batch."""
    assert completed(GivenPolicy(), 3.0).decode.batch_size == 400
    assert completed(GivenPolicy(), 0.75).expert_slots == 1
    small = completed(GivenPolicy(), 0.5)
    assert small.expert_slots == 1 and small.decode.batch_size < 400
    with pytest.raises(ConfigError, match="hardware.device_memory_gb"):
        completed(GivenPolicy(), 0.1)


@pytest.mark.parametrize("name", ["expert_slots", "resident_experts", "batch_size", "dense_slots"])
def test_a_given_size_that_does_not_fit_is_named(name):
    completed(GivenPolicy(**{name: 1}), 3.0)
    with pytest.raises(ConfigError, match=rf"strategy.policy.{name}: must be small enough .* got 256"):
        completed(GivenPolicy(**{name: 256}), 0.5 if name == "batch_size" else 2.7)


def test_tokens_accumulate_on_the_device_where_they_fit():
    """Even if they were predicted to take three times as long there: so says the paper, and ops are timed alone."""
    _, search, start, _ = prepared()
    predicted = search.candidate

    def slower_on_the_device(policy: Policy) -> Candidate:
        found = predicted(policy)
        times = 1 + policy.decode.on_device + policy.prefill.on_device
        return replace(found, request_s=times * found.request_s)

    search.candidate = slower_on_the_device
    best = search.around(start).best.policy
    assert start.decode.on_device and best.decode.on_device and best.prefill.on_device
    assert best != start, "all else is searched"


def test_the_policy_depends_on_the_machine():
    slow_link = found_on().best.policy
    slow_cpu = found_on(None, "hardware.h2d_gb_s=400", "hardware.cpu_gb_s=1").best.policy
    assert slow_link.decode.cpu_attention > slow_cpu.decode.cpu_attention


GRID = {
    ("decode", "cpu_attention"): (0.0, 0.5, 0.9),
    ("decode", "attention_batch"): (5, 40),
    ("prefill", "batch_size"): (10, 40),
    ("", "expert_slots"): (1, 3),
}


@pytest.mark.parametrize("slow_cpu", [(), ("hardware.cpu_gb_s=3", "hardware.host_gb_s=60")])
def test_the_search_is_as_good_as_trying_all(slow_cpu):
    """A grid of policies; the search has values between these too, and its rounds stop at gains below 0.2 %."""
    _, search, start, _ = prepared(None, *slow_cpu)
    tried = list(enumerated(search, replace(start, prefill=replace(start.prefill, attention_batch=5)), GRID))
    assert len(tried) > 12
    found = search.around(start)
    assert found.best.request_s <= 1.005 * min(each.request_s for each in tried)
    assert all(other.request_s >= found.best.request_s for other in found.runners_up) and found.runners_up


def test_of_equally_fast_policies_the_first_is_the_best_whatever_is_tried_first(monkeypatch):
    """Each candidate takes as long, so that the search tries the same ones in either order of its variables."""

    def as_fast(search: Search, policy: Policy) -> Candidate:
        return Candidate(policy=policy, prefill=None, decode=None, request_s=1.0)

    monkeypatch.setattr(Search, "candidate", as_fast)
    monkeypatch.setattr(Search, "_sooner_s", lambda search, policy: 0.0)
    orders = []
    for variables in (moegen_search._VARIABLES, moegen_search._VARIABLES[::-1]):
        monkeypatch.setattr(moegen_search, "_VARIABLES", variables)
        _, search, start, _ = prepared()
        found = search.around(start)
        assert found.best.policy == search._with_less_prefill(start)
        orders.append([each.policy for each in (found.best, *found.runners_up)])
    assert orders[0] == orders[1]


def test_a_batch_is_as_large_as_its_keys_and_values_allow():
    """Eq. 2. Each sequence caches 215 tokens at its end: all but the last one."""
    _, search, start, _ = prepared(None, *UNIFORM[:2], "kv_cache_gb=0.2", "dataset.max_new_tokens=16")
    found, spec = search.around(start).best.policy.decode.batch_size, search.deployment.spec
    most = 0.2e9 // (16 * spec.kv_bytes_per_token) // ceil(215 / 16)
    assert found == most < search.deployment.shape.num_requests


@pytest.mark.parametrize("room", [(), ("hardware.pinned_memory_gb=4.88",)])  # 67 MB beside weights and cache
def test_every_policy_that_fits_can_be_built(room):
    """Of the policies that the search has thought of, those that hold most, on memory of just the bytes that are
    counted. Where the host has little left, some whose tokens accumulate there do not fit it."""
    engine, search, start, _ = prepared(GivenPolicy(on_device=False) if room else None, *room)
    search.around(start)
    policies = [policy for policy, candidate in search._known.items() if candidate is not None]
    assert not room or len(policies) < len(search._known)
    before = {name: dict(engine.machine.tiers[name].holders()) for name in (DEVICE, PINNED)}
    for tier in (DEVICE, PINNED):
        policy = max(policies, key=lambda each, tier=tier: sum(search.deployment.held(each)[tier].values()))
        fresh = engine_of(*room)
        free = {name: fresh.machine.tiers[name].free_bytes for name in (DEVICE, PINNED)}
        pipeline_of(fresh, policy, search.deployment.shape)
        held = search.deployment.held(policy)
        for name, free_bytes in free.items():
            taken = free_bytes - fresh.machine.tiers[name].free_bytes
            assert taken <= sum(held[name].values())
    assert before == {name: dict(engine.machine.tiers[name].holders()) for name in (DEVICE, PINNED)}


def test_a_run_holds_no_more_than_was_predicted_and_takes_as_long():
    engine = engine_of("dataset.max_new_tokens=32", "dataset.num_requests=40")
    deployment = Deployment.of(engine)
    before = dict(engine.machine.tiers[DEVICE].holders())
    strategy = build(Config(), engine)
    passes = []
    engine.machine.drain()
    loop.run(engine, strategy, passes.append)
    held, tier = strategy.plan["held_bytes"][DEVICE], engine.machine.tiers[DEVICE]
    taken = {name: nbytes for name, nbytes in tier.holders().items() if nbytes and name not in before}
    assert taken == pytest.approx({matching(name, taken): nbytes for name, nbytes in held.items() if nbytes}, rel=1e-3)
    assert strategy.plan["chosen_by"] == "search" and strategy.plan["runners_up"]
    assert sum(before.values()) + sum(held.values()) >= tier.used_bytes
    tokens = sum(len(sequence.generated) for sequence in engine.sequences)
    seconds = passes[-1].end_s - passes[0].start_s
    assert strategy.prediction is not None
    assert strategy.prediction.throughput_tok_s == pytest.approx(tokens / seconds, rel=0.15)
    assert deployment.shape.num_requests == 40


def matching(name: str, taken: dict[str, int]) -> str:
    """The holder of that name, or of the name's first words."""
    return next((other for other in taken if other.startswith(name) or name.startswith(other)), name)


def test_slots_larger_than_the_device_are_named():
    """The refusal names the slots: one would fit, so that the device is not too small."""
    slots = ("strategy=moegen_h", "model=mixtral-8x7b", "hardware=a40", "strategy.policy.expert_slots=200")
    with pytest.raises(ConfigError, match=r"strategy.policy.expert_slots: must be small enough .* got 200"):
        draft_plan(composed(*slots, "machine=simulated", "kv_cache_gb=20", "dataset.num_requests=24"))
