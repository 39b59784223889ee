"""What MoE-Lens's text says of its Fig. 3 and 4, of the series that are drawn."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from paper_figures.moelens.utilization import BLOCK_TOKENS, G, P, compute

KV_BYTES_PER_TOKEN = 32 * 2 * 8 * 128 * 2  # Mixtral-8x7B in bfloat16: layers, K and V, KV heads, head dim


@pytest.fixture(scope="module")
def data() -> dict[str, Any]:
    return compute()


def test_fig_3a_longer_sequences_lower_and_prompt_heavier_ones_raise_utilization(data):
    a = data["fig3a"]
    rows = a["utilization"]  # [g][p]
    assert all(later <= row for earlier, more in pairwise(rows) for row, later in zip(earlier, more, strict=True))
    assert all(right <= left for row in rows for left, right in pairwise(row))
    p, g = a["p"], a["g"]
    short, long = g.index(256), p.index(256)
    swapped = g.index(64), p.index(64)
    assert rows[swapped[0]][long] > rows[short][swapped[1]], "at p + g = 320, the larger prompt share is the better"


def test_fig_3a_by_brute_force(data):
    """Tokens over token-slots, step by step, against what 150 TFLOP/s process while the weights pass at 32 GB/s."""
    a = data["fig3a"]
    for p, g in ((16, 16), (128, 256), (256, 64), (2048, 2048)):
        slots = sum(p + step for step in range(g + 1))
        in_parallel = 100e9 / KV_BYTES_PER_TOKEN * (p + g) / slots
        expected = min(1.0, in_parallel / (150e12 / 32e9 * 8 / 2))
        assert a["utilization"][a["g"].index(g)][a["p"].index(p)] == pytest.approx(expected)


def test_fig_3b_is_a_roofline(data):
    b = data["fig3b"]
    for name, shares in b["series"].items():
        full_gb = b["saturates_gb"][name]
        for kv_gb, share in zip(b["kv_gb"], shares, strict=True):
            assert share == pytest.approx(min(1.0, kv_gb / full_gb))
    assert b["saturates_gb"]["19.5 GB/s"] / b["saturates_gb"]["32 GB/s"] == pytest.approx(32 / 19.5)
    assert 200 < b["saturates_gb"]["32 GB/s"] < 250


def test_fig_4_larger_batches_come_closer_to_the_bound_and_never_pass_it(data):
    fig4 = data["fig4"]
    series = [fig4["series"][k] for k in sorted(fig4["series"], key=int)]
    for smaller, larger in pairwise(series):
        for few, many in zip(smaller, larger, strict=True):
            assert few is None or many is None or few <= many * (1 + 1e-9)
    for share, bound in zip(series[-1], fig4["bound"], strict=True):
        assert share is not None and share <= bound * (1 + 1e-9)


def test_fig_4_paging_shifts_the_turning_point_to_the_right(data):
    """By the slots that blocks of 16 leave empty, and no further than filling and draining explain: gq / K of T."""
    fig4 = data["fig4"]
    slots = sum(P + step for step in range(G + 1))
    in_blocks = sum(-(-(P + step) // BLOCK_TOKENS) * BLOCK_TOKENS for step in range(G + 1))
    paged_gb = data["fig3b"]["saturates_gb"]["32 GB/s"] * in_blocks / slots
    in_flight = G * data["pass_tokens"]["32 GB/s"] / (P + G) / 200_000
    shares = dict(zip(fig4["kv_gb"], fig4["series"]["200000"], strict=True))
    top = max(shares.values())
    assert top > 0.98
    turning_gb = min(kv_gb for kv_gb, share in shares.items() if share >= 0.9999 * top)
    assert paged_gb <= turning_gb <= paged_gb * (1 + in_flight) + 5, "grid of 5 GB"


def test_fig_4_ends_where_all_requests_fit(data):
    """5,000 requests of 228 tokens take 15 blocks each: 157 GB."""
    fig4 = data["fig4"]
    last = max(kv_gb for kv_gb, share in zip(fig4["kv_gb"], fig4["series"]["5000"], strict=True) if share is not None)
    assert last == 155.0
    all_gb = 5_000 * 15 * 16 * KV_BYTES_PER_TOKEN / 1e9
    assert all_gb == pytest.approx(157.3, abs=0.1)
