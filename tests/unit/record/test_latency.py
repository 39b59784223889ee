"""Latencies against a count by hand, on made-up times and on a simulated run's own records."""

import random
from fractions import Fraction

import pytest
from recorded import facts, link_bound_run

from harness.record.latency import latency
from harness.record.store import read_run
from harness.record.summary import build_summary
from harness.run.experiment import run_experiment
from tests.composing import composed


def percentile(values, p):
    """The value below which p per cent lie, between the two nearest of the sorted values; by hand, exactly."""
    ordered = sorted(map(Fraction, values))
    at = Fraction(p, 100) * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return float(ordered[low] + (at - low) * (ordered[high] - ordered[low]))


def spread(values):
    mean = float(sum(map(Fraction, values)) / len(values))
    return pytest.approx({"mean": mean, "p50": percentile(values, 50), "p90": percentile(values, 90),
                          "p99": percentile(values, 99)})  # fmt: skip


@pytest.mark.parametrize("seed", range(5))
def test_against_a_count_by_hand(seed):
    rng = random.Random(seed)
    start_s, first_tokens, per_token, gaps, whole, rows = rng.uniform(0, 1000), [], [], [], [], []
    for _ in range(rng.randint(1, 40)):
        waits = [rng.uniform(0.1, 9.0) for _ in range(rng.randint(1, 6))]
        rows.append([start_s + sum(waits[: n + 1]) for n in range(len(waits))])
        first_tokens.append(waits[0])
        gaps += waits[1:]
        per_token += [sum(waits[1:]) / len(waits[1:])] if waits[1:] else []
        whole.append(sum(waits))
    found = latency([*rows, [start_s + 1.0, start_s + 2.0]], start_s)
    assert found["num_requests"] == len(rows) + 1
    assert found["ttft_s"] == spread([*first_tokens, 1.0])
    assert found["tpot_s"] == spread([*per_token, 1.0])
    assert found["itl_s"] == spread([*gaps, 1.0])
    assert found["e2e_s"] == spread([*whole, 2.0])


def test_what_cannot_be_told_is_none():
    assert latency([], 0.0) is None
    alone = latency([[3.0], [5.0]], 1.0)
    assert alone["tpot_s"] is None and alone["itl_s"] is None and alone["ttft_s"]["mean"] == 3.0
    _, passes = link_bound_run()
    times = [[101.0, 102.0]]
    assert build_summary(facts(token_times_s=times), passes, [])["latency"]["e2e_s"]["p50"] == 2.0  # since t = 100
    assert build_summary(facts(token_times_s=times, clock="none"), passes, [])["latency"] is None
    assert build_summary(facts(token_times_s=times), [], [])["latency"] is None


def simulated(tmp_path, *overrides):
    return run_experiment(
        composed(
            *("machine=simulated", "model=mixtral-8x7b", "hardware=a40", "wandb.mode=disabled", "progress=false"),
            *(f"results_dir={tmp_path}", "dataset.num_requests=30", "dataset.max_new_tokens=7", *overrides),
        )
    )


def test_a_simulated_runs_latencies_follow_from_its_passes(tmp_path):
    """Requests of one micro-batch a pass have their tokens when the pass ends; the passes say when that was."""
    run = ("strategy=ondemand", "strategy.max_pass_tokens=1000", "kv_cache_gb=0.3")
    summary, folder = simulated(tmp_path, *run)
    recorded = read_run(folder)
    ends_s = [row["end_s"] - recorded.passes[0]["start_s"] for row in recorded.passes]
    requests = sorted(recorded.requests, key=lambda row: row["request_id"])
    queue, first_tokens = list(requests), []  # prompts are taken in their order, and no pass cuts one
    for row, end_s in zip(recorded.passes, ends_s, strict=True):
        left = row["num_prefill_tokens"]
        while left:
            left -= queue.pop(0)["prompt_tokens"]
            first_tokens.append(end_s)
    whole = [ends_s[row["finished_pass"]] for row in requests]
    per_token = [(last - first) / 6 for first, last in zip(first_tokens, whole, strict=True)]
    assert [row["first_token_s"] for row in requests] == pytest.approx(first_tokens)
    assert [row["finished_s"] for row in requests] == pytest.approx(whole)
    assert len(set(whole)) > 1, "more than one batch, so that some requests wait for others"
    assert summary["latency"]["ttft_s"] == spread(first_tokens)
    assert summary["latency"]["tpot_s"] == spread(per_token)
    assert summary["latency"]["e2e_s"] == spread(whole)
    assert summary["latency"]["itl_s"]["mean"] == pytest.approx(sum(per_token) / len(per_token))
    assert simulated(tmp_path, *run)[0]["latency"] == summary["latency"], "the virtual clock is deterministic"
