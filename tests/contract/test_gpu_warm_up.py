"""After `warm_up` no pass compiles: strategies ask the kernels for nothing that they were not compiled for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from tests.composing import composed
from tests.conftest import ROOT
from tests.contract.gpu_ops import DEVICE, MetaContext, submitted, weight_views

KERNELS = {"_choose", "_count", "_offsets", "_place", "_group_few", "_gate_up", "_down", "_combine", "_attend", "_join"}
KERNELS |= {"_norm", "_rotate", "_append"}


def asked(*arguments: str) -> dict[str, list[str]]:
    """In a process of its own, since Triton decides at import whether it interprets."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.contract.test_gpu_warm_up", *arguments]
    environment |= {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed (extra `test`, on Linux only)")
@pytest.mark.slow
def test_a_pass_asks_for_nothing_new():
    found = asked("ondemand", "ondemand, fine experts", "moelens on the gpu", "deepspeed_zero")
    assert {text.split()[0] for text in found["asked"]} == KERNELS
    assert len(found["warm"]) > len(KERNELS), "several tile sizes"
    assert found["new"] == []
    assert any("_gate_up" in text for text in found["new without the tallest tile"]), "what is missing is noticed"


class AnyGpu:
    """What Triton's compiler asks of a driver."""

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def main(names: list[str]) -> None:
    """Prints what is to be compiled: for `warm_up`, and then by all ops of the strategies' runs."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    import kernels.triton as gpu
    from harness.engine.ops import views
    from harness.model.gpu_kernels import warm_up
    from kernels.triton import decode, warming
    from kernels.triton.tiling import Chip

    patch, wanted, block_size = pytest.MonkeyPatch(), set(), composed()["kv_block_tokens"]
    driver.set_active(AnyGpu())
    run = JITFunction.run
    patch.setattr(JITFunction, "run", lambda self, *given, **options: run(self, *given, **options | {"warmup": True}))
    patch.setattr(JITFunction, "_do_compile", lambda self, key, *_: wanted.add(f"{self.fn.__name__} {key}"))
    patch.setattr(gpu, "serves", lambda tensor, kernel: True)
    patch.setattr(views, "_weight_views", weight_views)
    patch.setattr(decode, "chip", lambda device: Chip(processors=132))  # where few sequences share their contexts
    ops = [op for name in names for count in (3, 80) for op in submitted(patch, name, count)]

    def specialised(compute) -> set[str]:
        wanted.clear()
        compute()
        return set(wanted)

    def warm() -> None:
        for spec in {op.spec for op in ops}:
            warm_up(spec, DEVICE, block_size)

    def passes() -> None:
        for op in ops:
            for packet in range(op.packets):
                op.run(MetaContext(op.spec), packet)

    ready, needed = specialised(warm), specialised(passes)
    patch.setattr(warming, "mean_choices", lambda element_bytes: (8, 16, 32))
    short = specialised(warm)
    report = {"warm": ready, "asked": needed, "new": needed - ready, "new without the tallest tile": needed - short}
    print(json.dumps({name: sorted(texts) for name, texts in report.items()}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1:])
