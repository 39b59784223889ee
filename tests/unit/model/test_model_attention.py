"""Attention against a plain loop in float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.model.functional import AttentionOptions, causal_attention, decode_attention


def attend_one(q, k, v, window, sinks):
    """One query [heads, d] at the last position of k, v [context, kv_heads, d], head by head."""
    group = q.shape[0] // k.shape[1]
    start = 0 if window is None else max(0, k.shape[0] - window)
    outs = []
    for head in range(q.shape[0]):
        keys, values = k[start:, head // group], v[start:, head // group]
        weights = (keys @ q[head] / math.sqrt(q.shape[1])).exp()
        total = weights.sum() + (0.0 if sinks is None else sinks[head].double().exp())
        outs.append(weights @ values / total)
    return torch.cat(outs)


shapes = st.fixed_dictionaries(
    {
        "seq_lens": st.lists(st.integers(1, 20), min_size=1, max_size=4),
        "num_kv_heads": st.integers(1, 3),
        "group": st.integers(1, 4),
        "head_dim": st.sampled_from([2, 8, 16]),
        "window": st.none() | st.integers(1, 24),
        "has_sinks": st.booleans(),
    }
)


def random_qkv(shape, dtype):
    tokens, kv_heads, head_dim = sum(shape["seq_lens"]), shape["num_kv_heads"], shape["head_dim"]
    q = torch.randn(tokens, kv_heads * shape["group"], head_dim).to(dtype)
    return q, torch.randn(tokens, kv_heads, head_dim).to(dtype), torch.randn(tokens, kv_heads, head_dim).to(dtype)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@settings(max_examples=40)
@given(shape=shapes)
def test_prefill_and_decode_equal_the_loop(shape, dtype, tolerance):
    q, k, v = random_qkv(shape, dtype)
    sinks = torch.randn(q.shape[1]) if shape["has_sinks"] else None
    options = AttentionOptions(shape["head_dim"] ** -0.5, shape["window"], sinks)
    got = causal_attention(q, k, v, shape["seq_lens"], options)
    start = 0
    for length in shape["seq_lens"]:
        for position in range(start, start + length):
            context = slice(start, position + 1)
            expected = attend_one(
                q[position].double(), k[context].double(), v[context].double(), shape["window"], sinks
            )
            torch.testing.assert_close(got[position].double(), expected, rtol=0, atol=tolerance)
        # The last token again as a decode step, with unused room behind the context as in a KV buffer.
        room = torch.full((shape["num_kv_heads"], 3, shape["head_dim"]), float("nan"), dtype=dtype)
        cache_k, cache_v = (torch.cat((x[start : start + length].transpose(0, 1), room), dim=1) for x in (k, v))
        decoded = decode_attention(q[start + length - 1], cache_k, cache_v, length, options)
        torch.testing.assert_close(decoded.double(), expected, rtol=0, atol=tolerance)
        start += length


def test_no_sequences_give_no_rows():
    q, kv = torch.empty(0, 4, 8), torch.empty(0, 2, 8)
    assert causal_attention(q, kv, kv, [], AttentionOptions(1.0)).shape == (0, 32)


def test_lengths_that_do_not_add_up_are_refused():
    q, kv = torch.zeros(5, 4, 8), torch.zeros(5, 2, 8)
    with pytest.raises(AssertionError, match="sequences hold 4 tokens, q has 5"):
        causal_attention(q, kv, kv, [4], AttentionOptions(1.0))
