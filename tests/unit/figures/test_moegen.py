"""Reports on MoE-Gen: each computes on a tiny case, shows what is missing as missing, and judges by its rows."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from itertools import product

import pytest

from harness.settings import parse_settings
from paper_figures.measuring import batch_passes
from paper_figures.moegen import (
    accuracy,
    claims,
    datasets,
    emulated,
    extrapolation,
    long_contexts,
    omega,
    part,
    published,
    small_batches,
    throughput,
    traffic,
    unlimited,
)
from paper_figures.moegen.differences import differences, main
from paper_figures.moegen.rows import facts, find, key_of, predicted_passes, row
from paper_figures.moegen.settings import SYSTEMS, Case, most_sequences, ram_gb, spec_of
from paper_figures.passes import planned
from paper_figures.support import composed, write_json

TINY = Case(
    system="FlexGen", setting="C1", model="mixtral-tiny", prompt=24, g=30, num_requests=12, kv_gb=0.002,
    more=("strategy.policy.batch_size=12", "strategy.policy.micro_batch_size=4"),
)  # fmt: skip
SIMULATED = {
    "small_batches": small_batches, "omega": omega, "traffic": traffic, "long_contexts": long_contexts,
    "throughput": throughput, "datasets": datasets, "extrapolation": extrapolation,
    "unlimited": unlimited,
}  # fmt: skip


@pytest.fixture(scope="module")
def tiny():
    return row(TINY)


@pytest.fixture
def folder(tmp_path, tiny):
    """Every simulated report as if all cases had come out as the tiny one, and MoE-Gen's twelve times better."""
    for name, module in SIMULATED.items():
        rows = [as_case(tiny, case) for case in module.cases()]
        write_json(tmp_path / f"{name}.json", {"label": "simulated", "rows": rows})
    return tmp_path


def as_case(made, case):
    made = {**deepcopy(made), **{name: getattr(case, name) for name in FIELDS}}
    if case.system.startswith("MoE-Gen"):
        for fact in ("tok_s", "prefill_tok_s", "decode_tok_s"):
            made[fact] *= 12
        for fact in ("prefill_s", "decode_s"):
            made[fact] /= 12
        made["traffic_gb"] = {what: gb / 12 for what, gb in made["traffic_gb"].items()}
    return made


FIELDS = ("system", "setting", "model", "prompt", "g", "num_requests", "variant")


def rows_in(folder, name):
    return claims.stored(name, folder)


def test_skipped_steps_are_what_a_simulation_of_all_finds(tiny):
    whole = row(replace(TINY, whole=True))
    assert len(tiny["steps"]) == 7 and whole["decode"]["passes"] == 29
    for fact in ("tok_s", "decode_s", "decode_tok_s", "prefill_s"):
        assert tiny[fact] == pytest.approx(whole[fact], rel=2e-3)
    assert tiny["traffic_gb"] == pytest.approx(whole["traffic_gb"], rel=1e-2)
    assert tiny["traffic_gb"]["kv"] > 0


def test_skipped_prefills_are_what_a_simulation_of_all_finds():
    """Two prompts a pass: of the first six passes three are simulated, and the last one, of one prompt, is."""
    sizes = ("strategy.policy.prefill_batch_size=2", "strategy.policy.prefill_attention_batch=1")
    case = replace(TINY, system="MoE-Gen(G)", num_requests=13, g=2, kv_gb=0.003, more=("strategy.search=false", *sizes))
    plan = planned(case.overrides)
    passes = batch_passes(plan)
    assert [p.count for p in passes if p.step is None] == [1, 1, 4, 1]
    some, whole = facts(plan, passes), row(replace(case, whole=True))
    assert some["sequences"] == whole["sequences"] == 13
    for fact in ("prefill_s", "prefill_tok_s", "decode_s"):
        assert some[fact] == pytest.approx(whole[fact], rel=0.02)
    assert some["traffic_gb"] == pytest.approx(whole["traffic_gb"], rel=0.02)
    assert some["prefill"]["tokens_an_expert_run"] == pytest.approx(whole["prefill"]["tokens_an_expert_run"], rel=0.02)
    assert some["prefill"]["busy"] == pytest.approx(whole["prefill"]["busy"], rel=0.05, abs=0.01)


