"""Bad arguments are refused in Python with the argument's name; bad addresses never reach C++."""

from __future__ import annotations

import pytest
import torch
from paged import paged_case

import kernels


def decode_arguments(**changes):
    case = paged_case([20, 5])
    arguments = dict(zip(("q", "k_cache", "v_cache", "block_tables", "context_lens"), case.arguments, strict=True))
    arguments["out"] = torch.empty_like(case.q)
    return {**arguments, "scale": 1.0, **changes}


CASE = paged_case([20, 5])
BAD_DECODE = {
    "q-dim": ("q", CASE.q[0]),
    "q-dtype": ("q", CASE.q.double()),
    "q-type": ("q", CASE.q.float().numpy()),
    "q-device": ("q", CASE.q.to("meta")),
    "q-stride": ("q", CASE.q.transpose(0, 1).contiguous().transpose(0, 1)),
    "q-head_dim": ("k_cache", None),
    "k_cache-stride": ("k_cache", CASE.k_cache.transpose(1, 2).contiguous().transpose(1, 2)),
    "v_cache-shape": ("v_cache", CASE.v_cache[1:]),
    "v_cache-dtype": ("v_cache", CASE.v_cache.half()),
    "block_tables-dtype": ("block_tables", CASE.block_tables.long()),
    "block_tables-rows": ("block_tables", CASE.block_tables[:1]),
    "context_lens-dtype": ("context_lens", CASE.context_lens.long()),
    "context_lens-shape": ("context_lens", CASE.context_lens[:1]),
    "context_lens-long": ("context_lens", torch.tensor([20, 99], dtype=torch.int32)),
    "context_lens-negative": ("context_lens", torch.tensor([20, -1], dtype=torch.int32)),
    "block_tables-range": ("block_tables", torch.full_like(CASE.block_tables, 1000)),
    "block_tables-negative": ("block_tables", torch.full_like(CASE.block_tables, -1)),
    "out-shape": ("out", torch.empty(2, 8, 32, dtype=torch.bfloat16)),
    "out-dtype": ("out", torch.empty(2, 8, 64, dtype=torch.float16)),
    "out-expanded": ("out", torch.empty(1, 8, 64, dtype=torch.bfloat16).expand(2, 8, 64)),
    "sinks-dtype": ("sinks", torch.zeros(8, dtype=torch.bfloat16)),
    "sinks-shape": ("sinks", torch.zeros(2)),
    "sinks-stride": ("sinks", torch.zeros(16)[::2]),
    "sliding_window": ("sliding_window", -1),
    "num_threads": ("num_threads", 0),
    "mode": ("mode", "fp8"),
    "mode-type": ("mode", []),
    "scale-nan": ("scale", float("nan")),
    "scale-infinite": ("scale", float("-inf")),
    "scale-float32": ("scale", 1e39),
    "scale-type": ("scale", "1"),
    "sliding_window-wide": ("sliding_window", 2**31),
    "sliding_window-type": ("sliding_window", 1.5),
    "num_threads-float": ("num_threads", 2.0),
    "num_threads-string": ("num_threads", "2"),
    "num_threads-wide": ("num_threads", 2**31),
    "num_threads-many": ("num_threads", 1_000_000),
    "q-negated": ("q", torch._neg_view(CASE.q)),
    "k_cache-negated": ("k_cache", torch._neg_view(CASE.k_cache)),
    "sinks-conjugated": ("sinks", torch.zeros(8, dtype=torch.complex64).conj()),
}


@pytest.mark.parametrize("name", BAD_DECODE)
def test_decode_attention_names_the_bad_argument(name):
    field, value = BAD_DECODE[name]
    if name == "q-head_dim":
        value = torch.zeros(4, 2, 16, 32, dtype=torch.bfloat16)
    with pytest.raises((ValueError, TypeError), match=f"^{field}: |^{field}\\["):
        kernels.decode_attention(**decode_arguments(**{field: value}))


def test_lazily_conjugated_tensors_are_named_as_such():
    with pytest.raises(ValueError, match=r"^k: .*resolve_conj"):
        kernels.kv_append(**append_arguments(k=torch.zeros(3, 2, 8, dtype=torch.complex64).conj()))


@pytest.mark.parametrize(
    ("field", "changed"),
    [
        ("gating", {"gating": None}),
        ("accumulate", {"accumulate": "no"}),
        ("limit", {"gating": kernels.Gating(limit="x")}),
        ("alpha", {"gating": kernels.Gating(alpha=None)}),
    ],
)
def test_expert_ffn_names_the_option_of_the_wrong_type(field, changed):
    x, weight = torch.zeros(3, 8), torch.zeros(8, 8).bfloat16()
    with pytest.raises(TypeError, match=f"^{field}: "):
        kernels.expert_ffn(x, weight, weight, weight, torch.zeros(3, 8), **changed)


@pytest.mark.parametrize("source", ["q", "k_cache", "v_cache"])
def test_decode_attention_refuses_an_overlapping_output(source):
    arguments = decode_arguments()
    arguments["out"] = arguments[source].view(-1)[: arguments["q"].numel()].view(arguments["q"].shape)
    with pytest.raises(ValueError, match=f"^out: overlaps {source}"):
        kernels.decode_attention(**arguments)


