"""Loads against counting by hand."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.routing.build import build_routing
from harness.routing.statistics import LoadStatistics, all_tokens, load_statistics
from tests.unit.routing.models import MODEL, SYNTHETIC, steady


@steady
@given(kind=st.sampled_from(list(SYNTHETIC)), num_requests=st.integers(1, 5), num_positions=st.integers(1, 9))
def test_counts_and_what_follows_from_them(kind, num_requests, num_positions):
    routing = build_routing(SYNTHETIC[kind], MODEL, seed=4)
    tokens = all_tokens(num_requests, num_positions)
    assert list(zip(*(column.tolist() for column in tokens), strict=True)) == [
        (request, position) for request in range(num_requests) for position in range(num_positions)
    ]
    load = load_statistics(routing, [2, 5], tokens, num_experts=MODEL.num_experts)
    assert load.layers == (2, 5)
    for row, layer in enumerate((2, 5)):
        count = Counter(routing.experts(*tokens, layer).ravel().tolist())
        total = sum(count.values())
        assert total == 4 * num_requests * num_positions
        assert load.counts[row].tolist() == [count[e] for e in range(16)]
        assert load.imbalance[row] == pytest.approx(max(count.values()) * 16 / total)
        entropy = -sum(n / total * math.log2(n / total) for n in count.values())
        assert load.entropy_bits[row] == pytest.approx(entropy)
        hot = sorted(range(16), key=lambda e: (-count[e], e))[:3]
        assert load.hottest(3)[row].tolist() == hot
        assert load.hit_rate(load.hottest(3))[row] == pytest.approx(sum(count[e] for e in hot) / total)


def test_the_ends():
    load = LoadStatistics((0, 1), np.array([[5, 5, 5, 5], [0, 0, 9, 0]]))
    assert load.imbalance.tolist() == [1.0, 4.0]
    assert load.entropy_bits.tolist() == [2.0, 0.0]
    assert load.hottest(2).tolist() == [[0, 1], [2, 0]]
    assert load.hit_rate(load.hottest(0)).tolist() == [0.0, 0.0]
    assert load.hit_rate(load.hottest(4)).tolist() == [1.0, 1.0]
    assert load.hit_rate(np.array([[3], [3]])).tolist() == [0.25, 0.0]


def test_a_hot_table_from_other_tokens_hits_what_skew_promises():
    routing = build_routing({"name": "skewed", "zipf_exponent": 1.5}, MODEL, seed=4)
    offline = load_statistics(routing, MODEL.moe_layers, all_tokens(50, 40), num_experts=16)
    online = load_statistics(routing, MODEL.moe_layers, (np.arange(2000) + 1000, np.arange(2000)), num_experts=16)
    assert online.hit_rate(offline.hottest(4)).min() > 0.6
    assert online.hit_rate(offline.hottest(4)) == pytest.approx(offline.hit_rate(offline.hottest(4)), abs=0.03)
