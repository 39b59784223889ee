"""What people see: the table at several widths, with and without a terminal, and the plain progress lines."""

import io
import re
from pathlib import Path

import pytest
from recorded import facts, link_bound_run
from rich.console import Console

from harness.record.compare import compare_table, main
from harness.record.store import RunFolder, read_run
from harness.record.summary import build_summary
from harness.record.terminal import Progress, human_bytes, number, print_summary

FOLDER = Path("results/runs/moelens-mixtral-mini-mtbench-emulated-0123abcd")


def rendered(summary, folder=FOLDER, width=80, **options):
    stream = io.StringIO()
    print_summary(summary, folder, Console(file=stream, width=width, **options))
    return stream.getvalue()


@pytest.fixture
def summary():
    spans, passes = link_bound_run()
    return build_summary(facts(), passes, spans)


def test_the_table_says_what_matters(summary):
    text = rendered(summary, width=120)
    title = next(line for line in text.splitlines() if line.strip())
    assert "moelens" in title and "[emulated]" in title
    for expected in (
        "11 tok/s generated",
        "96.0%",
        "bottleneck",
        "h2d lane 96% busy, 0.48 of 0.50 GB/s",
        "10 tok/s predicted, 11 emulated: accuracy 90.9%",
        "device 120 MB of 150 MB",
        "4 requests (sample, 512 tokens): 0 mismatched, 1 excused",
        "SYNTHETIC prompts",
        "RANDOM weights",
        "19 of 20 finished; 1 rejected",
        str(FOLDER),
    ):
        assert expected in text
    assert text.index("h2d weights") < text.index("gpu experts") < text.index("cpu decode_attention")


def test_every_second_of_a_simulated_run_says_whose_it_is():
    spans, passes = link_bound_run()
    simulated = facts(label="simulated", clock="virtual", machine_facts={"memory_sharing": "max_min"})
    text = rendered(build_summary(simulated, passes, spans, {"host_steal_share": 0.5}), width=120)
    assert "memory_sharing max_min" in text
    assert "DISTURBED" not in text, "what others do to this computer does not change virtual time"
    lines = [line for line in text.splitlines() if re.search(r"\d s\b|virtual s\b", line)]
    assert re.search(r"virtual s generating; simulated in 9\.5 s of this computer, 2\.5 s of them set-up", lines[0])
    table = [line for line in lines[1:] if "steady window" not in line]
    assert table[0].strip().startswith("virtual time in") and all(line.strip().endswith("ops") for line in table)
    assert re.search(r"steady window +[\d.]+ virtual s,", text)
    assert "virtual" not in rendered(build_summary(facts(), passes, spans))


def test_a_run_without_a_clock_shows_no_times_but_those_of_this_computer():
    _, passes = link_bound_run()
    text = rendered(build_summary(facts(clock="none", label="none"), passes, []), width=120)
    assert "tok/s" not in text and "busy" not in text and "bottleneck" not in text and "predicted" not in text
    assert "it times nothing" in text and "6 passes" in text


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_no_line_is_wider_than_the_terminal_and_no_word_is_lost(summary, width):
    text = rendered(summary, width=width)
    assert all(len(line) <= max(width, len(f"run    {FOLDER}")) for line in text.splitlines())
    assert "".join(rendered(summary, width=200).split()) == "".join(text.split())


def test_the_bars_show_the_shares(summary):
    lines = [line.split() for line in rendered(summary).splitlines()]
    bars = {words[0]: words[2].count("▆") for words in lines if words[1:2] == ["busy"]}
    assert bars == {"gpu": 10, "cpu": 5, "h2d": 19, "d2h": 0}  # of 20; the pin lane, unused, is left out


def test_piped_text_has_no_control_characters_and_ascii_when_asked(summary):
    text = rendered(summary)
    assert not any(ord(char) < 32 and char != "\n" for char in text)
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", write_through=True)
    print_summary(summary, FOLDER, Console(file=stream, width=80))
    assert b"###################. " in raw.getvalue()


