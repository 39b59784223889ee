"""DBRX and gpt-oss give Hugging Face's tokens where GPUs share every layer, and where the CPU computes experts."""

from __future__ import annotations

import pytest

from tests.contract.running import check_tokens, engine_on, requests, run_to_end, shuffled, strategy_of
from tests.contract.test_strategies import YAMLS
from tests.tiny_families import tiny_family

ON_HOST = {"batch_size": 3, "micro_batch_size": 2, "gpu_ffn": False, "gpu_attention": False}


def check_run(machine, checkpoint, values, num_gpus=1):
    work = requests(5, vocab_size=checkpoint.spec.vocab_size, longest=24, max_new_tokens=5, seed=4)
    engine = engine_on(machine, checkpoint, work, kv_blocks=60, num_gpus=num_gpus, values=values)
    run_to_end(engine, lambda e: strategy_of(e, values))
    report = check_tokens(checkpoint, engine.sequences)
    assert report.checked == len(work) and report.ok, report.first_mismatch


@pytest.mark.parametrize("num_gpus", [2, 4])
@pytest.mark.parametrize("family", ["dbrx", "gpt_oss"])
def test_gpus_that_share_every_layer(family, num_gpus):
    """Four GPUs share two KV heads."""
    check_run(shuffled(num_gpus, num_gpus=num_gpus), tiny_family(family), YAMLS["ondemand"], num_gpus)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["dbrx", "gpt_oss"])
def test_experts_and_attention_on_the_host(family, dtype):
    """In bfloat16 by the CPU's kernels: with biases, clamped activation, sinks and windows."""
    check_run(shuffled(1), tiny_family(family, dtype), YAMLS["moelightning"] | {"policy": ON_HOST})
