"""What policies hold by the memory model, against what a pipeline really takes, and against plain arithmetic."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.engine.activation_pool import ActivationPool
from harness.engine.assembly import assemble_engine
from harness.machine.base import LaneKind
from harness.machine.simulated import SimulatedMachine
from harness.machine.virtual.costs import LaneCost, Roofline
from harness.memory.kv_cache import KVCache
from harness.memory.paged_weights import PagedWeights
from harness.memory.tiers import device_tier
from harness.memory.weights import Resident, WeightStore
from harness.model.planned import PlannedModel
from strategies.common.workload_shape import WorkloadShape
from strategies.offloading.gpu_attention import gpu_attention
from strategies.offloading.pipeline import MicroBatchPipeline
from strategies.offloading.planning.cost import CostModel, Rates
from strategies.offloading.planning.hrm import Level
from strategies.offloading.planning.memory import (
    Deployment,
    Storage,
    WeightSizes,
    fits,
    held_bytes,
    kv_staging_bytes,
    pool_sizes,
    shortfalls,
)
from strategies.offloading.planning.planner import OffloadPlan, deployment_of
from strategies.offloading.planning.policy import Policy
from tests.unit.model.test_components import spec_of

SPEC = spec_of("mixtral-8x7b")
LEVEL = Level(name="any", flops_s=1.0, bytes_s=1.0)
ROOM = {"device": 10**12, "pinned": 10**12, "host": 10**12}
SHAPE = WorkloadShape.of_lengths(77, 128, longest_prompt=418, num_requests=1000)


def machine() -> SimulatedMachine:
    free = Roofline(lanes={kind: LaneCost() for kind in LaneKind})
    return SimulatedMachine(capacities_bytes=ROOM, costs=free, host_bytes_s=float("inf"))


def policy(**changes) -> Policy:
    chosen = {"batch_size": 504, "micro_batch_size": 36, "gpu_attention": False, "gpu_ffn": True}
    return Policy(**{**chosen, "resident_weights": 0.0, "resident_kv": 0.0, **changes})


@pytest.mark.parametrize("tier", ["host", "pinned"])
@pytest.mark.parametrize("hidden", ["device", "pinned"])
@pytest.mark.parametrize("num_experts", [0, 1, 5, None])
@pytest.mark.parametrize("gpu_attention", [False, True])
def test_a_pipeline_reserves_what_the_model_says(tier, hidden, num_experts, gpu_attention):
    """Everything a run takes, on a machine with room for anything; equal but for the rounding of pages and blocks.
    None: experts on the CPU."""
    on = machine()
    store = WeightStore(on, PlannedModel(SPEC), tier=tier)
    resident = Resident(on, store)
    sizes = WeightSizes.of_store(store)
    share = (num_experts or 0) * sizes.experts_bytes / SPEC.num_experts / sizes.layer_bytes * (1 + 1e-9)
    gpu_ffn = num_experts is not None
    chosen = policy(resident_weights=share, gpu_attention=gpu_attention, gpu_ffn=gpu_ffn)
    storage = Storage(weights_tier=tier, prefill_hidden_tier=hidden, kv_cache_bytes=40 * 10**9)
    deployment = Deployment(spec=SPEC, sizes=sizes, shape=SHAPE, capacities_bytes=ROOM, storage=storage)
    PagedWeights(on, store, resident, num_pages=chosen.num_micro_batches, packet_bytes=10**6, resident_share=share)
    if not gpu_ffn:
        PagedWeights(
            on, store, resident, num_pages=chosen.num_micro_batches, packet_bytes=10**6, experts=False, prefix="dense "
        )
    ActivationPool(on, SPEC, pool_sizes(deployment, chosen))
    KVCache(on, SPEC, capacity_bytes=40 * 10**9)
    for _ in range(2 if gpu_attention else 0):
        on.tiers["device"].reserve("kv staging", kv_staging_bytes(deployment, 36))
    held = held_bytes(deployment, chosen)
    for name in ("device", "pinned", "host"):
        taken, counted = on.tiers[name].used_bytes, sum(held[name].values())
        rounding = 40 * 10**9 // 10**4 if name == "pinned" else 300_000
        assert taken <= counted <= taken + rounding, name


@pytest.mark.parametrize("tier", ["host", "pinned"])
@pytest.mark.parametrize("hidden", ["device", "pinned"])
@pytest.mark.parametrize(
    ("parallelism", "num_gpus", "relays_kv"),
    [("tensor", 2, False), ("tensor", 4, False), ("pipeline", 2, False), ("pipeline", 4, False), ("tensor", 1, True)],
)
def test_the_pipeline_on_its_engine_reserves_what_the_model_says(tier, hidden, parallelism, num_gpus, relays_kv):
    """On no GPU more than the model says, on the fullest hardly less, and in host memory for all of them together."""
    room = ROOM | {device_tier(rank): 10**12 for rank in range(num_gpus)}
    free = Roofline(lanes={kind: LaneCost() for kind in LaneKind})
    on = SimulatedMachine(capacities_bytes=room, costs=free, host_bytes_s=float("inf"))
    engine = assemble_engine(
        on, PlannedModel(SPEC), num_gpus=num_gpus, kv_bytes=40 * 10**9, block_size=16, sequences=[],
        eos_token_id=None, weights_tier=tier, parallelism=parallelism,
    )  # fmt: skip
    stages = num_gpus if parallelism == "pipeline" else 1
    known = deployment_of(engine, num_stages=stages)
    storage = replace(known.storage, prefill_hidden_tier=hidden, relays_kv=relays_kv)
    deployment = replace(known, shape=replace(SHAPE, num_requests=5000), storage=storage)
    share = 3 * known.storage.resident_step
    chosen = policy(resident_weights=share, gpu_attention=True)
    rates = Rates(gpu=LEVEL, cpu_attention=LEVEL, cpu_ffn=LEVEL, h2d_bytes_s=1.0, d2h_bytes_s=1.0)
    planned = OffloadPlan(policy=chosen, cost=CostModel(deployment=deployment, rates=rates))
    MicroBatchPipeline(
        engine, gpu_attention, planned.memory, num_pages=3, resident_share=share, packet_bytes=10**9,
        stages=stages > 1,
    )  # fmt: skip
    held = {name: sum(pools.values()) for name, pools in held_bytes(deployment, chosen).items()}
    used = {name: one.used_bytes for name, one in on.tiers.items()}
    ends = used["device"] - min(used[device_tier(rank)] for rank in range(num_gpus))
    devices = [used[device_tier(rank)] for rank in range(num_gpus)]
    assert max(devices) <= held["device"] <= max(devices) + 300_000
    assert ends <= known.sizes.device_ends_bytes
    for name in ("pinned", "host"):
        rounding = (40 * 10**9 // 10**4 if name == "pinned" else 0) + 300_000
        assert used[name] <= held[name] <= used[name] + rounding, name
    assert used["host" if tier == "host" else "pinned"] >= PlannedModel(SPEC).spec.model_bytes


def test_mixtral_by_hand():
    """S1 of the paper with a policy of Table 5; bfloat16, h = 4096, 32 layers of 8 experts."""
    deployment = Deployment(spec=SPEC, sizes=WeightSizes.of_spec(SPEC), shape=SHAPE, capacities_bytes=ROOM)
    chosen = policy(resident_weights=0.25)
    held = held_bytes(deployment, chosen)
    layer = 2 * (4096 * (2 * 4096 + 2 * 1024) + 2 * 4096 + 4096 * 8 + 8 * 3 * 4096 * 14336)
    ends = 2 * (2 * 32000 * 4096 + 4096)
    assert held["host"]["weights"] == 32 * layer + ends
    assert held["device"]["embedding and head"] == ends
    assert held["device"]["resident weights"] == 32 * layer // 4
    assert held["device"]["weight buffer"] == 2 * layer * 3 // 4 == held["pinned"]["weight staging"]
    assert held["pinned"]["kv cache"] == pytest.approx(504 * (77 + 127 + 7.5) * 32 * 2 * 1024 * 2, abs=1)
    tokens = 504 * 77 + 36 * 77
    assert held["device"]["hidden states"] == tokens * 4096 * 2


def test_resident_kv_moves_from_host_to_device():
    deployment = Deployment(spec=SPEC, sizes=WeightSizes.of_spec(SPEC), shape=SHAPE, capacities_bytes=ROOM)
    kv = [held_bytes(deployment, policy(gpu_attention=True, resident_kv=share)) for share in (0.0, 0.5, 1.0)]
    whole = kv[0]["pinned"]["kv cache"]
    assert [one["device"]["kv cache"] for one in kv] == pytest.approx([0, whole / 2, whole], abs=1)
    assert [one["pinned"]["kv cache"] for one in kv] == pytest.approx([whole, whole / 2, 0], abs=1)


def test_experts_on_the_cpu_stay_in_host_memory():
    deployment = Deployment(spec=SPEC, sizes=WeightSizes.of_spec(SPEC), shape=SHAPE, capacities_bytes=ROOM)
    held = held_bytes(deployment, policy(gpu_ffn=False, resident_weights=1.0))
    experts = 8 * 3 * 4096 * 14336 * 2
    assert held["device"]["weight buffer"] == 2 * SPEC.layer_bytes, "prefill brings whole layers, two at a time"
    assert held["device"]["resident weights"] == 32 * (SPEC.layer_bytes - experts)
    assert held["pinned"]["experts' rows"] == 504 * (4096 * (2 + 4) + 2 * (8 + 4))
    streamed = held_bytes(deployment, policy(gpu_ffn=False))["device"]
    assert streamed["weight buffer"] == 2 * (2 * SPEC.layer_bytes - experts)


def test_each_tier_has_to_hold_its_part_and_ram_both():
    deployment = Deployment(spec=SPEC, sizes=WeightSizes.of_spec(SPEC), shape=SHAPE, capacities_bytes=ROOM)
    held = {tier: sum(pools.values()) for tier, pools in held_bytes(deployment, policy()).items()}
    assert held["ram"] == held["pinned"] + held["host"]
    for tier, nbytes in held.items():
        exact = replace(deployment, capacities_bytes=ROOM | {tier: nbytes})
        assert fits(exact, policy())
        short = replace(deployment, capacities_bytes=ROOM | {tier: nbytes - 1})
        assert shortfalls(short, policy()) == {tier: 1}
    given = replace(deployment, storage=Storage(kv_cache_bytes=10**9))
    assert set(shortfalls(given, policy())) == {"kv cache"}


def test_a_limit_cuts_the_prefill_of_a_micro_batch_into_parts():
    deployment = Deployment(spec=SPEC, sizes=WeightSizes.of_spec(SPEC), shape=SHAPE, capacities_bytes=ROOM)
    limited = replace(deployment, storage=Storage(prefill_limit_tokens=1000))
    assert pool_sizes(deployment, policy()).largest == 36 * 77
    assert pool_sizes(limited, policy()).largest == 1000
    longest = replace(deployment, storage=Storage(prefill_limit_tokens=10))
    assert pool_sizes(longest, policy()).largest == 418, "the longest prompt goes in one piece"
    short = replace(longest, shape=WorkloadShape.of_lengths(5, 128, longest_prompt=20, num_requests=1000))
    assert pool_sizes(short, policy()).largest == 36, "a decode micro-batch does not go in parts"
    assert pool_sizes(short, policy()).in_attention == 4 * 36, "one before and behind attention each, two ahead in it"
