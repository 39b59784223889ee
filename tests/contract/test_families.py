"""Every family computes what transformers' own model does: tokens on all machines, and each part of each layer."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from harness.model.checkpoint import Checkpoint
from harness.model.checkpoint_files import read_json
from harness.plan.planning import make_plan
from harness.verify.collect import generated_sequence
from harness.verify.oracle import verify
from tests.composing import composed
from tests.contract.layerwise import (
    ATTENTION,
    ATTENTION_IN,
    ATTENTION_OUT,
    COMMON,
    DECODE,
    EXPERTS,
    HEAD,
    ROUTER,
    first_difference,
    of_transformers,
    weights_of,
)
from tests.contract.running import check_tokens, emulated, engine_on, requests, run_to_end, shuffled, strategy_of
from tests.contract.test_strategies import PLANNED, YAMLS
from tests.tiny_families import VOCAB_SIZE, folder_of, runnable, tiny_family

pytestmark = pytest.mark.usefixtures("short_probes")
FAMILIES = [name for name in runnable() if "-" not in name]
ONE_OF_A_PACKAGE = {values["package"]: name for name, values in YAMLS.items()}  # its others differ in settings only
SEARCHED = ("mixtral", "deepseek_v3")  # keys and values are cached, or latents: elsewhere memory alone gives the policy
CELLS = [
    (variant, strategy)
    for variant in runnable()
    for strategy in (YAMLS if variant in SEARCHED else ONE_OF_A_PACKAGE.values())
]
ON_HOST = {"batch_size": 3, "micro_batch_size": 2, "gpu_ffn": False, "gpu_attention": False}
PROMPT = torch.randint(3, VOCAB_SIZE, (40,), generator=torch.Generator().manual_seed(1)).tolist()
PLACES = {  # name of a part -> where a tensor of it that is wrong may show first
    "attention_in": {ATTENTION_IN},
    "attention": {ATTENTION, DECODE},
    "attention_out": {ATTENTION_OUT, ROUTER, COMMON},
    "head": {HEAD},
}


def check_run(machine, variant, values, dtype="float32", **given):
    return check_checkpoint(machine, tiny_family(variant, dtype), values, **given)


def check_checkpoint(machine, checkpoint, values, **given):
    work = requests(5, vocab_size=VOCAB_SIZE, longest=40, max_new_tokens=5, seed=2)
    engine = engine_on(machine, checkpoint, work, kv_blocks=60, values=values, **given)
    run_to_end(engine, lambda e: strategy_of(e, values))
    report = check_tokens(checkpoint, engine.sequences)
    assert report.checked == len(work)
    assert report.ok, report.first_mismatch
    return checkpoint, engine.sequences


@pytest.mark.parametrize(("variant", "strategy"), CELLS)
def test_tokens_on_the_shuffled_machine(variant, strategy):
    values = (YAMLS if variant in SEARCHED else PLANNED)[strategy]
    check_run(shuffled(seed=len(variant + strategy)), variant, values)


@pytest.mark.parametrize(
    ("variant", "strategy"),
    [*((name, "moelens") for name in FAMILIES if name != "mixtral"), ("deepseek_v3", "hybrimoe")],  # test_strategies.py
)
def test_tokens_on_the_emulated_machine(variant, strategy):
    check_run(emulated(), variant, PLANNED[strategy])


@pytest.mark.parametrize("variant", FAMILIES)
def test_float16_on_both_sides(variant):
    """Attention and experts on the device; then on the host, by the CPU's kernels."""
    check_run(shuffled(1), variant, YAMLS["deepspeed_zero"], "float16")
    check_run(shuffled(2), variant, YAMLS["moelightning"] | {"policy": ON_HOST}, "float16")


