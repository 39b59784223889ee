"""What every command shares: the configuration from overrides, and bad input told in one line."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from harness.config import ConfigError

CONF = Path(__file__).resolve().parents[1] / "conf"


def composed_values(overrides: Sequence[str]) -> dict[str, Any]:
    """conf/config.yaml with overrides as on run.py's command line, as plain values."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("config", overrides=list(overrides))
    values: Any = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    return {str(key): value for key, value in values.items()}


def explained(error: Exception, arguments: Sequence[str] = ()) -> str | None:
    """Bad input in one line: the field and what is valid. None for any other error.

    Hydra says less, over more lines, and advises to append a misspelt key.
    """
    if isinstance(error, ConfigError):
        return str(error)
    if isinstance(error, ValueError) and str(error).startswith("Config group override must be"):
        name = next((a.partition("=")[0] for a in arguments if a.partition("=")[2] in ("null", "")), "a config group")
        return f"{name}: must name one of the files in conf/{name}, got null"
    cause = error.__cause__
    if isinstance(error, ConfigCompositionException) and isinstance(cause, OmegaConfBaseException):
        return _unknown_key(cause)
    if isinstance(error, MissingConfigException) and error.options:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        valid = [option for option in error.options if not option.startswith("_")]
        return f"{group}: there is no '{name}'; valid are {', '.join(valid)}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, OmegaConfBaseException):
        return f"{error.full_key}: {lines[0]}"
    if isinstance(error, HydraException):
        return " ".join(line for line in lines if not line.startswith("See http"))
    return None


def _unknown_key(error: OmegaConfBaseException) -> str:
    parent = error.parent_node
    valid = sorted(str(key) for key in parent if key != "hydra") if isinstance(parent, DictConfig) else []
    close = difflib.get_close_matches(str(error.key), valid, n=1)
    hint = f"did you mean '{close[0]}'? " if close else ""
    known = f"valid keys are {', '.join(valid)}" if valid else "what it is under is a single value"
    return f"{error.full_key}: unknown key; {hint}{known}"
