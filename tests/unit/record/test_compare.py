"""What a comparison says: repeats, settings that differ, ratios, and the same numbers in every format."""

import csv
import io
import json
import re
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_folders import META, configuration, store

from harness.record import compare
from harness.record.comparing.folders import Finished, Summary, Verified
from harness.record.comparing.rows import compared, with_ratios

# -- repeats --------------------------------------------------------------------------------------------------------


def finished(number, tok_s, **settings):
    summary = Summary(
        label="emulated",
        throughput_tok_s=tok_s,
        predicted_throughput_tok_s=None,
        prediction_accuracy=None,
        utilization={},
        verify=Verified(checked=0, mismatched=0),
        data_source="",
        weights_source="",
    )
    names = {f"{group}.name": "x" for group in ("strategy", "model", "dataset", "machine", "hardware")}
    return Finished(run=f"run-{number}", settings={**names, **settings}, summary=summary)


@given(st.lists(st.tuples(st.sampled_from([0.5, 1, 2]), st.floats(0.1, 1e6)), min_size=1, max_size=20))
def test_repeats_are_one_row_with_median_and_extremes(runs):
    """Counted beside it in plain Python: every run is in the row of its setting, in the order of the first of each."""
    comparison = compared([finished(i, t, kv_cache_gb=kv, seed=i) for i, (kv, t) in enumerate(runs)], lambda g, c: {})
    expected = {kv: [t for other, t in runs if other == kv] for kv, _ in runs}
    table = comparison.exported
    assert [
        list(row) for row in table[["throughput_tok_s", "throughput_tok_s_min", "throughput_tok_s_max"]].values
    ] == [pytest.approx([median(t), min(t), max(t)]) for t in expected.values()]
    assert list(table["num_runs"]) == [len(t) for t in expected.values()]
    assert sorted(run for runs in table["runs"] for run in runs) == sorted(f"run-{i}" for i in range(len(runs)))
    ratios = with_ratios(comparison, None).measured
    if len(expected) > 1:
        base, *_ = expected.values()
        for (_, row), tok_s in zip(ratios.iterrows(), expected.values(), strict=True):
            possible = [t / b for t in tok_s for b in base]
            assert row["ratio"] == pytest.approx(median(tok_s) / median(base))
            assert (row["ratio_min"], row["ratio_max"]) == pytest.approx((min(possible), max(possible)))


def test_runs_are_repeats_unless_something_that_counts_differs(tmp_path, rows):
    """The seed and where records go are a run's own; another code, computer or checkpoint is none."""
    for seed, results_dir in ((0, "a"), (1, "b"), (2, "c")):
        store(tmp_path, 10.0 + seed, configuration(seed=seed, results_dir=results_dir, wandb={"mode": "offline"}))
    assert [row["num_runs"] for row in rows()] == [3]
    store(tmp_path, 10.0, meta={**META, "code_version": "4567"})
    store(tmp_path, 10.0, meta={**META, "environment": {"processor": "another"}})
    store(tmp_path, 10.0, weights_source="another checkpoint")
    store(tmp_path, 10.0, label="measured")
    found = rows()
    assert [row["num_runs"] for row in found] == [3, 1, 1, 1, 1]
    assert [row["code"] for row in found] == ["0123abcd", "4567", *["0123abcd"] * 3]
    assert [row["computer"] for row in found] == ["some processor"] * 2 + ["another"] + ["some processor"] * 2


def test_the_table_tells_how_many_runs_a_number_is_of(tmp_path, told):
    for seed, tok_s in enumerate((30.0, 10.0, 20.0)):
        store(tmp_path, tok_s, configuration(seed=seed))
    store(tmp_path, 40.0, configuration("flexgen"))
    lines = told().out.splitlines()
    (several,) = (line for line in lines if " moelens " in line)
    (single,) = (line for line in lines if " flexgen " in line)
    assert "20 (10-30)" in several and " 3 " in several
    assert "2.00x (1.33-4.00)" in single and " 40 " in single and " 1 " in single


# -- settings that differ -------------------------------------------------------------------------------------------


