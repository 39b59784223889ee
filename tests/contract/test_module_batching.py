"""MoE-Gen's pipeline gives the reference tokens with any sizes of its batches, wherever tokens accumulate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby, product

import pytest

from harness.engine.ops.experts import Expert
from tests.contract.running import (
    CAPACITIES_BYTES,
    check_tokens,
    emulated,
    engine_on,
    requests,
    run_to_end,
    shuffled,
    strategy_of,
)
from tests.contract.test_strategies import YAMLS
from tests.fake_device import cuda_machine
from tests.tiny_families import runnable, tiny_family

SMALL = {
    "attention_batch": 2,
    "prefill_attention_batch": 2,
}  # many micro-batches, slices of which most experts have more than one
POLICIES = {
    "all on the GPU": SMALL | {"cpu_attention": 0.0, "expert_batch": 1, "prefill_expert_batch": 5},
    "0.37 on the CPU": SMALL | {"cpu_attention": 0.37, "expert_batch": 3, "dense_slots": 3},
    "a tenth on the CPU": SMALL | {"cpu_attention": 0.1, "expert_slots": 1},
    "half on the CPU": SMALL | {"cpu_attention": 0.5, "on_device": False, "expert_batch": 2, "prefill_expert_batch": 7},
    "all on the CPU": SMALL | {"cpu_attention": 1.0, "on_device": False, "resident_experts": 5, "expert_slots": 3},
    "several batches": {"batch_size": 3, "prefill_batch_size": 2, "cpu_attention": 0.5, "expert_slots": 9},
    "larger than the workload": {"batch_size": 1000, "cpu_attention": 0.5, "expert_batch": 10**6, "dense_slots": 2},
    "nothing resident": {"resident_experts": 0, "on_device": False, "cpu_attention": 0.0},
    "all dense parts resident": {"dense_slots": 9, "resident_experts": 2, "cpu_attention": 1.0},
}  # fmt: skip
MACHINES = {
    "shuffled-0": lambda: shuffled(0),
    "shuffled-1": lambda: shuffled(1),
    "emulated": emulated,
    "cuda": lambda: cuda_machine(CAPACITIES_BYTES),
}


def check(machine, checkpoint, policy, work=None, *, kv_blocks=60, num_requests=8, **settings):
    values = YAMLS["moegen_h"] | {"search": False} | settings | {"policy": policy}
    work = work or requests(num_requests, vocab_size=checkpoint.spec.vocab_size, longest=40, max_new_tokens=4)
    engine = engine_on(machine, checkpoint, work, kv_blocks=kv_blocks, values=values)
    run_to_end(engine, lambda e: strategy_of(e, values))
    report = check_tokens(checkpoint, engine.sequences)
    assert report.checked == len(work)
    assert report.ok, report.first_mismatch
    return engine


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("policy", POLICIES)
def test_tokens(tiny, policy, machine):
    check(MACHINES[machine](), tiny, POLICIES[policy])


OF_FAMILIES = (
    "half on the CPU", "a tenth on the CPU", "0.37 on the CPU", "all on the CPU", "nothing resident",
    "larger than the workload",
)  # fmt: skip


@pytest.mark.parametrize("policy", OF_FAMILIES)
@pytest.mark.parametrize("variant", runnable())
def test_tokens_of_every_family(variant, policy):
    check(shuffled(runnable().index(variant)), tiny_family(variant), POLICIES[policy])


def with_a_clock() -> Iterator[object]:
    """Yield each machine, policy and family. All but one policy of each family on each machine are slow tests."""
    for (at, variant), (shift, machine) in product(enumerate(runnable()), enumerate(("emulated", "cuda"))):
        for number, policy in enumerate(OF_FAMILIES):
            is_slow = number != (at + 2 * shift) % len(OF_FAMILIES)
            yield pytest.param(variant, policy, machine, marks=[pytest.mark.slow] * is_slow)


@pytest.mark.parametrize(("variant", "policy", "machine"), with_a_clock())
def test_tokens_of_every_family_on_machines_with_a_clock(variant, policy, machine):
    check(MACHINES[machine](), tiny_family(variant), POLICIES[policy], num_requests=4)


@pytest.mark.parametrize("tenths", range(11))
def test_tokens_with_every_share_of_attention_on_the_cpu(tiny, tenths):
    check(shuffled(tenths), tiny, SMALL | {"cpu_attention": tenths / 10, "expert_batch": 2}, num_requests=10)


@pytest.mark.parametrize("variant", runnable())
def test_tokens_of_every_family_with_shares_of_attention_on_the_cpu(variant):
    """Each family has the share's ends, and two between; all shares are met."""
    at = runnable().index(variant)
    for tenths in (0, 10, 1 + at % 9, 1 + (at + 4) % 9):
        check(shuffled(at), tiny_family(variant), SMALL | {"cpu_attention": tenths / 10}, num_requests=5)


@pytest.mark.parametrize("on_device", [True, False])
def test_tokens_where_sequences_of_the_first_micro_batches_end_early(tiny, on_device):
    """What is left of them does not fit together, so that the CPU attends in more micro-batches than at first."""
    work = [replace(each, max_new_tokens=4) for each in requests(42, vocab_size=tiny.spec.vocab_size, longest=9)]
    work = [replace(each, max_new_tokens=2) if at < 21 and at % 3 == 0 else each for at, each in enumerate(work)]
    check(shuffled(1), tiny, {"attention_batch": 3, "cpu_attention": 0.5, "on_device": on_device}, work, kv_blocks=300)


@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize("variant", ["mixtral", "deepseek_v3"])
def test_tokens_with_experts_without_tokens(variant, prefetch):
    """Three tokens of a decode step choose fewer experts than a layer has."""
    machine, model, ran = shuffled(5), tiny_family(variant), []
    submit = machine.submit

    def noted(lane, op, **how):
        if isinstance(op, Expert):
            ran.append((op.layer, op.part.layout.expert))
        return submit(lane, op, **how)

    machine.submit = noted
    check(machine, model, SMALL | {"cpu_attention": 0.5}, num_requests=3, prefetch=prefetch)
    of_layers = [{expert for _, expert in layer} for _, layer in groupby(ran, key=lambda each: each[0])]
    assert of_layers and 1 < min(map(len, of_layers)) < model.spec.num_experts


@pytest.mark.parametrize(
    "settings",
    [{"padding": True}, {"prefetch": False}, {"packet_mb": 0.004}, {"kv_blocks": 24}, {"num_requests": 1}],
    ids=str,
)
def test_tokens_under_other_settings(tiny, settings):
    for on_device in (True, False):
        check(shuffled(3), tiny, {"on_device": on_device, "cpu_attention": 0.4, "attention_batch": 3}, **settings)
