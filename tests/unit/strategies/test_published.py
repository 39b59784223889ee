"""Published planners, restated: they give the published policies, keep to their own memory, and are what runs."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from harness.config import ConfigError
from harness.plan.planning import draft_plan
from paper_figures.moelens import table1
from paper_figures.moelightning.published import GENERATED, POLICIES
from paper_figures.support import composed, model_spec
from strategies.common.workload_shape import WorkloadShape
from strategies.offloading.planning.memory import Deployment, Storage, WeightSizes
from strategies.offloading.planning.policy import GivenPolicy
from strategies.offloading.published import flexgen, moelightning

GIB = 2**30
SPEC = model_spec("mixtral-8x7b")
DEVICE_GIB = {"S1": 15, "S2": 24}  # as the artifact takes a T4 and an L4


def deployment(prompt: float, new: int, device_gib: float, host_gib: float, **storage) -> Deployment:
    shape = WorkloadShape.of_lengths(prompt, new, longest_prompt=418, num_requests=20_000)
    return Deployment(
        spec=SPEC, sizes=WeightSizes.of_spec(SPEC), shape=shape, storage=Storage(**storage),
        capacities_bytes={"device": int(device_gib * GIB), "ram": int(host_gib * GIB)},
    )  # fmt: skip


@pytest.mark.parametrize("setting", ["S1", "S2"])
def test_moelightnings_planner_gives_its_published_padded_policies(setting):
    """All eight policies agree to the sequence, with the memory that a cloud machine of 192 GB shows."""
    plans = [moelightning.published_plan(deployment(418, g, DEVICE_GIB[setting], 187)) for g in GENERATED]
    wanted = [(sizes.micro_batch_size, sizes.batch_size) for sizes in POLICIES[setting]["MoE-Lightning(p)"]]
    assert [(plan.micro_batch_size, plan.batch_size) for plan in plans] == wanted


@pytest.mark.parametrize("setting", ["S1", "S2"])
def test_moelightnings_planner_comes_near_its_published_unpadded_batches(setting):
    for g, sizes in zip(GENERATED, POLICIES[setting]["MoE-Lightning"], strict=True):
        plan = moelightning.published_plan(deployment(77, g, DEVICE_GIB[setting], 187))
        assert plan.batch_size == pytest.approx(sizes.batch_size, rel=0.1)


@pytest.mark.parametrize("setting", ["S1", "S2"])
def test_flexgens_cost_model_gives_its_published_policies(setting):
    """All eight policies agree to the sequence, as do the shares of weights on the device and the throughputs that the
    port's own results give with them (experimental/mtbench/results)."""
    device_gib, kept, tok_s = {
        "S1": (16, (0.0701, 0.0806, 0.0859, 0.0859), (13.33, 20.61, 27.40, 30.59)),
        "S2": (24, (0.1279, 0.1279, 0.1279, 0.1490), (3.15, 5.69, 9.42, 13.66)),
    }[setting]
    plans = [flexgen.published_plan(deployment(418, g, device_gib, 192)) for g in GENERATED]
    wanted = [(sizes.micro_batch_size, sizes.batch_size) for sizes in POLICIES[setting]["FlexGen"]]
    assert [(plan.micro_batch_size, plan.batch_size) for plan in plans] == wanted
    assert [plan.resident for plan in plans] == pytest.approx(kept, abs=2e-4)
    assert [plan.rate / SPEC.num_layers for plan in plans] == pytest.approx(tok_s, rel=2e-3)


@pytest.mark.parametrize(("prompt", "generated", "share"), table1.PUBLISHED)
def test_moelightnings_planner_gives_moelens_table_1(prompt, generated, share):
    """Within half a point of what MoE-Lens publishes, with nothing fitted but which model and memory it is."""
    plan = moelightning.published_plan(table1.deployment(prompt, generated))
    assert plan.host_bytes / (table1.HOST_GIB * GIB) == pytest.approx(share, abs=0.006)
    assert plan.batch_size % plan.micro_batch_size == 0 and 0 <= plan.resident <= 1