@pytest.mark.parametrize("variant", runnable())
def test_bfloat16_is_told_from_wrong_experts(variant):
    """One of a token's experts is another one, in what a right run has recorded."""
    checkpoint, sequences = check_run(shuffled(1), variant, YAMLS["ondemand"], "bfloat16")
    right, generator = generated_sequence(sequences[0]), np.random.default_rng(0)
    [segment] = right.segments
    num_caught = 0
    for _ in range(16):
        routing = segment.routing.copy()
        chosen = routing[generator.integers(len(right.prompt_ids)), generator.integers(routing.shape[1])]
        others = np.setdiff1d(np.arange(checkpoint.spec.num_experts), chosen)
        chosen[generator.integers(len(chosen))] = generator.choice(others)
        wrong = replace(right, segments=[replace(segment, routing=routing)])
        num_caught += not verify(checkpoint, [wrong], eos=False).ok
    assert num_caught >= 12


def test_a_choice_within_one_group_is_replayed(tmp_path):
    """transformers chooses the only group too."""
    folder = shutil.copytree(folder_of("deepseek_v2", "bfloat16"), tmp_path / "one-group")
    entries = read_json(folder / "config.json") | {"n_group": 1, "topk_group": 1}
    (folder / "config.json").write_text(json.dumps(entries))
    check_checkpoint(shuffled(1), Checkpoint(folder), YAMLS["ondemand"])


@pytest.mark.parametrize("variant", FAMILIES)
def test_keys_and_values_staged_on_the_device(variant):
    check_run(shuffled(3), variant, PLANNED["moelens"] | {"attention": "gpu", "gpu_kv_staging_mb": 0.02, "n_real": 60})


@pytest.mark.parametrize(
    ("variant", "strategy"),
    [*((variant, "moelens") for variant in FAMILIES), *(("deepseek_v3", name) for name in YAMLS if name != "moelens")],
)
def test_planned_on_the_simulated_machine(variant, strategy):
    """By config.json alone."""
    settings = ("machine=simulated", "hardware=a40", "kv_cache_gb=0.01", "model=checkpoint", f"strategy={strategy}")
    workload = ("dataset.num_requests=6", "dataset.max_new_tokens=4")
    plan = make_plan(composed(*settings, *workload, f"model.path={folder_of(variant)}"))
    assert plan.engine.spec.family == variant and plan.summary["generated_tokens"] == 24
    assert 0 < max(plan.summary["utilization"].values()) <= 1 + 1e-9


@pytest.fixture(scope="module")
def right():
    """What transformers computes, by variant."""
    found = {}

    def of(variant):
        if variant not in found:
            found[variant] = of_transformers(tiny_family(variant), PROMPT)
        return found[variant]

    return of


@pytest.mark.parametrize("variant", runnable())
def test_every_part_of_every_layer(variant, right):
    checkpoint = tiny_family(variant)
    place = first_difference(checkpoint, weights_of(checkpoint), right(variant))
    assert place is None, f"layer {place[0]}, {place[1]}: other numbers than transformers'"


@pytest.mark.parametrize("variant", runnable())
def test_a_norm_or_bias_left_out_is_found_where_it_is(variant, right):
    checkpoint = tiny_family(variant)
    weights, last = weights_of(checkpoint), checkpoint.spec.num_layers - 1
    busiest = f"expert.{right(variant)[last, ROUTER].sum(0).argmax()}"
    planted = 0
    for (layer, part), tensors in weights.items():
        if (layer, part) not in ((None, "head"), *((last, name) for name in (*PLACES, busiest))):
            continue
        for name, tensor in tensors.items():
            if tensor.dim() > 1:
                continue
            kept = tensor.clone()
            tensor.fill_(1.0 if "norm" in name else 0.0)
            at, found = first_difference(checkpoint, weights, right(variant)) or (None, "nowhere")
            assert at == layer and found in PLACES.get(part, {EXPERTS}), f"{part}, {name}: found in {at}, {found}"
            tensor.copy_(kept)
            planted += 1
    assert planted >= 3
    assert first_difference(checkpoint, weights, right(variant)) is None