def test_ablations_show_with_several_strategies_too(tmp_path, told, monkeypatch, rows):
    """What comes with a strategy's name by default is not told, and everything else is."""
    strategies = {
        "moelens": {"pipeline": "vslpipe", "attention": "cpu", "packet_mb": 1.0},
        "moelightning": {"paging": "true", "staging": "true", "packet_mb": 1.0},
        "flexgen": {"staging": "false", "packet_mb": 1.0},
    }
    defaults = {name: {f"strategy.{key}": value for key, value in s.items()} for name, s in strategies.items()}
    monkeypatch.setattr(compare, "yaml_defaults", lambda group, choice: defaults.get(choice, {}))
    for name, changes in (
        ("moelens", {}),
        ("moelens", {"pipeline": "sequential"}),
        ("moelightning", {"paging": "false"}),
        ("flexgen", {}),
    ):
        given = {f"strategy__{key}": value for key, value in {**strategies[name], **changes}.items()}
        store(tmp_path, 10.0, configuration(name, **given))
    found = rows()
    assert [row["strategy.pipeline"] for row in found] == [
        "vslpipe",
        "sequential",
        None,
        None,
    ]  # differs in one strategy
    assert [row["strategy.paging"] for row in found] == [None, None, "false", None]  # is not its default
    assert [row["strategy.staging"] for row in found] == [None, None, "true", "false"]  # strategies differ in it
    assert "strategy.attention" not in found[0] and "strategy.packet_mb" not in found[0]
    header = told().out
    assert all(name in header for name in ("pipeline", "paging", "staging")) and "attention" not in header


def test_an_exchanged_group_is_its_name_and_what_was_changed_in_it(tmp_path, monkeypatch, rows):
    defaults = {"laptop": {"hardware.h2d_gb_s": 0.5, "hardware.cpu": 4}, "a40": {"hardware.h2d_gb_s": 19.5}}
    monkeypatch.setattr(compare, "yaml_defaults", lambda group, choice: defaults.get(choice, {}))
    laptop = {"hardware__cpu": 4}
    store(tmp_path, 10.0, configuration(**laptop, hardware__h2d_gb_s=0.5))
    store(tmp_path, 10.0, configuration(hardware="a40", hardware__h2d_gb_s=19.5))
    assert [row["hardware"] for row in rows()] == ["laptop", "a40"]
    assert not [name for name in rows()[0] if name.startswith("hardware.")]
    store(tmp_path, 10.0, configuration(**laptop, hardware__h2d_gb_s=1.0))
    assert [row["hardware.h2d_gb_s"] for row in rows()] == [0.5, 19.5, 1.0]
    assert "hardware.cpu" not in rows()[0]


def test_defaults_are_those_of_the_yaml():
    assert compare.yaml_defaults("strategy", "moelightning")["strategy.paging"] == "true"
    assert compare.yaml_defaults("strategy", "moelightning")["strategy.policy.batch_size"] == "null"
    assert compare.yaml_defaults("hardware", "laptop")["hardware.h2d_gb_s"] == 0.5
    assert isinstance(compare.yaml_defaults("hardware", "a40")["hardware.h2d_gb_s"], float)  # without its source
    assert compare.yaml_defaults("strategy", "nobody's") == {}


def test_a_rate_with_its_source_is_its_value(tmp_path, rows):
    stated = {"value": 19.5, "kind": "achieved", "source": "somebody"}
    for rate in (stated, 21.0):
        store(tmp_path, 10.0, configuration(hardware__h2d_gb_s=rate))
    assert [row["hardware.h2d_gb_s"] for row in rows()] == [19.5, 21.0]


# -- ratios ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def several(tmp_path):
    """Two strategies with two datasets, one strategy with a third one."""
    for strategy, dataset, tok_s in (
        *(("moelens", "mtbench", 20.0), ("flexgen", "mtbench", 10.0)),
        *(("moelens", "gsm8k", 6.0), ("flexgen", "gsm8k", 4.0), ("moelens", "mmlu", 5.0)),
    ):
        store(tmp_path, tok_s, configuration(strategy, dataset=dataset))