def test_facts_of_a_batch_by_hand(tiny):
    spec = spec_of(TINY.model)
    assert tiny["sequences"] == 12
    assert tiny["prefill_tok_s"] == pytest.approx(12 * 24 / tiny["prefill_s"])
    assert tiny["decode_tok_s"] == pytest.approx(12 * 29 / tiny["decode_s"])
    # Three micro-batches of four tokens in decode: an expert run has the tokens over the experts that get any.
    reached = spec.num_experts * (1 - (1 - spec.experts_per_token / spec.num_experts) ** 4)
    assert tiny["decode"]["tokens_an_expert_run"] == pytest.approx(4 * spec.experts_per_token / reached, rel=1e-3)
    assert 0 < tiny["decode"]["expert_flops_used"] < tiny["prefill"]["expert_flops_used"] <= 1


def test_what_does_not_fit_says_what_it_needs():
    made = row(Case(system="FlexGen", setting="C2", model="deepseek-r1", num_requests=1))
    assert (
        "512" in made["refused"]
        and throughput._needed_gb(made, "pinned", "host") > spec_of("deepseek-r1").model_bytes / 1e9 > 512
    )
    assert "| C2 | deepseek-r1 | FlexGen |" in throughput.tables({"rows": [made]})


@pytest.mark.parametrize("name", SIMULATED)
def test_a_report_computes_and_is_written(name, folder):
    module = SIMULATED[name]
    (made,) = module.compute([TINY])["rows"]
    assert made["tok_s"] > 0 and key_of(made) == TINY.key
    assert module.tables({"rows": [], "label": "simulated"})
    text = module.tables({"rows": rows_in(folder, name), "label": "simulated"})
    assert all(system in text for system in ("MoE-Gen(G)", "DeepSpeed") if name not in ("omega", "unlimited"))
    assert part.CASES[name]() == module.cases()


@pytest.mark.parametrize("name", ["throughput", "datasets", "small_batches", "long_contexts"])
def test_a_deleted_result_leaves_its_cell_empty(name, folder):
    """Its published value stays where it is called published, and stands for nothing else."""
    module, rows = SIMULATED[name], rows_in(folder, name)
    data = {"rows": rows, "label": "simulated"}
    case = {
        "throughput": Case(system="MoE-Gen(H)", setting="C2", model="mixtral-8x22b", g=1024),
        "datasets": datasets._case("MoE-Gen(H)", "GSM8K"),
        "small_batches": small_batches._case("MoE-Gen(G)", "deepseek-v2-lite", 32),
        "long_contexts": long_contexts._case("MoE-Gen(H)", published.TABLE8_SHAPES[0]),
    }[name]
    before = module.tables(data)
    without = {**data, "rows": [r for r in rows if key_of(r) != case.key]}
    after = module.tables(without)
    assert len(without["rows"]) == len(rows) - 1 and before != after
    if name == "throughput":  # a row is a line
        assert (
            "| mixtral-8x22b | 1024 | MoE-Gen(H) |" in before and "| mixtral-8x22b | 1024 | MoE-Gen(H) |" not in after
        )
    else:
        shown = {"datasets": "8", "small_batches": "35", "long_contexts": "13"}[name]
        assert f"| {shown} /  |" in after and f"| {shown} /  |" not in before


