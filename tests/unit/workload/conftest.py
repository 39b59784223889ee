"""A small byte-level BPE tokenizer with begin and end tokens, and the real datasets where they are there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
from omegaconf import OmegaConf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from harness.config import parse
from harness.workload import DatasetConfig

ROOT = Path(__file__).parents[3]
VOCAB_SIZE = 2048


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(list(topics.values())[:100], trainer)  # English text of the standard library
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@pytest.fixture
def dataset() -> Callable[..., DatasetConfig]:
    """Return `dataset(num_requests=3, **{"lengths.mean": 5})`: a valid configuration with some values replaced."""

    def make(**overrides: Any) -> DatasetConfig:
        values: dict[str, Any] = {
            "name": "test",
            "num_requests": 8,
            "max_new_tokens": 4,
            "lengths": {"mean": 20, "max": 60, "source": "Some paper, Table 1"},
        }
        config = OmegaConf.create(values)
        for key, value in overrides.items():
            OmegaConf.update(config, key, value)
        container: Any = OmegaConf.to_container(config, resolve=True)
        return parse(DatasetConfig, container, "dataset")

    return make


@pytest.fixture(scope="session")
def shared_data() -> Path:
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("real datasets are not there: ../shared/data")
    return folder
