import os
import shutil
from pathlib import Path

import pytest
import yaml

from harness.config import parse
from harness.model import zoo
from harness.model.checkpoint import Checkpoint
from harness.model.config import ModelConfig

os.environ.setdefault("HF_HUB_OFFLINE", "1")
CONF = Path(__file__).resolve().parents[3] / "conf" / "model"


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch) -> Path:
    """Return one cache folder for all tests of a session, apart from the user's own."""
    folder = tmp_path_factory.getbasetemp() / "model-cache"
    monkeypatch.setenv("MOE_HARNESS_CACHE", str(folder))
    return folder


@pytest.fixture
def model_config():
    """Make a ModelConfig from (YAML name, recipe overrides)."""

    def load(name: str, **recipe: object) -> ModelConfig:
        values = yaml.safe_load((CONF / f"{name}.yaml").read_text())
        values["recipe"] = values["recipe"] and values["recipe"] | recipe
        return parse(ModelConfig, values, "model")

    return load


@pytest.fixture
def tiny(cache, model_config) -> Checkpoint:
    return Checkpoint(zoo.ensure(model_config("mixtral-tiny")))


@pytest.fixture
def tiny_copy(tiny, tmp_path) -> Path:
    """Copy the tiny checkpoint, so that a test may damage it."""
    return Path(shutil.copytree(tiny.folder, tmp_path / "copy"))