@pytest.mark.parametrize("planner", [moelightning, flexgen])
def test_planners_keep_to_their_shares_of_memory(planner):
    """Less memory in the planner's share is less in the plan; none of it looks at the rest."""
    for device, host in ((15, 192), (24, 192), (15, 400)):
        assert planner.published_plan(deployment(77, 64, device, host)).host_bytes <= 0.8 * host * GIB
    batches = [planner.published_plan(deployment(418, 128, 24, host)).batch_size for host in (140, 160, 190)]
    assert all(less < more for less, more in pairwise(batches))
    residents = [planner.published_plan(deployment(418, 128, device, 190)).resident for device in (15, 24, 48)]
    assert all(less < more for less, more in pairwise(residents))
    with pytest.raises(ConfigError, match=r"strategy.planning: as_built: .* finds no policy in .* of the device"):
        planner.published_plan(deployment(418, 128, 6, 190))


def test_the_given_cache_and_the_given_sizes_count():
    free = moelightning.published_plan(deployment(77, 64, 15, 192))
    kept = moelightning.published_plan(deployment(77, 64, 15, 192, kv_cache_bytes=int(20e9)))
    assert kept.batch_size < free.batch_size
    given = GivenPolicy(batch_size=504, micro_batch_size=36)
    for planner in (moelightning, flexgen):
        done = planner.complete(deployment(418, 128, 15, 192), given)
        assert (done.batch_size, done.micro_batch_size, done.gpu_ffn, done.resident_kv) == (504, 36, True, 0.0)
        free = planner.complete(deployment(418, 128, 15, 192), GivenPolicy(micro_batch_size=20))
        assert free.micro_batch_size == 20 and free.batch_size % 20 == 0 and free.batch_size != 504
        assert planner.complete(deployment(418, 128, 8, 192), given).resident_weights == 0.0


