"""What is recorded of routers is what transformers' own model computes, for every strategy, family and machine."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch

from harness.engine.sequences import Records
from harness.model.checkpoint import Checkpoint
from harness.routing.recording import as_numbers, last_recorded
from harness.routing.token_sample import sample_tokens
from tests.contract.layerwise import ATTENTION_OUT, ROUTER, of_transformers
from tests.contract.running import (
    CAPACITIES_BYTES,
    emulated,
    engine_on,
    requests,
    run_to_end,
    shuffled,
    strategy_of,
)
from tests.contract.test_strategies import PLANNED
from tests.fake_device import FakeDevice, cuda_machine
from tests.tiny_families import runnable, tiny_family

pytestmark = pytest.mark.usefixtures("short_probes")

SHARE = 0.4
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.1}


def record(machine, checkpoint, values, *, num_gpus=1, kv_blocks=60, work=None):
    """Run some requests with a sample of their tokens recorded; the sequences, and which tokens the sample has."""
    work = work or requests(6, vocab_size=checkpoint.spec.vocab_size, longest=30, max_new_tokens=5, seed=4)
    engine = engine_on(machine, checkpoint, work, kv_blocks=kv_blocks, values=values, num_gpus=num_gpus)
    positions = {s.request.request_id: s.max_tokens for s in engine.sequences}
    sample = sample_tokens(positions, int(SHARE * sum(positions.values())), seed=3)
    for sequence in engine.sequences:
        sequence.records = Records(weights=True, sample=sample)
    passes = run_to_end(engine, lambda e: strategy_of(e, values))
    return engine.sequences, sample, passes


@cache
def _of_transformers(folder, dtype, tokens):
    return of_transformers(Checkpoint(folder, dtype), list(tokens))


def check(checkpoint, sequences, sample):
    """Compare the sequence with the most tokens; all have as many as were sampled."""
    spec = checkpoint.spec
    for sequence in sequences:
        inputs, count = last_recorded(sequence, "inputs"), sequence.num_tokens - 1
        wanted = sample(np.full(count, sequence.request.request_id), np.arange(count))
        assert (0 if inputs is None else len(inputs)) == wanted.sum()
    sequence = max(sequences, key=lambda s: s.num_tokens)
    tokens = (*sequence.request.prompt_ids, *sequence.generated[:-1])
    expected = _of_transformers(checkpoint.folder, spec.dtype, tokens)
    sampled = sample(np.full(len(tokens), sequence.request.request_id), np.arange(len(tokens)))
    recorded, weights = last_recorded(sequence, "inputs"), last_recorded(sequence, "weights")
    ids = last_recorded(sequence, "routing")
    assert recorded is not None and weights is not None and ids is not None
    assert sampled.any() and not sampled.all()
    numbers, tolerance = as_numbers(recorded, spec.dtype), TOLERANCE[spec.dtype]
    exact = spec.dtype == "float32"  # else rounding may send a token to another expert in a layer before
    for index, layer in enumerate(spec.moe_layers if exact else spec.moe_layers[:1]):
        normed = expected[layer, ATTENTION_OUT][:, -spec.hidden_dim :].numpy()[sampled]
        assert np.abs(normed).max() > 1
        assert np.abs(numbers[:, index] - normed).max() < tolerance, f"layer {layer}"
        if exact:
            of_each = np.zeros((len(tokens), spec.num_experts), dtype=np.float32)
            np.put_along_axis(of_each, ids[:, index].astype(np.int64), weights[:, index], axis=1)
            assert np.abs(of_each - expected[layer, ROUTER].numpy()).max() < tolerance, f"layer {layer}"


@pytest.mark.parametrize(("name", "change"), [*((name, {}) for name in PLANNED), ("moelightning", {"padding": True})])
def test_every_strategy(tiny, name, change):
    check(tiny, *record(shuffled(2), tiny, PLANNED[name] | change)[:2])


@pytest.mark.parametrize("variant", [name for name in runnable() if name != "mixtral"])
def test_every_family(variant):
    checkpoint = tiny_family(variant)
    check(checkpoint, *record(shuffled(3), checkpoint, PLANNED["moelens"])[:2])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_emulated_machine(dtype):
    checkpoint = tiny_family("qwen3_moe", dtype)
    check(checkpoint, *record(emulated(), checkpoint, PLANNED["moelightning"])[:2])


def test_the_code_of_the_cuda_machine(tiny):
    device = FakeDevice(1)
    machine = cuda_machine(CAPACITIES_BYTES, device=device)
    try:
        check(tiny, *record(machine, tiny, PLANNED["moelens"] | {"n_real": 60, "profile_repeats": 1})[:2])
    finally:
        machine.close()
        device.close()


@pytest.mark.parametrize("name", ["moelightning", "flexgen", "deepspeed_zero"])
def test_several_gpus(tiny, name):
    check(tiny, *record(shuffled(5, num_gpus=2), tiny, PLANNED[name], num_gpus=2, kv_blocks=200)[:2])


def test_a_position_that_was_computed_twice_is_recorded_once(tiny):
    work = requests(12, vocab_size=tiny.spec.vocab_size, longest=30, max_new_tokens=30)
    values = PLANNED["moelens"] | {"n_real": 200}
    sequences, sample, passes = record(shuffled(3), tiny, values, kv_blocks=24, work=work)
    assert sum(p.num_preemptions for p in passes) > 0
    check(tiny, sequences, sample)


def test_bytes_become_the_numbers_that_they_are():
    numbers = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)) * 100
    numbers[0, :3] = torch.tensor([float("inf"), float("nan"), 1e-40])
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        rounded = numbers.to(dtype)
        found = as_numbers(rounded.view(torch.uint8).numpy(), str(dtype).removeprefix("torch."))
        np.testing.assert_array_equal(found.astype(np.float32), rounded.float().numpy())
