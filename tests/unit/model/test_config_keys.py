"""Every entry of config.json is read, must have one value, or is listed as harmless; all others are refused by name."""

from __future__ import annotations

import dataclasses
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from published import PUBLISHED
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from harness.config import ConfigError
from harness.model import families
from harness.model.checkpoint import Checkpoint
from harness.model.checkpoint_files import WeightFiles, read_json
from harness.model.families.harmless import HARMLESS, NEUTRAL
from harness.model.families.reading import read_spec
from harness.run.session import Session
from tests.composing import composed
from tests.tiny_families import VARIANTS, VOCAB_SIZE, folder_of, runnable, tiny_family

FAMILIES = sorted({VARIANTS[name]["model_type"] for name in runnable()})
PROMPT = torch.randint(3, VOCAB_SIZE, (1, 30), generator=torch.Generator().manual_seed(0))
OTHER_VALUES = {  # harmless entries that transformers' classes know, with values they usually do not have
    "attention_dropout": 0.9,
    "bos_token_id": 7,
    "chunk_size_feed_forward": 1,
    "emb_pdrop": 0.9,
    "id2label": {0: "a", 1: "b", 2: "c"},
    "initializer_range": 3.0,
    "label2id": {"a": 0},
    "output_router_logits": True,
    "output_hidden_states": True,
    "pad_token_id": 5,
    "pretraining_tp": 4,
    "problem_type": "regression",
    "resid_pdrop": 0.9,
    "router_aux_loss_coef": 3.0,
    "router_jitter_noise": 0.5,
    "use_cache": False,
    "num_mtp_layers": 2,
    "num_nextn_predict_layers": 2,
    "max_window_layers": 1,
    "num_key_value_heads": 1,
    "experts_per_token": 1,
    "initial_context_length": 8,
}
WRITTEN_BY_OTHERS = {  # harmless entries of older versions of transformers, and of programs that work on its files
    "_attn_implementation_autoset": True,
    "diversity_penalty": 0.5,
    "early_stopping": True,
    "finetuning_task": "mnli",
    "gradient_checkpointing": True,
    "length_penalty": 2.0,
    "max_length": 5,
    "num_beam_groups": 2,
    "output_scores": True,
    "return_dict_in_generate": True,
    "sep_token_id": 3,
    "task_specific_params": {"summarization": {"num_beams": 4}},
    "tf_legacy_loss": True,
    "tokenizer_class": "LlamaTokenizer",
    "torchscript": True,
    "typical_p": 0.5,
    "unsloth_fixed": True,
    "unsloth_version": "2026.1",
    "use_bfloat16": True,
}
UNSUPPORTED = {  # family -> entry, value, what the error says
    "mixtral": ("hidden_act", "gelu", "hidden_act: must be 'silu', got 'gelu'"),
    "qwen3_moe": ("decoder_sparse_step", 0, "decoder_sparse_step: must be"),
    "olmoe": ("clip_qkv", -1.0, "clip_qkv: must be a positive number"),
    "qwen2_moe": ("layer_types", ["chunked_attention"] * 3, "layer_types: must"),
    "dbrx": ("attn_config", {"kv_n_heads": 2, "qk_ln": True}, "attn_config.qk_ln: unknown"),
    "deepseek_v2": ("topk_method", "noaux_tc", "topk_method: must be"),
    "deepseek_v3": ("head_dim", 8, "head_dim: must be 16, got 8"),
    "gpt_oss": ("rope_parameters", {"rope_type": "longrope"}, "rope_type: must be 'default' or 'yarn', got 'longrope'"),
}


def variants_of(family: str) -> list[str]:
    return [name for name in runnable() if VARIANTS[name]["model_type"] == family]


