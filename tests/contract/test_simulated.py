"""Every strategy on the simulated machine: any model of the papers, on any of their machines, without a tensor."""

from __future__ import annotations

import pytest

from harness.plan.planning import make_plan
from tests.composing import composed
from tests.contract.test_families import ONE_OF_A_PACKAGE
from tests.contract.test_strategies import YAMLS

# Models with the machines on which the papers ran something of their size; device memory must hold two of their layers.
CASES = [
    ("mixtral-8x7b", "a40", 70),
    ("mixtral-8x22b", "a40", 70),
    ("dbrx", "a40", 70),
    ("deepseek-v2-lite", "v100-32g", 4),
    ("qwen3-30b-a3b", "a100-40g-pcie", 4),
    ("deepseek-r1", "h200", 20),
    ("gpt-oss-120b", "h200", 20),
]

LAYERS = {"mixtral-8x7b": 20}  # more than the device holds, as of the others are 12
WHOLE = "ondemand"  # runs all layers of every model; they add nothing to what the others do
SHARING = {  # PreScope's pipeline, and MoE-Lightning's planner and lanes: two models are enough for these
    *("fiddler", "hybrimoe", "klotski", "fate", "expert_cache"),
    *("fastdecode", "flexgen", "flexgen_c"),
}
SMALL_EXPERTS = CASES[3]
CELLS = [
    (name, *case)
    for case in CASES
    for name in (YAMLS if case is CASES[0] else ONE_OF_A_PACKAGE.values())
    if name not in SHARING or case in (CASES[0], SMALL_EXPERTS)
]


def planned(*overrides: str):
    values = composed("machine=simulated", "dataset.num_requests=24", "dataset.max_new_tokens=8", *overrides)
    return make_plan(values)


@pytest.mark.parametrize(
    ("strategy", "model", "hardware", "kv_cache_gb"), CELLS, ids=[f"{model}-{name}" for name, model, *_ in CELLS]
)
def test_every_strategy_runs_every_model(strategy, model, hardware, kv_cache_gb):
    has_small_experts = not model.startswith(("mixtral", "dbrx"))  # passes over many of them take long
    new_tokens = 2 if has_small_experts else 4
    shortened = [f"model.spec.num_layers={LAYERS.get(model, 12)}"] if strategy != WHOLE else []
    shortened += ["strategy.search=false"] if strategy.startswith("moegen") else []  # it has tests of its own
    plan = planned(
        *shortened,
        f"strategy={strategy}",
        f"model={model}",
        f"dataset.max_new_tokens={new_tokens}",
        f"hardware={hardware}",
        f"kv_cache_gb={kv_cache_gb}",
        "hardware.pinned_memory_gb=800",
        "hardware.host_memory_gb=800",
        "hardware.ram_gb=800",
    )
    summary = plan.summary
    assert summary["label"] == "simulated"
    assert summary["generated_tokens"] == 24 * new_tokens
    assert 0 < max(summary["utilization"].values()) <= 1 + 1e-9
    ceiling = summary["h2d_ceiling_gb_s"]
    assert summary["h2d_busy_gb_s"] <= ceiling * (1 + 1e-9)
    for tier in plan.machine.tiers.values():
        tier.check_integrity()


@pytest.mark.parametrize("strategy", ["moelens", "moelightning", "vllm_offload", "fiddler"])
def test_answers_end_where_the_workload_says(strategy):
    """Requests for 12 tokens end where the workload says; without ends the same 24 take longer."""
    shared = (
        f"strategy={strategy}",
        "model=mixtral-8x7b",
        "model.spec.num_layers=12",
        "hardware=a40",
        "kv_cache_gb=20",
    )
    shared = (*shared, "dataset.max_new_tokens=12")
    ending = planned(*shared, "dataset.output_lengths={mean: 4, max: 30, source: a test}")
    ends = [min(s.request.ends_after, 12) for s in ending.engine.sequences]
    assert len(set(ends)) > 3 and min(ends) < 4 < max(ends)
    assert ending.summary["generated_tokens"] == sum(ends)
    assert "; ends drawn from mean 4, max 30 (a test)" in ending.data_source
    whole = planned(*shared)
    assert whole.summary["generated_tokens"] == 24 * 12
    ending_s, whole_s = (p.summary["generated_tokens"] / p.summary["throughput_tok_s"] for p in (ending, whole))
    assert ending_s < whole_s, "the longest answer ends a batch, at the latest"