def s6(prompt: int, new: int, num_gpus: int = 1) -> Deployment:
    """Mixtral-8x22B on T4s, each a stage of a pipeline, with the memory that the port's cost model has."""
    spec = model_spec("mixtral-8x22b")
    sizes = WeightSizes.of_spec(spec)
    stage = replace(sizes, layers_bytes=sizes.layers_bytes // num_gpus)
    one = deployment(prompt, new, 16, 416)
    return replace(one, spec=spec, sizes=stage, num_gpus=num_gpus, blocks_in_flight=num_gpus)


def test_flexgens_cost_model_gives_its_published_policies_for_mixtral_8x22b():
    """The port's results for one T4 and 416 GiB, by experimental/mtbench/results/generated_policy_t4_22b: sizes to the
    sequence, but for the last, which has 522 where 520 fit here; weights kept; tokens a second that it predicts. With
    one token more a prompt, they are those in the comments of run_script_mtbench_t4_22b_dist_1x2.sh."""
    plans = [flexgen.published_plan(s6(417, g)) for g in GENERATED]
    sizes = [(plan.micro_batch_size, plan.batch_size // plan.micro_batch_size) for plan in plans]
    assert sizes[:3] == [(16, 46), (4, 182), (8, 80)] and plans[3].batch_size == pytest.approx(2 * 261, abs=2)
    assert [plan.resident for plan in plans[:3]] == pytest.approx([0.0089572, 0.0125780, 0.0113711], abs=2e-6)
    tok_s = [plan.rate / model_spec("mixtral-8x22b").num_layers for plan in plans]
    assert tok_s == pytest.approx([3.67, 5.23, 6.31, 6.36], abs=0.005)
    plans = [flexgen.published_plan(s6(418, g)) for g in GENERATED]
    sizes = [(plan.micro_batch_size, plan.batch_size // plan.micro_batch_size) for plan in plans]
    assert sizes == [(16, 46), (8, 90), (3, 214), (4, 130)]


@pytest.mark.parametrize("num_gpus", [2, 4])
def test_batches_in_flight_share_the_batch_that_flexgens_cost_model_plans(num_gpus):
    """With two GPUs 8 x 40, which the port's tuned script has too (run_script_mtbench_t4_22b_dist_1x2_tuned.sh)."""
    for g in GENERATED:
        one, each = flexgen.published_plan(s6(417, g)), flexgen.published_plan(s6(417, g, num_gpus))
        assert each.micro_batch_size == one.micro_batch_size and each.resident == pytest.approx(one.resident)
        assert one.batch_size - num_gpus * one.micro_batch_size < num_gpus * each.batch_size <= one.batch_size
        assert each.batch_size % each.micro_batch_size == 0
    if num_gpus == 2:
        each = flexgen.published_plan(s6(417, 128, 2))
        assert (each.micro_batch_size, each.batch_size) == (8, 8 * 40)
    given = flexgen.published_plan(s6(417, 128, num_gpus), GivenPolicy(batch_size=60))
    assert given.batch_size == 60 and flexgen.published_plan(s6(417, 128), GivenPolicy(batch_size=60 * num_gpus)) == (
        replace(given, batch_size=60 * num_gpus)
    )


def test_a_batch_smaller_than_its_stages_has_one_sequence_in_each():
    few = replace(s6(417, 128, 4).storage, kv_cache_bytes=int(3 * 417 * 8e5))  # of three requests and no more
    plan = flexgen.published_plan(replace(s6(417, 128, 4), storage=few))
    assert (plan.batch_size, plan.micro_batch_size) == (1, 1)


S1 = (
    *("model=mixtral-8x7b", "hardware=t4", "dataset=mtbench_lightning", "dataset.synthetic=lengths", "kv_cache_gb=80"),
    *("strategy.packet_mb=100", "dataset.num_requests=3000", "dataset.max_new_tokens=128"),
)


@pytest.fixture(scope="module")
def plans():
    """Plans of the same machine and workload, as built and best."""
    return {
        (strategy, planning): draft_plan(
            composed(f"strategy={strategy}", *S1, *([f"strategy.planning={planning}"] if planning else []))
        )
        for strategy in ("moelightning", "flexgen")
        for planning in ("as_built", "best", None)
    }


@pytest.mark.parametrize("strategy", ["moelightning", "flexgen"])
def test_as_built_is_not_best_and_best_is_the_default(plans, strategy):
    as_built, best, default = (plans[strategy, planning] for planning in ("as_built", "best", None))
    assert as_built.strategy.plan["planning"] == "as_built"
    assert best.strategy.plan == default.strategy.plan and best.strategy.plan["planning"] == "best"
    sizes = ("batch_size", "micro_batch_size")
    assert [as_built.strategy.plan[name] for name in sizes] != [best.strategy.plan[name] for name in sizes]
    assert as_built.strategy.prediction.throughput_tok_s < 0.7 * best.strategy.prediction.throughput_tok_s


def test_the_plan_is_the_published_planners_and_names_its_sources(plans):
    plan = plans["moelightning", "as_built"].strategy.plan
    theirs = moelightning.published_plan(
        replace(deployment(77, 128, 16e9 / GIB, 192e9 / GIB, kv_cache_bytes=int(80e9)), shape=_shape(plans))
    )
    assert (plan["batch_size"], plan["micro_batch_size"]) == (theirs.batch_size, theirs.micro_batch_size)
    for strategy in ("moelightning", "flexgen"):
        told = plans[strategy, "as_built"].strategy.plan
        assert all(told[name] for name in ("planner", "memory_model", "staging_as_built", "as_in_best"))
        assert not {"planner", "as_in_best"} & set(plans[strategy, "best"].strategy.plan)


def _shape(plans) -> WorkloadShape:
    on = plans["moelightning", "best"].engine
    return WorkloadShape.of_sequences(on.sequences, block_tokens=on.kv.allocator.block_size)


def test_defaults_are_those_of_the_published_system(plans):
    """FlexGen as built pads, and keeps its weights in pageable memory; one thread stages them, not all of them."""
    waits = {key: plan.strategy.plan["weights_wait_in"] for key, plan in plans.items()}
    assert waits["flexgen", "as_built"] == waits["moelightning", "as_built"] == "pageable memory"
    assert waits["flexgen", "best"] == "pinned memory"
    assert flexgen.pin_thread_gb_s(model_spec("mixtral-8x22b")) == pytest.approx(4.7789 * GIB / 1e9)
    for strategy, fitted in (("moelightning", None), ("flexgen", 5.4299 * GIB / 1e9)):
        as_built, best = plans[strategy, "as_built"], plans[strategy, "best"]
        thread = fitted or best.settings.hardware.pin_thread_gb_s
        assert as_built.strategy.plan["rates"]["pin_bytes_s"] == pytest.approx(thread * 1e9, rel=0.01)
        assert as_built.settings.hardware.staging_gb_s == thread < best.settings.hardware.staging_gb_s
    for strategy, padded in (("flexgen", True), ("moelightning", False)):
        plan = plans[strategy, "as_built"]
        longest = max(sequence.prompt_len for sequence in plan.engine.sequences)
        tokens = plan.strategy.plan["micro_batch_size"] * longest
        assert (plan.strategy.plan["prefill_micro_batch_tokens"] == tokens) is padded


def test_flexgen_c_as_built_attends_to_a_copy_with_repeated_heads():
    """A number of the cache is read in 2 bytes and written in 4; read, and written for the 4 heads that share it; and
    read for them: 42 bytes where the kernel here reads 2. Without such heads the second step is left out."""
    assert flexgen.cpu_attention_times(SPEC) == 42 / 2
    assert flexgen.cpu_attention_times(replace(SPEC, num_kv_heads=SPEC.num_heads)) == 10 / 2
    sizes = ("strategy.policy.batch_size=1112", "strategy.policy.micro_batch_size=8")

    def attending(*more: str) -> float:
        plan = draft_plan(composed("strategy=flexgen_c", *S1, *sizes, *more))
        return plan.strategy.plan["rates"]["cpu_attention"]["bytes_s"] / plan.settings.hardware.cpu_gb_s / 1e9

    assert attending() == pytest.approx(1.0, rel=0.01)
    assert attending("strategy.planning=as_built") == pytest.approx(1 / 21, rel=0.01)
    assert attending("strategy.planning=as_built", "hardware.cpu_attention_gb_s=9") == pytest.approx(9 / 45, rel=0.01)


def test_a_setting_wins_over_what_the_published_system_has():
    plan = draft_plan(
        composed(
            "strategy=flexgen", *S1, "strategy.planning=as_built", "strategy.staging=false", "hardware.pin_threads=2"
        )
    )
    assert plan.strategy.plan["weights_wait_in"] == "pinned memory"
    assert plan.settings.hardware.staging_gb_s == 2 * plan.settings.hardware.pin_thread_gb_s


@pytest.mark.parametrize(
    ("strategy", "message"),
    [("fastdecode", r"strategy.planning: must be best: no planner of its own"), ("ondemand", "planning: unknown key")],
)
def test_a_system_without_a_planner_of_its_own_refuses(strategy, message):
    values = composed(f"strategy={strategy}", "model=mixtral-8x7b", "hardware=t4")
    values["strategy"]["planning"] = "as_built"
    with pytest.raises(ConfigError, match=message):
        draft_plan(values)


def test_moelens_is_the_same_either_way_and_says_so():
    values = ("strategy=moelens", "model=mixtral-8x7b", "hardware=a40", "dataset.num_requests=50", "kv_cache_gb=10")
    plans = [
        draft_plan(composed(*values, f"strategy.planning={planning}")).strategy.plan
        for planning in ("as_built", "best")
    ]
    assert [plan.pop("planning") for plan in plans] == ["as_built", "best"]
    assert plans[0] == plans[1] and "profiler" in plans[0]["as_built_is_best"]
