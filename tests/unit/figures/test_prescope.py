"""Reports on PreScope: what is missing is shown as missing, and what is lost follows from the rows alone."""

from __future__ import annotations

import pytest

from harness.settings import load_strategy, parse_settings
from paper_figures.prescope import ablation, gap, throughput
from paper_figures.prescope.cases import OTHERS, OURS, Case, all_cases, find
from paper_figures.prescope.published import LOST
from paper_figures.support import composed


def made(case: Case, tok_s: float) -> dict:
    ways = {"resident": 6, "prefetched": 1, "cpu": 3, "active": 10, "wasted_bytes": 2e9}
    named = {"system": case.system, "gpu": case.gpu, "model": case.model, "batch": case.batch, "variant": ""}
    return {**named, "tok_s": tok_s, "token_s": 1 / tok_s, "counted": ways}


@pytest.mark.parametrize("system", [*OURS, *OTHERS])
def test_every_system_has_settings_that_are_known(system):
    case = Case(system=system, gpu="V100", model="qwen3-30b-a3b", batch=8)
    values = composed(*case.overrides)
    assert parse_settings(values).dataset.num_requests == 8
    load_strategy(values["strategy"])


def test_what_is_lost_is_told_beside_what_is_published():
    case = next(c for c in all_cases(OURS) if (c.gpu, c.model, c.batch, c.system) in LOST)
    whole = made(Case(system="PreScope", gpu=case.gpu, model=case.model, batch=case.batch), 8.0)
    rows = [whole, made(case, 6.0)]
    assert ablation.lost(rows, case.gpu, case.model, case.batch, case.system) == pytest.approx(0.25)
    text = ablation.tables({"rows": rows})
    assert f"25% ({LOST[case.gpu, case.model, case.batch, case.system]:.0%})" in text
    assert "25%" not in ablation.tables({"rows": rows[1:]}), "without the whole nothing is lost"


def test_throughput_shows_what_was_simulated_and_nothing_else():
    case = Case(system="PreScope", gpu="A100", model="qwen3-30b-a3b", batch=64)
    text = throughput.tables({"rows": [made(case, 4.0)]})
    assert "4 (13.3)" in text and "resident 60%, prefetched 10%, cpu 30%, wasted 2 GB" in text
    assert find([{**made(case, 4.0), "refused": "no room"}], *case.key) is None
    assert "4 (13.3)" not in throughput.tables({"rows": []})


def test_the_gap_of_a_layer_is_between_both_sides():
    rows = [{"system": "PreScope", "layers_s": [(0.010, 0.004), (0.001, 0.003)]}]
    line = next(line for line in gap.tables({"rows": rows}).splitlines() if line.startswith("| PreScope"))
    assert [cell.strip() for cell in line.split("|")[2:-1]] == ["4", "5.6", "6"]
