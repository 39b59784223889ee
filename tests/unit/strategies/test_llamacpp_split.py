"""llama.cpp's split: who gets a slot, how passes are cut, and how device memory is divided."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.config import ConfigError
from harness.engine.engine import Engine
from harness.engine.limits import SLACK_BYTES
from harness.settings import load_strategy
from strategies.llamacpp_split.config import DeviceWeights
from strategies.llamacpp_split.planner import Policy, plan_split
from strategies.llamacpp_split.scheduler import Slots
from tests.composing import composed
from tests.unit.model.test_components import spec_of
from tests.unit.strategies.driving import FakeKV, Workload, check_conservation, check_first_admissions, drive, workloads
from tests.unit.strategies.test_offload_planner import engine

LAYER_EXPERTS_BYTES = 8 * 3 * 4096 * 14336 * 2  # of Mixtral-8x7B
EXPERT_BYTES = LAYER_EXPERTS_BYTES // 8


@settings(max_examples=200)
@given(workloads(), st.integers(1, 6), st.integers(1, 50), st.integers(1, 50))
def test_slots_are_filled_in_order_and_passes_are_cut_between_sequences(load, num_slots, batch, micro_batch):
    kv, sequences, plans = FakeKV(load.num_blocks, load.block_size), load.sequences(), []
    limits = {"num_slots": num_slots, "batch_tokens": batch, "micro_batch_tokens": micro_batch}
    scheduler = Slots(sequences, kv.allocator, max_tokens=load.max_pass_tokens, **limits)
    next_pass = scheduler.next_pass

    def noted():
        if plan := next_pass():
            plans.append(plan)
            cuts.append([[(s, len(s.pending_ids())) for s in group] for group in plan.micro_batches])
        return plan

    cuts: list[list] = []
    scheduler.next_pass = noted
    record = drive(scheduler, kv, sequences, load)
    check_conservation(record, load, lambda s: too_large(load, s))
    check_first_admissions(record)
    for plan, one, cut in zip(plans, record.passes, cuts, strict=True):
        assert one.decode == one.running_before, "every slot that generates gets its token"
        assert len(plan.sequences) <= num_slots
        assert len(one.prefill) <= 1 or len(one.decode) + sum(one.prefill_tokens) <= batch
        assert [s for group in cut for s, _ in group] == [*plan.decode, *plan.prefill]
        sizes = [sum(n for _, n in group) for group in cut]
        assert all(size <= micro_batch or len(group) == 1 for size, group in zip(sizes, cut, strict=True))
        following = [group[0][1] for group in cut[1:]]
        assert all(size + n > micro_batch for size, n in zip(sizes, following, strict=False)), "cut too early"
        if one.unfinished and one.queue_head is not None and not one.prefill:
            head = sequences[one.queue_head]
            full = len(plan.sequences) == num_slots
            assert full or kv.allocator.blocks_for(head.max_tokens) > kv.allocator.num_blocks - held(load, one)


def held(load: Workload, one) -> int:
    """The blocks set aside for those who run: for the whole of each request."""
    requests = [load.requests[number] for number in (*one.prefill, *one.decode)]
    return sum(-(-(prompt + new - 1) // load.block_size) for prompt, new, _ in requests)


def too_large(load: Workload, sequence) -> bool:
    blocks = -(-sequence.max_tokens // load.block_size)
    return blocks > load.num_blocks or sequence.prompt_len > load.max_pass_tokens


def planned(on: Engine, **changes) -> Policy:
    _, config = load_strategy({**composed("strategy=llamacpp_split")["strategy"], **changes})
    return plan_split(config, on)


def with_device(gb: float, prompts: list[int], *, new: int = 32, spec=None) -> Engine:
    given = engine(prompts, new=new, tier="pinned", **({} if spec is None else {"spec": spec}))
    given.machine.tiers["device"].capacity_bytes = int(gb * 1e9)
    return given


def test_more_memory_leaves_fewer_layers_to_the_host():
    found = [planned(with_device(gb, [100] * 8)).cpu_moe_layers for gb in (5, 8, 12, 24, 48, 80, 96)]
    assert found == sorted(found, reverse=True)
    assert (found[0], found[-1]) == (32, 0)
    assert len(set(found)) == len(found)


def test_the_least_number_of_layers_is_chosen_to_the_byte():
    """What the plan needs, and one byte less."""
    on = with_device(24, [100] * 8)
    device, layers = on.machine.tiers["device"], planned(on).cpu_moe_layers
    load_strategy(composed("strategy=llamacpp_split")["strategy"]).build(on)
    taken_bytes = device.used_bytes
    assert device.capacity_bytes - taken_bytes < LAYER_EXPERTS_BYTES, "another layer's experts fit"
    for spare_bytes, expected in ((0, layers), (-1, layers + 1)):
        again = with_device(24, [100] * 8)
        again.machine.tiers["device"].capacity_bytes = taken_bytes + SLACK_BYTES + spare_bytes
        assert planned(again).cpu_moe_layers == expected


def test_what_is_built_takes_what_was_planned():
    on = with_device(24, [100] * 8)
    loaded = load_strategy(composed("strategy=llamacpp_split", "strategy.cpu_moe_layers=30")["strategy"])
    loaded.build(on)
    held = on.machine.tiers["device"].holders()
    assert held["resident experts"] == 2 * LAYER_EXPERTS_BYTES
    assert held["copies of experts"] == 3 * EXPERT_BYTES, "a third of eight experts, rounded up"
    stated = sum(DeviceWeights(on).bytes_with(30, copies=True).values())
    assert stated == sum(held[name] for name in ("resident experts", "copies of experts", "all layers without experts"))
    assert sum(loaded.config.least_weight_bytes(on).values()) == stated - held["resident experts"]


def test_the_cache_holds_the_longest_request_in_every_slot():
    policy = planned(with_device(24, [100, 385, 20, 30, 40, 50], new=32))
    assert (policy.slots, policy.context_tokens) == (4, 4 * 416)
    assert policy.max_tokens == 512
    assert planned(with_device(24, [100, 385])).context_tokens == 2 * 416, "no more slots than requests"
    assert planned(with_device(24, [700, 20]), micro_batch_tokens=64).max_tokens == 700
    assert planned(with_device(24, [20] * 2, new=4)).max_tokens == 64, "not more than the cache holds"


def test_more_slots_take_the_memory_of_experts():
    found = [planned(with_device(24, [400] * 300), slots=slots).cpu_moe_layers for slots in (1, 100, 200)]
    assert found[0] < found[1] < found[2]


def test_a_cache_that_cannot_hold_all_slots_takes_what_there_is():
    """With the experts of all layers in host memory; then requests wait for blocks."""
    policy = planned(with_device(6, [400] * 300), slots=300)
    assert policy.cpu_moe_layers == 32
    assert 432 < policy.context_tokens < 300 * 432
    assert planned(with_device(6, [400, 400_000]), slots=2).context_tokens == 2 * 432, (
        "nobody waits for what cannot run"
    )


def test_without_copies_there_is_no_room_for_them():
    with_copies, without = (planned(with_device(24, [100] * 8), offload_min_tokens=least) for least in (32, None))
    assert (with_copies.copied_experts, without.copied_experts) == (3, 0)
    assert with_copies.cpu_moe_layers in (without.cpu_moe_layers, without.cpu_moe_layers + 1)


def test_layers_are_counted_from_the_first_dense_ones_included():
    spec = spec_of("deepseek-v2-lite")
    on = with_device(8, [100] * 4, spec=spec)
    weights = DeviceWeights(on)
    assert not any("copies" in name for name in weights.bytes_with(1, copies=True)), "the first layer has no experts"
    assert any("copies" in name for name in weights.bytes_with(2, copies=True))


def test_a_request_that_does_not_fit_hides_no_other():
    """A prompt of 40,000 tokens, whose activations the device has no room for, needs fewer blocks than the other."""
    alone, both = with_device(12, [100], new=41_000), with_device(12, [40_000, 100], new=1)
    both.sequences[1:] = alone.sequences
    assert planned(both, slots=1) == planned(alone, slots=1)
    assert planned(alone, slots=1).context_tokens >= 41_099


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context_tokens": 10**7}, r"strategy.context_tokens: must be at most \d+, which fill the device, or null$"),
        ({"cpu_moe_layers": 0}, r"strategy.cpu_moe_layers: must be at least 2\d on this device, or null, got 0$"),
    ],
)
def test_what_does_not_fit_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message) as refused:
        planned(with_device(24, [100] * 8), **changes)
    if "cpu_moe_layers" in changes:
        least = int(re.findall(r"least (\d+)", str(refused.value))[0])
        assert planned(with_device(24, [100] * 8), cpu_moe_layers=least).cpu_moe_layers == least
        with pytest.raises(ConfigError, match=f"at least {least} "):
            planned(with_device(24, [100] * 8), cpu_moe_layers=least - 1)
    if "context_tokens" in changes:
        most = int(re.findall(r"\d+", str(refused.value))[0])
        assert planned(with_device(24, [100] * 8), context_tokens=most).context_tokens == most
        with pytest.raises(ConfigError, match=f"at most {most},"):
            planned(with_device(24, [100] * 8), context_tokens=most + 1)


@pytest.mark.parametrize(
    ("name", "value", "valid"),
    [
        ("slots", 0, ">= 1, got 0"),
        ("batch_tokens", 0, ">= 1, got 0"),
        ("micro_batch_tokens", 0, ">= 1, got 0"),
        ("cpu_moe_layers", -1, ">= 0 or null, got -1"),
        ("offload_min_tokens", 0, ">= 1 or null, got 0"),
        ("context_tokens", 0, ">= 1 or null, got 0"),
        ("packet_mb", 0.0, "between 0.001"),
    ],
)
def test_bad_settings_are_refused(name, value, valid):
    with pytest.raises(ConfigError, match=valid) as refused:
        load_strategy({**composed("strategy=llamacpp_split")["strategy"], name: value})
    assert refused.value.field.endswith(name)
