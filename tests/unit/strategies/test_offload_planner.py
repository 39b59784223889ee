"""Rates as the probe finds them on a machine whose rates are known, and plans made for engines."""

from __future__ import annotations

from dataclasses import asdict, replace
from math import ceil

import pytest

from harness.bench.shapes import Shape
from harness.config import ConfigError, parse
from harness.engine.assembly import assemble_engine
from harness.engine.engine import Engine
from harness.engine.sequences import Sequence
from harness.hardware.profile import HardwareConfig
from harness.machine.simulated import Config, build
from harness.machine.virtual.world import World
from harness.memory.kv_cache import KVCache
from harness.memory.weights import Resident, WeightStore
from harness.model.planned import PlannedModel
from harness.model.spec import ModelSpec
from harness.routing.kinds.uniform import UniformRouting
from harness.workload.request import Request
from strategies.moelightning.cgopipe import cgopipe
from strategies.offloading.config import OffloadingConfig
from strategies.offloading.planning import planner as offload_planner
from strategies.offloading.planning.cost import SizedFlops
from strategies.offloading.planning.memory import fits
from strategies.offloading.planning.planner import deployment_of, plan_policy
from strategies.offloading.planning.policy import GivenPolicy
from strategies.offloading.planning.rate_probe import RateProbe
from strategies.offloading.system import build_offloading
from tests.composing import composed
from tests.unit.model.test_components import spec_of

SPEC = spec_of("mixtral-8x7b")
T4 = parse(HardwareConfig, composed("hardware=t4")["hardware"], "hardware")


def engine(
    prompts: list[int], *, new: int = 32, kv_gb: float = 20.0, tier: str = "host", spec: ModelSpec = SPEC
) -> Engine:
    machine = build(Config(), T4, spec)
    routing = UniformRouting(spec.num_experts, spec.experts_per_token, seed=0)
    machine.world = World(routing, spec.num_experts)
    store = WeightStore(machine, PlannedModel(spec), tier=tier)
    requests = [
        Request(request_id=i, prompt_ids=(1,) * length, max_new_tokens=new, text=None)
        for i, length in enumerate(prompts)
    ]
    return Engine(
        machine=machine,
        spec=spec,
        family=PlannedModel(spec).family,
        store=store,
        resident=Resident(machine, store),
        kv=KVCache(machine, spec, capacity_bytes=int(kv_gb * 1e9)),
        sequences=[Sequence(request) for request in requests],
    )


def test_the_probe_finds_the_rates_of_the_machine_and_leaves_nothing_behind():
    on = engine([50])
    used = {name: tier.used_bytes for name, tier in on.machine.tiers.items()}
    rates = RateProbe(on, packet_bytes=10**8).measure()
    assert rates.h2d_bytes_s == pytest.approx(12e9, rel=0.01)
    assert rates.d2h_bytes_s == pytest.approx(12e9, rel=0.05), "with the latency of a single copy"
    assert rates.pin_bytes_s == pytest.approx(4 * 8.8e9, rel=0.01)
    assert rates.gpu.bytes_s == pytest.approx(239.6e9, rel=0.02)
    assert rates.gpu.flops_s == pytest.approx(24e12, rel=0.15), "some of its ops are bound by memory"
    assert rates.cpu_attention.bytes_s == pytest.approx(45e9, rel=0.02)
    assert {name: tier.used_bytes for name, tier in on.machine.tiers.items()} == used
    assert on.kv.allocator.num_used == 0


def test_the_probe_finds_what_an_op_costs_and_what_the_host_has():
    """A kernel launch of 5 us, a copy's latency of 10 us and 73 GB/s, as conf/hardware/t4.yaml states them; nothing of
    that for the paper's equations."""
    on = engine([50])
    assert not RateProbe(on, packet_bytes=10**8).measure().extends_paper
    rates = RateProbe(on, packet_bytes=10**8, extended=True).measure()
    assert rates.op_s.gpu == pytest.approx(5e-6, rel=0.05)
    assert (rates.op_s.h2d, rates.op_s.d2h) == pytest.approx((10e-6, 10e-6), rel=0.05)
    assert rates.op_s.cpu < 1e-6
    assert rates.gpu.bytes_s == pytest.approx(239.6e9, rel=0.01), "without the launches"
    assert rates.host_bytes_s == 73e9
    assert on.kv.allocator.num_used == 0


