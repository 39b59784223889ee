"""Strategies that use several GPUs: Hugging Face's tokens, and each GPU busy with its share."""

from __future__ import annotations

from collections import defaultdict

import pytest
import yaml

from harness.machine.base import CPU, HOST_KINDS, PIN, LaneKind
from tests.conftest import ROOT
from tests.contract.running import check_tokens, emulated, engine_on, requests, run_to_end, shuffled, strategy_of

YAMLS = {path.stem: yaml.safe_load(path.read_text()) for path in sorted((ROOT / "conf/strategy").glob("*.yaml"))}
SEVERAL = [
    ("moelightning", {}),
    ("moelightning", {"policy": {"gpu_attention": True, "resident_weights": 0.4}}),
    ("moelightning", {"paging": False, "staging": False}),
    ("fastdecode", {}),
    ("flexgen_c", {"staging": True}),
    ("flexgen", {"parallelism": "tensor"}),
    ("flexgen", {"staging": True, "policy": {"batch_size": 3, "micro_batch_size": 1}}),
    ("flexgen", {"policy": {"resident_weights": 0.4}}),
    ("deepspeed_zero", {}),
    ("deepspeed_zero", {"prefetch": False, "batch_size": 2}),
]


def run(tiny, machine, name: str, change: dict, num_gpus: int, *, count: int = 12, kv_blocks: int = 200):
    values = YAMLS[name] | change
    work = requests(count, vocab_size=tiny.spec.vocab_size, longest=40, seed=6)
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
@pytest.mark.parametrize("num_gpus", [2, 4])
def test_shuffled_machine(tiny, name, change, num_gpus):
    for seed in range(2):
        run(tiny, shuffled(seed, num_gpus=num_gpus), name, change, num_gpus)


@pytest.mark.parametrize(
    ("name", "num_gpus"),
    [("moelightning", 2), ("moelightning", 4), ("flexgen", 2), ("deepspeed_zero", 2), ("deepspeed_zero", 4)],
)
def test_emulated_machine(tiny, name, num_gpus):
    """Every GPU brings and computes a share; the host's lanes are one."""
    engine, _ = run(tiny, emulated(num_gpus=num_gpus), name, {}, num_gpus)
    moved: dict[int, float] = defaultdict(float)
    for span in engine.machine.spans:
        if span.kind == "weights":
            moved[span.lane.rank] += span.work.link_bytes
    assert set(moved) == set(range(num_gpus))
    assert max(moved.values()) < 1.1 * min(moved.values())
    assert {s.lane for s in engine.machine.spans if s.lane.kind in HOST_KINDS} <= {CPU, PIN}
    assert {s.lane.rank for s in engine.machine.spans if s.lane.kind is LaneKind.GPU} == set(range(num_gpus))
