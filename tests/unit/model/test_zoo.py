import errno
import hashlib
import json
import os
import threading
from dataclasses import replace

import pytest
import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM

from harness.config import ConfigError
from harness.model import cache as cache_module
from harness.model import zoo
from harness.model.cache import cache_folder, make_once
from harness.model.checkpoint import Checkpoint
from harness.model.spec import DTYPE_BYTES
from tests.kernels.eventually import GIVE_UP_S

SMALL_BF16 = {"dtype": "bfloat16", "hidden_dim": 128, "vocab_size": 512, "init_std": None}


def digests(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_made_once_and_the_same_everywhere(model_config, tmp_path, monkeypatch):
    model = model_config("mixtral-tiny")
    first = zoo.ensure(model)
    before = {path: path.stat().st_mtime_ns for path in first.iterdir()}
    assert zoo.ensure(model) == first and before == {path: path.stat().st_mtime_ns for path in first.iterdir()}
    monkeypatch.setenv("MOE_HARNESS_CACHE", str(tmp_path))
    again = zoo.ensure(model)
    assert again != first and digests(again) == digests(first)


def test_making_and_reading_is_quiet(model_config, capfd, recwarn):
    Checkpoint(zoo.ensure(model_config("mixtral-tiny", seed=21))).tokenizer()
    assert capfd.readouterr() == ("", "") and not recwarn.list


def test_recipe_seed_and_version_have_their_own_folders(model_config, monkeypatch):
    keys = {
        zoo.recipe_key(model_config("mixtral-tiny", **change).recipe) for change in ({}, {"seed": 1}, {"num_layers": 5})
    }
    monkeypatch.setattr(zoo, "GENERATOR_VERSION", zoo.GENERATOR_VERSION + 1)
    keys.add(zoo.recipe_key(model_config("mixtral-tiny").recipe))
    assert len(keys) == 4


@pytest.mark.parametrize("recipe", [{}, SMALL_BF16], ids=["tiny", "bfloat16"])
def test_weights_have_the_stated_dtype_mean_and_deviation(model_config, recipe):
    model = model_config("mixtral-tiny", **recipe)
    folder = zoo.ensure(model)
    checkpoint = Checkpoint(folder)
    assert checkpoint.stored_dtypes() == {model.recipe.dtype}
    stored_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert stored_bytes == pytest.approx(checkpoint.spec.num_params * DTYPE_BYTES[model.recipe.dtype], rel=0.02)
    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert sum(p.numel() for p in hf.parameters()) == checkpoint.spec.num_params
    for name, parameter in hf.named_parameters():
        if parameter.dim() == 1:
            assert parameter.std().item() == pytest.approx(0.2, rel=0.25), name
            assert abs(parameter.mean().item() - 1) < 0.1 and parameter.min() > 0.6, name
        else:
            std = 1.0 if "embed" in name else model.recipe.weight_std
            assert parameter.std().item() == pytest.approx(std, rel=0.05), name
            assert abs(parameter.mean().item()) < 5 * std / parameter.numel() ** 0.5, name


@pytest.mark.parametrize("writer", ["transformers.PreTrainedModel", "transformers.PreTrainedTokenizerFast"])
@pytest.mark.parametrize("kind", [SafetensorError, Exception])
def test_a_disk_that_fills_while_a_checkpoint_is_made_is_told_in_a_line(
    writer, kind, model_config, tmp_path, monkeypatch
):
    """Rust's writers raise errors of their own, or bare ones."""

    def full(*args, **options):
        raise kind("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setenv("MOE_HARNESS_CACHE", str(tmp_path))
    monkeypatch.setattr(f"{writer}.save_pretrained", full)
    with pytest.raises(ConfigError, match=r"^MOE_HARNESS_CACHE: cannot write to .*No space left on device"):
        zoo.ensure(model_config("mixtral-tiny"))
    assert not list((tmp_path / "models").iterdir())


def test_a_cached_checkpoint_that_was_edited_is_not_verified_against_itself(model_config):
    model = model_config("mixtral-tiny", seed=31)
    path = zoo.ensure(model) / "config.json"
    entries = json.loads(path.read_text())
    assert entries["rms_norm_eps"] == 0.1, "stated, whatever the default"
    for key, value in (("num_hidden_layers", 3), ("rope_parameters", None), ("rms_norm_eps", 1e-6), ("dtype", "x")):
        path.write_text(json.dumps(entries | {key: value}))
        with pytest.raises(ConfigError, match=rf"model\.recipe: .*json: {key} is .* in the recipe; remove .*, and it"):
            zoo.ensure(model)
    path.write_text(json.dumps(entries))
    assert zoo.ensure(model) == path.parent


@pytest.mark.parametrize(
    ("kind", "count", "vectors"),
    [
        ("deepseek_v3", "n_routed_experts", ("e_score_correction_bias", "kv_a_layernorm")),
        ("gpt_oss", "num_local_experts", ("bias", "sinks", "gate_up_proj_bias", "down_proj_bias")),
    ],
)
def test_no_vector_is_neutral_and_no_buffer_left_as_it_was(model_config, kind, count, vectors):
    """Biases, sinks and the correction bias, which is a buffer, are spread about 0, norms about 1."""
    recipe = model_config("mixtral-tiny").recipe
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4, count: 32}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, vocab_size=300, **sizes))
    model.to_empty(device="cpu")
    for tensor in model.state_dict().values():
        tensor.fill_(float("nan"))
    zoo._fill(model, recipe)
    found = set()
    for name, tensor in model.state_dict().items():
        assert tensor.isfinite().all(), name
        if "norm" in name or "bias" in name or "sinks" in name:
            vector = name.removesuffix(".weight").rsplit(".", 1)[-1]
            found.add(vector)
            assert abs(tensor.float().mean().item() - ("norm" in name)) < 0.3, name
            assert 0.05 < tensor.float().std().item() < 0.3, name
    assert found >= {"input_layernorm", "norm"} | set(vectors)