def test_ratios_are_to_the_first_row_unless_told_otherwise(several, rows, told):
    assert [row["ratio"] for row in rows()] == [1.0, 0.5, 0.3, 0.2, 0.25]
    assert [row["ratio"] for row in rows("--baseline", "flexgen-aaaa-2")] == [5.0, 2.5, 1.5, 1.0, 1.25]
    assert "ratio: of tok/s to row 1, the oldest" in told().out


def test_only_a_person_at_the_terminal_is_told_how_to_choose_another_baseline(several, told):
    assert "chooses another" in told().out
    assert "chooses another" not in told("--baseline", "strategy=flexgen").out
    assert json.loads(told("--format", "json").out)["baseline"] == "row 1, the oldest"
    assert all("chooses another" not in told("--format", form).out for form in ("json", "csv", "markdown"))


def test_a_baseline_by_setting_agrees_in_all_others(several, rows, told):
    assert [row["ratio"] for row in rows("--baseline", "strategy=flexgen")] == [2.0, 1.0, 1.5, 1.0, None]
    assert [row["ratio_to_row"] for row in rows("--baseline", "strategy=flexgen")] == [2, 2, 4, 4, None]
    assert [row["ratio"] for row in rows("--baseline", "dataset=gsm8k,strategy=moelens")] == pytest.approx(
        [20 / 6, 10 / 6, 1.0, 4 / 6, 5 / 6]
    )
    assert "row 5: no baseline agrees in all else" in told("--baseline", "strategy=flexgen").out


def test_a_baseline_is_found_among_machines_of_different_settings(tmp_path, rows, told):
    """What one machine does not have agrees only with what another has not; a number may be of any size or kind."""
    machines = ({"machine": "emulated", "machine__lanes": 3}, {"machine": "cuda", "machine__device": "cuda:0"})
    revisions = ({}, {"dataset__revision": 1e308}, {"dataset__revision": "main"})
    cases = [(machine, revision) for machine in machines for revision in revisions]
    for number, (machine, revision) in enumerate(cases, start=1):
        store(tmp_path, 2.0 * number, configuration("moelens", **machine, **revision))
        store(tmp_path, 1.0 * number, configuration("flexgen", **machine, **revision))
    found = rows("--baseline", "strategy=flexgen")
    assert [row["ratio_to_row"] for row in found] == [2, 2, 4, 4, 6, 6, 8, 8, 10, 10, 12, 12]
    assert [row["ratio"] for row in found] == [2.0, 1.0] * 6
    assert "strategy=flexgen that agrees in all else" in told("--baseline", "strategy=flexgen").out


@pytest.mark.parametrize(
    ("asked", "answer"),
    [
        ("strategy=nobodys", "no row has strategy=nobodys; valid are moelens, flexgen"),
        ("strateg=moelens", "there is no setting 'strateg'; rows differ in strategy, "),
        ("strategy=flexgen,dataset=mmlu", "no row has it"),
        ("seed=3", "there is no setting 'seed'"),
        ("nobodys-run", "no run in the table is named so"),
        ("aaaa-2", "2 runs are named so"),
        ("", "no run in the table is named so"),
    ],
)
def test_a_baseline_that_is_none_is_one_line(several, told, asked, answer):
    (line,) = told("--baseline", asked, code=2).err.splitlines()
    assert line.startswith("error: --baseline: ") and answer in line


def test_an_ambiguous_baseline_names_the_rows(tmp_path, told):
    for padding, tok_s in (("false", 1.0), ("true", 2.0)):
        store(tmp_path, tok_s, configuration("flexgen", strategy__padding=padding))
    err = told("--baseline", "strategy=flexgen", code=2).err
    assert "rows 1, 2 all have it; add a setting" in err


def test_a_ratio_of_unlike_labels_says_so(tmp_path, told, rows):
    store(tmp_path, 10.0)
    store(tmp_path, 20.0, configuration(machine="simulated"), label="simulated")
    out = told().out
    assert "2.00x*" in out and "1.00x*" not in out
    assert "* row 2 is simulated, its baseline emulated: not like with like" in out
    assert [row["ratio_to_label"] for row in rows()] == ["emulated"] * 2
    assert [row["ratio"] for row in rows("--baseline", "strategy=moelens,machine=emulated")] == [1.0, 2.0]


