"""Strategies that use several GPUs: Hugging Face's tokens, and each GPU busy with its share."""

from __future__ import annotations

from collections import defaultdict

import pytest

from harness.config import ConfigError
from harness.machine.base import CPU, HOST_KINDS, LaneKind
from harness.machine.shuffled import ShuffledMachine
from harness.memory.tiers import device_tier
from tests.contract.running import check_tokens, emulated, engine_on, requests, run_to_end, shuffled, strategy_of
from tests.contract.test_strategies import PLANNED

pytestmark = pytest.mark.usefixtures("short_probes")
TURNS = {"planning": "as_built", "policy": {"batch_size": 3, "micro_batch_size": 1, "resident_weights": 0.0}}
SEVERAL = [
    ("moelightning", {}),
    ("moelightning", {"policy": {"gpu_attention": True, "resident_weights": 0.4}}),
    ("moelightning", {"paging": False, "staging": False}),
    ("fastdecode", {}),
    ("flexgen_c", {"parallelism": "tensor", "staging": True, "padding": True}),
    ("flexgen_c", {"staging": True, "policy": {"batch_size": 3, "micro_batch_size": 1}}),
    ("flexgen_c", {"padding": True, "policy": {"resident_weights": 0.4}}),
    ("flexgen", {"parallelism": "tensor", "padding": True}),
    ("flexgen", {"staging": True, "policy": {"batch_size": 3, "micro_batch_size": 1}}),
    ("flexgen", {"policy": {"resident_weights": 0.4}}),
    ("flexgen", {"planning": "as_built", "policy": {"micro_batch_size": 1}}),
    ("flexgen", {"planning": "as_built", "policy": {"batch_size": 3, "micro_batch_size": 2, "resident_weights": 0.4}}),
    ("flexgen", {"planning": "as_built", "staging": False, "policy": {}}),
    ("flexgen_c", {"planning": "as_built", "policy": {"micro_batch_size": 2}}),
    ("flexgen_c", {"planning": "as_built", "policy": {"batch_size": 3, "micro_batch_size": 1}}),
    ("deepspeed_zero", {}),
    ("deepspeed_zero", {"prefetch": False, "batch_size": 2}),
    ("vllm_offload", {"prefetch": True, "cpu_offload_gb": 0.0002}),
]


def run(tiny, machine, name: str, change: dict, num_gpus: int, *, count=12, kv_blocks=200, longest=40):
    values = PLANNED[name] | change
    work = requests(count, vocab_size=tiny.spec.vocab_size, longest=longest, seed=6)
    engine = engine_on(machine, tiny, work, kv_blocks=kv_blocks, values=values, num_gpus=num_gpus)
    built = []

    def build(on):
        built.append(strategy_of(on, values))
        return built[0]

    run_to_end(engine, build)
    report = check_tokens(tiny, engine.sequences)
    assert report.checked == count
    assert report.ok, report.first_mismatch
    return engine, built[0]


