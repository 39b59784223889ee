import os
import sys
from pathlib import Path

import pytest
import yaml

from harness.config import parse
from harness.model import zoo
from harness.model.checkpoint import Checkpoint
from harness.model.config import ModelConfig

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parent))
TINY = Path(__file__).resolve().parents[3] / "conf" / "model" / "mixtral-tiny.yaml"

# The mini model's proportions and initialisation (1 / sqrt(hidden)), small enough for a unit test.
MINI_LIKE = {"hidden_dim": 256, "num_heads": 4, "head_dim": 64, "expert_dim": 320, "num_layers": 6, "vocab_size": 1024}
RECIPES = {
    "tiny-float32": {},
    "tiny-bfloat16": {"dtype": "bfloat16"},
    "tiny-float16": {"dtype": "float16"},
    "mini-like-bfloat16": {**MINI_LIKE, "dtype": "bfloat16", "init_std": None},
}
PROMPTS = (
    "How do I sort a list of numbers?",
    "Tell me about railways and clocks.",
    "Explain why the moon turns.",
    "A recipe for bread, please.",
)


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch) -> Path:
    """Return one cache folder for all tests of a session, apart from the user's own."""
    folder = tmp_path_factory.getbasetemp() / "model-cache"
    monkeypatch.setenv("MOE_HARNESS_CACHE", str(folder))
    return folder


@pytest.fixture
def checkpoint_of(cache):
    """Make a Checkpoint from a recipe's name and overrides."""

    def load(name: str, **overrides: object) -> Checkpoint:
        values = yaml.safe_load(TINY.read_text())
        values["recipe"] |= {**RECIPES[name], **overrides}
        return Checkpoint(zoo.ensure(parse(ModelConfig, values, "model")))

    return load


@pytest.fixture
def prompts_of():
    def tokenize(checkpoint: Checkpoint) -> list[list[int]]:
        tokenizer = checkpoint.tokenizer()
        return [tokenizer(text)["input_ids"] for text in PROMPTS]

    return tokenize