def test_a_terminal_gets_colour(summary):
    assert "\x1b[" in rendered(summary, force_terminal=True, color_system="standard")


def test_the_trace_and_how_to_open_it(summary, tmp_path):
    assert "perfetto" not in rendered(summary, tmp_path)
    (tmp_path / "trace.json").write_text("{}")
    assert f"trace  {tmp_path / 'trace.json'}  (drag it into https://ui.perfetto.dev)" in rendered(summary, tmp_path)


def test_a_failed_run_says_so_first():
    text = rendered(
        build_summary(facts(status="oom", error="device memory: 'kv' needs 3 GB", verify={"mode": "off"}), [], [])
    )
    first = text.splitlines()[3]
    assert first.split() == ["status", "oom", "-", "device", "memory:", "'kv'", "needs", "3", "GB"]
    assert "- tok/s generated" in text and "no (off)" in text


def test_a_mismatch_and_a_lost_wandb_are_shown(summary):
    summary["verify"]["mismatched"] = 2
    summary["wandb"] = "not recorded: W&B: no answer"
    text = rendered(summary)
    assert "2 mismatched" in text and "not recorded: W&B: no answer" in text


def test_markup_in_names_is_text(summary):
    summary["data_source"] = "file [bold]x[/bold].jsonl"
    assert "file [bold]x[/bold].jsonl" in rendered(summary)


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0.0, "0"), (0.01234, "0.0123"), (12.34, "12.3"), (99.96, "100"), (12345.6, "12,346")],
)
def test_numbers(value, text):
    assert number(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(None, "-"), (0, "0 B"), (999, "999 B"), (999_999, "1 MB"), (2.5e12, "2,500 GB")]
)
def test_bytes(value, text):
    assert human_bytes(value) == text


# -- progress -------------------------------------------------------------------------------------------------------


def run_progress(console):
    with Progress(200, console) as progress:
        progress.stage("loading weights")
        progress.stage("generating")
        for finished in range(201):
            progress.update(finished, tok_s=12.0)


def test_without_a_terminal_a_few_plain_lines():
    stream = io.StringIO()
    run_progress(Console(file=stream, width=80))
    rates = [f"  {n}/200 requests, 12 tok/s" for n in (50, 100, 150, 200)]
    assert stream.getvalue().splitlines() == ["loading weights", "generating", *rates]


def test_on_a_terminal_a_line_that_goes_away():
    stream = io.StringIO()
    run_progress(Console(file=stream, width=80, force_terminal=True))
    drawn = stream.getvalue()
    assert "generating" in drawn and "200/200 requests, 12 tok/s" in drawn
    assert drawn.count("requests") < 20  # drawn now and then, not at every update
    assert drawn.rstrip().endswith("\x1b[2K")  # erased


def test_an_error_gives_the_cursor_back():
    stream = io.StringIO()
    with pytest.raises(KeyError), Progress(2, Console(file=stream, force_terminal=True)) as progress:
        progress.stage("loading")
        raise KeyError("x")
    assert stream.getvalue().count("\x1b[?25l") == stream.getvalue().count("\x1b[?25h") == 1


def test_no_requests_at_all():
    stream = io.StringIO()
    with Progress(0, Console(file=stream)) as progress:
        progress.stage("generating")
        progress.update(0)
    assert stream.getvalue() == "generating\n"


# -- comparing ------------------------------------------------------------------------------------------------------


def store(tmp_path, strategy, generated, status="ok", settings=None, **changes):
    spans, passes = link_bound_run()
    config = {"strategy": {"name": strategy}, **(settings or {})}
    with RunFolder.create(tmp_path, f"{strategy}-aaaa", config, {}) as folder:
        if status == "ok":
            summary = build_summary(facts(strategy=strategy, **changes), passes, spans)
            folder.write_summary({**summary, "throughput_tok_s": generated})
        folder.finish(status)
    return read_run(folder.path)


def table_text(runs, width=120):
    stream = io.StringIO()
    Console(file=stream, width=width).print(compare_table(runs))
    return stream.getvalue()