def append_arguments(**changes):
    k, cache = torch.zeros(3, 2, 8), torch.zeros(4, 2, 16, 8)
    arguments = {"k": k, "v": k.clone(), "k_cache": cache, "v_cache": cache.clone(), "slots": torch.tensor([0, 5, 63])}
    return {**arguments, **changes}


BAD_APPEND = {
    "k-dim": ("k", torch.zeros(3, 16)),
    "k-dtype": ("k", torch.zeros(3, 2, 8, dtype=torch.int32)),
    "k-stride": ("k", torch.zeros(3, 8, 2).transpose(1, 2)),
    "v-shape": ("v", torch.zeros(2, 2, 8)),
    "v-dtype": ("v", torch.zeros(3, 2, 8, dtype=torch.float16)),
    "k_cache-shape": ("k_cache", torch.zeros(4, 2, 16, 4)),
    "v_cache-shape": ("v_cache", torch.zeros(5, 2, 16, 8)),
    "slots-shape": ("slots", torch.tensor([0, 1])),
    "slots-dtype": ("slots", torch.tensor([0.0, 1.0, 2.0])),
    "slots-range": ("slots", torch.tensor([0, 1, 64])),
    "slots-negative": ("slots", torch.tensor([0, 1, -1])),
    "slots-stride": ("slots", torch.arange(6)[::2]),
}


@pytest.mark.parametrize("name", BAD_APPEND)
def test_kv_append_names_the_bad_argument(name):
    field, value = BAD_APPEND[name]
    arguments = append_arguments(**{field: value})
    with pytest.raises(ValueError, match=f"^{field}"):
        kernels.kv_append(**arguments)
    assert not arguments["k_cache"].any()


def test_kv_append_refuses_overlap():
    arguments = append_arguments()
    arguments["k"] = arguments["k_cache"].view(-1)[:48].view(3, 2, 8)
    with pytest.raises(ValueError, match=r"^k_cache: overlaps k"):
        kernels.kv_append(**arguments)


MEMORY = torch.zeros(4096)
ROW = (2, 16, 8)  # kv_heads, block_size, head_dim: 256 elements


def blocks(start: int, stride: int, num_blocks: int = 4) -> torch.Tensor:
    return MEMORY.as_strided((num_blocks, *ROW), (stride, 128, 8, 1), start)


OVERLAPPING = {
    "same": (blocks(0, 256), blocks(0, 256)),
    "part of a block": (blocks(0, 256), blocks(1000, 256)),
    "same among others": (blocks(0, 600), blocks(0, 600)),
    "strided into the next": (blocks(0, 600), blocks(255, 600)),
    "strided into the one before": (blocks(0, 600), blocks(345, 600)),
    "strided, later blocks": (blocks(0, 600), blocks(1200, 600)),
    "unequal strides": (blocks(0, 512), blocks(256, 1024)),
    "one block": (blocks(0, 256, 1), blocks(255, 256, 1)),
}


@pytest.mark.parametrize("case", OVERLAPPING)
@pytest.mark.parametrize("swapped", [False, True])
def test_kv_append_refuses_caches_that_overlap_each_other(case, swapped):
    k_cache, v_cache = OVERLAPPING[case][:: -1 if swapped else 1]
    slots = torch.tensor([0, 5, 15])
    with pytest.raises(ValueError, match=r"^v_cache: overlaps k_cache"):
        kernels.kv_append(**append_arguments(k_cache=k_cache, v_cache=v_cache, slots=slots))


@pytest.mark.parametrize(
    ("k_start", "v_start", "stride"), [(0, 256, 512), (256, 0, 512), (0, 344, 600), (0, 1024, 256)]
)
def test_kv_append_takes_caches_whose_blocks_alternate(k_start, v_start, stride):
    MEMORY.zero_()
    k_cache, v_cache = blocks(k_start, stride), blocks(v_start, stride)
    ones = torch.ones(64, 2, 8)
    kernels.kv_append(ones, 2 * ones, k_cache, v_cache, torch.arange(64))
    assert (k_cache == 1).all() and (v_cache == 2).all() and MEMORY.sum() == 3 * 4 * 256
    MEMORY.zero_()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dst", torch.zeros(9, dtype=torch.uint8)),
        ("dst", torch.zeros(8, dtype=torch.int8)),
        ("src", torch.zeros(16, dtype=torch.uint8)[::2]),
        ("src", torch.zeros(2, 4, dtype=torch.uint8)),
        ("rate_bytes_s", -1.0),
        ("rate_bytes_s", float("nan")),
        ("deadline_s", float("inf")),
    ],
)
def test_paced_copy_names_the_bad_argument(field, value):
    region = torch.zeros(8, dtype=torch.uint8)
    arguments = {"dst": region, "src": region.clone(), "rate_bytes_s": 0.0, "deadline_s": 0.0, field: value}
    with pytest.raises(ValueError, match=f"^{field}"):
        kernels.paced_copy(**arguments)


def test_paced_copy_refuses_overlap():
    region = torch.zeros(16, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"^dst: overlaps src"):
        kernels.paced_copy(region[:9], region[7:], 0.0, 0.0)