def test_the_probe_finds_what_the_gpu_reaches_at_the_sizes_of_a_policy():
    """16 tokens take as long as reading the weights that they reach; 1,024 tokens reach the FLOP/s of the GPU;
    more than the probe has room for are as fast as those."""
    on = engine([50])
    used = {name: tier.used_bytes for name, tier in on.machine.tiers.items()}
    probe = RateProbe(on, packet_bytes=10**8, extended=True)
    rates = probe.measure()

    def sized(decode_tokens: int, prompts: Shape) -> SizedFlops:
        found = probe.at_sizes(rates, decode_tokens=decode_tokens, prompts=prompts)
        assert found.sized is not None and replace(found, sized=None) == rates
        return found.sized

    few = sized(16, Shape.of_prompts(16, 16))
    experts_bytes = SPEC.num_experts * SPEC.expert_params * SPEC.dtype_bytes
    read_bytes = SPEC.layer_bytes - experts_bytes * (1 - SPEC.experts_per_token / SPEC.num_experts) ** 16
    assert few.decode == pytest.approx(16 * SPEC.flops_per_token_layer * 239.6e9 / read_bytes, rel=0.05)
    assert few.prefill == pytest.approx(few.decode, rel=0.05), "matrices do not know whose tokens these are"
    many = sized(1024, Shape.of_prompts(1024, 256))
    assert many.decode == pytest.approx(rates.gpu.flops_s, rel=0.02)
    assert few.prefill_attention < many.prefill_attention, "each token has more others to attend to"
    assert asdict(sized(10**6, Shape.of_prompts(10**6, 256))) == pytest.approx(asdict(many), rel=0.02)
    assert {name: tier.used_bytes for name, tier in on.machine.tiers.items()} == used
    assert on.kv.allocator.num_used == 0


@pytest.mark.parametrize("dense_layers", [(0,), (31,), (0, 31), tuple(range(0, 32, 2)), tuple(range(1, 32, 2))])
def test_the_probes_rates_are_those_of_layers_with_experts(dense_layers):
    """Wherever the dense layers lie, and where the other slot has only such."""
    spec = replace(SPEC, dense_layers=dense_layers, dense_dim=SPEC.expert_dim)
    expected, found = (
        RateProbe(engine([50], spec=each), packet_bytes=10**8, extended=True).measure() for each in (SPEC, spec)
    )
    assert found.gpu.flops_s == pytest.approx(expected.gpu.flops_s, rel=0.01)
    assert found.gpu.bytes_s == pytest.approx(expected.gpu.bytes_s, rel=0.01)
    assert found.cpu_ffn.bytes_s == pytest.approx(expected.cpu_ffn.bytes_s, rel=0.01)
    assert found.h2d_bytes_s == pytest.approx(expected.h2d_bytes_s, rel=0.01)
    assert found.op_s.gpu == pytest.approx(expected.op_s.gpu, rel=0.05)


def test_the_probe_makes_do_with_the_host_memory_that_is_left():
    """Two layers on their way to the device, and rows of few tokens beside them."""
    on = engine([50])
    ram, layers_bytes = on.machine.tiers["ram"], 2 * on.store.layer_bytes
    on.machine.tiers["pinned"].reserve("others", ram.free_bytes - layers_bytes - (1 << 17) - 10_000_000)
    used = ram.used_bytes
    assert RateProbe(on, packet_bytes=10**8).measure().pin_bytes_s == pytest.approx(35.2e9, rel=0.01)
    assert ram.used_bytes == used
    on.machine.tiers["pinned"].reserve("more", 20_000_000)
    with pytest.raises(ConfigError, match=r"^hardware.ram_gb: 192 GB is .*staging buffers 5.805 GB.* leave room"):
        RateProbe(on, packet_bytes=10**8)


def test_the_probe_of_two_gpus_leaves_room_for_the_staging_of_both():
    """Two layers on their way to each, in host memory that has just that, and some rows."""
    hardware = parse(HardwareConfig, composed("hardware=t4x2")["hardware"], "hardware")
    on = assemble_engine(
        build(Config(), hardware, SPEC), PlannedModel(SPEC), num_gpus=2, kv_bytes=10**9, block_size=16, sequences=[],
        eos_token_id=None, weights_tier="host",
    )  # fmt: skip
    on.machine.world = World(UniformRouting(SPEC.num_experts, SPEC.experts_per_token, seed=0), SPEC.num_experts)
    ram = on.machine.tiers["ram"]
    on.machine.tiers["pinned"].reserve("others", ram.free_bytes - 4 * on.store.layer_bytes - 10_000_000)
    assert RateProbe(on, packet_bytes=10**9).measure().pin_bytes_s == pytest.approx(73e9 / 2 / 2, rel=0.01)


