"""MoE-Lightning's Eq. 12-14 by hand, and the predictions made from them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.model.sharding import shard_spec
from strategies.common.workload_shape import WorkloadShape
from strategies.offloading.planning.cost import CostModel, OpSeconds, Rates, SizedFlops
from strategies.offloading.planning.hrm import Level
from strategies.offloading.planning.memory import Deployment, Storage, Switches, WeightSizes
from strategies.offloading.planning.policy import Policy
from strategies.offloading.planning.prediction import predict
from tests.unit.model.test_components import spec_of

SPEC = spec_of("mixtral-8x7b")
SHAPE = WorkloadShape.of_lengths(418, 128, longest_prompt=418, num_requests=504)
DEPLOYMENT = Deployment(
    spec=SPEC, sizes=WeightSizes.of_spec(SPEC), shape=SHAPE, capacities_bytes={}, storage=Storage(weights_tier="pinned")
)
RATES = Rates(
    gpu=Level(name="gpu", flops_s=40e12, bytes_s=240e9),
    cpu_attention=Level(name="cpu", flops_s=560e9, bytes_s=45e9),
    cpu_ffn=Level(name="cpu", flops_s=560e9, bytes_s=73e9),
    h2d_bytes_s=12e9,
    d2h_bytes_s=12e9,
    pin_bytes_s=36e9,
)
COST = CostModel(deployment=DEPLOYMENT, rates=RATES)
LAYER = SPEC.layer_bytes
EXPERTS = 8 * 3 * 4096 * 14336 * 2
KV = 2 * 1024 * 2  # of a token and layer
CONTEXT = 418 + 64


def policy(**changes) -> Policy:
    chosen = {"batch_size": 504, "micro_batch_size": 36, "gpu_attention": False, "gpu_ffn": True}
    return Policy(**{**chosen, "resident_weights": 0.0, "resident_kv": 0.0, **changes})


def decode(cost: CostModel = COST, **changes) -> dict[str, float]:
    chosen = policy(**changes)
    return cost.decode(Switches.of(chosen)).by_resource(chosen)


def test_weights_and_attention_results_cross_the_link():
    assert decode(resident_weights=0.25)["link"] == pytest.approx((0.75 * LAYER + 504 * 4096 * 2) / 12e9)


def test_the_cpu_reads_the_cache():
    """4 queries a key: 2 FLOP per byte of bfloat16, far below the CPU's 12."""
    assert decode()["cpu"] == pytest.approx(504 * CONTEXT * KV / 45e9)


def test_products_are_as_fast_as_they_were_measured_at_the_policys_sizes():
    """The roof of FLOP/s is another one for each kind of work; that of bytes/s stays."""
    sized = SizedFlops(decode=2e12, prefill=20e12, prefill_attention=5e12)
    cost = replace(COST, rates=replace(RATES, sized=sized))
    assert cost.rates.extends_paper and not RATES.extends_paper
    assert decode(cost)["gpu"] == pytest.approx(504 * SPEC.flops_per_token_layer / 2e12)
    assert decode(replace(cost, rates=replace(cost.rates, sized=replace(sized, decode=1e18)))) == decode()
    assert decode(cost, gpu_ffn=False) == decode(gpu_ffn=False), "projections alone were not measured"
    chosen = policy()
    found = cost.prefill(Switches.of(chosen)).by_resource(chosen)["gpu"]
    pairs = 504 * 418 * 419 / 2
    tokens_s = 504 * 418 * SPEC.flops_per_token_layer / 20e12
    assert found == pytest.approx(tokens_s + pairs * SPEC.prefill_pair_flops / 5e12, rel=1e-3)


def test_every_micro_batch_reads_the_weights_that_its_tokens_reach():
    reached = LAYER - EXPERTS * 0.75**36
    assert decode()["gpu"] == pytest.approx(14 * reached / 240e9)
    few = decode(micro_batch_size=2, batch_size=28)["gpu"]
    assert few == pytest.approx(14 * (LAYER - EXPERTS * 0.75**2) / 240e9)


def test_with_many_tokens_the_gpu_computes():
    flops = 2000 * 2 * (4096 * (2 * 4096 + 2 * 1024) + 4096 * 8 + 2 * 3 * 4096 * 14336)
    assert decode(batch_size=4000, micro_batch_size=2000)["gpu"] == pytest.approx(2 * flops / 40e12)