@pytest.mark.parametrize("name", ["mixtral-mini", "qwen3-mini", "deepseek-mini"])
def test_mini_is_large_enough_to_time_and_small_enough_to_keep(model_config, name):
    recipe = model_config(name).recipe
    expert = 3 * recipe.hidden_dim * recipe.expert_dim
    attention = 2 * recipe.hidden_dim * recipe.head_dim * (recipe.num_heads + recipe.num_kv_heads)
    layer = recipe.num_experts * (expert + recipe.hidden_dim) + attention + 2 * recipe.hidden_dim
    num_layers = recipe.num_layers - len(recipe.dense_layers)
    num_bytes = 2 * (num_layers * layer + 2 * recipe.vocab_size * recipe.hidden_dim + recipe.hidden_dim)
    assert 200e6 < num_bytes < 400e6


@pytest.mark.parametrize(("name", "recipe"), [("mixtral-tiny", {}), ("mixtral-tiny", SMALL_BF16), ("qwen3-tiny", {})])
def test_random_models_say_many_different_things(model_config, name, recipe):
    folder = zoo.ensure(model_config(name, **recipe))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    texts = []
    for prompt in ("Tell me about bread.", "How do I sort a list?", "Why does the moon turn?"):
        ids = torch.tensor([Checkpoint(folder).tokenizer()(prompt)["input_ids"]])
        out = model.generate(ids, do_sample=False, max_new_tokens=32, min_new_tokens=32, pad_token_id=0)
        texts.append(out[0, ids.shape[1] :].tolist())
    assert all(len(set(text)) >= 12 for text in texts)
    assert len({token for text in texts for token in text}) >= 40 and len({tuple(text) for text in texts}) == 3
    with torch.inference_mode():
        probs = torch.stack(model(ids, output_router_logits=True).router_logits).softmax(dim=-1)
    top = probs.amax(dim=-1).mean().item()
    assert 0.2 < top < 0.8, "neither uniform routing nor one expert for everything"
    assert len(probs.argmax(dim=-1).unique()) >= 6


@pytest.mark.parametrize("vocab_size", [260, 384, 2048])
def test_tokenizer_has_exactly_the_asked_vocabulary(vocab_size):
    first, second = zoo.train_tokenizer(vocab_size), zoo.train_tokenizer(vocab_size)
    assert first.get_vocab_size() == vocab_size and first.to_str() == second.to_str()
    assert first.token_to_id("<s>") == 0 and first.token_to_id("</s>") == 1


def test_a_vocabulary_beyond_the_corpus_is_refused():
    with pytest.raises(ConfigError, match=r"model\.recipe\.vocab_size: must be at most [0-9]+, all the corpus yields"):
        zoo.train_tokenizer(60_000)


def test_path_takes_the_place_of_the_recipe(tiny, model_config):
    assert zoo.ensure(replace(model_config("mixtral-mini"), path=str(tiny.folder))) == tiny.folder


def test_cache_folder_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("MOE_HARNESS_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"
    monkeypatch.delenv("MOE_HARNESS_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "moe-offload-harness"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "moe-offload-harness"


@pytest.mark.parametrize("below", [".", "nested"])
def test_a_cache_that_cannot_be_written_is_named(below, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("MOE_HARNESS_CACHE", str(tmp_path / "file" / below))
    with pytest.raises(ConfigError, match="MOE_HARNESS_CACHE: cannot write to .*; name a writable folder"):
        make_once(cache_folder() / "models" / "one", lambda folder: None)


def test_a_disk_that_is_full_is_named(tmp_path):
    def fill(folder):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(ConfigError, match="No space left on device"):
        make_once(tmp_path / "models" / "one", fill)
    assert not list((tmp_path / "models").iterdir())


def test_makers_at_once_all_get_one_complete_folder(tmp_path):
    barrier, target, results = threading.Barrier(4), tmp_path / "made", []

    def make(folder):
        (folder / "a").write_text("first")
        barrier.wait(timeout=GIVE_UP_S)  # all are making it before any finishes
        (folder / "b").write_text("second")

    threads = [threading.Thread(target=lambda: results.append(make_once(target, make))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [target] * 4
    assert {path.name for path in target.iterdir()} == {"a", "b"}
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_a_failing_maker_leaves_nothing_behind(tmp_path):
    def fail(folder):
        (folder / "half").write_text("x")
        raise OSError("disk full")

    with pytest.raises(ConfigError, match="disk full"):
        make_once(tmp_path / "made", fail)
    assert not list(tmp_path.iterdir())


def test_what_killed_makers_left_is_removed(tmp_path, monkeypatch):
    left = tmp_path / ".making-killed"
    left.mkdir()
    make_once(tmp_path / "one", lambda folder: None)
    assert left.exists()  # young: its maker may be alive
    monkeypatch.setattr(cache_module, "ABANDONED_AFTER_S", -1.0)
    make_once(tmp_path / "two", lambda folder: None)
    assert not left.exists() and (tmp_path / "one").is_dir() and (tmp_path / "two").is_dir()