def test_each_of_eight_gpus_brings_its_share_of_the_weights():
    """Norms and the router come to each of them, and heads of keys and values to four."""
    more = ("model.recipe.num_heads=8", "strategy.cpu_offload_gb=1")  # more than there is: everything
    case = replace(TINY, system="vLLM", setting="C2, 8 GPUs", g=3, more=more)
    eight, one = row(case), row(replace(case, setting="C2"))
    assert "hardware=a5000x8" in case.overrides and "hardware.ram_gb=512" in case.overrides
    share = eight["decode"]["link_gb"]["weights"] / one["decode"]["link_gb"]["weights"]
    assert 1 / 8 < share < 1.15 / 8
    assert eight["decode"]["tokens_an_expert_run"] == pytest.approx(one["decode"]["tokens_an_expert_run"], rel=1e-3)
    assert eight["sequences"] == one["sequences"] == 12


def test_one_gpu_is_beside_eight_in_table_5(folder):
    rows = rows_in(folder, "throughput")
    case = Case(system="vLLM", setting="C2, 8 GPUs", model="mixtral-8x22b")
    find(rows, case).update(decode_tok_s=77.0, tok_s=66.0)
    find(rows, replace(case, system="MoE-Gen(H)", setting="C2")).update(decode_tok_s=55.0, tok_s=44.0)
    text = throughput.tables({"rows": rows})
    assert "| 8 | vLLM | 140 | 1,780 | 77 | 66 |" in text and "| 1 | MoE-Gen(H) | 143 | 380 | 55 | 44 |" in text
    without = throughput.tables({"rows": [r for r in rows if key_of(r) != case.key]})
    assert "| 8 | vLLM | 140 | 1,780 |  |  |" in without


def test_pictures_are_drawn_of_what_there_is(folder):
    pytest.importorskip("matplotlib")
    for name, module in (("omega", omega), ("traffic", traffic), ("throughput", throughput)):
        for rows in (rows_in(folder, name), []):
            assert module.draw({"rows": rows, "label": "simulated"}).get_axes()


def test_a_verdict_follows_its_results(folder):
    judged = {c["claim"]: c for c in claims.compute(folder)["claims"]}
    assert {name: c["verdict"] for name, c in judged.items()} == {
        "time": "reached", "decode": "not reached", "prefill": "reached", "long": "reached", "traffic": "in part",
    }  # fmt: skip
    assert judged["decode"]["here"] == pytest.approx([12, 12])
    rows = rows_in(folder, "throughput")
    for r in rows:
        if r["system"] == "DeepSpeed" and r["model"] == "mixtral-8x7b":
            r["decode_tok_s"] /= 2
    write_json(folder / "throughput.json", {"rows": rows})
    changed = {c["claim"]: c for c in claims.compute(folder)["claims"]}
    assert changed["decode"]["verdict"] == "in part" and changed["decode"]["here"] == pytest.approx([12, 24])
    (folder / "throughput.json").unlink()
    missing = claims.compute(folder)
    assert next(c for c in missing["claims"] if c["claim"] == "decode")["verdict"] == "not computed"
    assert "not computed" in claims.tables(missing)


def test_a_claim_says_why(folder):
    text = claims.tables(claims.compute(folder))
    assert "12 sequences" in text and "busy" in text
    assert "up to 20 times less fetch traffic" in text
    assert "| higher decode throughput | FlexGen | 12 | not reached |" in text


def test_the_searchs_accuracy_is_collected(folder, tiny):
    write_json(folder / "emulated.json", {"rows": [{"system": "MoE-Gen(H)", "model": "mixtral-mini", "refused": "x"}]})
    found = accuracy.compute(folder, folder)
    simulated = [r for name in accuracy.REPORTS for r in rows_in(folder, name) if r["accuracy"] is not None]
    assert len(found["rows"]) == len(simulated) > 0
    assert found["rows"][0]["accuracy"] == pytest.approx(tiny["accuracy"])
    searched = rows_in(folder, "throughput")[:1]
    searched[0] |= {"search": {"request_s": searched[0]["g"] / (1.1 * searched[0]["tok_s"])}, "predicted_tok_s": 1e-9}
    write_json(folder / "throughput.json", {"rows": searched})
    (of_batch,) = (r for r in accuracy.compute(folder, folder)["rows"] if r["report"] == "throughput")
    assert of_batch["accuracy"] == pytest.approx(0.9), "of the batch, not of the whole workload"
    assert "MoE-Gen(H)" in accuracy.tables(found)


