"""Batches on several GPUs: what is continued beyond the simulated steps, and what is compared."""

from __future__ import annotations

import pytest

from paper_figures.moelightning import several_gpus
from paper_figures.moelightning.several_gpus import (
    GENERATED,
    SETTINGS,
    SHOWN,
    SYSTEMS,
    Batch,
    joined,
    overrides,
    scaling,
    simulated,
)
from paper_figures.passes import planned
from paper_figures.support import composed, read_json, write_json

SMALL = (
    *("model=mixtral-8x7b", "hardware=t4x2", "kv_cache_gb=4", "strategy.packet_mb=1000", "dataset.num_requests=24"),
    *("dataset=mtbench_lightning", "dataset.synthetic=lengths", "dataset.max_new_tokens=7"),
)


def row(setting: str, system: str, g: int, tok_s: float) -> dict:
    return {"setting": setting, "system": system, "g": g, "simulated_tok_s": tok_s}


def test_steps_go_on_in_a_straight_line():
    """2, 3, 4, 5 seconds and so on; the first step, which the prefill holds up, is no part of the line."""
    batch = Batch(num_sequences=10, prefill_s=100.0, steps_s=(9.0, 3.0, 4.0), new_tokens=8)
    assert batch.total_s == pytest.approx(100 + 9 + 3 + 4 + 5 + 6 + 7 + 8)
    assert batch.tok_s == pytest.approx(80 / batch.total_s)
    whole = Batch(num_sequences=1, prefill_s=1.0, steps_s=(1.0, 2.0), new_tokens=3)
    assert whole.total_s == 4.0


@pytest.mark.parametrize(
    ("strategy", "together"), [("flexgen", 2), ("flexgen_c", 2), ("flexgen strategy.parallelism=tensor", 1)]
)
def test_a_batch_is_continued_to_what_a_whole_run_takes(strategy, together):
    name, *more = strategy.split()
    size = (f"strategy.policy.batch_size={24 // together}", "strategy.policy.micro_batch_size=9")
    arguments = (f"strategy={name}", *more, *SMALL, *size)
    whole, part = (simulated(planned(arguments), new_tokens=7, steps=steps) for steps in (6, 4))
    assert whole.num_sequences == part.num_sequences == 24
    assert (len(whole.steps_s), len(part.steps_s)) == (6, 4)
    assert part.steps_s[:3] == pytest.approx(whole.steps_s[:3])
    assert part.total_s == pytest.approx(whole.total_s, rel=0.02)


@pytest.mark.parametrize(("setting", "system"), [(setting, name) for setting in SETTINGS for name in SHOWN[setting]])
def test_figure_7_is_padded_to_its_longest_prompt_and_figure_8_is_not(setting, system):
    lengths = composed(*overrides(setting, system, 32, 60))["dataset"]["lengths"]
    padded = {"mean": 418, "shape": "constant"}
    assert (padded.items() <= lengths.items()) == (setting in ("S6", "S7"))
    assert lengths["max"] == 418


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_system_as_built_says_so_and_no_other_is(system):
    values = composed(*overrides("S6", system, 32, 60))
    planning = values["strategy"].get("planning", "best")
    assert planning == ("as_built" if system.endswith(", as built") else "best")
    staged = planning == "as_built" and system.startswith("FlexGen")
    assert values["kv_cache_gb"] == (60 if staged else 100)


def test_throughput_with_four_gpus_is_set_beside_that_with_two():
    system = next(iter(SYSTEMS))
    rows = [row("S6", system, 32, 10.0), row("S7", system, 32, 25.0), row("S8", "FlexGen", 32, 5.0)]
    (found,) = scaling(rows)
    assert found == {"of": "S7/S6", "system": system, "g": 32, "simulated": 2.5, "published": [2.77, 3.38]}


def test_new_rows_take_the_place_of_old_ones():
    first, second = list(SETTINGS)[:2]
    system, g = next(iter(SYSTEMS)), GENERATED[0]
    kept = [row(second, system, g, 1.0), row(first, system, g, 2.0)]
    assert joined(kept, [row(second, system, g, 3.0)]) == [row(first, system, g, 2.0), row(second, system, g, 3.0)]


def test_a_report_of_some_cells_tells_the_code_of_all_its_rows(tmp_path, monkeypatch):
    def made(setting: str, code: str) -> dict:
        sizes = {"N": 8, "mu": 2, "r_w": None, "attention": "GPU", "sequences": 8, "predicted_tok_s": None}
        return row(setting, "FlexGen, as built", 32, 5.0) | sizes | {"steps_s": [1.0], "code": code}

    write_json(tmp_path / "several_gpus.json", {"rows": [made("S6", "older")]})
    monkeypatch.setattr(several_gpus, "compute", lambda *_: {"rows": [made("S7", "newer")]})
    assert several_gpus.main(["--settings", "S7", "--g", "32", "--out", str(tmp_path)]) == 0
    report = read_json(tmp_path / "several_gpus.json")
    assert report["code"] == "newer, older" and [r["setting"] for r in report["rows"]] == ["S6", "S7"]
