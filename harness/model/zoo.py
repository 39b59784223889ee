"""Make checkpoints with random weights on first use, as real Hugging Face folders.

Matrices are uniform with mean zero and the recipe's standard deviation, about 1 / sqrt(hidden) by default: PCG64
integers scaled to floats, which every platform reproduces bit for bit, at five times the speed of a normal
distribution. Norm weights are spread about one, and biases and sinks about zero, so that one that is left out shows in
the tokens.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterable
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.config import ConfigError, file_name
from harness.model import families
from harness.model.cache import cache_folder, make_once
from harness.model.checkpoint_files import read_json
from harness.model.config import ModelConfig
from harness.model.hub import resolve_model
from harness.model.quiet import quiet_transformers
from harness.model.recipe import RandomRecipe

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from torch import nn
    from transformers import PreTrainedModel

GENERATOR_VERSION = 2  # part of the cache key: raise it with any change to weights, tokenizer or corpus
MAX_SHARD_SIZE = "100MB"  # several shards even for the mini model, as real checkpoints have
BOS, EOS = "<s>", "</s>"  # tokens 0 and 1
CORPUS = Path(__file__).parent / "data" / "corpus.txt"


def ensure(model: ModelConfig) -> Path:
    """Return the checkpoint folder: `path` if there is one, else the recipe's, made now unless an earlier run did."""
    if model.path is not None:
        return resolve_model(model.path)
    assert model.recipe is not None, "ModelConfig has a path or a recipe"
    recipe = model.recipe
    folder = cache_folder() / "models" / f"{file_name(model.name)}-{recipe_key(recipe)}"
    _require_entries(make_once(folder, lambda target: _make(recipe, target)), config_entries(recipe))
    return folder


def recipe_key(recipe: RandomRecipe) -> str:
    defaults = {field.name: field.default for field in fields(recipe)}  # a field to come leaves the key as it is
    told = {name: value for name, value in asdict(recipe).items() if getattr(recipe, name) != defaults[name]}
    content = json.dumps([GENERATOR_VERSION, told], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:12]


def config_entries(recipe: RandomRecipe) -> dict[str, Any]:
    """Return the entries of config.json for a recipe's model."""
    entries = families.layout(recipe.family).config_from_recipe(recipe)
    return {**entries, "dtype": recipe.dtype, "bos_token_id": 0, "eos_token_id": 1}


def _require_entries(folder: Path, entries: dict[str, Any]) -> None:
    """Check that the entries in the cache are the recipe's: a checkpoint that was edited there is another model."""
    path = folder / "config.json"
    try:
        stored = read_json(path)
        for key, value in entries.items():
            found = stored.get(key)
            if isinstance(found, dict) and "model_type" in found:  # transformers adds its defaults to nested ones
                found = {name: found.get(name) for name in value}
            if found != value:
                raise ConfigError("model.recipe", f"{path}: {key} is {found!r}, {value!r} in the recipe")
    except ConfigError as error:
        raise ConfigError(error.field, f"{error.message}; remove {folder}, and it is made again") from error


def _make(recipe: RandomRecipe, folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = train_tokenizer(recipe.vocab_size)
    with quiet_transformers():
        hf_config = AutoConfig.for_model(**config_entries(recipe))
        with torch.device("meta"):  # skips Hugging Face's own initialisation
            model = AutoModelForCausalLM.from_config(hf_config, dtype=getattr(torch, recipe.dtype))
        model.to_empty(device="cpu")
        model.tie_weights()  # to_empty gives tied tensors a memory of their own
        _fill(model, recipe)
    save_checkpoint(model, tokenizer, folder)


def save_checkpoint(model: PreTrainedModel, tokenizer: Tokenizer, folder: Path) -> None:
    """Write a Hugging Face folder. Raises OSError where the disk is full."""
    from safetensors import SafetensorError
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS)
    with quiet_transformers():
        try:
            model.save_pretrained(folder, max_shard_size=MAX_SHARD_SIZE)
            fast.save_pretrained(folder)
        except Exception as error:
            if isinstance(error, SafetensorError) or type(error) is Exception:  # Rust's error for a full disk
                raise OSError(str(error)) from error
            raise


def _fill(model: nn.Module, recipe: RandomRecipe) -> None:
    """Fill each tensor from a stream of its own, keyed by its name, so that the order of the tensors does not
    matter."""
    import numpy as np
    import torch

    stored = model.state_dict().keys()  # without what transformers derives from config.json
    tensors = [*model.named_parameters(), *((name, each) for name, each in model.named_buffers() if name in stored)]
    for name, tensor in tensors:
        is_bias = name.endswith(("bias", "sinks"))  # of experts they have two dimensions
        is_norm = tensor.dim() == 1 and not is_bias
        std = recipe.embed_std if name.endswith(("embed_tokens.weight", "wte.weight")) else recipe.weight_std
        std = recipe.norm_std if is_norm or is_bias else std
        stream = np.random.Generator(np.random.PCG64([recipe.seed, zlib.crc32(name.encode())]))
        values = torch.from_numpy(stream.random(tensor.numel(), dtype=np.float32))
        values.sub_(0.5).mul_(std * 12**0.5)  # a uniform variable of width 1 has variance 1/12
        tensor.data.copy_(values.view(tensor.shape) + float(is_norm))


def train_tokenizer(vocab_size: int, texts: Iterable[str] | None = None) -> Tokenizer:
    """Make a byte-level BPE with exactly `vocab_size` tokens, trained on `texts`: by default the corpus that ships
    with the package."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=1,
        special_tokens=[BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    corpus = CORPUS.read_text(encoding="utf-8").splitlines() if texts is None else texts
    tokenizer.train_from_iterator(corpus, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        most = tokenizer.get_vocab_size()
        raise ConfigError("model.recipe.vocab_size", f"must be at most {most}, all the corpus yields, got {vocab_size}")
    bos_id = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, bos_id)]
    )
    return tokenizer