def test_pinned_weights_need_no_staging():
    assert RateProbe(engine([50], tier="pinned"), packet_bytes=10**8).measure().pin_bytes_s is None


def test_a_plan_fits_the_engine_and_its_prediction_says_why():
    on = engine([30, 60, 100] * 40)
    plan = plan_policy(on, GivenPolicy(gpu_ffn=True), packet_bytes=10**8, min_micro_batches=2)
    assert fits(plan.deployment, plan.policy)
    assert plan.policy.batch_size == 120
    assert plan.memory.pool.in_pass >= sum(s.prompt_len for s in on.sequences)
    assert plan.prediction is not None and plan.prediction.throughput_tok_s > 0
    assert "decode bound by h2d (weights, link)" in plan.prediction.model
    assert plan.as_record()["layer_link_s"] == pytest.approx(plan.prediction.terms["decode layer, link, s"])
    assert plan.cost.rates.sized is not None, "the prediction is made of what the policy's sizes reach"
    printed = plan_policy(on, GivenPolicy(gpu_ffn=True), packet_bytes=10**8, extended=False)
    assert printed.cost.rates.sized is None and "at the rates" not in printed.prediction.model
    nothing = plan_policy(engine([]), GivenPolicy(), packet_bytes=10**8)
    assert nothing.cost.rates.sized is None, "there is nothing to predict"


def test_what_is_timed_are_the_sizes_of_the_policy(monkeypatch):
    """The probe is asked for the micro-batch of decode, and for the prompt tokens that go through a layer together."""
    asked = []
    sized = RateProbe.at_sizes
    monkeypatch.setattr(RateProbe, "at_sizes", lambda probe, rates, **sizes: asked.append(sizes) or sized(
        probe, rates, **sizes))  # fmt: skip
    plan = plan_policy(engine([400] * 120), GivenPolicy(batch_size=120, micro_batch_size=120), packet_bytes=10**8)
    (sizes,) = asked
    assert sizes["decode_tokens"] == 120
    assert sizes["prompts"].num_tokens == ceil(plan.deployment.prefill_tokens(120)) < 120 * 400
    assert max(sizes["prompts"].prompts) == 400


def test_the_fixed_cost_of_ops_is_no_part_of_the_rates_at_a_policys_sizes():
    """A layer's matrices are four ops, attention is one; a cost larger than the ops themselves leaves a tenth."""
    probe, sizes = RateProbe(engine([50]), packet_bytes=10**8, extended=True), Shape.of_prompts(64, 32)
    rates = probe.measure()

    def seconds(op_s: float) -> dict[str, float]:
        given = replace(rates, op_s=replace(rates.op_s, gpu=op_s))
        found = probe.at_sizes(given, decode_tokens=8, prompts=sizes).sized
        assert found is not None
        return {name: 1 / flops_s for name, flops_s in asdict(found).items()}  # of one FLOP

    free, costly = seconds(0.0), seconds(1e-6)
    shares = {name: 1 - costly[name] / free[name] for name in free}
    matrices_s, attention_s = (4e-6 / shares["decode"], 1e-6 / shares["prefill_attention"])
    assert matrices_s == pytest.approx(8 * SPEC.flops_per_token_layer * free["decode"], rel=0.02)
    assert attention_s == pytest.approx(2 * 32 * 32 / 2 * SPEC.prefill_pair_flops * free["prefill_attention"], rel=0.05)
    assert 4e-6 / shares["prefill"] == pytest.approx(64 * SPEC.flops_per_token_layer * free["prefill"], rel=0.02)
    assert seconds(1.0) == pytest.approx({name: 0.1 * each for name, each in free.items()})


def test_no_request_is_left_for_a_batch_of_its_own(monkeypatch):
    """Where the fastest layer has one sequence too few, a batch of all of them is predicted to be better."""
    fastest, num_requests = offload_planner.faster_of, 48

    def one_too_few(*tasks):
        given = replace(tasks[0].given, batch_size=tasks[0].given.batch_size or num_requests - 1)
        task, policy = fastest(*(replace(task, given=given) for task in tasks))
        return replace(task, given=tasks[0].given), policy

    monkeypatch.setattr(offload_planner, "faster_of", one_too_few)
    given = GivenPolicy(gpu_ffn=True, gpu_attention=False, resident_kv=0.0, micro_batch_size=8)
    plan = plan_policy(engine([50] * num_requests), given, packet_bytes=10**8)
    assert plan.policy.batch_size == num_requests
    given = replace(given, batch_size=num_requests - 1)
    assert plan_policy(engine([50] * num_requests), given, packet_bytes=10**8).policy.batch_size == num_requests - 1


