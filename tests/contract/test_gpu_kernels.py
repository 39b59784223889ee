"""Whole runs through the GPU kernels give Hugging Face's tokens: in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from harness.model.checkpoint import Checkpoint
from harness.model.dimensions import ClampedSwiglu
from harness.model.zoo import ensure
from kernels import triton as gpu
from strategies.moelens import profiler
from tests.conftest import ROOT, tiny_config
from tests.contract.running import check_tokens, engine_on, requests, run_to_end, shuffled, strategy_of
from tests.contract.test_strategies import YAMLS
from tests.tiny_families import runnable, tiny_family

STAGED = {"attention": "gpu", "gpu_kv_staging_mb": 0.02, "n_real": 60, "profile_repeats": 1}
RUNS = {
    "all experts at once": ("mixtral", "moelens", STAGED),
    "one expert after another": ("mixtral", "ondemand", {}),
    "sinks, windows and clamped experts with biases": ("gpt_oss", "moelens", STAGED),
    "a cache on the device": ("gpt_oss", "deepspeed_zero", {}),
}
GPT_OSS = {
    "qkv_bias": True,
    "sliding_window": 4,
    "sliding_layers": "even",
    "clamped_swiglu": ClampedSwiglu(limit=0.8, alpha=1.5),
}
ALWAYS = {"choose_experts", "grouped_experts", "causal_attention", "rotate"}
FAMILIES = [name for name in runnable() if "-" not in name]  # without variants
DECODES = {"moelens": "staged_decode_attention", "deepspeed_zero": "paged_decode_attention"}


def test_cpu_tensors_are_not_served():
    assert not any(gpu.serves(torch.empty(1), kernel) for kernel in gpu.KERNELS)


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed (extra `test`, on Linux only)")
@pytest.mark.slow
def test_tokens():
    assert told_by("all") == [f"{run}: right" for run in RUNS]


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed (extra `test`, on Linux only)")
@pytest.mark.slow
def test_every_family_s_rows():
    """Norms, rotary embeddings, a cache on the device and forecasts of all families, as far as each has them."""
    assert told_by("rows") == [f"{family}: right" for family in FAMILIES] and len(FAMILIES) > 7


def told_by(part: str) -> list[str]:
    """Run a part in a process of its own, since Triton decides at import whether it interprets."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.contract.test_gpu_kernels", part]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def small_checkpoint(family: str) -> Checkpoint:
    """Make one whose layers are as few and small as there can be, since the interpreter is slow."""
    config = tiny_config()
    assert config.recipe is not None
    sizes = {"num_layers": 2, "num_experts": 4, "expert_dim": 32, "hidden_dim": 32, "num_heads": 2, "num_kv_heads": 1}
    own = GPT_OSS if family == "gpt_oss" else {}
    return Checkpoint(ensure(replace(config, recipe=replace(config.recipe, family=family, **sizes, **own))), "float32")


def rows() -> None:
    """Serve CPU tensors with the kernels for rows and for routing as if they were on a GPU."""
    torch.set_num_threads(1)
    gpu.serves = lambda tensor, kernel: kernel in ("rows", "routing")  # type: ignore[assignment]
    values = YAMLS["prescope"] | {"profile_tokens": 4, "batch_size": 3, "table": "none"}
    for family in FAMILIES:
        checkpoint = tiny_family(family)
        work = requests(2, vocab_size=checkpoint.spec.vocab_size, longest=6, max_new_tokens=2, seed=1)
        engine = engine_on(shuffled(0), checkpoint, work, kv_blocks=60)
        run_to_end(engine, lambda e: strategy_of(e, values))
        report = check_tokens(checkpoint, engine.sequences)
        assert report.checked == len(work) and report.ok, f"{family}: {report.first_mismatch}"
        print(f"{family}: right")


def main() -> None:
    """Serve CPU tensors as if they were on a GPU, and count the kernels' calls."""
    torch.set_num_threads(1)
    calls: Counter[str] = Counter()

    def counted(name):  # type: ignore[no-untyped-def]
        kernel = getattr(gpu, name)

        def call(*arguments, **options):  # type: ignore[no-untyped-def]
            calls[name] += 1
            return kernel(*arguments, **options)

        return call

    for name in (*ALWAYS, *DECODES.values()):
        setattr(gpu, name, counted(name))
    gpu.serves = lambda tensor, kernel: True  # type: ignore[assignment]
    known = profiler.Profile(seconds_per_token=1e-6, fixed_s=0.0, layer_transfer_s=1e-3, samples=())
    profiler.PipelineProfiler.measure = lambda self: known  # how long the interpreter takes is of no interest
    for run, (family, strategy, change) in RUNS.items():
        checkpoint = small_checkpoint(family)
        calls.clear()
        work = requests(2, vocab_size=checkpoint.spec.vocab_size, longest=9, max_new_tokens=2, seed=1)
        engine = engine_on(shuffled(0), checkpoint, work, kv_blocks=40)
        run_to_end(engine, lambda e, values=YAMLS[strategy] | change: strategy_of(e, values))
        report = check_tokens(checkpoint, engine.sequences)
        assert report.checked == len(work) and report.ok, f"{run}: {report.first_mismatch}"
        wanted = ALWAYS | ({DECODES[strategy]} if strategy in DECODES else set())
        assert set(calls) == wanted, f"{run}: kernels called: {calls}"
        print(f"{run}: right")


if __name__ == "__main__":
    {"all": main, "rows": rows}[sys.argv[1]]()