def test_differences_are_told_by_phase_and_lane(folder, tiny):
    """The link is predicted to be busy for half of the pass, and was for all of it."""
    busy = {**tiny["decode"]["busy"], "h2d": 1.0, "gpu": 0.25}
    searched = {"decode_pass_s": 3.0, "decode_busy_s": {"h2d": 1.0, "gpu": 0.5}}
    made = {**tiny, "search": searched, "decode": {**tiny["decode"], "pass_s": 2.0, "busy": busy}}
    found = {each.lane: each for each in differences(made)}
    assert (found["all"].predicted_s, found["all"].simulated_s, found["all"].share) == (3.0, 2.0, 0.5)
    assert (found["h2d"].predicted_s, found["h2d"].simulated_s, found["h2d"].share) == (1.0, 2.0, -0.5)
    assert found["gpu"].share == 0 and not list(differences(tiny)), "no search, no differences"
    rows = [{**made, "report": "throughput", "differences": [vars(each) for each in found.values()]}]
    text = accuracy.tables({"label": "simulated", "rows": [{**rows[0], "by": "simulated", "observed_tok_s": 1.0}]})
    assert "| decode | h2d | 1 | -50.0% |" in text


def test_differences_of_a_policy_on_the_command_line(capsys):
    more = ("strategy=moegen_g", "model=mixtral-tiny", "hardware=a5000", "dataset.num_requests=4", "kv_cache_gb=0.01")
    policy = ("strategy.policy.attention_batch=2", "strategy.policy.expert_batch=32", "dataset.max_new_tokens=4")
    assert main([*more, *policy]) == 0
    assert capsys.readouterr().out.count("| decode |") == 5
    assert main(["strategy=moelens", *more[1:]]) == 2
    assert "strategy: must be moegen_g or moegen_h" in capsys.readouterr().err


def test_lanes_are_predicted_to_be_busy_in_layers_without_experts_too():
    """One of three layers is such, and has a third of what comes over the link for a step."""
    plan = planned([
        *("strategy=moegen_h", "model=deepseek-v2-lite", "model.spec.num_layers=3", "model.spec.dense_dim=90000"),
        *("hardware=a5000", "dataset.num_requests=40", "dataset.max_new_tokens=3", "kv_cache_gb=1"),
        *("strategy.policy.cpu_attention=1", "strategy.policy.resident_experts=0", "strategy.policy.dense_slots=1"),
    ])  # fmt: skip
    made = {**facts(plan, batch_passes(plan)), "search": predicted_passes(plan.strategy.plan)}
    found = {(each.phase, each.lane): each for each in differences(made)}
    assert found["decode", "h2d"].share == pytest.approx(0, abs=0.03)


def test_some_rows_are_computed_again_and_others_kept(tiny):
    every = [replace(TINY, variant=str(at)) for at in range(3)]
    kept = [as_case(tiny, case) for case in every[:2]]
    new = [{**as_case(tiny, every[1]), "tok_s": 1.0}, as_case(tiny, every[2])]
    merged = part.merged(every, kept, new)
    assert [r["variant"] for r in merged] == ["0", "1", "2"] and merged[1]["tok_s"] == 1.0
    assert find(merged, every[1]) is merged[1] and find(merged[:1], every[1]) is None


def test_the_extrapolation_of_a_data_set(folder):
    rows = rows_in(folder, "datasets")
    batch = find(rows, datasets._case("DeepSpeed", "GSM8K"))
    expected = 8500 / 12 * (batch["prefill_s"] + batch["decode_s"]) / 3600
    assert datasets.hours(rows, "DeepSpeed", "GSM8K") == pytest.approx(expected)