def test_with_attention_on_the_gpu_the_cache_crosses_the_link():
    busy = decode(gpu_attention=True, resident_kv=0.5)
    assert busy["link"] == pytest.approx((LAYER + 252 * CONTEXT * KV) / 12e9)
    assert busy["gpu"] == pytest.approx(14 * (LAYER - EXPERTS * 0.75**36) / 240e9 + 504 * CONTEXT * KV / 240e9)
    assert "cpu" not in busy


def test_who_has_a_cache_on_the_device_is_attended_to_there():
    """Half of the sequences: half of the CPU's attention, of queries and of results, and no new keys over the link."""
    busy, without = decode(resident_kv=0.5), decode()
    assert busy["cpu"] == pytest.approx(without["cpu"] / 2)
    assert busy["gpu"] - without["gpu"] == pytest.approx(252 * CONTEXT * KV / 240e9)
    assert busy["offload"] == pytest.approx(252 * (KV + 4096 * 2) / 12e9)
    assert busy["link"] == pytest.approx((LAYER + 252 * 4096 * 2) / 12e9)


def test_experts_on_the_cpu_stay_off_the_link():
    busy = decode(gpu_ffn=False)
    assert busy["link"] == pytest.approx((LAYER - EXPERTS + 504 * 4096 * (2 + 4)) / 12e9)
    assert busy["offload"] == pytest.approx(504 * (KV + 4096 * 2 + 4096 * 2 + 2 * 12) / 12e9)
    attention_s, flops = 504 * CONTEXT * KV / 45e9, 504 * 2 * 2 * 3 * 4096 * 14336
    experts_s = max(14 * EXPERTS * (1 - 0.75**36) / 73e9, flops / 560e9)
    assert busy["cpu"] == pytest.approx(attention_s + experts_s)


def test_pageable_weights_are_staged():
    staged = replace(COST, deployment=replace(DEPLOYMENT, storage=Storage(weights_tier="host")))
    assert "pin" not in decode()
    assert decode(staged, resident_weights=0.5)["pin"] == pytest.approx(LAYER / 2 / 36e9)


WITH_OPS = replace(COST, rates=replace(RATES, op_s=OpSeconds(gpu=1.0, cpu=100.0, h2d=1e4, d2h=1e6)))


@pytest.mark.parametrize(
    ("changes", "gpu", "cpu", "h2d"),
    [
        ({}, 4, 2, 1),  # QKV, O and router, experts, sum; new keys, attention; results
        ({"gpu_attention": True}, 5, 1, 1),
        ({"gpu_ffn": False}, 3, 3, 2),  # all experts are one op
    ],
)
def test_every_op_adds_its_fixed_cost_to_its_lane(changes, gpu, cpu, h2d):
    """Beside them the link has a page of weights for each of the 14 micro-batches."""
    busy, without = decode(WITH_OPS, **changes), decode(**changes)
    assert busy["gpu"] - without["gpu"] == pytest.approx(14 * gpu)
    assert busy["cpu"] - without.get("cpu", 0.0) == pytest.approx(14 * cpu * 100)
    assert busy["link"] - without["link"] == pytest.approx((14 * h2d + 14) * 1e4)
    assert busy["offload"] - without["offload"] == pytest.approx(14 * h2d * 1e6)


def test_weights_as_one_block_are_one_op():
    busy, without = (decode(replace(cost, overlap="weights apart"))["link"] for cost in (WITH_OPS, COST))
    assert busy - without == pytest.approx((14 + 1) * 1e4)


def test_a_prefill_has_its_ops_too():
    chosen = policy()
    busy, without = (cost.prefill(Switches.of(chosen)).by_resource(chosen) for cost in (WITH_OPS, COST))
    assert busy["gpu"] - without["gpu"] == pytest.approx(14 * 5)
    assert busy["cpu"] == pytest.approx(14 * 100)
    assert busy["offload"] - without["offload"] == pytest.approx(14 * 1e6)


def test_all_that_crosses_host_memory_shares_its_roof():
    """Staged weights three times; the CPU reads the cache, and new keys and values are copied into it."""
    rates = replace(RATES, host_bytes_s=73e9)
    pinned = decode(replace(COST, rates=rates))["host memory"] * 73e9
    cached = 504 * CONTEXT * KV
    assert pinned == pytest.approx(LAYER + 504 * 4096 * 2 + 504 * (KV + 4096 * 2) + cached + 504 * 2 * KV)
    storage = Storage(weights_tier="host")
    staged = decode(replace(COST, rates=rates, deployment=replace(DEPLOYMENT, storage=storage)))["host memory"] * 73e9
    assert staged - pinned == pytest.approx(2 * LAYER)
    assert "host memory" not in decode()


