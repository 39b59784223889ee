"""The policy search against brute force, and on the paper's machines."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from harness.config import ConfigError
from strategies.common.workload_shape import WorkloadShape
from strategies.offloading.planning import program as policy_program
from strategies.offloading.planning import search as policy_search
from strategies.offloading.planning.cost import CostModel, OpSeconds, Rates
from strategies.offloading.planning.hrm import Level
from strategies.offloading.planning.memory import (
    Deployment,
    Storage,
    WeightSizes,
    held_bytes,
    kv_bytes_per_sequence,
)
from strategies.offloading.planning.policy import GivenPolicy, Policy
from strategies.offloading.planning.program import Program
from strategies.offloading.planning.search import search
from strategies.offloading.planning.task import Search
from tests.unit.engine.fakes import SPEC
from tests.unit.model.test_components import spec_of

SIZES = WeightSizes.of_spec(SPEC)
SHARES = (0.0, 0.25, 0.5, 1.0)
rate = st.sampled_from((1e6, 1e7, 1e8, 1e9))
op_s = st.sampled_from((0.0, 0.0, 1e-6, 1e-4, 1e-2))


def level(draw) -> Level:
    return Level(name="any", flops_s=10 * draw(rate), bytes_s=draw(rate))


@st.composite
def searches(draw) -> Search:
    """Small enough for brute force; memory from too little to plenty."""
    shape = WorkloadShape.of_lengths(
        draw(st.integers(1, 60)), draw(st.integers(1, 30)), longest_prompt=draw(st.integers(60, 90)),
        num_requests=draw(st.integers(1, 9)), block_tokens=4,
    )  # fmt: skip
    storage = Storage(
        weights_tier=draw(st.sampled_from(("host", "pinned"))),
        prefill_hidden_tier=draw(st.sampled_from(("device", "pinned"))),
        kv_cache_bytes=draw(st.one_of(st.none(), st.integers(10_000, 500_000))),
        resident_step=draw(st.sampled_from((None, None, 0.25))),
    )
    weights = SIZES.layers_bytes + SIZES.ends_bytes
    capacities = {
        "device": int(weights * draw(st.floats(0.5, 2.5))),
        "pinned": int(weights * draw(st.floats(0.7, 3.0))),
        "host": int(weights * draw(st.sampled_from((0.9, 1.1)))),
    }
    deployment = Deployment(spec=SPEC, sizes=SIZES, shape=shape, capacities_bytes=capacities, storage=storage)
    rates = Rates(
        gpu=level(draw), cpu_attention=level(draw), cpu_ffn=level(draw),
        h2d_bytes_s=draw(rate), d2h_bytes_s=draw(rate), pin_bytes_s=draw(st.one_of(st.none(), rate)),
        op_s=OpSeconds(gpu=draw(op_s), cpu=draw(op_s), h2d=draw(op_s), d2h=draw(op_s)),
        host_bytes_s=draw(st.one_of(st.none(), rate)),
    )  # fmt: skip
    cost = CostModel(
        deployment=deployment, rates=rates, overlap=draw(st.sampled_from(("all", "weights apart", "nothing")))
    )
    return Search(
        cost=cost,
        given=GivenPolicy(
            batch_size=draw(st.sampled_from((None, None, None, 4))),
            micro_batch_size=draw(st.sampled_from((None, None, None, 2))),
            gpu_attention=draw(st.sampled_from((None, None, True, False))),
            gpu_ffn=draw(st.sampled_from((None, None, True, False))),
            resident_weights=draw(st.sampled_from((None, None, None, 0.5))),
            resident_kv=draw(st.sampled_from((None, None, None, 0.5))),
        ),
        min_micro_batches=draw(st.integers(1, 3)),
        max_micro_batches=draw(st.sampled_from((None, None, 3))),
    )


def filled_to_a_byte() -> Search:
    """A device of two megabytes that the best policy fills: bytes by name, each rounded up, are one too many."""
    shape = WorkloadShape.of_lengths(37, 9, longest_prompt=71, num_requests=2, block_tokens=4)
    storage = Storage(weights_tier="pinned", prefill_hidden_tier="pinned", kv_cache_bytes=12_823)
    capacities = {"device": 2_328_647, "pinned": 2_386_656}
    cpu = Level(name="any", flops_s=1e10, bytes_s=1e7)
    rates = Rates(
        gpu=Level(name="any", flops_s=1e8, bytes_s=1e7), cpu_attention=cpu, cpu_ffn=cpu, h2d_bytes_s=1e9,
        d2h_bytes_s=1e8, op_s=OpSeconds(cpu=1e-4, d2h=1e-4),
    )  # fmt: skip
    deployment = Deployment(spec=SPEC, sizes=SIZES, shape=shape, capacities_bytes=capacities, storage=storage)
    cost = CostModel(deployment=deployment, rates=rates, overlap="nothing")
    return Search(cost=cost, given=GivenPolicy(gpu_attention=False), min_micro_batches=2)


def every_policy(task: Search):
    """A coarse grid over all six numbers. Where r_w comes in steps, what is no expert stays whole or not at all."""
    has_steps = task.deployment.storage.resident_step is not None and task.given.resident_weights is None
    for batch in range(1, task.most_sequences + 1):
        for size, on_gpu, ffn in product(range(1, batch + 1), (False, True), (False, True)):
            kv_shares = {number / batch for number in (0, 1, batch // 2, batch)} | {0.5}
            for weights, kv in product((0.0, 1.0) if has_steps and not ffn else SHARES, kv_shares):
                yield Policy(
                    batch_size=batch,
                    micro_batch_size=size,
                    gpu_attention=on_gpu,
                    gpu_ffn=ffn,
                    resident_weights=weights,
                    resident_kv=kv,
                )


@settings(max_examples=80)
@given(searches())
@example(filled_to_a_byte())
def test_no_policy_of_a_grid_is_better_and_what_is_found_is_allowed(task):
    """`allows` and `rate` are the memory and cost models themselves; the search has them as rows of its programs."""
    best = max((task.rate(policy) for policy in every_policy(task) if task.allows(policy)), default=None)
    try:
        found = search(task)
    except ConfigError as error:
        assert best is None, f"{error}, although the grid has a policy"
        return
    assert task.allows(found)
    step = task.deployment.storage.resident_step
    if step is not None and task.given.resident_weights is None:
        assert math.isclose(found.resident_weights / step, round(found.resident_weights / step), abs_tol=1e-9)
    # 0.1 % for the smaller batch, and the margin in a tier's capacity.
    assert best is None or task.rate(found) >= best * (1 - 2e-3)


@settings(max_examples=25)
@given(searches(), st.floats(1.0, 3.0))
def test_more_of_everything_is_never_worse(task, factor):
    try:
        before = task.rate(search(task))
    except ConfigError:
        assume(False)
    d, r = task.deployment, task.cost.rates
    larger = replace(d, capacities_bytes={tier: int(size * factor) for tier, size in d.capacities_bytes.items()})
    faster = replace(r, h2d_bytes_s=r.h2d_bytes_s * factor)
    assert task.rate(search(replace(task, cost=replace(task.cost, deployment=larger)))) >= before * (1 - 2e-3)
    bettered = replace(task, cost=replace(task.cost, rates=faster))
    assert bettered.rate(search(bettered)) >= before * (1 - 2e-3)


@settings(max_examples=60)
@given(searches(), st.data())
def test_narrowing_keeps_all_policies_within_the_limits(task, data):
    """`limits` are what a search has put on N and the number of micro-batches, in any order."""
    most = task.most_sequences
    sizes = sorted(data.draw(st.tuples(st.integers(1, most), st.integers(1, most))))
    limits = []
    for column in data.draw(st.lists(st.sampled_from((0, 1)), max_size=3, unique=True)):
        least, largest = sorted(data.draw(st.tuples(st.integers(1, most), st.integers(1, most))))
        limits.append((column, float(least), float(largest)))
    program = Program(task, False, True, *sizes, limits=tuple(limits))
    kept = [
        (batch, size)
        for batch, size in product(range(1, most + 1), range(sizes[0], sizes[1] + 1))
        if size <= batch
        and task.given.batch_size in (None, batch)
        and task.fewest_micro_batches <= -(-batch // size) <= (task.max_micro_batches or most)
        and all(least <= (batch, -(-batch // size))[column] <= largest for column, least, largest in limits)
    ]
    narrowed = program.narrowed()
    assert narrowed is not None or not kept
    for batch, size in kept:
        assert narrowed.smallest <= size <= narrowed.largest
        low, high = narrowed._bounds
        assert low[0] <= batch <= high[0] and low[1] <= -(-batch // size) <= high[1]


@pytest.mark.parametrize(
    ("limits", "sizes"),
    [
        ([(1, 1, 1), (0, 200, 300)], (200, 300)),  # one micro-batch is as large as the batch
        ([(1, 3, 4), (0, 200, 301)], (50, 150)),
        ([(0, 200, 300)], (1, 300)),
    ],
)
def test_limits_rule_out_sizes(limits, sizes):
    task = replace(s1(), min_micro_batches=1)
    narrowed = Program(task, False, True, 1, 600, limits=tuple(limits)).narrowed()
    assert (narrowed.smallest, narrowed.largest) == sizes
    assert replace(narrowed, smallest=301, largest=600).narrowed() is None


def s1(**changes) -> Search:
    """MoE-Lightning's S1, a T4, with rates of conf/hardware/t4.yaml; prompts of MTBench padded."""
    spec = spec_of("mixtral-8x7b")
    shape = WorkloadShape.of_lengths(418, 128, longest_prompt=418, num_requests=600)
    capacities = {"device": 16 * 10**9, "pinned": 192 * 10**9, "host": 192 * 10**9, "ram": 192 * 10**9}
    deployment = Deployment(
        spec=spec, sizes=WeightSizes.of_spec(spec), shape=shape, capacities_bytes=capacities | changes
    )
    rates = Rates(
        gpu=Level(name="gpu", flops_s=41.9e12, bytes_s=239.6e9),
        cpu_attention=Level(name="cpu", flops_s=560e9, bytes_s=45e9),
        cpu_ffn=Level(name="cpu", flops_s=560e9, bytes_s=73e9),
        h2d_bytes_s=12e9, d2h_bytes_s=12e9, pin_bytes_s=36e9,
    )  # fmt: skip
    return Search(cost=CostModel(deployment=deployment, rates=rates), min_micro_batches=2)


