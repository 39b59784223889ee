"""Compose the configuration as `run.py` gets it, from files that Hydra reads once in a process."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterable
from functools import cache
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf, open_dict

from harness.cli.overrides import CONF

GROUPS = ("strategy", "model", "dataset", "machine", "hardware", "routing", "experiment")
_CHOICE = re.compile(rf"({'|'.join(GROUPS)})=[\w-]+")  # of a file, which Hydra composes
_SETTING = re.compile(r"(?!hydra\.)[\w.]+=[\w.+,:/ \[\]-]*")  # of a plain value, which comes after all files


def composed(*overrides: str) -> dict[str, Any]:
    """Compose conf/config.yaml with command-line overrides, as plain values."""
    choices, settings = parted(overrides)
    cfg = with_settings(choices, settings) if all(map(_SETTING.fullmatch, settings)) else None
    values = OmegaConf.to_container(cfg or by_hydra(overrides), resolve=True, throw_on_missing=True)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def parted(overrides: Iterable[str]) -> tuple[tuple[str, ...], list[str]]:
    """Return the choices of files, then all else."""
    choices = tuple(each for each in overrides if _CHOICE.fullmatch(each))
    return choices, [each for each in overrides if each not in choices]


def by_hydra(overrides: Iterable[str]) -> DictConfig:
    """Compose all of it anew, which takes a tenth of a second."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", overrides=list(overrides))


def with_settings(choices: tuple[str, ...], settings: list[str]) -> DictConfig | None:
    """Set values in what the files say; None where one has no place there, which Hydra is to say."""
    cfg: DictConfig = pickle.loads(_of_files(choices))
    for override in OverridesParser.create().parse_overrides(settings):
        try:
            if override.key_or_group in GROUPS or override.is_sweep_override():
                return None
            OmegaConf.update(cfg, override.key_or_group, override.value())
        except (AttributeError, KeyError, ValueError):
            return None
    return cfg


@cache
def _of_files(choices: tuple[str, ...]) -> bytes:
    """Compose files once. Where each choice alone changes nothing but its own group, the groups are put together here.
    Pickle copies them four times as fast as `deepcopy`."""
    parts = {choice.partition("=")[0]: _own_part(choice) for choice in choices} if len(choices) > 1 else {}
    if len(parts) < max(2, len(choices)) or None in parts.values():
        return pickle.dumps(by_hydra(choices))
    cfg: DictConfig = pickle.loads(_of_files(()))
    with open_dict(cfg):
        for group, part in parts.items():
            cfg[group] = pickle.loads(part or b"")[group]
    return pickle.dumps(cfg)


@cache
def _own_part(choice: str) -> bytes | None:
    """Return the configuration with one choice; None where that changes more than its group."""
    content, group = _of_files((choice,)), choice.partition("=")[0]
    chosen, default = (OmegaConf.to_container(pickle.loads(each)) for each in (content, _of_files(())))
    assert isinstance(chosen, dict) and isinstance(default, dict)
    is_alone = list(chosen) == list(default) and all(chosen[key] == default[key] for key in default if key != group)
    return content if is_alone else None
