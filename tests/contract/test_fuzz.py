"""Settings drawn at random give Hugging Face's tokens on the shuffled machine: strategies, GPUs, sizes of batches, of
the KV cache and of packets, orders of execution, with poison and without.

`MOE_HARNESS_FUZZ_S=1200 pytest -s tests/contract/test_fuzz.py` goes on for so many seconds, over settings of its own,
and tells all failures.
"""

from __future__ import annotations

import os
import random
import time
from itertools import count

import pytest

from tests.contract import fuzzing
from tests.tiny_families import tiny_family

NUM_CASES = 36
SECONDS = float(os.environ.get("MOE_HARNESS_FUZZ_S", 0))
SUMS_THAT_COME_LATE = (
    "strategy=fastdecode machine=shuffled machine.seed={seed} machine.poison=false model=mixtral-tiny dataset=gsm8k "
    "dataset.min_prompt_tokens=1 dataset.max_prompt_tokens=20 dataset.num_requests=3 dataset.max_new_tokens=9 "
    "kv_cache_gb=0.0001 hardware.num_gpus=2 hardware.device_memory_gb=0.02 strategy.packet_mb=0.01 "
    "strategy.extended_model=false strategy.policy.batch_size=1 strategy.policy.micro_batch_size=1 verify=all"
)


@pytest.fixture
def outcome(tmp_path):
    """What comes of a run; its command is printed where it is a failure."""

    def of(overrides: list[str]) -> str:
        found = fuzzing.run(overrides, tmp_path)
        if found not in ("ok", "refused"):
            print(f"\n{found}\n{fuzzing.command(overrides)}", flush=True)
        return found

    return of


@pytest.mark.parametrize("seed", [2, 3, 5])
def test_a_pass_that_is_over_on_one_gpu_is_not_disturbed_by_another(outcome, seed):
    """GPU 1 may still add its last sums when GPU 0 has sampled and the next pass has been laid out."""
    assert outcome(SUMS_THAT_COME_LATE.format(seed=seed).split()) == "ok"


@pytest.mark.parametrize("part", range(3))
def test_random_settings(tiny, outcome, part):
    """The last part has a cache of latents."""
    rng, model = random.Random(part), tiny_family("deepseek_v3") if part == 2 else tiny
    found = [outcome(fuzzing.draw(rng, model)) for _ in range(NUM_CASES // 3)]
    assert set(found) <= {"ok", "refused"}, "the commands that repeat it are in the output"
    assert found.count("ok") >= len(found) / 2, "too many settings are refused"


@pytest.mark.skipif(not SECONDS, reason="MOE_HARNESS_FUZZ_S says for how many seconds")
@pytest.mark.timeout(SECONDS + 600)
def test_random_settings_for_long(tiny, outcome):
    first, until_s = time.time_ns(), time.monotonic() + SECONDS
    failed = 0
    for number in count():
        rng, model = random.Random(first + number), tiny_family("deepseek_v3") if number % 3 == 2 else tiny
        failed += outcome(fuzzing.draw(rng, model)) not in ("ok", "refused")
        if time.monotonic() > until_s:
            break
    print(f"{number + 1} runs, {failed} failed", flush=True)
    assert not failed
