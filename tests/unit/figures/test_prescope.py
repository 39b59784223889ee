"""Reports on PreScope: what is missing is shown as missing, and what is lost follows from the rows alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.machine.base import CPU, D2H, GPU, H2D, Span, Work
from harness.record.passes import PassRecord
from harness.record.store import list_runs
from harness.run.experiment import run_experiment
from harness.settings import load_strategy, parse_settings
from paper_figures.prescope import (
    ablation,
    cases,
    cpu_rates,
    emulated,
    gap,
    hit_rates,
    launches,
    measured_rates,
    throughput,
)
from paper_figures.prescope.__main__ import REPORTS
from paper_figures.prescope.cases import GPUS, OF_EXPERTS, OTHERS, OURS, Case, all_cases, find
from paper_figures.prescope.published import ACTIVE, CPU_EXPERT_MS, LOST, THROUGHPUT_A100_64
from paper_figures.support import ROOT, composed, read_json


def made(case: Case, tok_s: float) -> dict:
    ways = {"resident": 6, "prefetched": 1, "on_demand": 0, "cpu": 3, "active": 10, "wasted_bytes": 2e9}
    named = {"system": case.system, "gpu": case.gpu, "model": case.model, "batch": case.batch, "variant": ""}
    costs = dict.fromkeys(("io_s", "gpu_s", "gpu_token_s", "cpu_start_s", "cpu_token_s"), 1e-3)
    busy = {"busy": {"gpu": 0.1, "cpu": 0.5, "h2d": 0.9}}
    plan = {"plan": {"costs": costs}, "decode": busy, "prefill_s": 2.0}
    return {**named, "tok_s": tok_s, "token_s": 1 / tok_s, "decode_counts": ways, **plan}


@pytest.mark.parametrize("system", [*OURS, *OTHERS, *OF_EXPERTS])
def test_every_system_has_settings_that_are_known(system):
    case = Case(system=system, gpu="V100", model="qwen3-30b-a3b", batch=8)
    values = composed(*case.overrides)
    assert parse_settings(values).dataset.num_requests == 8
    load_strategy(values["strategy"])


def test_what_is_lost_is_told_beside_what_is_published():
    case = next(c for c in all_cases(OURS) if (c.gpu, c.model, c.batch, c.system) in LOST)
    whole = made(Case(system="PreScope", gpu=case.gpu, model=case.model, batch=case.batch), 8.0)
    rows = [whole, made(case, 6.0)]
    assert ablation.lost(rows, case.gpu, case.model, case.batch, case.system) == pytest.approx(0.25)
    text = ablation.tables({"rows": rows})
    assert f"25% ({LOST[case.gpu, case.model, case.batch, case.system]:.0%})" in text
    assert "25%" not in ablation.tables({"rows": rows[1:]}), "without the whole nothing is lost"


def test_what_the_table_hits_is_told_with_hot_and_with_random_experts():
    hot, other = (
        Case(system=name, gpu="A100", model="mixtral-8x7b", batch=4) for name in ("PreScope", "without table")
    )
    fewer = made(other, 6.0) | {"decode_counts": {"resident": 3, "active": 10}}
    text = ablation.tables({"rows": [made(hot, 8.0), fewer]})
    assert cells(text, "A100, mixtral-8x7b |") == [["A100, mixtral-8x7b", "60% → 30%", *["- → -"] * 4]]


def test_throughput_shows_what_was_simulated_and_nothing_else():
    case = Case(system="PreScope", gpu="A100", model="qwen3-30b-a3b", batch=64)
    text = throughput.tables({"rows": [made(case, 4.0)]})
    assert "4 (13.3)" in text and "resident 60%, prefetched 10%, on demand 0%, cpu 30%, wasted 2 GB" in text
    assert find([{**made(case, 4.0), "refused": "no room"}], *case.key) is None
    assert "4 (13.3)" not in throughput.tables({"rows": []})


@pytest.mark.needs("matplotlib", extra="figures")
def test_the_picture_of_an_expert_has_what_was_measured_of_it():
    """The CPU begins with 1 ms and takes 2 for a token; the transfer takes 10 and the GPU 1, whatever the tokens."""
    case = Case(system="PreScope", gpu="A100", model="mixtral-8x7b", batch=64)
    costs = {"io_s": 10e-3, "gpu_s": 1e-3, "gpu_token_s": 0.0, "cpu_start_s": 1e-3, "cpu_token_s": 2e-3}
    data = {"rows": [{**made(case, 4.0), "plan": {"costs": costs}}]}
    (axes,) = throughput.draw_expert(data).axes
    drawn = {line.get_label(): dict(zip(*line.get_data(), strict=True)) for line in axes.lines}
    assert [drawn[name][3] for name in ("CPU", "transfer", "GPU")] == pytest.approx([7, 10, 1])
    assert drawn["CPU, LayerScope's"] == CPU_EXPERT_MS["mixtral-8x7b"]
    assert throughput.ExpertTimes(costs).even == pytest.approx(5) and "| 5 tokens |" in throughput.tables(data)


def test_experts_are_counted_over_all_steps_of_decode_and_no_prefill():
    """Seven of 63 steps are simulated: four tokens reach 6 to 24 of a layer's 64 experts, and the prefill all."""
    more = ("model.spec.num_layers=3", "strategy.profile_tokens=16")
    found = cases.row(Case(system="PreScope", gpu="A100", model="deepseek-v2-lite", batch=4, more=more))
    counted, num_layers = found["decode_counts"], 2
    assert 63 * num_layers * 6 <= counted["active"] <= 63 * num_layers * 24
    ways = ("resident", "prefetched", "cached", "on_demand", "cpu")
    assert sum(counted[way] for way in ways) == pytest.approx(counted["active"])


