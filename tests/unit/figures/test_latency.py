"""Reports of systems for small batches say what their rows say, and nothing where a row is missing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from harness.settings import load_strategy, parse_settings
from paper_figures.latency import caches, part, systems, where
from paper_figures.latency.grid import LLAPOR, RECORDED, SMALL_MODELS, Case, G
from paper_figures.latency.grid import row as computed_row
from paper_figures.measuring import batch_passes, counts
from paper_figures.passes import planned
from paper_figures.support import composed


def row(system: str, tok_s: float, token_s: float, batch: int = 4, variant: str = "") -> dict:
    lanes = {"gpu": 0.5, "cpu": 0.25, "h2d": 1.0}
    counted = {"active": 8, "resident": 4, "cached": 0, "prefetched": 0, "on_demand": 2, "cpu": 2}
    return {
        "system": system, "model": "deepseek-v2-lite", "gpu": "A100", "batch": batch, "variant": variant,
        "tok_s": tok_s, "token_s": token_s, "gap_p99_s": 2 * token_s, "decode_counts": counted,
        "decode": {"busy": lanes, "link_gb": {"weights": 1.5}},
    }  # fmt: skip


def test_gains_are_the_largest_over_rows_that_both_have():
    rows = [
        *(row("prescope", 30, 0.1), row("prescope", 50, 0.2, batch=8), row("prescope", 90, 0.1, batch=16)),
        *(row("fate", 20, 0.4), row("fate", 40, 0.3, batch=8), row("klotski", 30, 0.1), row(LLAPOR, 40, 0.2)),
        {**row("fate", 1, 9, batch=16), "refused": "too small"},
    ]
    lines = {line.split(" | ")[0].removeprefix("| "): line for line in systems.gains(rows).splitlines()}
    assert lines["fate"] == "| fate | 264 | 100 | 50 | 68.2 | 50 | 75 |", "a refused row has no numbers"
    assert lines["klotski"] == "| klotski | 141 | 33 | 0 | 74.6 | -100 | 0 |"
    assert lines["fiddler"] == "| fiddler | 129 |  |  | 72.3 |  |  |"


def test_each_published_gain_stands_beside_that_of_its_place():
    rows = [row(LLAPOR, 30, 0.1, batch=64), row("prescope", 25, 0.2, batch=64), row("fate", 20, 0.4, batch=64)]
    rows = [{**each, "model": "qwen3-30b-a3b", "gpu": "V100"} for each in rows]
    lines = systems.gains_by_place(rows).splitlines()
    assert "| throughput | V100 | qwen3-30b-a3b | 64 | fate | 108 | 50 | 25 |" in lines
    assert "| time per token | V100 | qwen3-30b-a3b | 64 | fate | 46.7 | 75 | 50 |" in lines
    assert "| throughput | V100 | mixtral-8x7b | 8 | fate | 213 |  |  |" in lines, "not simulated"


def test_a_part_without_rows_is_refused_before_anything_is_computed(tmp_path, capsys):
    assert part.main(["systems", "--batch", "5", "--out", str(tmp_path)]) == 2
    assert "--batch" in capsys.readouterr().err
    assert part.main(["where", "--system", "ondemand", "--out", str(tmp_path)]) == 2
    assert "where has no row with these systems" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert part.main(["systems", "--out", str(tmp_path / "file" / "below")]) == 2
    assert "--out" in capsys.readouterr().err


def test_prescope_by_llapor_has_its_predictors_and_the_hits_that_its_paper_states():
    """The other systems, and PreScope beside them, predict by the gate, and hit as often as was recorded of it."""
    for variant in ("", RECORDED):
        case = Case(system=LLAPOR, model="mixtral-8x7b", gpu="A100", batch=4, variant=variant)
        settings = parse_settings(composed(*case.overrides))
        load_strategy(settings.strategy)
        assert settings.strategy["package"] == "strategies.prescope"
        assert settings.strategy["predictor"] == "learned"
        assert settings.routing["hit_rates"] == [[0.97]]
    stated = {"prescope": "[[0.82],[0.78]]", "hybrimoe": "[[0.82],[0.78],[0.74]]", "fate": "[[0.82]]"}
    for system, rates in stated.items():
        gate = replace(case, system=system, variant="").overrides
        assert f"routing.hit_rates={rates}" in gate and "strategy.predictor=learned" not in gate


def test_tables_show_where_experts_were_and_the_published_value_beside_ours():
    text = systems.tables({"label": "simulated", "rows": [row(LLAPOR, 12.3, 0.1, batch=64)]})
    assert (
        "12.3 (published 37.4)" in text
        and "| prescope, LLaPor | 64 | 50% | 0% | 0% | 25% | 25% | 50% | 25% | 100% | 1.5 |" in text
    )


def test_the_best_of_each_line_is_marked():
    rows = [row(system, 1, token_s, variant="6 GB/s, 10 GB") for system, token_s in (("fate", 0.2), ("fiddler", 0.1))]
    text = where.tables({"label": "simulated", "rows": rows})
    assert "| 4 | 10 | 6 |  |  |  |  | 0.2 | **0.1** |  |  |  |" in text and text.count("**") == 2


def test_a_system_stands_beside_itself_without_prefetches():
    alike = [case for case in where.cases() if case.system == "fate" and case.batch == 4]
    without, prefetching = (case.overrides for case in alike[:2])
    assert without == [*prefetching, "strategy.predictor=none"] and len(alike) == 24
    assert len({case.key for case in where.cases()}) == len(where.cases())


@pytest.mark.parametrize(("system", "number"), [("klotski", 8), ("fate", 4)])
def test_klotski_has_two_batches_of_the_size(system, number):
    overrides = Case(system=system, model="mixtral-8x7b", gpu="V100", batch=4).overrides
    assert f"dataset.num_requests={number}" in overrides and "strategy.batch_size=4" in overrides
    assert "routing.hit_rates=[[0.82]]" in overrides and "model.dtype=float16" in overrides


def test_a_row_counts_passes_that_others_stand_for():
    """A row simulates three of eight equal passes of prefill and a few of 63 steps; a whole run has them all."""
    case = Case(system="fiddler", model="deepseek-v2-lite", gpu="A100", batch=8, more=("strategy.max_pass_tokens=512",))
    found, passes = computed_row(case), batch_passes(planned(case.overrides), whole=True)
    prefill, decode = ([p.length_s for p in passes if (p.step is None) == first] for first in (True, False))
    assert (len(prefill), len(decode)) == (8, G - 1)
    assert found["sequences"] == 8
    assert found["first_token_s"] == pytest.approx(sum(prefill), rel=0.02)
    assert found["tok_s"] == pytest.approx(8 * G / (sum(prefill) + sum(decode)), rel=0.02)
    for share, expected in ((50, np.median(decode)), (99, np.percentile(decode, 99))):
        assert found[f"gap_p{share}_s"] == pytest.approx(expected, rel=0.1)
    whole = counts([p for p in passes if p.step is not None])
    rate = (whole["resident"] + whole["cached"] + whole["prefetched"]) / whole["active"]
    assert found["decode_counts"]["active"] == pytest.approx(whole["active"], rel=0.02), "those of decode alone"
    assert found["decode_counts"]["hit_rate"] == pytest.approx(rate, abs=0.01)


def test_rows_of_a_recorded_trace_stand_apart():
    """Rows of a trace have its routing and its predictions, and no published value beside them."""
    overrides = Case(system="fate", model="moonlight-16b-a3b", gpu="A100", batch=4, variant=RECORDED).overrides
    assert "routing=trace" in overrides and not [each for each in overrides if "hit_rates" in each]
    rows = [row(LLAPOR, 12.3, 0.1, batch=64), row(LLAPOR, 4.56, 0.2, batch=64, variant=RECORDED)]
    fitted, recorded = systems.tables({"label": "simulated", "rows": rows}).split(f"A100, {RECORDED}\n")
    assert "12.3 (published 37.4)" in fitted and "4.56" not in fitted
    assert "| prescope, LLaPor | 4.56 |" in recorded.split("largest gains")[0]
    assert {case.variant for case in systems.cases()} == {"", RECORDED, SMALL_MODELS}


def test_a_gate_that_looks_further_hits_less_often_as_stated():
    """4 points a layer, or what small trained models lose; the systems that look one layer ahead lose nothing."""
    ahead = {"hybrimoe": 3, "prescope": 2, "fate": 1}
    for variant, losses in (("", (0, 0.04, 0.08)), (SMALL_MODELS, (0, 0.068, 0.121))):
        for system, layers in ahead.items():
            case = Case(system=system, model="mixtral-8x7b", gpu="A100", batch=4, variant=variant)
            rates = [rate for [rate] in composed(*case.overrides)["routing"]["hit_rates"]]
            assert rates == pytest.approx([0.82 - loss for loss in losses[:layers]])


def test_no_cache_passes_the_bound_of_its_routing():
    """All policies run the same requests; the oracle knows these, and is ahead of the others."""
    short = ("dataset.max_prompt_tokens=16", "dataset.max_new_tokens=4", "strategy.profile_tokens=24")
    [case] = [case for case in caches.cases() if case.model == "deepseek-v2-lite" and case.batch == 4]
    rows = caches.rows(replace(case, more=("hardware.device_memory_gb=10", *short)))
    assert [r["policy"] for r in rows] == [*caches.POLICIES]
    assert len({r["whole"]["active"] for r in rows}) == 1 == len({r["places"] for r in rows})
    *others, oracle = (r["whole"]["cached"] for r in rows)
    assert max(others) < oracle <= rows[-1]["optimum"] < rows[-1]["whole"]["active"]
    assert all(0 < r["decode"]["active"] < r["whole"]["active"] for r in rows)
    *alone, whole = (r["command"] for r in rows)
    assert all(command.startswith("python -m harness.plan strategy=expert_cache") for command in alone)
    assert whole == "python -m paper_figures.latency caches", "a run alone has no routing for the oracle"
    text = caches.tables({"label": "simulated", "rows": rows})
    assert f" {rows[-1]['optimum'] / rows[-1]['whole']['active']:.1%} |" in text and text.count("| 4 |") == 3
