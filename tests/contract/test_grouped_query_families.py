"""Qwen3-MoE, OLMoE and Qwen2-MoE give Hugging Face's tokens, on one GPU and where several share each layer."""

from __future__ import annotations

import json
import shutil

import pytest
import yaml

from harness.config import ConfigError, parse
from harness.model.checkpoint import Checkpoint
from harness.model.config import ModelConfig
from harness.model.zoo import ensure
from tests.conftest import ROOT
from tests.contract.running import check_tokens, engine_on, requests, run_to_end, shuffled, strategy_of

pytestmark = pytest.mark.usefixtures("short_probes")

TINY = yaml.safe_load((ROOT / "conf/model/qwen3-tiny.yaml").read_text())
STRATEGIES = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / "conf/strategy").glob("*.yaml")}
ALL_EXPERTS = {"dense_layers": [], "dense_dim": 0}  # in every layer
VARIANTS = {  # as changes of conf/model/qwen3-tiny.yaml, which has a layer without experts
    "qwen3_moe": {},
    "qwen3_moe with biases and a window": {"qkv_bias": True, "sliding_window": 6, "head_dim": 24},
    "qwen3_moe, tied, weighed by probability, with YaRN": {
        "tie_embeddings": True,
        "router": {"renormalise": False},
        "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
    },
    "olmoe": ALL_EXPERTS | {"family": "olmoe"},
    "olmoe with clipping and biases": ALL_EXPERTS | {"family": "olmoe", "clip_qkv": 0.6, "qkv_bias": True},
    "qwen2_moe": {"family": "qwen2_moe", "shared_expert_dim": 64},
    "qwen2_moe with windows in every second layer": {
        "family": "qwen2_moe",
        "shared_expert_dim": 32,
        "sliding_window": 6,
        "sliding_layers": "even",
        "dense_layers": [0, 2],
    },
}


def checkpoint_of(variant: str) -> Checkpoint:
    config = parse(ModelConfig, TINY | {"recipe": TINY["recipe"] | VARIANTS[variant]}, "model")
    return Checkpoint(ensure(config))


def run(checkpoint: Checkpoint, num_gpus: int, seed: int, strategy: str = "ondemand") -> None:
    work, values = requests(8, vocab_size=checkpoint.spec.vocab_size, longest=20, seed=seed), STRATEGIES[strategy]
    machine = shuffled(seed, num_gpus=num_gpus)
    engine = engine_on(machine, checkpoint, work, kv_blocks=60, num_gpus=num_gpus, values=values)
    run_to_end(engine, lambda e: strategy_of(e, values))
    report = check_tokens(checkpoint, engine.sequences)
    assert report.checked == len(work) and report.ok, report.first_mismatch


@pytest.mark.parametrize("variant", VARIANTS)
def test_tokens(variant):
    run(checkpoint_of(variant), 1, seed=2)


@pytest.mark.parametrize("variant", ["qwen3_moe", "olmoe", "qwen2_moe"])
def test_tokens_of_a_folder_with_the_entries_of_the_hub(variant, tmp_path):
    """Verification gives transformers these entries, so that it knows them under these names, too."""
    made = checkpoint_of(variant)
    folder = shutil.copytree(made.folder, tmp_path / made.folder.name)
    entries = json.loads((folder / "config.json").read_text())
    entries["num_experts"] = entries.pop("num_local_experts", entries.get("num_experts"))
    entries["rope_theta"] = entries.pop("rope_parameters")["rope_theta"]
    entries["torch_dtype"] = entries.pop("dtype")
    (folder / "config.json").write_text(json.dumps(entries))
    assert Checkpoint(folder).spec == made.spec
    run(Checkpoint(folder), 1, seed=5)


@pytest.mark.parametrize("num_gpus", [2, 4])
@pytest.mark.parametrize(
    "variant", ["qwen3_moe with biases and a window", "qwen2_moe with windows in every second layer"]
)
def test_tokens_of_gpus_that_share_every_layer(variant, num_gpus):
    """Four GPUs share two KV heads: each head, with its biases, is then kept by two."""
    run(checkpoint_of(variant), num_gpus, seed=3)


def test_norms_over_all_heads_are_not_divided():
    with pytest.raises(ConfigError, match=r"^hardware.num_gpus: must be 1 .* \(qk_norm\), got 2"):
        run(checkpoint_of("olmoe"), 2, seed=0)


@pytest.mark.parametrize("strategy", ["flexgen", "deepspeed_zero"])
def test_gpus_that_have_whole_layers_have_norms_over_all_heads(strategy):
    """The GPUs of a pipeline have layers of their own, those with data parallelism sequences of their own."""
    run(checkpoint_of("olmoe"), 2, seed=4, strategy=strategy)
