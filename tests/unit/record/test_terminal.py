"""What people see: the table at several widths, with and without a terminal, and the plain progress lines."""

import io
import re
from pathlib import Path

import pytest
from recorded import facts, link_bound_run
from rich.console import Console

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
    return build_summary(facts(token_times_s=[[101.0, 103.0, 104.0], [105.0]]), passes, spans)


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


@pytest.mark.parametrize(
    ("plan", "line"),
    [
        ({"planning": "as_built"}, "as built: by the published planner"),
        ({"planning": "best"}, "best: by the search here"),
        ({"planning": "as_built", "as_built_is_best": "its profiler decides"}, "as built and best alike: its profiler"),
        ({}, None),
    ],
)
def test_the_summary_says_who_planned(plan, line, summary):
    text = " ".join(rendered({**summary, "plan": plan}, width=200).split())
    assert (f"planned {line}" in text) if line else ("planned" not in text)


def test_active_experts_are_told_by_where_they_ran(summary):
    counted = {"resident": 371, "prefetched": 12, "cached": 0, "on_demand": 1120, "cpu": 226, "active": 1729}
    guesses = {"hit_rate": 383 / 1729, "issued": 40, "withdrawn": 3, "wasted": 25, "wasted_bytes": 78_600_000}
    assert "active ones" not in rendered(summary)
    assert "active ones" not in rendered({**summary, "counted": {**counted, "active": 0, "hit_rate": 0.0}})
    text = rendered({**summary, "counted": counted | guesses}, width=250)
    assert "22.2% of 1,729 active ones were on the device: 371 resident, 12 prefetched, 1,120 on demand, 226" in text
    assert "40 prefetches, 3 of them withdrawn in time, 25 in vain (78.6 MB)" in text
    assert "prefetches" not in rendered({**summary, "counted": counted | guesses | {"issued": 0}}, width=250)


def test_latencies_are_a_row_each(summary):
    assert "first token" not in rendered({**summary, "latency": None}), "no request finished"
    lines = [line.split() for line in rendered(summary).splitlines()]
    at = lines.index(["latency", "seconds", "mean", "p50", "p90", "p99"])
    assert [line[-4:] for line in lines[at + 1 : at + 5]] == [
        ["3", "3", "4.6", "4.96"],  # first token, after 1 and 5 s
        ["1.5", "1.5", "1.5", "1.5"],
        ["1.5", "1.5", "1.9", "1.99"],
        ["4.5", "4.5", "4.9", "4.99"],
    ]
    assert "includes queueing" in rendered(summary)
    assert re.search(r"latency +virtual s", rendered(summary | {"clock": "virtual"}))


@pytest.mark.parametrize(
    ("predicted", "told"),
    [
        (10.0, "11 emulated: accuracy 90.9%"),
        (22.0, "accuracy 0.0%"),
        (78.1, "11 emulated: predicted 7.1x the emulated"),
    ],
)
def test_an_accuracy_below_zero_is_told_as_a_ratio(predicted, told):
    spans, passes = link_bound_run()
    summary = build_summary(facts(predicted_throughput_tok_s=predicted), passes, spans)
    assert told in rendered(summary, width=120)
    assert summary["prediction_accuracy"] == pytest.approx(1 - abs(predicted - 11) / 11)


def test_every_second_of_a_simulated_run_says_whose_it_is():
    spans, passes = link_bound_run()
    simulated = facts(label="simulated", clock="virtual", machine_facts={"memory_sharing": "max_min"})
    text = rendered(build_summary(simulated, passes, spans), width=120)
    assert "memory_sharing max_min" in text
    lines = [line for line in text.splitlines() if re.search(r"\d s\b|virtual s\b", line)]
    assert re.search(r"virtual s generating; simulated in 9\.5 s of this computer, 2\.5 s of them set-up", lines[0])
    table = [line for line in lines[1:] if "steady window" not in line]
    assert table[0].strip().startswith("virtual time in") and all(line.strip().endswith("ops") for line in table)
    assert re.search(r"steady window +[\d.]+ virtual s,", text)
    assert "virtual" not in rendered(build_summary(facts(), passes, spans))


def test_a_stopped_run_is_not_compared_with_a_prediction_for_a_whole_one(summary):
    assert summary["predicted_throughput_tok_s"] and "accuracy" in rendered(summary, width=200)
    text = " ".join(rendered({**summary, "stopped": "after 2 passes in a row that only decode"}, width=200).split())
    assert "stopped after 2 passes" in text and "accuracy" not in text
    assert "tok/s predicted; it is for a whole run, and is not compared with this part of one" in text


def test_a_run_without_a_clock_shows_no_times_but_those_of_this_computer():
    _, passes = link_bound_run()
    text = rendered(build_summary(facts(clock="none", label="none"), passes, []), width=120)
    assert "tok/s" not in text and "busy" not in text and "bottleneck" not in text and "predicted" not in text
    assert "it times nothing" in text and "6 passes" in text


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_no_line_is_wider_than_the_terminal_and_no_word_is_lost(summary, width):
    text = rendered(summary, width=width)
    assert all(len(line) <= max(width, len(f"run    {FOLDER}")) for line in text.splitlines())
    assert "first token       3      3    4.6   4.96" in text, "a table's line is not folded"
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


def test_what_w_and_b_has_can_be_copied_from_one_line(summary):
    folder = f"{FOLDER}/wandb/offline-run-20260102_030405-abcdefgh"
    shown = rendered(summary | {"wandb": f"offline: wandb sync {folder}"})
    assert shown.splitlines()[-1] == f"wandb  offline: wandb sync {folder}"
    assert "wandb" not in rendered(summary | {"wandb": "disabled"})


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
