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
    "sliding_window": ("sliding_window", -1),
    "num_threads": ("num_threads", 0),
    "mode": ("mode", "fp8"),
}


@pytest.mark.parametrize("name", BAD_DECODE)
def test_decode_attention_names_the_bad_argument(name):
    field, value = BAD_DECODE[name]
    if name == "q-head_dim":
        value = torch.zeros(4, 2, 16, 32, dtype=torch.bfloat16)
    with pytest.raises((ValueError, TypeError), match=f"^{field}"):
        kernels.decode_attention(**decode_arguments(**{field: value}))


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
