"""DBRX and gpt-oss give Hugging Face's tokens where GPUs share every layer, and where the CPU computes experts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from harness.config import ConfigError, parse
from harness.model.checkpoint import Checkpoint
from harness.model.config import ModelConfig
from harness.model.quiet import quiet_transformers
from harness.model.zoo import ensure
from tests.conftest import ROOT
from tests.contract.running import check_tokens, engine_on, requests, run_to_end, shuffled, strategy_of
from tests.contract.test_strategies import YAMLS
from tests.tiny_families import tiny_family

ON_HOST = {"batch_size": 3, "micro_batch_size": 2, "gpu_ffn": False, "gpu_attention": False}
TINY = yaml.safe_load((ROOT / "conf/model/mixtral-tiny.yaml").read_text())
RECIPES = {  # as changes of conf/model/mixtral-tiny.yaml
    "dbrx": {"family": "dbrx", "clip_qkv": 1.5, "norm_eps": 1e-5, "router": {"renormalise": False}},
    "gpt_oss": {
        "family": "gpt_oss",
        "qkv_bias": True,
        "sliding_window": 6,
        "sliding_layers": "even",
        "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
        "clamped_swiglu": {"limit": 0.8, "alpha": 1.5},
    },
}


def folder_of(family: str) -> Path:
    return ensure(parse(ModelConfig, TINY | {"recipe": TINY["recipe"] | RECIPES[family]}, "model"))


def check_run(machine, checkpoint, values, num_gpus=1):
    work = requests(5, vocab_size=checkpoint.spec.vocab_size, longest=24, max_new_tokens=5, seed=4)
    engine = engine_on(machine, checkpoint, work, kv_blocks=60, num_gpus=num_gpus, values=values)
    run_to_end(engine, lambda e: strategy_of(e, values))
    report = check_tokens(checkpoint, engine.sequences)
    assert report.checked == len(work) and report.ok, report.first_mismatch


@pytest.mark.parametrize("num_gpus", [2, 4])
@pytest.mark.parametrize("family", ["dbrx", "gpt_oss"])
def test_gpus_that_share_every_layer(family, num_gpus):
    """Four GPUs share two KV heads."""
    check_run(shuffled(num_gpus, num_gpus=num_gpus), tiny_family(family), YAMLS["ondemand"], num_gpus)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["dbrx", "gpt_oss"])
def test_experts_and_attention_on_the_host(family, dtype):
    """In bfloat16 by the CPU's kernels: with biases, clamped activation, sinks and windows."""
    check_run(shuffled(1), tiny_family(family, dtype), YAMLS["moelightning"] | {"policy": ON_HOST})


@pytest.mark.parametrize("family", RECIPES)
def test_random_checkpoints_by_a_recipe(family):
    check_run(shuffled(2), Checkpoint(folder_of(family)), YAMLS["moelens"])


def test_a_recipe_says_what_its_family_has():
    with pytest.raises(ConfigError, match=r"^model\.recipe\.norm_eps: must be 1e-05 for the family dbrx, got 0\.1"):
        parse(ModelConfig, TINY | {"recipe": TINY["recipe"] | {"family": "dbrx"}}, "model")


def in_mxfp4(folder: Path, target: Path) -> Path:
    """Copy a checkpoint of gpt-oss with the experts' matrices drawn anew in MXFP4, by the names of published files."""
    shutil.copytree(folder, target)
    tensors, generator = load_file(target / "model.safetensors"), torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        shape = (experts, outputs, inputs // 32)
        for end, bounds, dims in (("_blocks", (0, 256), (*shape, 16)), ("_scales", (121, 124), shape)):
            tensors[name + end] = torch.randint(*bounds, dims, dtype=torch.uint8, generator=generator)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (target / "config.json").write_text(json.dumps(config))
    return target


@pytest.mark.needs("accelerate", extra="dev")  # transformers reads MXFP4 with it
def test_published_files_of_gpt_oss(tmp_path):
    """Against the tokens of what transformers itself reads from the folder."""
    folder = in_mxfp4(folder_of("gpt_oss"), tmp_path / "gpt_oss")
    checkpoint = Checkpoint(folder, "float32")
    work = requests(4, vocab_size=checkpoint.spec.vocab_size, longest=24, max_new_tokens=6, seed=5)
    engine = engine_on(shuffled(0), checkpoint, work, kv_blocks=60)
    run_to_end(engine, lambda e: strategy_of(e, YAMLS["ondemand"]))
    with quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
        )
    for sequence in engine.sequences:
        prompt, count = sequence.request.prompt_ids, sequence.request.max_new_tokens
        options = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        expected = model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :]
        assert sequence.generated == expected.tolist()