def test_requests_that_fit_no_cache_do_not_shape_the_plan():
    on = engine([50, 50, 9000], kv_gb=1.0)
    assert deployment_of(on).shape.num_requests == deployment_of(on).num_requests == 2
    nothing = plan_policy(engine([9000], kv_gb=1.0), GivenPolicy(), packet_bytes=10**8)
    assert nothing.prediction is None


def test_a_given_micro_batch_whose_prompts_do_not_fit_is_prefilled_in_parts():
    on = engine([400] * 120)
    plan = plan_policy(on, GivenPolicy(batch_size=120, micro_batch_size=120), packet_bytes=10**8)
    assert plan.deployment.storage.prefill_limit_tokens is not None
    assert plan.memory.pool.largest < 120 * 400 < plan.memory.prompt_tokens


def test_a_given_batch_beyond_the_workload_is_refused_only_for_what_the_workload_needs():
    few = [50] * 8
    roomy = plan_policy(engine(few), GivenPolicy(batch_size=100, micro_batch_size=4), packet_bytes=10**8)
    assert roomy.policy.num_micro_batches == 25, "as given where it fits"
    given = GivenPolicy(batch_size=100_000, micro_batch_size=4)
    plan = plan_policy(engine(few), given, packet_bytes=10**8, min_micro_batches=3)
    assert (plan.policy.batch_size, plan.policy.num_micro_batches) == (9, 3), "a pipeline of three micro-batches"
    with pytest.raises(ConfigError, match=r"^kv_cache_gb: "):
        plan_policy(engine([50] * 400, kv_gb=1.0), replace(given, resident_kv=0.0), packet_bytes=10**8)


@pytest.mark.parametrize(("parallelism", "num_gpus"), [("tensor", 2), ("tensor", 4), ("pipeline", 4)])
def test_the_probe_of_several_gpus_finds_each_link_and_what_is_between_them(parallelism, num_gpus):
    """Four links of 12 GB/s leave the 73 GB/s of host memory alone; staging copies share it out."""
    hardware = parse(HardwareConfig, composed(f"hardware=t4x{num_gpus}")["hardware"], "hardware")
    machine = build(Config(), hardware, SPEC)
    machine.world = World(UniformRouting(SPEC.num_experts, SPEC.experts_per_token, seed=0), SPEC.num_experts)
    on = assemble_engine(
        machine, PlannedModel(SPEC), num_gpus=num_gpus, kv_bytes=10**9, block_size=16, sequences=[],
        eos_token_id=None, weights_tier="host", parallelism=parallelism,
    )  # fmt: skip
    used = {name: tier.used_bytes for name, tier in machine.tiers.items()}
    rates = RateProbe(on, packet_bytes=10**9, shares_layers=parallelism == "tensor").measure()
    assert rates.h2d_bytes_s == pytest.approx(12e9, rel=0.01)
    assert rates.pin_bytes_s == pytest.approx(73e9 / 2 / num_gpus, rel=0.01), "of each, all at the same time"
    assert rates.gpu.bytes_s == pytest.approx(239.6e9, rel=0.03)
    expected = pytest.approx(9.7e9, rel=0.05) if parallelism == "tensor" else None
    assert rates.peer_bytes_s == expected
    assert {name: tier.used_bytes for name, tier in machine.tiers.items()} == used


def test_a_prediction_counts_the_batches_that_the_scheduler_forms():
    """The cache holds 40 mean requests, but not the 40 longest ones, which come first: two batches become three."""
    on = engine([40] * 40 + [400] * 40, kv_gb=40 * 270 * SPEC.kv_bytes_per_token / 1e9)
    given = GivenPolicy(batch_size=40, micro_batch_size=20, gpu_attention=False, gpu_ffn=True, resident_weights=0.0)
    plan = plan_policy(on, given, packet_bytes=10**8)
    system = build_offloading(on, plan, cgopipe, OffloadingConfig(staging=True), paging=True)
    sequences, formed = list(on.sequences), []
    while (made := system.scheduler.next_pass()) is not None:
        formed.append(len(made.prefill))
        system.scheduler.retire(made, made.prefill)
        for sequence in made.prefill:
            on.kv.allocator.release(sequence)
    assert len(formed) == 3 and sum(formed) == len(sequences) and formed[0] < 40, formed
    assert system.prediction == plan.predicted(formed)
    assert plan.prediction.throughput_tok_s > 1.2 * system.prediction.throughput_tok_s