def test_on_the_papers_machine_attention_goes_to_the_cpu_and_experts_to_the_gpu():
    """§4.2: "for our major setting"."""
    found = search(s1())
    assert (found.gpu_attention, found.gpu_ffn, found.resident_kv) == (False, True, 0.0)
    assert found.num_micro_batches >= 2


def test_a_slow_cpu_leaves_attention_to_the_gpu_where_its_memory_holds_the_cache():
    """A GPU of 40 GB beside a CPU of a tenth of the bandwidth: what weights do not need is better used for r_c."""
    deployment = s1(device=40 * 10**9).deployment
    cost = replace(s1().cost, deployment=replace(deployment, shape=replace(deployment.shape, num_requests=150)))
    slow = Level(name="cpu", flops_s=56e9, bytes_s=1e9)
    task = Search(cost=replace(cost, rates=replace(cost.rates, cpu_attention=slow)), min_micro_batches=2)
    found = search(task)
    assert found.resident_kv > 0.1
    assert task.rate(found) > 1.05 * task.rate(search(replace(task, given=GivenPolicy(resident_kv=0.0))))


def test_experts_go_to_the_cpu_where_that_is_better():
    """Few sequences behind a link of a tenth: reading experts where they lie beats bringing them."""
    task = s1()
    shape = replace(task.deployment.shape, num_requests=16)
    cost = replace(task.cost, deployment=replace(task.deployment, shape=shape))
    slow = replace(task, cost=replace(cost, rates=replace(cost.rates, h2d_bytes_s=1.2e9)))
    found = search(slow)
    assert not found.gpu_ffn
    assert slow.rate(found) > 2 * slow.rate(search(replace(slow, given=GivenPolicy(gpu_ffn=True))))


