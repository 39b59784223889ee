"""Committed reports: labelled, with what made them, and their tables and claims are those of their numbers."""

from __future__ import annotations

import json

import pytest

from paper_figures import reports
from paper_figures.moegen.__main__ import REPORTS as MOEGEN
from paper_figures.moelens.__main__ import REPORTS as MOELENS
from paper_figures.moelightning.__main__ import REPORTS as MOELIGHTNING
from paper_figures.reports import Report
from paper_figures.support import read_json

COMMITTED = {
    f"{paper}-{name}": (name, report)
    for paper, named in (("moelens", MOELENS), ("moelightning", MOELIGHTNING), ("moegen", MOEGEN))
    for name, report in named.items()
    if (report.folder / f"{name}.json").exists()
}


def test_these_reports_are_committed():
    expected = {"fig6", "fig10", "systems", "table4", "table5", "hrm_accuracy", "table1", "fig1"}
    assert expected <= {name for name, _ in COMMITTED.values()}


@pytest.mark.parametrize("which", COMMITTED)
def test_a_committed_report_is_whole(which):
    name, report = COMMITTED[which]
    data = read_json(report.folder / f"{name}.json")
    assert set(data["label"].split(" and ")) <= {"simulated", "predicted", "emulated"}
    assert data["command"].endswith(name) and data["code"] and data["date"]
    assert (report.folder / f"{name}.md").read_text(encoding="utf-8") == report.tables(data)
    assert all((report.folder / f"{picture}.png").stat().st_size > 10_000 for picture in report.pictures)


def test_table_5_has_the_papers_order():
    """Each variant beats the one before it, with either set of rates."""
    rows = read_json(MOELIGHTNING["table5"].folder / "table5.json")["rows"]
    for rates in {r["rates"] for r in rows}:
        chosen = [r for r in rows if r["rates"] == rates]
        for side in ([r["published_tok_s"] for r in chosen], [r["simulated"]["tok_s"] for r in chosen]):
            assert side == sorted(side)


def test_cgopipe_is_shortest_in_figure_6():
    windows = read_json(MOELIGHTNING["fig6"].folder / "fig6.json")["windows"]
    assert windows[0]["length_ms"] == min(w["length_ms"] for w in windows)


def small_report(folder) -> Report:
    return Report(
        compute=lambda: {"label": "predicted", "rows": [1, 2]}, tables=lambda data: f"{data['rows']}\n", note="a note",
        folder=folder,
    )  # fmt: skip


def test_a_report_is_written_with_what_made_it(tmp_path, capsys):
    asked = ["small", "--out", str(tmp_path)]
    assert reports.main("paper", {"small": small_report(tmp_path / "own")}, pytest.fail, asked) == 0
    data = json.loads((tmp_path / "small.json").read_text())
    assert data["rows"] == [1, 2] and data["command"] == "python -m paper_figures.paper small"
    assert (tmp_path / "small.md").read_text() == "[1, 2]\n"
    assert "[1, 2]" in capsys.readouterr().out
    assert not (tmp_path / "own").exists()


def test_an_unknown_name_is_told(tmp_path, capsys):
    assert reports.main("paper", {"small": small_report(tmp_path)}, pytest.fail, ["large"]) == 2
    assert "NAME: must be one of small, got large" in capsys.readouterr().err
