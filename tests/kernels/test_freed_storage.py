"""Tensors whose storage was freed or shrunk, as sharded training does, are refused by name: not read, not written."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kernels

BFLOAT16 = torch.bfloat16


def arguments(kernel: str) -> dict[str, Any]:
    """Valid arguments, every tensor of which has more than 4 bytes."""
    tables, lens = torch.zeros(2, 4, dtype=torch.int32), torch.full((2,), 3, dtype=torch.int32)
    cache, k = torch.zeros(4, 2, 16, 8), torch.zeros(3, 2, 8)
    w = torch.zeros(16, 16, dtype=BFLOAT16)
    biases = {name: torch.zeros(16) for name in ("gate_bias", "up_bias", "down_bias")}
    return {
        "decode_attention": {
            **{"q": torch.zeros(2, 4, 8), "k_cache": cache, "v_cache": cache.clone(), "block_tables": tables},
            **{"context_lens": lens, "out": torch.zeros(2, 4, 8), "sinks": torch.zeros(4), "scale": 1.0},
        },
        "latent_attention": {
            **{"q": torch.zeros(2, 4, 8), "cache": torch.zeros(4, 16, 8), "block_tables": tables},
            **{"context_lens": lens, "out": torch.zeros(2, 4, 6), "scale": 1.0},
        },
        "staged_attention": {
            **{"q": torch.zeros(2, 4, 8), "staging": torch.zeros(6 * 2 * 2 * 8), "context_lens": lens},
            **{"out": torch.zeros(2, 4, 8), "sinks": torch.zeros(4), "num_kv_heads": 2, "scale": 1.0},
        },
        "kv_gather": {
            **{"caches": [cache, cache.clone()], "block_tables": tables, "lengths": lens},
            **{"out": torch.zeros(6 * 2 * 2 * 8)},
        },
        "kv_append": {"k": k, "v": k.clone(), "k_cache": cache, "v_cache": cache.clone(), "slots": torch.arange(3)},
        "latent_append": {"latent": torch.zeros(3, 8), "cache": torch.zeros(4, 16, 8), "slots": torch.arange(3)},
        "linear": {"x": torch.zeros(3, 16), "weight": w, "out": torch.zeros(3, 32)[:, :16]},
        "expert_ffn": {
            **{"x": torch.zeros(4, 16), "gate": w, "up": w.clone(), "down": w.clone(), "out": torch.zeros(4, 16)},
            **{"row_weights": torch.ones(4), **biases},
        },
        "paced_copy": {
            **{"dst": torch.zeros(16, dtype=torch.uint8), "src": torch.zeros(16, dtype=torch.uint8)},
            **{"rate_bytes_s": 0.0, "deadline_s": 0.0},
        },
    }[kernel]


def call(kernel: str, given: dict[str, Any]) -> None:
    if kernel == "expert_ffn":
        biases = {name: given.pop(name) for name in ("gate_bias", "up_bias", "down_bias")}
        given["gating"] = kernels.Gating(**biases)
    getattr(kernels, kernel)(**given)


@pytest.mark.parametrize("name", ["gate", "up", "down", "up_bias"])
@pytest.mark.parametrize("grows", [False, True])
def test_an_expert_whose_memory_was_freed_since_it_was_checked(name, grows):
    given = {each: torch.zeros(16, 16, dtype=BFLOAT16) for each in ("gate", "up", "down")} | {
        "up_bias": torch.zeros(16)
    }
    gating = kernels.Gating(up_bias=given["up_bias"])
    expert = kernels.ExpertWeights(given["gate"], given["up"], given["down"], gating)
    x, out = torch.zeros(2, 16), torch.ones(2, 16)
    kernels.expert_ffns(x, [2], [expert], out)
    given[name].untyped_storage().resize_(1 << 20 if grows else 0)
    with pytest.raises(ValueError, match="^gate: its memory is another" if grows else f"^{name}: reaches beyond"):
        kernels.expert_ffns(x, [2], [expert], out.fill_(3))
    assert (out == 3).all()


KERNELS = (
    *("decode_attention", "latent_attention", "staged_attention", "kv_append", "kv_gather", "latent_append"),
    *("linear", "expert_ffn", "paced_copy"),
)
TENSORS = [(kernel, name) for kernel in KERNELS for name, value in arguments(kernel).items() if torch.is_tensor(value)]


@pytest.mark.parametrize("held_bytes", [0, 4])
@pytest.mark.parametrize(("kernel", "name"), TENSORS)
def test_a_tensor_beyond_its_storage_is_refused_by_name(kernel, name, held_bytes):
    given = arguments(kernel)
    call(kernel, {**given})  # as a control
    storage = given[name].untyped_storage()
    storage.resize_(held_bytes)
    try:
        with pytest.raises(ValueError, match=f"^{name}: .*storage"):
            call(kernel, given)
    finally:
        storage.resize_(4096)  # a failure prints the tensors


def test_a_tensor_that_ends_with_its_storage_is_taken():
    """The last rows of a storage, strided: what lies behind the last row's end is not the tensor's."""
    memory = torch.zeros(5, 32)
    out = memory[2:, 16:]
    kernels.linear(torch.ones(3, 16), torch.ones(16, 16, dtype=BFLOAT16), out)
    assert (out == 16).all() and memory.sum() == 3 * 16 * 16
