"""One batch of a system on the simulator: the whole against its parts, and what every batch obeys."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest

from harness.plan.planning import make_plan
from paper_figures import pool
from paper_figures.measuring import first_batch
from paper_figures.moelightning import hrm_accuracy, systems, table4, table5
from paper_figures.moelightning.batches import Case, row
from paper_figures.moelightning.published import FIG7_TOK_S, GENERATED, POLICIES, TABLE5
from paper_figures.passes import planned, simulated_passes
from paper_figures.support import composed

SMALL = Case(
    system="MoE-Lightning(p)", strategy="moelightning", setting="S1", hardware="t4", g=6, batch_size=40,
    micro_batch_size=20,
)  # fmt: skip


@pytest.fixture(scope="module")
def rows():
    """Every system on a small batch."""
    found = {}
    for system, (strategy, padded) in systems.STRATEGIES.items():
        case = replace(SMALL, system=system, strategy=strategy, padded=padded)
        found[system] = row(replace(case, micro_batch_size=None) if strategy == "deepspeed_zero" else case)
    return found


def test_a_batch_is_what_an_ordinary_run_of_it_is(rows):
    summary = make_plan(composed(*SMALL.overrides)).summary
    assert summary is not None
    mine = rows["MoE-Lightning(p)"]["simulated"]
    assert mine["sequences"] == 40
    assert mine["tok_s"] == pytest.approx(summary["throughput_tok_s"], rel=1e-3)
    assert mine["decode_busy"]["h2d"] == pytest.approx(summary["utilization"]["h2d"], abs=0.02)


@pytest.mark.parametrize("g", [17, 31, 64])
def test_steps_that_are_not_simulated_take_what_a_run_takes(g):
    """Of FlexGen, padded: its cache's transfer grows by a block at a time, for all sequences at once."""
    case = replace(SMALL, system="FlexGen", strategy="flexgen", g=g)
    part, whole = first_batch(planned(case.overrides)), make_plan(composed(*case.overrides)).summary
    assert part.steps_simulated == 7 and part.num_steps == g - 1 and whole is not None
    assert part.throughput_tok_s == pytest.approx(whole["throughput_tok_s"], rel=5e-3)


def test_the_first_of_several_batches_is_taken():
    case = replace(SMALL, more=("dataset.num_requests=100",))
    batch = first_batch(planned(case.overrides))
    assert batch.num_sequences == 40 and batch.prefill_tokens == 40 * 418
    assert batch.steps_simulated == batch.num_steps == 5


def test_shares_are_shares_and_cgopipe_is_the_fastest_of_the_padded(rows):
    for made in rows.values():
        for phase in ("prefill_busy", "decode_busy"):
            assert all(0 <= share <= 1 + 1e-9 for share in made["simulated"][phase].values())
    padded = {name: made["simulated"]["tok_s"] for name, made in rows.items() if made["padded"]}
    del padded["DeepSpeed-Zero"]  # whose cache is on the device while batches are this small
    assert max(padded, key=lambda name: padded[name]) == "MoE-Lightning(p)"
    assert padded["FastDecode"] > padded["FlexGen(c)"], "attention overlapped, against the same in turn"
    assert rows["MoE-Lightning"]["simulated"]["tok_s"] > padded["MoE-Lightning(p)"]


def test_the_prediction_is_of_the_same_batch(rows):
    assert rows["DeepSpeed-Zero"]["predicted"] is None
    for name in ("MoE-Lightning(p)", "FlexGen"):
        predicted = rows[name]["predicted"]
        assert predicted["tok_s"] == pytest.approx(40 * 6 / (predicted["prefill_s"] + 5 * predicted["step_s"]))
        assert 0.5 < predicted["accuracy"] <= 1


def test_what_the_prediction_lacks_is_split_by_phase(rows):
    for name in ("MoE-Lightning(p)", "FlexGen", "FlexGen(c)", "FastDecode"):
        found = hrm_accuracy.compared(rows[name])
        late = found["late_in_prefill"] + found["late_in_decode"]
        assert found["N"] == found["sequences"], "else times are of different batches"
        assert late == pytest.approx(1 - found["simulated_tok_s"] / found["predicted_tok_s"])