@pytest.mark.parametrize(("name", "change"), SEVERAL)
@pytest.mark.parametrize("num_gpus", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_shuffled_machine(tiny, name, change, num_gpus):
    run(tiny, shuffled(num_gpus, num_gpus=num_gpus), name, change, num_gpus)


@pytest.mark.parametrize(
    ("name", "num_gpus", "change"),
    [
        *(("moelightning", 2, {}), ("moelightning", 4, {}), ("flexgen", 2, {}), ("flexgen_c", 2, {})),
        *(("flexgen", 2, TURNS), ("flexgen", 4, TURNS), ("flexgen_c", 2, TURNS)),
        *(("deepspeed_zero", 2, {}), ("deepspeed_zero", 4, {})),
    ],
)
def test_emulated_machine(tiny, name, num_gpus, change):
    """Every GPU brings and computes a share; the host's lane is one."""
    engine, _ = run(tiny, emulated(num_gpus=num_gpus), name, change, num_gpus)
    moved: dict[int, float] = defaultdict(float)
    for span in engine.machine.spans:
        if span.kind == "weights":
            moved[span.lane.rank] += span.work.link_bytes
    assert set(moved) == set(range(num_gpus))
    assert max(moved.values()) < 1.1 * min(moved.values())
    assert {s.lane for s in engine.machine.spans if s.lane.kind in HOST_KINDS} <= {CPU}
    staging = {s.lane.rank for s in engine.machine.spans if s.lane.kind is LaneKind.PIN}
    is_staged = name == "moelightning" or change is TURNS
    assert staging == (set(range(num_gpus)) if is_staged else set()), "each stages its own pages"
    assert {s.lane.rank for s in engine.machine.spans if s.lane.kind is LaneKind.GPU} == set(range(num_gpus))


def small(seed: int, num_gpus: int, device_bytes: int) -> ShuffledMachine:
    """GPUs whose memory does not hold the hidden states of a whole prefill."""
    capacities = {device_tier(rank): device_bytes for rank in range(num_gpus)} | {"pinned": 400_000_000, "host": 10**8}
    return ShuffledMachine(capacities_bytes=capacities, seed=seed)


@pytest.mark.parametrize(
    ("name", "device_bytes"), [("moelightning", 1_650_000), ("flexgen", 2_500_000), ("flexgen_c", 2_300_000)]
)
def test_hidden_states_wait_in_pinned_memory_once_for_all_gpus(tiny, name, device_bytes):
    change = {"policy": {"batch_size": 24, "micro_batch_size": 4}}
    _, strategy = run(tiny, small(0, 2, device_bytes), name, change, 2, count=48, longest=100, kv_blocks=1600)
    assert strategy.plan["hidden_states_wait_in"] == "pinned memory"


@pytest.mark.parametrize("count", [1, 3])
def test_fewer_requests_than_gpus(tiny, count):
    for name in ("flexgen", "flexgen_c", "deepspeed_zero"):
        run(tiny, shuffled(1, num_gpus=4), name, {}, 4, count=count)
    run(tiny, shuffled(1, num_gpus=4), "flexgen", TURNS, 4, count=count)


@pytest.mark.parametrize("name", ["flexgen", "flexgen_c"])
def test_stages_have_the_layers_in_order_and_as_many_passes_as_stages_are_in_flight(tiny, name):
    """On the emulated machine: each GPU has its own layers only, and GPUs work on different passes at the same time."""
    engine, strategy = run(tiny, emulated(num_gpus=2), name, {}, 2)
    assert strategy.passes_in_flight == 2
    layers = defaultdict(set)
    for span in engine.machine.spans:
        if span.lane.kind is LaneKind.GPU and span.layer is not None:
            layers[span.lane.rank].add(span.layer)
    assert layers == {0: {0, 1}, 1: {2, 3}}
    busy = {rank: [s for s in engine.machine.spans if s.kind == "experts" and s.lane.rank == rank] for rank in (0, 1)}
    first_of_1, last_of_0 = min(s.start_s for s in busy[1]), max(s.end_s for s in busy[0])
    together = [s for s in busy[0] if first_of_1 < s.start_s < last_of_0]
    assert together, "the first stage goes on while the second one works"


def test_each_gpu_of_a_data_parallel_system_has_its_own_sequences(tiny):
    engine, _ = run(tiny, shuffled(0, num_gpus=2), "deepspeed_zero", {}, 2)
    assert [s.kv_rank for s in engine.sequences] == [0, 1] * (len(engine.sequences) // 2)
    held = [engine.machine.tiers[device_tier(rank)].holders()["kv cache"] for rank in range(2)]
    assert held[0] == held[1] > 0


@pytest.mark.parametrize(
    ("name", "num_gpus", "told"),
    [
        ("flexgen", 3, "must divide the model's 4 layers, got 3"),
        ("flexgen_c", 3, "must divide the model's 4 layers, got 3"),
        ("moelightning", 3, "must divide the model's num_kv_heads 2"),
        ("fastdecode", 8, "must divide the model's num_heads"),
    ],
)
def test_a_model_that_cannot_be_divided_is_refused(tiny, name, num_gpus, told):
    with pytest.raises(ConfigError, match=told) as caught:
        run(tiny, shuffled(0, num_gpus=num_gpus), name, {}, num_gpus)
    assert caught.value.field == "hardware.num_gpus"


@pytest.mark.parametrize("policy", [{}, {"batch_size": 6, "micro_batch_size": 2}])
def test_flexgen_as_built_shares_no_layers(tiny, policy):
    change = {"planning": "as_built", "parallelism": "tensor", "policy": policy}
    for name in ("flexgen", "flexgen_c"):
        with pytest.raises(ConfigError, match="must be pipeline as built") as caught:
            run(tiny, shuffled(0, num_gpus=2), name, change, 2)
        assert caught.value.field == "strategy.parallelism"
