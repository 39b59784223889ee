"""The summary of a run whose numbers can be worked out by hand."""

import json
import re

import pytest
from recorded import facts, link_bound_run

from harness.record.summary import accuracy, build_summary


def test_throughput_counts_all_passes_and_shares_the_steady_ones():
    spans, passes = link_bound_run(6)
    summary = build_summary(facts(), passes, spans)
    assert summary["generation_s"] == pytest.approx(6.0)
    assert summary["generated_tokens"] == 66
    assert summary["throughput_tok_s"] == pytest.approx(11.0)
    assert summary["processed_tok_s"] == pytest.approx(100.0)
    assert summary["prediction_accuracy"] == pytest.approx(1 - 1 / 11)
    assert summary["window_s"] == pytest.approx(4.0)
    assert summary["utilization"] == pytest.approx({"gpu": 0.5, "cpu": 0.25, "h2d": 0.96, "d2h": 0.0, "pin": 0.0})
    assert summary["h2d_gb_s"] == pytest.approx(0.48) and summary["h2d_ceiling_gb_s"] == 0.5
    assert summary["overlap_ratio"] == pytest.approx(1.71)
    assert summary["tokens_per_t_gpu"] == pytest.approx(0.5)  # 100 tokens a second of 200
    assert summary["stolen_core_share"] == pytest.approx(0.2)
    assert summary["preemptions"] == 1 and summary["num_passes"] == 6
    assert summary["bottleneck"].startswith("transfer to the device (h2d lane 96% busy, 0.48 of 0.50 GB/s")
    top = summary["where_time_goes"][0]
    assert (top["lane"], top["kind"], top["num_ops"]) == ("h2d", "weights", 4)
    assert top["busy_s"] == pytest.approx(3.84)


def test_all_that_readers_rely_on_is_there_and_is_json():
    spans, passes = link_bound_run()
    summary = build_summary(facts(), passes, spans, {"wandb": "disabled"})
    promised = """
        status label strategy model dataset machine hardware num_requests num_finished num_rejected
        prompt_tokens generated_tokens wall_s setup_s throughput_tok_s processed_tok_s num_passes window_s utilization
        tokens_per_t_gpu h2d_gb_s h2d_ceiling_gb_s overlap_ratio where_time_goes bottleneck predicted_throughput_tok_s
        prediction_accuracy preemptions peak_bytes memory_holders verify data_source weights_source plan
        wandb
    """
    assert not set(re.findall(r"\w+", promised)) - set(summary)
    assert set(summary["peak_bytes"]) >= {"device", "pinned", "host"}
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary


def test_where_there_is_no_clock_there_are_no_rates():
    """The shuffled machine counts packets; read as seconds they would be throughput, shares and accuracy."""
    _, passes = link_bound_run(6)
    summary = build_summary(facts(clock="none", label="none"), passes, [])
    timed = """generation_s throughput_tok_s processed_tok_s predicted_throughput_tok_s prediction_accuracy
        tokens_per_t_gpu idle_share"""
    assert [name for name in timed.split() if summary[name] is not None] == []
    assert summary["window_s"] == 0 and not any(summary["utilization"].values())
    assert summary["num_passes"] == 6 and summary["generated_tokens"] == 66


def test_a_run_that_never_got_to_a_pass_has_no_throughput():
    summary = build_summary(facts(status="oom", error="device memory: full"), [], [])
    assert summary["status"] == "oom" and summary["error"] == "device memory: full"
    for name in ("throughput_tok_s", "processed_tok_s", "prediction_accuracy", "tokens_per_t_gpu"):
        assert summary[name] is None
    assert summary["window_s"] == 0 and summary["bottleneck"] == "nothing ran in the steady window"
    json.dumps(summary, allow_nan=False)


@pytest.mark.parametrize(
    ("predicted", "observed", "expected"),
    [
        (90.0, 100.0, 0.9),
        (110.0, 100.0, 0.9),
        (300.0, 100.0, -1.0),
        (None, 100.0, None),
        (5.0, None, None),
        (5.0, 0.0, None),
    ],
)
def test_accuracy(predicted, observed, expected):
    assert accuracy(predicted, observed) == (None if expected is None else pytest.approx(expected))
