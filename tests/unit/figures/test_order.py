"""The order of the systems on cells of MoE-Lightning's Fig. 7 comes out as published: simulated, all as built."""

from __future__ import annotations

from itertools import combinations

import pytest

from paper_figures.moelightning import systems
from paper_figures.moelightning.batches import row

ALL = ("MoE-Lightning", "MoE-Lightning(p)", "FlexGen", "FlexGen(c)", "DeepSpeed-Zero")
# Two of each setting. On S1 FlexGen(c) and DeepSpeed change places at g = 128, where 7.2 and 7.8 are published.
CELLS = (("S1", 32), ("S1", 64), ("S2", 32), ("S2", 128))


def kendall(pairs: list[tuple[float, float]]) -> float:
    """Return Kendall's tau of (published, simulated): the share of pairs in the same order less that of the others."""
    signs = [(a[0] - b[0]) * (a[1] - b[1]) for a, b in combinations(pairs, 2)]
    return sum((sign > 0) - (sign < 0) for sign in signs) / len(signs)


@pytest.mark.parametrize(("setting", "g"), CELLS)
@pytest.mark.slow
def test_the_order_is_the_published_one(setting, g):
    """All ten pairs of the five systems, so that one that changes places is noticed."""
    found = {}
    for case in systems.cases([setting], [g]):
        if case.system == "DeepSpeed-Zero" or case.planning == "as_built":
            made = row(case)
            found[case.system] = (systems.published_tok_s(made), made["simulated"]["tok_s"])
    assert set(found) == set(ALL)
    assert kendall(list(found.values())) == 1.0, found


def test_tau_counts_pairs_in_order():
    assert kendall([(1, 10), (2, 20), (3, 30)]) == 1.0
    assert kendall([(1, 10), (2, 20), (3, 15)]) == pytest.approx(1 / 3)
    assert kendall([(1, 3), (2, 2), (3, 1)]) == -1.0