def test_baselines_without_limits_are_beside_those_of_the_other_reports(folder):
    """Each has its switches the other way, and a run of mixed phases counts a request once however often it begins."""
    given = {
        system: dict(o.split("=", 1) for o in unlimited.without_limits(system, unlimited.WORKLOADS[0]).overrides)
        for system in unlimited.SYSTEMS
    }
    assert (
        given["vLLM"]["strategy.continuous_batching"] == given["MoE-Lens"]["strategy.overlap_prefill_decode"] == "true"
    )
    for system in ("FlexGen", "MoE-Lightning"):
        assert given[system]["strategy.policy.gpu_ffn"] == given[system]["strategy.policy.resident_kv"] == "null"
    assert all(
        f"{system} |" in unlimited.tables({"rows": rows_in(folder, "unlimited")}) for system in unlimited.SYSTEMS
    )
    case = Case(
        system="vLLM", setting="C1", model="mixtral-tiny", prompt=24, g=30, num_requests=12, kv_gb=0.002, whole=True,
        more=("strategy.continuous_batching=true", "strategy.num_gpu_blocks_override=12"),
    )  # fmt: skip
    made = row(case)
    assert made["sequences"] == 12 and made["tok_s"] == pytest.approx(12 * 30 / (made["prefill_s"] + made["decode_s"]))
    passes = batch_passes(planned(case.overrides), whole=True)
    assert sum(p.record.num_preemptions for p in passes) > 0


def test_what_limits_baselines_is_said_below_their_tables(folder):
    for name in ("throughput", "small_batches", "long_contexts", "datasets"):
        text = SIMULATED[name].tables({"rows": rows_in(folder, name), "label": "simulated"})
        assert "overlap_prefill_decode=false" in text and "gpu_ffn=true" in text
    assert "resident_kv=0" in claims.tables(claims.compute(folder))


def test_the_error_of_simulating_some_steps(folder):
    rows = rows_in(folder, "extrapolation")
    case = extrapolation.BATCHES[1]
    run = find(rows, extrapolation.whole(case))
    assert extrapolation.whole(case).whole and extrapolation.whole(case).overrides == case.overrides
    run["tok_s"] *= 2
    run["sequences"] = 34
    (line,) = (line for line in extrapolation.tables({"rows": rows}).splitlines() if case.system in line)
    assert line.endswith("| -50.00% |") and "| 12 / 34 |" in line and line.count("+0.00%") == 2
    without = [r for r in rows if r["variant"] != extrapolation.ALL_PASSES or r["system"] != case.system]
    assert case.system not in extrapolation.tables({"rows": without})


def test_runs_on_the_emulated_machine():
    quickly = ("verify=off", "exclusive=false")
    case = emulated.Case(
        table="systems", model="mixtral-tiny", system="DeepSpeed", num_requests=3, g=3, more=quickly
    )  # fmt: skip
    too_small = replace(case, more=(*quickly, "hardware.device_memory_gb=0.0005"))
    refused, made, again = emulated.compute([too_small, case, case])["rows"]
    assert made["tok_s"] > 0 and made["prefill_tok_s"] > made["decode_tok_s"] > 0
    spec, decode = spec_of("mixtral-tiny"), made["decode"]
    assert 0.99 <= decode["tokens_an_expert_run"] <= 3.01 and decode["passes"] == 2
    whole_gb = spec.model_bytes / 1e9
    assert 0 < decode["link_gb"]["weights"] < 2 * whole_gb, "what runs ahead counts to the pass in which it began"
    assert 2 * whole_gb < made["link_gb"]["weights"] < 4 * whole_gb, "each of three passes brings the model, or nearly"
    rows = [refused, made | {"tok_s": 2.0}, again | {"tok_s": 4.0, "disturbed": "by others"}]
    text = emulated.tables({"label": "emulated", "rows": rows})
    assert "0 checked, 0 mismatched" in text and "| DeepSpeed | 2 | 3 (2-4) | 1 |" in text, "the median, and the range"
    assert f"* mixtral-tiny, DeepSpeed, systems: {refused['refused']}" in text
    others = [{**made, "table": "omega", "system": "MoE-Gen(H)", "variant": "0.5"},
              {**made, "table": "small", "variant": "8 requests", "decode_tok_s": 7.5}]  # fmt: skip
    text = emulated.tables({"label": "emulated", "rows": others})
    assert f"| mixtral-tiny |  |  | {made['tok_s']:.3g} |" in text and "| DeepSpeed | 7.5 |" in text


