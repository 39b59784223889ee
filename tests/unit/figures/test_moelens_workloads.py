"""Speed-ups over all models and workloads: of like rows, with the means of the cells that are there."""

from __future__ import annotations

from paper_figures.moelens.workloads import LENS, LENS_EOS, LIGHTNING, cases, main, row, tables
from tests.composing import composed


def made(model: str, dataset: str, g: int, kv_gb: int, system: str, tok_s: float) -> dict[str, object]:
    fields = {"model": model, "dataset": dataset, "g": g, "kv_cache_gb": kv_gb, "system": system}
    return {**fields, "tok_s": tok_s, "requests_s": tok_s / g, "requests": 19, "predicted_tok_s": 2 * tok_s}


def test_every_cell_has_both_systems_and_composes():
    by_cell: dict[tuple[object, ...], set[str]] = {}
    for case in cases():
        composed("machine=simulated", "strategy=moelens", *case.overrides)
        by_cell.setdefault(case.key[:-1], set()).add(case.system)
    assert len(by_cell) == 3 * 2 * 6 and all({LENS, LIGHTNING} <= systems for systems in by_cell.values())
    assert sum(LENS_EOS in systems for systems in by_cell.values()) == 12


def test_means_are_over_the_cells_that_are_there():
    rows = [
        *(made("dbrx", "mtbench", 128, 70, LENS, 40.0), made("dbrx", "mtbench", 128, 70, LIGHTNING, 10.0)),
        *(made("dbrx", "mtbench", 256, 70, LENS, 90.0), made("dbrx", "mtbench", 256, 70, LIGHTNING, 10.0)),
        *(made("dbrx", "mtbench", 256, 70, LENS_EOS, 80.0), made("dbrx", "mtbench", 128, 210, LENS, 70.0)),
    ]
    lines = tables({"rows": rows}).splitlines()
    assert "| mtbench | 70 | 2 | 6.5 | 6 | 9 | 3.2 |  |" in lines
    assert "| dbrx | mtbench | 256 | 70 | 90 | 80 | 10 | 19 | 180 | 9 | 8 | 8 |" in lines
    assert "| dbrx | mtbench | 128 | 210 | 70 |  |  |  | 140 |  |  |  |" in lines, "not both simulated"


def test_a_small_cell_is_simulated_by_both(monkeypatch):
    monkeypatch.setattr("paper_figures.moelens.workloads.DATASETS", {"mtbench": (2,)})
    found = {}
    for case in cases()[:2]:
        assert case.model == "mixtral-8x7b" and case.kv_cache_gb == 70
        small = type(case)(**{**vars(case), "kv_cache_gb": 0.4, "model": "mixtral-8x7b"})
        found[case.system] = row(small)
    lens, lightning = found[LENS], found[LIGHTNING]
    assert lens["requests"] > 0 and lens["tok_s"] > lightning["tok_s"] > 0
    assert 0 < lens["busy"]["h2d"] <= 1 and "planning=as_built" in lightning["command"]


def test_bad_input_is_refused(capsys):
    assert main(["--model", "gpt-2"]) == 2
    assert "--model" in capsys.readouterr().err