def test_one_row_has_no_ratio(tmp_path, told, rows):
    store(tmp_path, 10.0)
    assert "ratio" not in told().out and "ratio" not in rows()[0]


def test_without_a_clock_there_are_no_rates(tmp_path, told, rows):
    store(tmp_path, 10.0)
    store(tmp_path, None, configuration(machine="shuffled"), label="none", utilization={}, prediction_accuracy=None)
    assert rows()[1]["throughput_tok_s"] is None and rows()[1]["ratio"] is None
    assert "nan" not in told().out.lower()
    assert [row["ratio"] for row in rows("--baseline", "machine=shuffled")] == [None, None]


# -- runs that are no row -------------------------------------------------------------------------------------------


def test_runs_that_did_not_end_well_are_told_below_with_their_cause(tmp_path, told, rows):
    store(tmp_path, 10.0)
    store(tmp_path, None, status="oom", error="MemoryCapacityError: device:\n 'kv' needs 3 GB")
    store(tmp_path, None, status="interrupted")
    assert [row["ratio"] for row in rows()] if "ratio" in rows()[0] else len(rows()) == 1
    text = told().out
    below = text[text.index("2 not in the table:") :]
    assert "MemoryCapacityError: device: 'kv' needs 3 GB" in below and "interrupted" in below
    left_out = json.loads(told("--format", "json").out)["left_out"]
    assert [run["status"] for run in left_out] == ["oom", "interrupted"]
    csv_told = told("--format", "csv")
    assert "not in the table" in csv_told.err and "not in the table" not in csv_told.out


def test_without_a_row_there_is_no_table(tmp_path, told):
    captured = told(code=2)
    assert captured.err.startswith("error: no run has ended well in ") and not captured.out
    store(tmp_path, None, status="failed", error="the cause")
    assert "the cause" in told(code=2).err


# -- folders and formats --------------------------------------------------------------------------------------------


def test_any_folder_of_runs_works_and_each_run_counts_once(tmp_path, told, monkeypatch):
    paths = [store(tmp_path / "results", 10.0, configuration(seed=seed)) for seed in range(2)]
    (tmp_path / "results" / "runs" / ".new-half").mkdir()
    (tmp_path / "results" / "reference").mkdir()
    (tmp_path / "results" / "reference" / "summary.json").write_text("{}")
    for folders in (["results"], ["results/runs"], [str(path) for path in paths], ["results", "results/runs", "."]):
        monkeypatch.chdir(tmp_path)
        out = json.loads(told("--format", "json", *folders[1:], folder=folders[0]).out)
        assert [row["num_runs"] for row in out["rows"]] == [2] and out["left_out"] == []
    assert "there is no such folder" in told(folder=tmp_path / "nothing", code=2).err


def test_csv_and_json_say_the_same(several, told, rows):
    table = list(csv.DictReader(io.StringIO(told("--format", "csv").out)))
    assert [float(row["ratio"]) for row in table] == [row["ratio"] for row in rows()]
    assert [row["strategy"] for row in table] == ["moelens", "flexgen", "moelens", "flexgen", "moelens"]
    assert [row["label"] for row in table] == ["emulated"] * 5
    assert [row["runs"].split() for row in table] == [row["runs"] for row in rows()]
    assert set(table[0]) == set(rows()[0])


def test_markdown_is_one_table_with_its_notes(tmp_path, told):
    for template in ("{prompt} | answer", "{prompt}"):
        store(tmp_path, 10.0, configuration(dataset__template=template))
    store(tmp_path, None, status="failed", error="the cause")
    lines = told("--format", "markdown").out.splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert len(table) == 2 + 2
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table}) == 1
    assert r"{prompt} \| answer" in table[2]
    notes = [line for line in lines if line.startswith("* ")]
    assert any("data: " in note for note in notes) and any("failed: the cause" in note for note in notes)
