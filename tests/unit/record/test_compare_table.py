"""What the table of a comparison shows, however narrow the terminal is."""

import re

import pytest
from run_folders import configuration, store


def cells(text):
    return sorted(re.sub(r"[─\s]+", "\n", text).split())


def test_a_line_has_what_a_row_is(tmp_path, told):
    wrong = {"mode": "all", "checked": 4, "mismatched": 2}
    spread = {"mean": 1.0, "p50": 1.5, "p90": 2.0, "p99": 3.25}
    store(tmp_path, 25.0, latency={"arrival": "", "ttft_s": spread, "tpot_s": None, "e2e_s": spread})
    store(
        tmp_path,
        10.0,
        configuration("ondemand"),
        verify=wrong,
        prediction_accuracy=-5.5,
        disturbed="joblib ran beside it",
    )
    text = told().out
    first, second = (
        next(line for line in text.splitlines() if f" {name} " in line) for name in ("moelens", "ondemand")
    )
    for expected in ("emulated", "25", "1.00x", "h2d 96.0%", "90.9%", "4 ok", "1.5 / 3.25", "0 of 1", "aaaa"):
        assert expected in first
    for expected in ("emulated", "10", "0.40x", "7.5x", "2 of 4 WRONG", "1 of 1", "aaaa"):
        assert expected in second
    assert "disturbed, row 2: joblib ran beside it; no time or rate there counts" in text
    assert "model mixtral-mini, dataset mtbench, machine emulated, hardware laptop" in text
    assert "first token s" in text and "request s" in text and "per token s" not in text
    assert text.count("data: synthetic prompts from published length statistics") == 1


def test_a_row_tells_what_disturbed_any_of_its_repeats(tmp_path, told, rows):
    """Each reason once, in the order of the runs."""
    for seed, reason in enumerate((None, "joblib ran beside it", "the host was busy", "joblib ran beside it")):
        store(tmp_path, 10.0, configuration(seed=seed), disturbed=reason)
    store(tmp_path, 10.0, configuration("flexgen"))
    assert [row["disturbed"] for row in rows()] == ["joblib ran beside it; the host was busy", None]
    assert "disturbed, row 1: joblib ran beside it; the host was busy; no time" in " ".join(told().out.split())


def test_sources_that_differ_are_told_row_by_row(tmp_path, told):
    store(tmp_path, 10.0)
    store(tmp_path, 20.0, configuration("flexgen"), data_source="mt_bench.jsonl")
    text = told().out
    assert "data of row 1: synthetic prompts" in text and "data of row 2: mt_bench.jsonl" in text


@pytest.mark.parametrize("columns", [60, 80, 100])
def test_no_part_of_a_narrow_table_has_numbers_without_their_label(columns, tmp_path, told):
    spread = {"mean": 1.0, "p50": 1.5, "p90": 2.0, "p99": 3.25}
    latency = {"arrival": "", "ttft_s": spread, "tpot_s": spread, "e2e_s": spread}
    store(tmp_path, 10.0, label="simulated", latency=latency)
    store(tmp_path, 20.0, configuration("flexgen", kv_cache_gb=0.1), latency=latency, disturbed="another process")
    text = told(columns=columns).out
    parts = sum(set(line.strip()) == {"─"} for line in text.splitlines())
    assert parts > 1
    for row in (r"1 +moelens +simulated +0 of 1 ", r"2 +flexgen +emulated +1 of 1 "):
        assert len(re.findall(row, text)) == parts
    assert "seconds of row 1 are simulated" in " ".join(text.split())


@pytest.mark.parametrize("columns", [20, 60, 80, 100])
def test_a_narrow_terminal_gets_every_word_all_the_same(columns, tmp_path, told):
    """What it has no room for goes on below, each part with the row's number and strategy."""
    for name, hardware in (("moelightning", "laptop"), ("deepspeed_zero", "a100-40g-pcie")):
        store(tmp_path, 123.0, configuration(name, hardware=hardware, strategy__overlap_prefill_decode="false"))
    wide, narrow = told().out, told(columns=columns).out
    assert set(cells(wide)) - {"hardware", "laptop", "a100-40g-pcie"} <= set(cells(narrow))
    assert "hardware=a100-40g-pcie" in narrow or "a100-40g-pcie" in narrow
    assert "…" not in narrow
    lines = [line for line in narrow.splitlines() if line.strip()]
    assert all(len(line) <= columns for line in lines) or columns < 60
    parts = sum(set(line.strip()) == {"─"} for line in lines)
    assert parts > 1 and sum("deepspeed_zero" in line for line in lines) == parts


def test_the_settings_of_a_narrow_terminal_are_those_that_a_row_has(tmp_path, told):
    store(tmp_path, 1.0, configuration("moelens", strategy__a_rather_long_setting="some", kv_cache_gb=0.02))
    store(tmp_path, 2.0, configuration("flexgen", kv_cache_gb=0.04))
    text = told(columns=60).out
    assert "a_rather_long_setting=some" in text and "kv_cache_gb=0.04" in text
    (line,) = (line for line in text.splitlines() if line.startswith(" 2") and "flexgen" in line and "kv" in line)
    assert "a_rather" not in line


def test_rows_are_sorted_by_any_column(tmp_path, told, rows):
    for kv, tok_s in ((0.04, 2.0), (0.02, 1.0), (0.1, 3.0)):
        store(tmp_path, tok_s, configuration(kv_cache_gb=kv))
    assert [row["kv_cache_gb"] for row in rows("--sort", "kv_cache_gb")] == [0.02, 0.04, 0.1]
    assert [row["row"] for row in rows("--sort", "tok/s", "--descending")] == [3, 1, 2]
    assert [row["row"] for row in rows("--sort", "ratio")] == [2, 1, 3]
    assert [row["ratio"] for row in rows("--sort", "ratio")] == [0.5, 1.0, 1.5]
    err = told("--sort", "speed", code=2).err
    assert err.startswith("error: --sort: there is no column 'speed'; valid are strategy, ") and err.count("\n") == 1