def test_costly_ops_make_larger_micro_batches():
    """As on a GPU that a core plays: what 14 micro-batches cost beside their work is worth a few resident experts."""
    task = replace(s1(), given=GivenPolicy(batch_size=504, gpu_attention=False, gpu_ffn=True))
    costly = replace(task, cost=replace(task.cost, rates=replace(task.cost.rates, op_s=OpSeconds(gpu=5e-3))))
    free, found = search(task), search(costly)
    assert found.micro_batch_size > 2 * free.micro_batch_size
    assert costly.rate(found) > 1.05 * costly.rate(free)


def test_what_is_given_stays_and_the_rest_is_searched():
    found = search(replace(s1(), given=GivenPolicy(batch_size=504, micro_batch_size=36)))
    assert (found.batch_size, found.num_micro_batches, found.gpu_attention) == (504, 14, False)
    held = sum(held_bytes(s1().deployment, found)["device"].values())
    assert held == pytest.approx(16e9, rel=1e-4), "what is left of the device holds weights"


def test_a_given_micro_batch_may_be_as_large_as_the_workload():
    """A pipeline of two micro-batches then has one sequence more than there are requests."""
    task = s1()
    deployment = replace(task.deployment, shape=replace(task.deployment.shape, num_requests=8))
    cost = replace(task.cost, deployment=deployment)
    found = search(replace(task, cost=cost, given=GivenPolicy(micro_batch_size=8), min_micro_batches=2))
    assert (found.batch_size, found.num_micro_batches) == (9, 2)


