"""The work that ops of one micro-batch share is what each would work out for itself."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest

from harness.engine import loop
from harness.engine.ops.alike import once_a_batch
from harness.engine.ops.data import MicroBatchOp
from harness.engine.ops.experts import Experts
from harness.machine.base import Work
from harness.plan.planning import draft_plan
from tests.composing import composed

COMMON = (
    *("machine=simulated", "hardware=a40", "dataset=mtbench", "dataset.synthetic=lengths", "kv_cache_gb=0.05"),
    *("dataset.max_new_tokens=8", "dataset.num_requests=40", "model.spec.num_layers=4"),
)
RUNS = {
    "replayed": ("strategy=moelens", "model=mixtral-8x7b"),
    "windows in some layers": ("strategy=moelens", "model=gpt-oss-120b"),
    "a dense layer and latents": ("strategy=moelightning", "model=deepseek-v2-lite"),
    "shares of two GPUs": ("strategy=moelightning", "model=mixtral-8x7b", "hardware=t4x2"),
    "passes that are recorded, too": ("strategy=moegen_h", "model=deepseek-v2-lite"),
    "single experts": ("strategy=prescope", "model=qwen3-30b-a3b"),
    "experts on the host in some layers": (
        *("strategy=fiddler", "model=mixtral-8x7b", "hardware.device_memory_gb=9", "dataset.num_requests=2"),
    ),
}


def classes(of):
    return {of, *(found for each in of.__subclasses__() for found in classes(each))}


@pytest.mark.parametrize("run", RUNS)
def test_shared_work_is_each_ops_own(run, monkeypatch):
    seen, own = Counter(), {}

    def checked(op, method):
        assert method(op) == method.__wrapped__(op), f"{op} shares the work of another op"
        seen[op.kind] += 1
        return method(op)

    for of in classes(MicroBatchOp):
        for name in ("work", "_expected_work"):
            if hasattr(vars(of).get(name), "__wrapped__"):
                own[of, name] = vars(of)[name]
                monkeypatch.setattr(of, name, lambda op, method=own[of, name]: checked(op, method))
    assert (Experts, "_expected_work") in own and len(own) > 8
    chosen = {one.partition("=")[0]: one for one in (*COMMON, *RUNS[run])}
    plan = draft_plan(composed(*chosen.values()))
    loop.run(plan.engine, plan.strategy, lambda record: None)
    assert seen["attention in"] > 20 and seen["attention out"] > 20


class Sized:
    """Does what its model asks for."""

    def __init__(self, spec, batch):
        self.spec, self.batch = spec, batch

    @once_a_batch()
    def work(self):
        return Work(flops=self.spec.size)


def test_models_that_come_and_go_share_no_work_on_one_batch():
    batch = SimpleNamespace(works={})
    assert [Sized(SimpleNamespace(size=size), batch).work().flops for size in range(50)] == list(range(50))