def with_entries(family: str, parent: Path, **entries: object) -> Path:
    folder = Path(shutil.copytree(folder_of(family), parent / family))
    (folder / "config.json").write_text(json.dumps(read_json(folder / "config.json") | entries))
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_every_entry_that_transformers_knows_is_accounted_for(family):
    other_names, layout = CONFIG_MAPPING[family].attribute_map, families.layout(family)
    known = {field.name for field in dataclasses.fields(CONFIG_MAPPING[family])} | set(other_names)
    read: set[str] = set()
    for name in variants_of(family):
        entries = read_json(folder_of(name) / "config.json") | {"is_encoder_decoder": False}
        swapped = {**other_names, **{own: other for other, own in other_names.items()}}
        renamed = {swapped.get(key, key): value for key, value in entries.items()}  # as another version writes them
        specs = []
        for each in (entries, renamed):
            spec, found = read_spec(layout, each, "m", "float32")
            specs.append(spec)
            read |= set(found)
        assert specs[0] == specs[1]
        known |= set(entries)
    assert known - read - {*HARMLESS, *layout.harmless} == set()


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_harmless_entries_change_no_number(family, tmp_path):
    """With another value of all of them at once; transformers finds those that it derives by itself."""
    folder = folder_of(family)
    known = {field.name for field in dataclasses.fields(CONFIG_MAPPING[family])} | set(
        read_json(folder / "config.json")
    )
    harmless = known & {*HARMLESS, *families.layout(family).harmless}
    kept = {"architectures", "dtype", "transformers_version", "return_dict"}
    kept |= {"sliding_window", "intermediate_size", "n_group", "topk_group"}  # these count here
    changed = {key: OTHER_VALUES[key] for key in harmless - kept}
    assert len(changed) >= 8 and HARMLESS.keys() >= WRITTEN_BY_OTHERS.keys()
    changed |= WRITTEN_BY_OTHERS | NEUTRAL
    other_folder = with_entries(family, tmp_path, **changed)
    models = [AutoModelForCausalLM.from_pretrained(each) for each in (folder, other_folder)]
    right, other = (model.eval()(PROMPT, return_dict=True).logits for model in models)
    assert torch.equal(right, other)
    assert replace(Checkpoint(other_folder).spec, name="") == replace(tiny_family(family).spec, name="")


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_entries_are_known(name):
    entries = PUBLISHED[name].config
    read_spec(families.layout(entries["model_type"]), entries, name, "bfloat16")


@pytest.fixture
def refused(tmp_path, monkeypatch):
    """Says why a checkpoint with another entry is refused, which must happen before any weight is read."""

    def read(files, name):
        raise AssertionError(f"{name} was read")

    def message(family, **entries):
        folder = with_entries(family, tmp_path, **entries)
        monkeypatch.setattr(WeightFiles, "tensor", read)
        with pytest.raises(ConfigError) as raised:
            Checkpoint(folder)
        return str(raised.value)

    return message


@pytest.mark.parametrize("family", FAMILIES)
def test_an_unknown_entry_is_refused_by_its_name(refused, family):
    expected = "model.path: config.json: residual_multiplier: unknown, and so is what it changes; got 0.22"
    assert refused(family, residual_multiplier=0.22) == expected


@pytest.mark.parametrize("family", UNSUPPORTED)
def test_an_unsupported_value_is_refused_by_its_name(refused, family):
    key, value, expected = UNSUPPORTED[family]
    assert expected in refused(family, **{key: value})


@pytest.mark.parametrize(
    ("key", "value"), [("repetition_penalty", 1.2), ("is_decoder", True), ("pruned_heads", {1: [0]})]
)
def test_an_entry_that_is_neutral_by_one_value_is_refused_with_another(refused, key, value):
    assert f"config.json: {key}: must be {NEUTRAL[key]!r}, got " in refused("olmoe", **{key: value})


def engine_by(*settings):
    with Session.of(composed(*settings)) as session:
        session.load_model()
        session.load_workload()
        session.build_machine()
        session.queue_requests()
        return session.build_engine()


def test_several_end_tokens_matter_only_to_runs_that_stop_at_one(tmp_path):
    folder = with_entries("olmoe", tmp_path, eos_token_id=[1, 2])
    assert Checkpoint(folder).spec.eos_token_id is None
    settings = ("machine=shuffled", "strategy=ondemand", "model=checkpoint", f"model.path={folder}")
    workload = ("dataset.num_requests=1", "dataset.max_new_tokens=2")
    assert engine_by(*settings, *workload).eos_token_id is None
    with pytest.raises(ConfigError, match="^stop_at_eos: config.json names no end-of-sequence token, or several"):
        engine_by(*settings, *workload, "stop_at_eos=true")


def test_an_unknown_entry_of_rope_is_refused(refused):
    rope = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "short_factor": [1.0]}
    assert "config.json: rope_parameters.short_factor: unknown" in refused("qwen3_moe", rope_parameters=rope)


def test_null_is_as_good_as_absent(tmp_path):
    folder = with_entries("olmoe", tmp_path, residual_multiplier=None)
    assert Checkpoint(folder).spec == replace(tiny_family("olmoe").spec, name="olmoe")