def test_gpus_meet_at_the_hosts_memory():
    """Four that share layers have four links, and the same hidden states."""
    quarter = shard_spec(SPEC, 4)
    storage = Storage(weights_tier="host", prefill_hidden_tier="pinned")
    deployment = replace(
        DEPLOYMENT, spec=quarter, sizes=WeightSizes.of_spec(quarter), num_gpus=4, storage=storage
    )  # fmt: skip
    cost = replace(COST, deployment=deployment, rates=replace(RATES, peer_bytes_s=10e9, host_bytes_s=73e9))
    chosen = policy()
    crossed = cost.prefill(Switches.of(chosen)).by_resource(chosen)["host memory"] * 73e9
    tokens, hidden = 504 * 418, 504 * 418 * 4096 * 2
    assert crossed == pytest.approx(4 * 3 * quarter.layer_bytes + tokens * KV * (1 + 2) + (4 + 1) * hidden)


def test_a_prediction_says_which_equations_it_is_by():
    chosen = policy()
    assert "(Eq. 12-14)" in predict(COST, chosen).model
    extended = predict(WITH_OPS, chosen)
    assert "(Eq. 12-14, with the cost of ops and host memory)" in extended.model
    sized = replace(WITH_OPS.rates, sized=SizedFlops(decode=1e12, prefill=1e12, prefill_attention=1e12))
    assert "host memory, at the rates of its sizes)" in predict(replace(WITH_OPS, rates=sized), chosen).model
    assert extended.throughput_tok_s < predict(COST, chosen).throughput_tok_s


def test_resources_work_side_by_side_or_as_the_schedule_lets_them():
    chosen = policy()
    switches = Switches.of(chosen)
    side_by_side = COST.decode(switches)
    busy = side_by_side.by_resource(chosen)
    assert side_by_side.seconds(chosen) == max(busy.values()) == busy["link"]
    assert side_by_side.bottleneck(chosen) == "h2d (weights, link)"
    weights_s = LAYER / 12e9
    apart = replace(COST, overlap="weights apart").decode(switches).by_resource(chosen)
    assert apart == pytest.approx(busy | {"gpu": weights_s + busy["gpu"], "cpu": weights_s + busy["cpu"]})
    in_turn = replace(COST, overlap="nothing").decode(switches).by_resource(chosen)
    assert in_turn["gpu and cpu in turn"] == pytest.approx(weights_s + busy["gpu"] + busy["cpu"])
    prefill = [replace(COST, overlap=o).prefill(switches).seconds(chosen) for o in ("all", "weights apart", "nothing")]
    assert len(set(prefill)) == 1, "nothing but weights crosses the link to the GPU"


@pytest.mark.parametrize("overlap", ["weights apart", "nothing"])
def test_a_gpu_that_waits_for_weights_is_bound_by_the_link(overlap):
    """The GPU's time contains the transfer of weights then, but the GPU has less work than the link."""
    chosen, alone = policy(), decode()
    assert alone["gpu"] < alone["link"]
    times = replace(COST, overlap=overlap).decode(Switches.of(chosen))
    assert max(times.by_resource(chosen), key=times.by_resource(chosen).get) != "link", "a resource that waits as well"
    assert times.bottleneck(chosen) == "h2d (weights, link)"
    slow = replace(COST, overlap=overlap, rates=replace(RATES, gpu=replace(RATES.gpu, bytes_s=12e9 / 4)))
    assert slow.decode(Switches.of(chosen)).bottleneck(chosen) == "gpu (ffn, memory)"


def test_prefill_is_bound_by_arithmetic_and_sends_the_cache_to_the_host():
    chosen = policy()
    busy = COST.prefill(Switches.of(chosen)).by_resource(chosen)
    tokens = 504 * 418
    flops = tokens * 2 * (4096 * (2 * 4096 + 2 * 1024) + 4096 * 8 + 2 * 3 * 4096 * 14336)
    flops += 504 * 418 * (419 / 2) * 4 * 4096
    assert busy["gpu"] == pytest.approx(flops / 40e12)
    assert busy["offload"] == pytest.approx(tokens * KV / 12e9)
    assert busy["link"] == pytest.approx(LAYER / 12e9)


