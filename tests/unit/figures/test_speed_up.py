"""MoE-Lens over MoE-Lightning: like with like, over the better of MoE-Lightning's two hosts."""

from __future__ import annotations

import pytest

from paper_figures.moelens import speed_up


def cell(planning: str, host: str, tok_s: float) -> dict:
    busy = {"gpu": 0.5, "h2d": 1.0}
    return {
        "kv_cache_gb": 70, "g": 32, "planning": planning, "host": host, "tok_s": tok_s, "mu": 4, "N": 8,
        "prefill_s": 1.0, "step_s": 1.0, "decode_busy": busy,
    }  # fmt: skip


MOELENS = [{"kv_cache_gb": 70, "g": 32, "throughput_tok_s": 600.0}]


def test_each_way_of_planning_has_a_ratio_of_its_own_over_the_better_host():
    rows = [cell("as_built", "+30 GB", 100.0), cell("as_built", "x 1.25", 200.0), cell("best", "+30 GB", 500.0)]
    (found,) = speed_up.ratios(rows, MOELENS)
    assert found["ratio"] == {"as_built": 3.0, "best": pytest.approx(1.2)}
    (found,) = speed_up.ratios(rows[:2], MOELENS)
    assert found["ratio"] == {"as_built": 3.0, "best": None}, "nothing stands for what was not simulated"


def test_means_are_of_all_lengths_or_of_none():
    found = [
        {"kv_cache_gb": 70, "ratio": {"as_built": ratio, "best": best}} for ratio, best in ((2.0, 1.0), (8.0, None))
    ]
    (mean,) = speed_up.means(found)
    assert (mean["planning"], mean["arithmetic"], mean["geometric"], mean["most"]) == ("as_built", 5.0, 4.0, 8.0)
    assert mean["published"] == 3.2


def test_a_cell_is_planned_as_its_label_says(monkeypatch):
    monkeypatch.setattr(speed_up, "_MOST_REQUESTS", 700)
    monkeypatch.setattr(speed_up, "HOSTS", {"x 1.25": speed_up.HOSTS["x 1.25"]})
    rows = [row for planning in speed_up.PLANNINGS for row in speed_up.moelightning(12, 3, planning)]
    as_built, best = rows
    assert [r["planning"] for r in rows] == ["as_built", "best"] and all(r["planning"] in r["command"] for r in rows)
    assert as_built["step_s"] > 1.5 * best["step_s"], "one copying thread, not four"
    data = {"rows": rows, "ratios": speed_up.ratios(rows, [{**MOELENS[0], "kv_cache_gb": 12, "g": 3}]), "means": []}
    assert "speed-up, as built | speed-up, best |" in speed_up.tables(data)
    assert "| 12 | 3 | as built | x 1.25 |" in speed_up.tables(data)