def test_the_same_twice_bit_for_bit():
    def spans():
        plan = planned("model=mixtral-8x7b", "hardware=a40", "kv_cache_gb=2", "hardware.device_memory_gb=16")
        return [(str(s.lane), s.kind, s.layer, s.start_s, s.end_s) for s in plan.machine.spans]

    first = spans()
    assert len(first) > 1000
    assert first == spans()


@pytest.mark.parametrize("num_gpus", [2, 4])
@pytest.mark.parametrize("prefetch", ["false", "true"])
def test_gpus_share_the_weights_and_meet_in_collectives(num_gpus, prefetch):
    shared = ("strategy=ondemand", f"strategy.prefetch={prefetch}", "model=mixtral-8x7b", "kv_cache_gb=4")
    one = planned(*shared, "hardware=t4", "hardware.ram_gb=416", "hardware.pinned_memory_gb=416")
    several = planned(*shared, f"hardware=t4x{num_gpus}")
    ratio = several.summary["throughput_tok_s"] / one.summary["throughput_tok_s"]
    assert 0.85 * num_gpus < ratio <= num_gpus * (1 + 1e-9)  # the link is the bottleneck, and each GPU has its own
    spec, spans = several.engine.spec, list(several.machine.spans)
    launch_s, p2p_bytes_s = 5e-6, 9.7e9
    members = [s for s in spans if s.kind == "all-reduce"]
    assert len(members) == 2 * spec.num_layers * several.summary["num_passes"] * num_gpus
    sizes = {s.work.link_bytes / (2 * (num_gpus - 1) / num_gpus) / (2 * spec.hidden_dim) for s in members}
    assert sizes <= {float(n) for n in range(1, 5000)}, "whole tokens, two bytes a number"
    for meeting in zip(*(iter(members),) * num_gpus, strict=True):
        assert len({s.lane.rank for s in meeting}) == num_gpus
        assert max(s.end_s for s in meeting) - min(s.end_s for s in meeting) < 1e-3
        for s in meeting:
            assert s.end_s - s.start_s == pytest.approx(launch_s + s.work.link_bytes / p2p_bytes_s, rel=1e-6)


@pytest.mark.parametrize(
    ("strategy", "least"),
    [
        ("moelightning", 1.8),
        ("flexgen", 1.0),
        ("flexgen strategy.parallelism=tensor", 1.8),
        ("flexgen_c", 1.0),
        ("flexgen_c strategy.parallelism=tensor", 1.3),
    ],
)
def test_a_second_gpu_is_worth_what_its_link_brings(strategy, least):
    """Of as many requests: half of every layer, and of what stays on the GPUs twice as much; or, where the GPUs are
    stages, every layer for each half of the requests."""
    name, *more = strategy.split()
    shared = (f"strategy={name}", *more, "model=mixtral-8x7b", "kv_cache_gb=20", "dataset.num_requests=240")
    shared = (*shared, "hardware.ram_gb=416", "hardware.pinned_memory_gb=416", "strategy.packet_mb=1000")
    sizes = ("strategy.policy.batch_size=240", "strategy.policy.micro_batch_size=70")
    halves = ("strategy.policy.batch_size=120", "strategy.policy.micro_batch_size=35") if least == 1.0 else sizes
    one, two = planned(*shared, *sizes, "hardware=t4"), planned(*shared, *halves, "hardware=t4x2")
    assert least < two.summary["throughput_tok_s"] / one.summary["throughput_tok_s"] < 2.5
    assert two.summary["num_passes"] == 8 * two.strategy.passes_in_flight
    predicted = two.strategy.prediction.throughput_tok_s
    assert predicted == pytest.approx(two.summary["throughput_tok_s"], rel=0.15)