def test_reports_are_made_of_rows(rows, monkeypatch):
    """Tables and pictures of `systems`, `table4`, `table5` and `hrm_accuracy` take the rows that their cases give."""
    made = {r["system"]: r for r in rows.values()}
    monkeypatch.setattr(pool, "num_cores", lambda: 1)
    for module in (systems, table4, table5, hrm_accuracy):
        monkeypatch.setattr(module, "row", lambda case: {
            **made[case.system], "setting": case.setting, "g": case.g, "dataset": case.dataset,
            "policy_source": case.policy_source, "planning": None if "Zero" in case.system else case.planning,
            "simulated": made[case.system]["simulated"]
            | ({"tok_s": 1.0} if (case.system, case.planning) == ("FlexGen", "as_built") else {}),
        })  # fmt: skip
    compared = systems.compute(list(systems.cases(["S1"], [128])))
    assert [r["planning"] for r in compared["rows"] if r["system"] == "FlexGen"] == ["best", "as_built"]
    ours = next(r for r in compared["ratios"] if r["system"] == "MoE-Lightning(p)" and r["over"] == "FlexGen")
    assert ours["published"] == pytest.approx(30.1 / 9.5)
    expected = made["MoE-Lightning(p)"]["simulated"]["tok_s"] / made["FlexGen"]["simulated"]["tok_s"]
    assert ours["best"] == pytest.approx(expected), "both best"
    assert ours["as_built"] == pytest.approx(made["MoE-Lightning(p)"]["simulated"]["tok_s"]), "both as built"
    unpadded = next(r for r in compared["ratios"] if r["system"] == "MoE-Lightning" and r["over"] == "FlexGen")
    assert unpadded["as_built"] == pytest.approx(made["MoE-Lightning"]["simulated"]["tok_s"]), "not its searched policy"
    alone = systems.ratios([r for r in compared["rows"] if (r["system"], r["planning"]) != ("FlexGen", "as_built")])
    assert all(r["as_built"] is None for r in alone if r["over"] == "FlexGen"), "a best row stands for nothing else"
    assert systems.tables(compared).count("\n| S1 |") == len(compared["rows"]) + len(compared["ratios"])
    assert table4.tables(table4.compute()).count("| summarization |") == 8
    assert "9.72 s for tokens 32-64" in table5.tables(table5.compute())
    accuracy = hrm_accuracy.compute(hrm_accuracy.cases()[:2])
    assert "The ten worst" in hrm_accuracy.tables(accuracy)


def test_published_values_agree_with_each_other():
    """Table 5 is Fig. 7 at g = 128, with FlexGen's policy; Table 4's ratios are those of section 5.2's text."""
    at = GENERATED.index(128)
    theirs, *_, ours = TABLE5
    assert (theirs.tok_s, ours.tok_s) == (FIG7_TOK_S["S1"]["FlexGen"][at], pytest.approx(30.1, abs=0.05))
    assert POLICIES["S1"]["FlexGen"][at] == theirs.sizes and POLICIES["S1"]["MoE-Lightning(p)"][at] == ours.sizes
    best = {
        (ours, baseline): max(
            mine / theirs
            for setting in FIG7_TOK_S.values()
            for mine, theirs in zip(setting[ours], setting[baseline], strict=True)
        )
        for ours in ("MoE-Lightning", "MoE-Lightning(p)")
        for baseline in ("FlexGen", "FlexGen(c)", "DeepSpeed-Zero")
    }
    claimed = {"FlexGen": 3.5, "FlexGen(c)": 5.0, "DeepSpeed-Zero": 6.7}  # section 5.2
    for baseline, ratio in claimed.items():
        assert best["MoE-Lightning(p)", baseline] == pytest.approx(ratio, abs=0.05)
    assert best["MoE-Lightning", "FlexGen"] == pytest.approx(10.3, abs=0.05)
    cells = {(c.task, c.setting, c.system): c.tok_s for c in table4.TABLE4}
    for task, setting, system, ratio in (
        ("summarization", "S1", "FlexGen", 1.16), ("summarization", "S1", "FlexGen(c)", 1.73),
        ("synthetic_reasoning", "S2", "FlexGen", 2.1), ("synthetic_reasoning", "S2", "FlexGen(c)", 5.26),
    ):  # fmt: skip
        assert cells[task, setting, "MoE-Lightning(p)"] / cells[task, setting, system] == pytest.approx(ratio, abs=0.01)


def test_what_a_plan_holds_is_gone_with_it():
    """Without a search for cycles, which engine and machine are in."""
    gc.collect()
    gc.disable()
    try:
        plan = planned(["strategy=moelens", "model=mixtral-8x7b", "hardware=a40", "kv_cache_gb=2",
                        "dataset.num_requests=2", "dataset.max_new_tokens=4", "dataset.synthetic=lengths"])  # fmt: skip
        simulated_passes(plan)
        held = [weakref.ref(each) for each in (plan.engine, plan.machine, plan.strategy.pipeline, plan.machine.spans)]
        del plan
        assert [each() for each in held] == [None] * len(held)
    finally:
        gc.enable()