def test_every_emulated_case_is_one_that_a_run_would_take():
    chosen = emulated.cases()
    assert len(chosen) == 2 * 24 + 3 * 5 + 2 * 16 + 8
    for case in {(each.table, each.model): each for each in chosen}.values():
        assert parse_settings(composed(*case.overrides)).dataset.num_requests == case.num_requests


def test_the_cache_holds_the_sequences_that_it_was_sized_for():
    """Not one less by rounding, which would be a batch of its own."""
    for setting, model in product(("C1", "C2", "C3"), ("mixtral-8x7b", "deepseek-v2")):
        spec = spec_of(model)
        given = dict(o.split("=") for o in Case(system="DeepSpeed", setting=setting, model=model).overrides)
        num_blocks = float(given["kv_cache_gb"]) * 1e9 // (16 * spec.kv_bytes_per_token)
        assert num_blocks >= 48 * int(given["dataset.num_requests"])


def test_settings_are_the_papers():
    assert [ram_gb(setting) for setting in ("C1", "C2", "C3")] == [256, 512, 480]
    spec = spec_of("mixtral-8x7b")
    most = most_sequences("C2", spec, 512, 256)
    assert most * 768 * spec.kv_bytes_per_token + spec.model_bytes < 512e9
    assert most_sequences("C1", spec_of("mixtral-8x22b"), 512, 256) == 0  # Table 10: C1 cannot hold it


def test_published_values_agree_with_the_papers_text():
    judged = {name: list(claims._published(name)) for name in published.CLAIMS}
    assert min(judged["prefill"]) == pytest.approx(7.7, abs=0.05) and max(judged["prefill"]) == pytest.approx(
        11, abs=0.1
    )
    assert max(judged["time"]) == pytest.approx(63, abs=0.5) and sorted(judged["time"])[3] < 9  # GSM8K's 8.5
    assert max(judged["long"]) > 13 and max(judged["decode"]) < 33
    assert set(published.TABLE6) == set(published.TABLE4_HOURS) == set(published.TABLE7) == set(published.SYSTEMS)
    assert set(published.SYSTEMS) <= set(SYSTEMS)


def test_what_is_called_inconsistent_is_so():
    assert spec_of("deepseek-r1").model_bytes > 512e9
    tables = published
    assert tables.TABLE1["MoE-Gen"]["prefill"].tok_s != tables.TABLE7["MoE-Gen(G)"]["deepseek-v2"]
    assert tables.TABLE5["MoE-Gen"][0] != tables.TABLE6["MoE-Gen(H)"]["mixtral-8x22b", 256]
    over = [ours / tables.TABLE6["MoE-Lightning"][c] for c, ours in tables.TABLE6["MoE-Gen(H)"].items()]
    assert (round(min(over), 1), round(max(over))) == (3.6, 10)
    mmlu = [tables.TABLE4_HOURS[s]["MMLU"] / tables.TABLE4_HOURS["MoE-Gen(H)"]["MMLU"] for s in tables.MODEL_BASED]
    assert (round(min(mmlu), 1), round(max(mmlu), 1)) == (1.3, 1.4)
    requests, _, g = tables.DATASETS["Chatbot Arena"]
    assert round(requests * g / tables.TABLE4_HOURS["MoE-Lightning"]["Chatbot Arena"] / 3600, 1) == 1.0
    v2 = spec_of("deepseek-v2")
    sequences = tables.TABLE1["MoE-Gen"]["decode"].tokens_an_expert * v2.num_experts / v2.experts_per_token
    assert sequences == 2000 and sequences * 768 * v2.kv_bytes_per_token + v2.model_bytes > 512e9