def test_shares_of_a_layer_meet_on_every_gpu():
    shared = ("strategy=deepspeed_zero", "model=mixtral-8x7b", "kv_cache_gb=1", "hardware=t4x2")
    plan = planned(*shared)
    spans = list(plan.machine.spans)
    layer_bytes, num_layers = plan.engine.store.layer_bytes, plan.engine.spec.num_layers
    num_passes = plan.summary["num_passes"]
    for rank in range(2):
        received = sum(s.work.link_bytes for s in spans if s.kind == "all-gather" and s.lane.rank == rank)
        assert received == pytest.approx(num_passes * num_layers * layer_bytes / 2, rel=0.01)
        fetched = sum(s.work.link_bytes for s in spans if s.kind == "weights" and s.lane.rank == rank)
        assert fetched == pytest.approx(received, rel=0.1), "beyond the last pass some was prefetched"


def test_a_run_on_the_simulated_machine_is_recorded_like_any_other(tmp_path):
    from harness.run.experiment import run_experiment

    values = composed(
        "machine=simulated", "model=mixtral-8x7b", "hardware=a40", "kv_cache_gb=2", "dataset.num_requests=8",
        "dataset.max_new_tokens=4", "wandb.mode=disabled", "progress=false", f"results_dir={tmp_path}",
    )  # fmt: skip
    summary, folder = run_experiment(values)
    assert (summary["status"], summary["label"], summary["verify"]["mode"]) == ("ok", "simulated", "off")
    assert summary["num_finished"] == 8
    assert {p.name for p in folder.iterdir()} >= {"summary.json", "trace.json", "passes.jsonl", "requests.jsonl"}


def test_a_run_that_forgets_its_spans_tells_the_same_without_a_trace(tmp_path):
    from harness.record.files import read_lines
    from harness.run.experiment import run_experiment

    found, rows = {}, {}
    for kept in ("all", "totals"):
        values = composed(
            "machine=simulated", "model=mixtral-8x7b", "hardware=a40", "kv_cache_gb=2", "dataset.num_requests=24",
            "strategy=moelightning", "dataset.max_new_tokens=6", "wandb.mode=disabled", "progress=false",
            f"keep_spans={kept}", f"results_dir={tmp_path}",
        )  # fmt: skip
        summary, folder = run_experiment(values)
        assert summary["num_passes"] > 4 and (folder / "trace.json").exists() == (kept == "all")
        found[kept] = {name: value for name, value in summary.items() if name not in ONLY_OF_A_RUN}
        rows[kept] = read_lines(folder / "passes.jsonl")
    assert rows["totals"] == rows["all"]
    totals, whole = (flat(found[kept]) for kept in ("totals", "all"))
    assert set(totals) == set(whole) and totals["/num_spans"] > 500
    for name, value in whole.items():
        assert totals[name] == (pytest.approx(value, rel=1e-9) if isinstance(value, float) else value), name


def test_only_the_simulated_machine_forgets_spans():
    from harness.config import ConfigError
    from harness.settings import parse_settings

    with pytest.raises(ConfigError, match=r"keep_spans: must be all on machine=shuffled"):
        parse_settings(composed("machine=shuffled", "keep_spans=totals"))


ONLY_OF_A_RUN = {"run_id", "wall_s", "setup_s", "warnings", "trace_excerpt", "host_steal_share", "others_core_share"}


def flat(values, name=""):
    """All numbers and texts of nested mappings and lists, by their paths."""
    if not isinstance(values, dict | list):
        return {name: values}
    pairs = values.items() if isinstance(values, dict) else enumerate(values)
    return {path: leaf for key, value in pairs for path, leaf in flat(value, f"{name}/{key}").items()}
