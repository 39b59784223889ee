"""What holds for every kind: a function of the token, whatever else is asked, when, and in which order."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.routing.build import build_routing
from harness.routing.popularity import write_shares
from harness.routing.trace_file import TraceRow
from tests.unit.routing.models import MODEL, SYNTHETIC, header, random_experts, steady, write

KINDS = [*SYNTHETIC, "shares", "trace"]
TOKENS = st.lists(st.tuples(st.integers(0, 2**40), st.integers(0, 2000)), min_size=1, max_size=40)


@pytest.fixture(scope="module")
def routings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("routing")
    rng = np.random.default_rng(0)
    write_shares(folder / "shares.json", rng.uniform(0.2, 1.0, (5, 16)), "a test")
    rows = [TraceRow(i, 0, random_experts(rng, MODEL, 3 + i)) for i in range(4)]
    trace = write(folder / "trace.jsonl", header(MODEL), *rows)
    values = SYNTHETIC | {
        "shares": {"name": "skewed", "distributions": str(folder / "shares.json")},
        "trace": {"name": "trace", "path": str(trace)},
    }
    return {kind: build_routing(values[kind], MODEL, seed=5) for kind in KINDS}


def columns(tokens: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    requests, positions = np.array(tokens, dtype=np.int64).reshape(-1, 2).T
    return requests, positions


@pytest.mark.parametrize("kind", KINDS)
@steady
@given(tokens=TOKENS, layer=st.sampled_from(list(MODEL.moe_layers)))
def test_rows_are_distinct_experts(routings, kind, tokens, layer):
    chosen = routings[kind].experts(*columns(tokens), layer)
    assert chosen.dtype == np.int64
    assert chosen.shape == (len(tokens), MODEL.experts_per_token)
    assert chosen.min() >= 0 and chosen.max() < MODEL.num_experts
    assert all(len(set(row)) == len(row) for row in chosen.tolist())


@pytest.mark.parametrize("kind", KINDS)
@steady
@given(tokens=TOKENS, layer=st.sampled_from(list(MODEL.moe_layers)), data=st.data())
def test_any_split_in_any_order_gives_the_same_rows(routings, kind, tokens, layer, data):
    routing = routings[kind]
    together = dict(zip(tokens, routing.experts(*columns(tokens), layer).tolist(), strict=True))
    order = data.draw(st.permutations(tokens))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(order)), max_size=6)) | {0, len(order)})
    for start, end in pairwise(cuts):
        part = order[start:end]
        routing.experts(*columns(part), data.draw(st.sampled_from(list(MODEL.moe_layers))))  # questions leave no trace
        assert routing.experts(*columns(part), layer).tolist() == [together[token] for token in part]


@pytest.mark.parametrize("kind", KINDS)
def test_no_tokens_have_no_rows(routings, kind):
    assert routings[kind].experts(*columns([]), 2).shape == (0, MODEL.experts_per_token)


@pytest.mark.parametrize("kind", SYNTHETIC)
def test_long_batches_are_rows_of_their_own(kind):
    """More rows than are worked on at a time."""
    routing = build_routing(SYNTHETIC[kind], MODEL, seed=1)
    requests, positions = np.divmod(np.arange(6000), 200)
    whole = routing.experts(requests, positions, 3)
    for row in (0, 2047, 2048, 4095, 4096, 5999):
        alone = routing.experts(requests[row : row + 1], positions[row : row + 1], 3)
        assert alone.tolist() == whole[row : row + 1].tolist()


@pytest.mark.parametrize("kind", SYNTHETIC)
def test_seed_request_position_and_layer_all_matter(kind):
    requests, positions = np.full(400, 3), np.full(400, 9)
    base = build_routing(SYNTHETIC[kind], MODEL, seed=0)
    same = base.experts(requests[:1], positions[:1], 2)
    others = [
        base.experts(np.arange(400) + 4, positions, 2),
        base.experts(requests, np.arange(400) * 100 + 200, 2),
        np.concatenate([build_routing(SYNTHETIC[kind], MODEL, seed=s).experts([3], [9], 2) for s in range(1, 60)]),
    ]
    for other in others:
        assert (other == same).all(axis=1).mean() < 0.05
    tokens = np.divmod(np.arange(400), 20)
    assert (base.experts(*tokens, 2) == base.experts(*tokens, 4)).all(axis=1).mean() < 0.05


@pytest.mark.parametrize("kind", SYNTHETIC)
def test_built_twice_it_is_the_same(kind):
    tokens = np.divmod(np.arange(300), 30)
    one, two = (build_routing(SYNTHETIC[kind], MODEL, seed=11).experts(*tokens, 5) for _ in range(2))
    assert (one == two).all()


def test_sources_say_what_they_are(routings):
    for kind, routing in routings.items():
        assert routing.source.startswith("recorded:" if kind == "trace" else "synthetic:"), routing.source
    assert "shares.json (a test)" in routings["shares"].source
    assert "a test" in routings["trace"].source


def test_the_numbers_stay_what_they_were():
    """Published results name a seed: whoever changes a number here changes them all."""
    told = {
        kind: build_routing(values, MODEL, seed=42).experts(np.array([7]), np.array([123]), 4)[0].tolist()
        for kind, values in SYNTHETIC.items()
    }
    assert told == EXPECTED


EXPECTED = {
    "uniform": [5, 13, 1, 3],
    "skewed": [0, 12, 4, 7],
    "correlated": [6, 2, 8, 4],
    "both": [12, 10, 0, 9],
}