def test_the_prediction_adds_up_prefill_and_decode_of_all_batches():
    chosen = policy()
    switches = Switches.of(chosen)
    batch_s = 32 * (COST.prefill(switches).seconds(chosen) + 127 * COST.decode(switches).seconds(chosen))
    assert predict(COST, chosen).throughput_tok_s == pytest.approx(504 * 128 / batch_s)
    twice = replace(COST, deployment=replace(DEPLOYMENT, shape=replace(SHAPE, num_requests=1008)))
    assert predict(twice, chosen).throughput_tok_s == pytest.approx(504 * 128 / batch_s)
    left = replace(COST, deployment=replace(DEPLOYMENT, shape=replace(SHAPE, num_requests=510)))
    assert predict(left, chosen).throughput_tok_s < 0.6 * 504 * 128 / batch_s, "a batch of 6 streams all weights too"


def test_gpus_that_share_a_layer_divide_the_link_and_share_the_cpu():
    """Two with half of everything each: the link brings half, the CPU attends for both, sums cross between them."""
    half = shard_spec(SPEC, 2)
    deployment = replace(DEPLOYMENT, spec=half, sizes=WeightSizes.of_spec(half), num_gpus=2)
    two = decode(replace(COST, deployment=deployment, rates=replace(RATES, peer_bytes_s=10e9)))
    one = decode()
    assert two["cpu"] == pytest.approx(one["cpu"])
    assert two["link"] == pytest.approx((half.layer_bytes + 504 * 2048 * 2) / 12e9)
    sums_s = 2 * (2 * 504 * 4096 * 2 / 2) / 10e9
    assert two["gpu"] == pytest.approx(14 * (half.layer_bytes - EXPERTS / 2 * 0.75**36) / 240e9 + sums_s)


def test_one_thread_that_copies_and_launches_adds_up_both():
    """Weights and relayed keys and values at the staging copies' rate, and then the GPU; the CPU's part in decode."""
    storage = Storage(weights_tier="host", relays_kv=True)
    thread = replace(COST, overlap="one thread", deployment=replace(DEPLOYMENT, storage=storage))
    on_gpu, apart = decode(thread, gpu_attention=True), decode(gpu_attention=True)
    copied_s = (LAYER + 504 * CONTEXT * KV) / 36e9
    assert on_gpu["pin"] == pytest.approx(copied_s)
    assert on_gpu["copies, gpu and cpu in turn"] == pytest.approx(copied_s + apart["gpu"])
    on_cpu, beside = decode(thread), decode()
    assert on_cpu["copies, gpu and cpu in turn"] == pytest.approx(LAYER / 36e9 + beside["gpu"] + beside["cpu"])
    chosen = policy()
    prefill = thread.prefill(Switches.of(chosen)).by_resource(chosen)
    alone = COST.prefill(Switches.of(chosen)).by_resource(chosen)
    assert prefill["copies, gpu and cpu in turn"] == pytest.approx(LAYER / 36e9 + alone["gpu"])


def test_the_cpu_attends_for_one_stage_while_the_gpu_of_another_computes():
    """A stage waits for the CPU's work on its own batch; the CPU works for the batches of all stages."""
    four = replace(COST, overlap="nothing", deployment=replace(DEPLOYMENT, num_gpus=4, blocks_in_flight=4))
    one, staged = decode(replace(COST, overlap="nothing")), decode(four)
    assert staged["gpu and cpu in turn"] == pytest.approx(one["gpu and cpu in turn"])
    assert "cpu" not in one and staged["cpu"] == pytest.approx(4 * decode()["cpu"])


def test_stages_each_have_a_batch_in_flight():
    """Each as fast as a machine of its own with all layers and its share of the requests."""
    own = replace(DEPLOYMENT, shape=replace(SHAPE, num_requests=126))
    staged = replace(own, num_gpus=4, blocks_in_flight=4)
    chosen = policy(batch_size=126, gpu_attention=True)
    alone, four = predict(replace(COST, deployment=own), chosen), predict(replace(COST, deployment=staged), chosen)
    assert four.throughput_tok_s == pytest.approx(4 * alone.throughput_tok_s)
    fewer = predict(replace(COST, deployment=replace(staged, num_requests=4 * 126 - 3)), chosen)
    assert fewer.throughput_tok_s == pytest.approx(four.throughput_tok_s * 501 / 504), "of three batches one lacks one"