@pytest.mark.parametrize("sequences", [2, 7])
def test_a_cache_that_holds_just_so_many_sequences_holds_them(sequences):
    task = s1()
    kv_bytes = sequences * kv_bytes_per_sequence(task.deployment)
    storage = replace(task.deployment.storage, kv_cache_bytes=int(kv_bytes))
    cost = replace(task.cost, deployment=replace(task.deployment, storage=storage))
    found = search(replace(task, cost=cost, given=GivenPolicy(gpu_ffn=True, resident_kv=0.0)))
    assert found.batch_size == sequences
    storage = replace(storage, kv_cache_bytes=int(kv_bytes) - 1)
    fewer = replace(task, cost=replace(cost, deployment=replace(task.deployment, storage=storage)))
    given = GivenPolicy(batch_size=sequences, gpu_ffn=True, resident_kv=0.0)
    with pytest.raises(ConfigError, match=r"^kv_cache_gb: in whole blocks "):
        search(replace(fewer, given=given))


@pytest.fixture
def solved(monkeypatch):
    """Notes the programs that are solved. A plan is to answer in seconds, and a program takes milliseconds."""
    calls, real = [], policy_program.least
    monkeypatch.setattr(policy_program, "least", lambda *args: calls.append(args) or real(*args))
    return calls


def test_a_search_solves_few_programs(solved):
    """Each of the 600 sizes has four."""
    deployment = s1().deployment
    storage = replace(deployment.storage, resident_step=0.12)
    task = replace(s1(), cost=replace(s1().cost, deployment=replace(deployment, storage=storage)))
    found = search(task)
    assert len(solved) <= 150
    assert policy_search.better_policy(task, task.rate(found) * (1 + 2e-3)) is None