def test_runs_side_by_side(tmp_path):
    wrong = {"mode": "all", "checked": 4, "mismatched": 2}
    runs = [
        store(tmp_path, "ondemand", 10.0),
        store(tmp_path, "moelens", 25.0, verify=wrong),
        store(tmp_path, "moegen", None, status="oom"),
    ]
    lines = table_text(runs, 160).splitlines()
    row = {
        name: next(line for line in lines if line.strip().startswith(name))
        for name in ("ondemand", "moelens", "moegen")
    }
    assert "1.00x" in row["ondemand"] and "h2d 96.0%" in row["ondemand"] and "4 ok" in row["ondemand"]
    assert "2.50x" in row["moelens"] and "2 of 4 WRONG" in row["moelens"]
    assert "oom" in row["moegen"] and "x" not in row["moegen"].split("moegen")[1].split("oom")[1]


def test_what_runs_share_is_said_once_and_what_differs_has_a_column(tmp_path):
    runs = [store(tmp_path, "a", 10.0), store(tmp_path, "b", 20.0, label="simulated")]
    text = table_text(runs)
    assert "dataset: mtbench" in text and "label: " not in text
    assert all(label in text for label in ("emulated", "simulated"))


def test_sources_that_differ_are_told_run_by_run(tmp_path):
    runs = [store(tmp_path, "a", 10.0), store(tmp_path, "b", 20.0, data_source="mt_bench.jsonl")]
    text = table_text(runs)
    assert "data source: synthetic prompts" in text and "data source: mt_bench.jsonl" in text
    assert text.count("weights source: random weights") == 1


def test_runs_of_a_sweep_are_told_apart_by_their_settings(tmp_path):
    same = {"seed": 1, "hardware": {"name": "laptop", "h2d_gb_s": 0.5}, "dataset": {"name": "mtbench"}}
    runs = [store(tmp_path, "a", 10.0, settings={**same, "kv_cache_gb": gb}) for gb in (0.01, 0.02)]
    text = table_text(runs, 80)
    assert [text.count(f"kv_cache_gb={gb}\n") for gb in (0.01, 0.02)] == [1, 1]
    assert "h2d_gb_s=" not in text and "seed=" not in text


def test_an_exchanged_group_is_a_column_and_its_settings_are_not_told(tmp_path):
    groups = [{"hardware": {"name": name, "h2d_gb_s": rate}} for name, rate in (("laptop", 0.5), ("a40", 19.5))]
    runs = [store(tmp_path, "a", 10.0, settings=group, hardware=group["hardware"]["name"]) for group in groups]
    text = table_text(runs)
    assert "a40" in text and "19.5" not in text


def test_compare_explains_itself(capsys):
    assert main(["--help"]) == 0
    assert "python -m harness.record.compare RUN_DIR" in capsys.readouterr().out


@pytest.mark.parametrize("columns", [30, 60, 80])
def test_a_narrow_terminal_gets_whole_words_all_the_same(columns, tmp_path, capsys, monkeypatch):
    """Of a column for each letter nobody makes a strategy's name."""
    monkeypatch.setenv("COLUMNS", str(columns))
    for name, hardware in (("moelightning", "laptop"), ("deepspeed_zero", "a100-40g-pcie")):
        store(tmp_path, name, 123.0, hardware=hardware)
    assert main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    words = ("moelightning", "deepspeed_zero", "laptop", "a100-40g-pcie", "123", "1.00x", "accuracy", "4 ok")
    assert [word for word in words if word not in out] == []
    assert "…" not in out


def test_compare_from_the_command_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    folders = [str(store(tmp_path, name, 10.0).folder) for name in ("a", "b")]
    assert main(folders) == 0
    assert capsys.readouterr().out.count("1.00x") == 2
    assert main([str(tmp_path)]) == 0  # a results folder stands for its runs
    assert capsys.readouterr().out.count("1.00x") == 2
    assert main([str(tmp_path / "nothing")]) == 2
    assert "not a run folder" in capsys.readouterr().err
    assert main([]) == 2
    assert "usage" in capsys.readouterr().err