def test_it_is_told_from_how_many_tokens_on_the_gpu_is_faster():
    made_row = made(Case(system="PreScope", gpu="A100", model="qwen3-30b-a3b", batch=64), 4.0)
    costs = {"io_s": 4e-3, "gpu_s": 2e-3, "gpu_token_s": 1e-3, "cpu_start_s": 1e-3, "cpu_token_s": 2e-3}
    text = throughput.tables({"rows": [made_row | {"plan": {"costs": costs}}]})
    assert "4 tokens" in text, "1 + 4 x 2 ms on the CPU, 4 + 2 + 3 x 1 with the GPU"


def test_the_gap_of_a_layer_is_between_both_sides():
    rows = [{"system": "PreScope", "layers_s": [(0.010, 0.004, 0.009), (0.001, 0.003, 0.002)]}]
    line = next(line for line in gap.tables({"rows": rows}).splitlines() if line.startswith("| PreScope"))
    gaps = ["1.5", "4", "1.9", "5.6", "2", "6"]
    assert [cell.strip() for cell in line.split("|")[2:-1]] == [*gaps, "6.5", "0%", "-"]
    late = {"system": "PreScope", "layers_s": [(0.010, 0.004, 0.013), (0.001, 0.003, 0.004), (0.010, 0.010, 0.010)]}
    [cells_of] = cells(gap.tables({"rows": [late]}), "PreScope")
    assert cells_of[-2:] == ["67%", "2"], "3 and 1 ms; a tie is not last"


def test_the_cpu_rates_table_shows_what_prediction_gains():
    place, rate = cpu_rates.PLACES[0], cpu_rates.RATES_GFLOP_S[0]
    three = [cpu_rates.case(system, *place, rate) for system in cpu_rates.SYSTEMS]
    assert len({case.key for case in three}) == 3, "each row is found again"
    assert three[2].overrides[-1] == "strategy.prefetch_slots=null", "the last word is the larger table's"
    rows = [{**made(case, tok_s), "variant": case.variant} for case, tok_s in zip(three, (8.0, 6.4, 10.0), strict=True)]
    text = cpu_rates.tables({"rows": rows})
    assert "8: +25.0%, -20.0%" in text
    assert "8: " not in cpu_rates.tables({"rows": rows[:2]})


