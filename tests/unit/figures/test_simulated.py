"""The simulated runs' summary against the one that every run gets, and what the plots need of the committed files."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from harness.plan.planning import make_plan
from paper_figures.moelens import simulate as runner
from paper_figures.moelens.simulated import FOLDER, markdown, runs, summarize
from paper_figures.support import composed, read_json

KV_GB, G = 2.0, 8  # a small cache, so that there are preemptions; paper_requests has no say in it


@pytest.fixture(scope="module")
def small() -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "paper_requests", lambda *_: 400)
        return runner.simulate(KV_GB, G, 1.0)


def test_the_summary_agrees_with_that_of_an_ordinary_run(small):
    """make_plan keeps all spans to the end; here they are folded into passes on the way."""
    summary = make_plan(composed(*runner.overrides(KV_GB, G, 400))).summary
    mine = summarize(small)
    assert summary is not None
    assert mine["num_passes"] == summary["num_passes"] > 10
    assert mine["preemptions"] == summary["preemptions"] > 0
    assert mine["throughput_tok_s"] == pytest.approx(summary["throughput_tok_s"], rel=1e-4)
    assert mine["tokens_over_t_gpu"] == pytest.approx(summary["tokens_per_t_gpu"], rel=1e-3)
    for lane in ("gpu", "cpu", "h2d"):
        assert mine[f"{lane}_busy"] == pytest.approx(summary["utilization"][lane], abs=2e-3)


def test_stalls_are_counted_while_requests_wait():
    prefill = np.array([9, 9, 0, 0, 9, 9, 0, 9, 0, 0, 0])
    passes = {name: [1] * 11 for name in ("num_decode_tokens", "num_preemptions", "generated_tokens")}
    passes |= {f"{lane}_busy_s": [0.5] * 11 for lane in ("gpu", "h2d", "cpu")}
    passes |= {"start_s": [0.0], "end_s": list(range(1, 12)), "num_prefill_tokens": prefill.tolist()}
    run = {
        "setting": {}, "passes": passes, "plan": {"n_real": 1}, "gpu_tok_s": 1.0, "gpu_peak_tok_s": 1.0,
        "prediction": {"throughput_tok_s": 1.0, "terms": {"passes": 11}},
    }  # fmt: skip
    row = summarize(run)
    assert row["share_of_passes_without_prefill"] == pytest.approx(3 / 8)
    assert (row["num_stalls"], row["passes_between_stalls"]) == (2, 4.0)
    assert row["throughput_tok_s"] == 1.0
    assert row["gpu_busy"] == row["gpu_busy_while_requests_wait"] == 0.5


@pytest.mark.parametrize(("kv_gb", "g", "expected"), [(70, 32, 25_000), (70, 256, 20_000)])
def test_the_number_of_requests_is_the_papers(kv_gb, g, expected):
    assert runner.paper_requests(kv_gb, g, 2**17) == expected


def test_five_g_q_by_hand():
    """210 GB are 100,135 blocks of 16 tokens; a sequence of 98 + 32 holds 7 to 9 of them over 33 passes."""
    held = sum(-(-(98 + step) // 16) for step in range(33))
    assert runner.paper_requests(210, 32, 2**17) == round(5 * 32 * 100_135 / held)


def test_the_committed_runs_are_labelled_and_their_summary_is_theirs():
    found = runs()
    assert found, f"{FOLDER} holds the simulated runs"
    for run in found:
        assert run["label"] == "simulated"
        assert "synthetic" in run["prompts"]
    rows = [summarize(run) for run in found]
    assert read_json(FOLDER / "summary.json")["rows"] == rows
    assert (FOLDER / "summary.md").read_text(encoding="utf-8") == markdown(rows)
