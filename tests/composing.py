"""The configuration as `run.py` gets it, without running anything."""

from __future__ import annotations

from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from tests.conftest import ROOT

CONF = ROOT / "conf"
GROUPS = ("strategy", "model", "dataset", "machine", "hardware", "routing", "experiment")


def composed(*overrides: str) -> dict[str, Any]:
    """Compose conf/config.yaml with command-line overrides, as plain values."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("config", overrides=list(overrides))
    values = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def names_in(group: str) -> list[str]:
    """List what can be picked in a group; files that start with an underscore are shared parts."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml") if not path.stem.startswith("_"))