def test_a_search_does_not_learn_size_by_size_what_fills_micro_batches(solved, monkeypatch):
    """Without what looks for such sizes beforehand the same policy takes twice as many programs."""
    task = s1(device=40 * 10**9, **dict.fromkeys(("pinned", "host", "ram"), 600 * 10**9))
    shape = replace(task.deployment.shape, num_requests=2999)
    task = replace(task, cost=replace(task.cost, deployment=replace(task.deployment, shape=shape)))
    found, count = search(task), len(solved)
    monkeypatch.setattr(policy_search, "_climbed", lambda task, found: found)
    assert search(task) == found
    assert count < 0.7 * (len(solved) - count)


def test_among_many_sizes_a_rough_search_spares_most_of_the_exact_one(solved, monkeypatch):
    """Without it each size is a little better than the last, and three times as many programs lead to the same
    policy. gpt-oss-120b with most of its weights on one GPU."""
    spec = spec_of("gpt-oss-120b")
    deployment = Deployment(
        spec=spec,
        sizes=WeightSizes.of_spec(spec),
        shape=WorkloadShape.of_lengths(98, 32, longest_prompt=440, num_requests=25_000),
        capacities_bytes={"device": 192 * 10**9, "pinned": 2600 * 10**9},
        storage=Storage(weights_tier="pinned", kv_cache_bytes=200 * 10**9, resident_step=0.00757),
    )
    cpu = Level(name="cpu", flops_s=1.8e12, bytes_s=224e9)
    rates = Rates(
        gpu=Level(name="gpu", flops_s=480e12, bytes_s=4.1e12), cpu_attention=cpu, cpu_ffn=cpu, h2d_bytes_s=55e9,
        d2h_bytes_s=44e9, op_s=OpSeconds(gpu=5e-6, h2d=1e-5, d2h=1e-5), host_bytes_s=224e9,
    )  # fmt: skip
    given = GivenPolicy(gpu_attention=False, gpu_ffn=True)
    task = Search(cost=CostModel(deployment=deployment, rates=rates), given=given, min_micro_batches=2)
    found, count = search(task), len(solved)
    monkeypatch.setattr(policy_search, "_MANY_PROGRAMS", None)
    assert search(task) == found
    assert count < 0.5 * (len(solved) - count)


@pytest.mark.parametrize("most_programs", [1, 10])
def test_a_rough_search_finds_nothing_else(monkeypatch, most_programs):
    deployment = s1().deployment
    storage = replace(deployment.storage, resident_step=0.12)
    for each in (deployment, replace(deployment, storage=storage)):
        task = replace(s1(), cost=replace(s1().cost, deployment=each))
        expected = search(task)
        with monkeypatch.context() as patched:
            patched.setattr(policy_search, "_MANY_PROGRAMS", most_programs)
            assert search(task) == expected


@pytest.mark.parametrize(
    ("given", "changes", "field", "told"),
    [
        ({}, {"device": 5 * 10**9}, "hardware.device_memory_gb", "5 GB is too small: any policy needs"),
        ({}, {"ram": 90 * 10**9}, "hardware.ram_gb", "weights 93.4"),
        ({"batch_size": 5000}, {}, "hardware.ram_gb", "kv cache"),
        ({"micro_batch_size": 300}, {}, "hardware.device_memory_gb", "this policy needs"),
        ({"batch_size": 4, "micro_batch_size": 4}, {}, "strategy.policy", "pipeline"),
    ],
)
def test_what_does_not_fit_is_told_by_name(given, changes, field, told):
    with pytest.raises(ConfigError) as caught:
        search(replace(s1(**changes), given=GivenPolicy(**given)))
    assert caught.value.field == field
    assert told in caught.value.message


def test_a_smaller_batch_of_the_same_speed_is_preferred_unless_it_leaves_a_rest():
    """The link takes the same time for any batch; with one request less, a second batch would follow."""
    assert search(s1()).batch_size == 600
