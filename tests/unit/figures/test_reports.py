"""Committed reports: labelled, with what made them, and their tables and claims are those of their numbers."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from paper_figures import reports, timelines
from paper_figures.moegen import part
from paper_figures.moegen.__main__ import REPORTS as MOEGEN
from paper_figures.moelens import simulate, simulated, speed_up
from paper_figures.moelens.__main__ import REPORTS as MOELENS
from paper_figures.moelightning import several_gpus
from paper_figures.moelightning.__main__ import REPORTS as MOELIGHTNING
from paper_figures.prescope import emulated, prediction
from paper_figures.reports import Report
from paper_figures.routing import __main__ as routing
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


def test_a_report_with_kept_rows_names_their_commits_and_computes_all_where_asked(tmp_path):
    asked = []

    def compute(out, *, again):
        asked.append((out, again))
        return {"label": "simulated", "rows": [{"code": code} for code in ("f00d", "c0de", "f00d")]}

    report = replace(small_report(tmp_path / "own"), compute=compute, keeps_rows=True)
    for more in ([], ["--again"]):
        assert reports.main("paper", {"kept": report}, pytest.fail, ["kept", "--out", str(tmp_path), *more]) == 0
    assert asked == [(tmp_path, False), (tmp_path, True)]
    data = json.loads((tmp_path / "kept.json").read_text())
    assert data["code"] == "c0de, f00d" and data["written"] and "date" not in data


def test_again_is_for_reports_that_are_named_and_keep_rows(tmp_path, capsys):
    small = small_report(tmp_path)
    assert reports.main("paper", {"small": small}, pytest.fail, ["small", "--again"]) == 2
    assert reports.main("paper", {"small": replace(small, keeps_rows=True)}, pytest.fail, ["--again"]) == 2
    told = capsys.readouterr().err.splitlines()
    assert [line.split(":")[1].strip() for line in told] == ["--again", "--again"]


def test_a_folder_that_cannot_be_made_is_told_before_anything_is_computed(tmp_path, capsys):
    (tmp_path / "file").touch()
    report = replace(small_report(tmp_path), compute=pytest.fail)
    for names in (["small"], []):
        assert reports.main("paper", {"small": report}, pytest.fail, [*names, "--out", str(tmp_path / "file/x")]) == 2
        assert capsys.readouterr().err.startswith("error: --out: cannot write to")


COMMANDS = {
    simulate: [], simulated: [], speed_up: [], several_gpus: [], part: ["throughput"], routing: [],
    timelines: ["RUN_FOLDER"], emulated: ["FOLDER"], prediction: [],
}  # fmt: skip


@pytest.mark.parametrize("module", COMMANDS, ids=lambda module: module.__name__.removeprefix("paper_figures."))
def test_every_command_tells_so_first(module, tmp_path, capsys):
    (tmp_path / "file").touch()
    assert module.main([*COMMANDS[module], "--out", str(tmp_path / "file" / "x.png")]) == 2
    assert capsys.readouterr().err.startswith("error: --out: cannot write to")
