"""Runs planned as built and best are rows of their own, named so, and no ratio mixes them unseen."""

import pytest
from run_folders import configuration, store


@pytest.fixture
def four(tmp_path):
    """Two systems, each planned in both ways."""
    for tok_s, strategy, planning in (
        (10.0, "flexgen", "as_built"), (40.0, "flexgen", "best"), (30.0, "moelightning", "as_built"),
        (60.0, "moelightning", "best"),
    ):  # fmt: skip
        store(tmp_path, tok_s, configuration(strategy, strategy__planning=planning))


def test_a_baseline_is_planned_like_its_row(four, rows):
    found = rows("--baseline", "strategy=flexgen")
    assert [row["planning"] for row in found] == ["as_built", "best", "as_built", "best"]
    assert [row["ratio"] for row in found] == [1.0, 1.0, 3.0, 1.5]
    assert [row["ratio_to_planning"] for row in found] == [row["planning"] for row in found]


def test_a_ratio_across_both_is_marked(four, told):
    text = " ".join(told().out.split())
    assert "planned: rows 1, 3 as_built, rows 2, 4 best; a speed-up is of rows planned alike" in text
    for row in (2, 4):
        assert f"* row {row} is planned best, its baseline as_built: not like with like" in text
    assert "4.00x*" in text and "3.00x*" not in text and "3.00x" in text


def test_no_baseline_stands_for_the_other_way_of_planning(tmp_path, rows, told):
    store(tmp_path, 10.0, configuration("flexgen", strategy__planning="best"))
    store(tmp_path, 30.0, configuration("moelightning", strategy__planning="as_built"))
    assert [row["ratio"] for row in rows("--baseline", "strategy=flexgen")] == [1.0, None]
    assert "row 2: no baseline agrees in all else" in told("--baseline", "strategy=flexgen").out


def test_a_system_without_a_planner_is_like_both(four, tmp_path, rows):
    store(tmp_path, 5.0, configuration("ondemand"))
    found = rows("--baseline", "strategy=ondemand")
    assert [row["ratio"] for row in found] == [2.0, 8.0, 6.0, 12.0, 1.0]
    assert [row["planning"] for row in found][-1] is None
    found = rows("--baseline", "strategy=flexgen")
    assert found[-1]["ratio"] == pytest.approx(5 / 40), "as the best of the others, where there is one"


def test_what_all_rows_share_is_told_above_the_table(tmp_path, told):
    for strategy in ("flexgen", "moelightning"):
        store(tmp_path, 10.0, configuration(strategy, strategy__planning="as_built"))
    text = told().out
    assert "planned as_built" in text and "not like with like" not in text


def test_a_way_of_planning_may_be_the_baseline_of_both(four, rows):
    assert [row["ratio"] for row in rows("--baseline", "strategy=flexgen,planning=best")] == [0.25, 1.0, 0.75, 1.5]