def cells(text: str, beginning: str) -> list[list[str]]:
    """Return the cells of each row of a table that begins so."""
    lines = [line for line in text.splitlines() if line.startswith(f"| {beginning}")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


def test_the_hit_rates_table_shows_what_a_worse_prediction_costs_decode_too():
    place = hit_rates.PLACES[0]
    both = [hit_rates.case(place, stated) for stated in (1.0, 0.4)]
    assert [composed(*case.overrides)["routing"]["hit_rates"] for case in both] == [[[1.0]], [[0.4]]]
    rows = [{**made(case, tok_s), "variant": case.variant} for case, tok_s in zip(both, (8.0, 5.0), strict=True)]
    rows[1]["token_s"] = 0.25
    text = hit_rates.tables({"rows": rows})
    here = "V100, mixtral-8x7b, 64, 32 GB"
    rest = ["10.0%", "0.0%", "2", "90%", "50%"]
    assert cells(text, "V100") == [[here, "100%", "8", "2", "125", *rest], [here, "40%", "5", "2", "250", *rest]]
    assert not cells(hit_rates.tables({"rows": []}), "V100")


def test_a_faster_link_is_that_of_the_case_and_of_its_name():
    place = next(each for each in hit_rates.WITH_TIME_LEFT if each[-1])
    case, own = hit_rates.case(place, 0.6), hit_rates.case((*place[:-1], None), 0.6)
    rates = [composed(*each.overrides)["hardware"]["h2d_gb_s"] for each in (case, own)]
    assert rates[0] == hit_rates.PCIE5_GB_S[0] != rates[1] and case.variant != own.variant


@pytest.mark.needs("matplotlib", extra="figures")
def test_the_hit_rates_picture_is_relative_to_the_right_prediction():
    both = [hit_rates.case(hit_rates.PLACES[0], stated) for stated in (1.0, 0.4)]
    rows = [{**made(case, tok_s), "variant": case.variant} for case, tok_s in zip(both, (8.0, 6.0), strict=True)]
    rows[1]["token_s"] = rows[0]["token_s"] / 0.5
    drawn = [axes.get_lines() for axes in hit_rates.draw({"rows": rows}).get_axes()]
    ends = [[0.75], [0.5], [0.1]]
    assert [[line.get_ydata()[1] for line in lines] for lines in drawn] == ends
    assert all(line.axes.get_ylim()[0] <= line.get_ydata().min() for (line,) in drawn), "no line leaves its panel"
    assert [line.get_xydata()[0].tolist() for (line,) in drawn] == [[1.0, 1.0], [1.0, 1.0], [1.0, 0.1]]
    assert not hit_rates.draw({"rows": rows[1:]}).get_axes()[0].get_lines(), "beside nothing there is nothing to draw"


@pytest.mark.parametrize("model", measured_rates.RATES)
def test_measured_rates_are_those_of_the_models_ranks(model):
    case = measured_rates.measured(Case(system="PreScope", gpu="A100", model=model, batch=4))
    routing = composed(*case.overrides)["routing"]
    assert routing["hit_rates"] is None, "the stated rate is taken back"
    [rows] = read_json(ROOT / routing["hit_rates_path"])["rates"]
    assert {len(row) for row in rows if row} == {ACTIVE[model]}


def test_measured_rates_stand_beside_the_stated_one_and_each_layer_by_itself():
    stated = Case(system="PreScope", gpu="A100", model="mixtral-8x7b", batch=8)
    three = [measured_rates.measured(stated), stated, replace(stated, system="without LLaPor")]
    rows = [{**made(case, tok_s), "variant": case.variant} for case, tok_s in zip(three, (8.0, 10.0, 6.4), strict=True)]
    assert "8: -20.0%, +25.0%" in measured_rates.tables({"rows": rows})
    assert "8: " not in measured_rates.tables({"rows": rows[1:]})


def test_measured_rates_add_rows_to_those_of_the_ablation():
    added = [case for case in measured_rates.wanted() if case not in all_cases(OURS)]
    assert {case.variant for case in added} == {measured_rates.MEASURED}
    assert len(added) == len(GPUS) * len(cases.BATCHES) * len(measured_rates.RATES)


def test_published_numbers_stand_beside_both_simulations():
    model, value = next(iter(THROUGHPUT_A100_64.items()))
    case = Case(system="PreScope", gpu="A100", model=model, batch=64)
    rows = [{**made(case, tok_s), "variant": way} for tok_s, way in zip((400.0, 40.0), launches.WAYS, strict=True)]
    line = next(line for line in launches.tables({"rows": rows}).splitlines() if line.startswith(f"| {model}, A100"))
    assert [cell.strip() for cell in line.split("|")[2:-1]] == [f"{value:g}", "400", "40"]


def span(lane, kind: str, start_s: float, end_s: float) -> Span:
    return Span(
        lane=lane, kind=kind, layer=0, micro_batch=0, ticket=0, packet=0, num_packets=1, urgent=False, start_s=start_s,
        end_s=end_s, cpu_s=0.0, work=Work(),
    )  # fmt: skip


def test_a_layers_times_count_from_the_routers_answer_in_passes_of_decode():
    one = [
        span(D2H, "fetch route", 0, 1), span(CPU, "experts", 1, 4), span(GPU, "experts", 1, 3),
        span(GPU, "combine", 4, 5), span(H2D, "weights", 3, 6),
    ]  # fmt: skip
    later = [replace(s, start_s=s.start_s + 10, end_s=s.end_s + 10, ticket=1) for s in one]
    assert gap.layer_times_s([*later, *one], [(9.0, 20.0)]) == [(3.0, 2.0, 5.0)]
    assert gap.layer_times_s([*one, *later], [(0.0, 20.0)]) == [(3.0, 2.0, 5.0)] * 2
    assert gap.gaps_s([(3.0, 2.0, 5.0)], with_link=True) == [2.0]
    assert gap.gaps_s([(3.0, 2.0, 5.0)], with_link=False) == [1.0]
    prefill, decode = (PassRecord(index=n, start_s=n, end_s=n + 1, **{f"num_{kind}_tokens": 1})
                       for n, kind in enumerate(("prefill", "decode")))  # fmt: skip
    assert gap.decode_windows_s([prefill, decode]) == [(1, 2)]


@pytest.fixture
def simulated(monkeypatch, tmp_path) -> list[Case]:
    """The cases that were simulated, each in no time; committed rows are those of a folder of its own."""
    monkeypatch.setattr(cases, "FOLDER", tmp_path / "committed")
    asked: list[Case] = []
    monkeypatch.setattr(
        cases, "row", lambda case: asked.append(case) or made(case, 1.0) | {"code": "c0de", "command": case.command}
    )
    return asked


def test_a_row_is_computed_once_for_all_reports(simulated, tmp_path):
    """A row is known by its command: a case whose settings have changed is simulated again."""
    case, out = Case(system="PreScope", gpu="A100", model="mixtral-8x7b", batch=4), tmp_path / "committed"
    cases.computed("one", [case], out)
    [kept] = cases.computed("another", [replace(case, variant="named otherwise")], out)
    assert (len(simulated), kept["variant"]) == (1, "named otherwise")
    cases.computed("another", [replace(case, more=("seed=1",))], out)
    assert len(simulated) == 2


def test_all_rows_are_computed_again_where_that_is_asked(simulated, tmp_path):
    case, out = Case(system="PreScope", gpu="A100", model="mixtral-8x7b", batch=4), tmp_path / "committed"
    cases.computed("one", [case], out)
    cases.computed("one", [case], out, again=True)
    assert simulated == [case, case]


def test_what_is_written_elsewhere_leaves_the_committed_rows_alone(simulated, tmp_path):
    case, out = Case(system="PreScope", gpu="A100", model="mixtral-8x7b", batch=4), tmp_path / "committed"
    cases.computed("one", [case], out)
    before = (out / "one.json").read_bytes()
    cases.computed("one", [case, replace(case, more=("seed=1",))], tmp_path / "elsewhere")
    assert (out / "one.json").read_bytes() == before and len(simulated) == 2
    assert len(read_json(tmp_path / "elsewhere" / "one.json")["rows"]) == 2


@pytest.mark.parametrize("name", sorted(path.stem for path in cases.FOLDER.glob("*.json")))
def test_committed_tables_are_those_of_the_rows_and_name_their_commits(name):
    report, data = REPORTS[name], read_json(cases.FOLDER / f"{name}.json")
    assert (cases.FOLDER / f"{name}.md").read_text(encoding="utf-8") == report.tables(data)
    if report.keeps_rows:
        assert set(data["code"].split(", ")) == {row["code"] for row in data["rows"]}


def test_emulated_runs_that_are_not_there_are_told(tmp_path, capsys):
    assert emulated.main(["--out", str(tmp_path / "empty")]) == 2
    assert "error: FOLDER: " in (told := capsys.readouterr().err) and "has no emulated.json yet" in told
    assert not (tmp_path / "empty").exists()


def test_a_row_of_an_emulated_run_has_the_bytes_of_the_whole_run(tmp_path):
    """A cache of two slots brings nearly every expert on demand, and the link carries little else."""
    small = ("strategy.cache_slots=2", "strategy.table=none", "strategy.profile_tokens=16", "model=mixtral-tiny")
    work = ("dataset=mtbench", "dataset.synthetic=lengths", "dataset.num_requests=3", "dataset.max_new_tokens=4")
    quickly = ("wandb.mode=disabled", "progress=false", "verify=off", "exclusive=false", f"results_dir={tmp_path}")
    run_experiment(composed("machine=emulated", "hardware=laptop", "strategy=expert_cache", *small, *work, *quickly))
    [run] = list_runs(tmp_path)
    row = emulated.row(run)
    spec = parse_settings(composed("model=mixtral-tiny")).model.recipe
    expert_bytes = 4 * 3 * spec.hidden_dim * spec.expert_dim
    assert row["counted"]["on_demand"] >= 0.9 * row["counted"]["active"] > 0
    assert 1 <= row["h2d_bytes"] / (expert_bytes * row["counted"]["on_demand"]) < 1.2
    assert 0 < row["itl_s"]["p50"] <= row["itl_s"]["p99"]
    text = emulated.tables({"rows": [row]})
    assert f"| {row['h2d_bytes'] / 1e6:.3g} | 0 |" in text and "| - |" not in text


def test_an_emulated_table_has_medians_and_says_its_label():
    latency = {"p50": 0.02, "p90": 0.03}
    counted = {"resident": 5, "prefetched": 1, "cached": 0, "on_demand": 1, "cpu": 3, "active": 10, "wasted_bytes": 4e6}
    row = {
        "strategy": "prescope", "model": "m", "weights": "random", "link_gb_s": 0.7, "predictions": "gate",
        "label": "emulated", "code": "abc", "ttft_s": latency, "tpot_s": latency, "e2e_s": latency, "counted": counted,
        "busy": {"gpu": 0.5, "cpu": 0.4, "h2d": 0.9}, "gap_s": {"50": 0.001, "90": 0.002}, "disturbed": None,
        "verified": "8 checked, 0 mismatched", "without_core": 0.0,
    }  # fmt: skip
    other = row | {"strategy": "moelens", "counted": {}, "gap_s": {}, "disturbed": "something", "tok_s": 1.0}
    text = emulated.tables({"rows": [*(row | {"tok_s": tok_s} for tok_s in (3.0, 9.0, 4.0)), other]})
    assert text.startswith("# PreScope beside other systems (emulated)")
    ways = "0.02 | 50% | 10% | 0% | 10% | 30%"
    assert f"| m | 0.7 | prescope | 3 | 4 (3-9) | 20 | 30 | - | {ways} | - | 4 | 1 / 2 |" in text
    assert "| m | 0.7 | moelens | 1 | 1 (1-1) | 20 | 30 | - | 0.02 | - | - | - | - | - | - | - | - |" in text
    newer = [{"itl_s": {"p50": s, "p99": 3 * s}, "h2d_bytes": s * 1e9} for s in (0.01, 0.03, 0.02)]
    text = emulated.tables({"rows": [row | {"tok_s": 3.0, "without_core": 0.25} | each for each in newer]})
    assert f"| 20 | 30 | 20 / 60 | {ways} | 20 | 4 | 1 / 2 |" in text
    assert "| 50% | 40% | 90% | 25% | 0 | 8 checked, 0 mismatched |" in text and "counts of the whole run" in text
