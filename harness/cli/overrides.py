"""The configuration from overrides as a command line has them, with bad ones told in one line."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

import harness
from harness.config import ConfigError

CONF = Path(harness.__file__).resolve().parents[1] / "conf"


def composed_values(overrides: Sequence[str], root: str = "config") -> dict[str, Any]:
    """Compose conf/config.yaml, or another `root`, with overrides as on run.py's command line, as plain values. Raises
    ConfigError."""
    require_single_choices(overrides)
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            cfg = compose(root, overrides=list(overrides))
        values: Any = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    except Exception as error:
        if (told := explained(error, overrides)) is None:
            raise
        raise told from error
    return {str(key): value for key, value in values.items()}


def made_folder(setting: str, path: str) -> Path:
    """Make the folder that a setting names and return it. Raises ConfigError."""
    folder = Path(path).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(setting, f"cannot make '{folder}' ({error.strerror}); name a writable folder") from None
    return folder


def require_single_choices(overrides: Sequence[str]) -> None:
    """Require one choice in each group. Hydra would merge the files of a list, so that the last one hides the others.
    Experiments may be merged."""
    for override in overrides:
        group, _, chosen = override.partition("=")
        if chosen.startswith("[") and group != "experiment" and (CONF / group).is_dir():
            several = f"-m {group}={chosen.strip('[]')} makes a run of each"
            raise ConfigError(group, f"must name one of the files in conf/{group}, got {chosen}; {several}")


def choices() -> str:
    """List what each group of Hydra's configuration offers, a group a line. Hydra would list what files share, and
    groups of other commands."""
    loader, groups = GlobalHydra.instance().config_loader(), HydraConfig.get().runtime.choices
    return "\n".join(
        f"{group}: {', '.join(_offered(loader.get_group_options(group)))}"
        for group in sorted(groups)
        if not group.startswith("hydra/")
    )


def _offered(options: Sequence[str]) -> list[str]:
    """Sort a group's files, without those that its files share."""
    return sorted(option for option in options if not option.startswith("_"))


def left_to_jobs(arguments: Sequence[str]) -> list[str]:
    """Return a sweep's arguments with `group.key=value` as a choice of one value, where the sweep chooses among a
    group's files. Hydra would hold a plain one against the default file, whose keys may be others."""
    groups = [name for name, _, _ in (argument.partition("=") for argument in arguments) if (CONF / name).is_dir()]
    swept = [argument.partition("=")[0] for argument in arguments if _is_sweep(argument)]
    if not {"-m", "--multirun"} & set(arguments) or not set(groups) & set(swept):
        return list(arguments)
    left = []
    for argument in arguments:
        name, _, value = argument.partition("=")
        group, dot, _ = name.partition(".")
        plain = dot and value and (CONF / group).is_dir() and not _is_sweep(argument)
        left.append(f"{name}=choice({value})" if plain else argument)
    return left


def _is_sweep(argument: str) -> bool:
    try:
        return bool(OverridesParser.create().parse_override(argument).is_sweep_override())
    except HydraException:
        return False  # an option, or what is refused later


def explained(error: Exception, arguments: Sequence[str] = ()) -> ConfigError | None:
    """Explain bad input by the field and what is valid. Returns None for any other error. Hydra says less, over more
    lines, and advises to append a misspelt key."""
    if isinstance(error, ConfigError):
        return error
    if isinstance(error, ValueError) and str(error).startswith("Config group override must be"):
        return _no_name(arguments)
    if isinstance(error, OverrideParseException):
        return _unreadable(str(error.override))
    if isinstance(error, MissingMandatoryValue):
        return ConfigError(str(error.full_key), "missing; a value is needed")
    if isinstance(error, OSError) and (field := _folder_of_hydra(error, arguments)):
        return ConfigError(field, f"cannot write to '{error.filename}' ({error.strerror}); name a writable folder")
    cause = error.__cause__
    if isinstance(error, ConfigCompositionException) and isinstance(cause, OmegaConfBaseException):
        return _unknown_key(cause)
    if isinstance(error, MissingConfigException) and error.options:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        return ConfigError(group, f"there is no '{name}'; valid are {', '.join(_offered(error.options))}")
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, OmegaConfBaseException):
        return ConfigError(str(error.full_key), lines[0])
    if isinstance(error, HydraException):
        return ConfigError("configuration", " ".join(line for line in lines if not line.startswith("See http")))
    return None


def _folder_of_hydra(error: OSError, arguments: Sequence[str]) -> str | None:
    """Name the argument that names a folder of Hydra's own in which the error arose."""
    for argument in arguments:
        field, _, folder = argument.partition("=")
        if field.startswith("hydra.") and folder and str(error.filename).startswith(folder):
            return field
    return None


def _no_name(arguments: Sequence[str]) -> ConfigError:
    """Give the error for an argument that gives a config group something that is no text, such as null or 3."""
    for argument in arguments:
        group, _, given = argument.partition("=")
        if not group:
            return _unreadable(argument)
        if (CONF / group).is_dir() and not isinstance(yaml.safe_load(given), str):
            return ConfigError(group, f"must name one of the files in conf/{group}, got {given}")
    return ConfigError("configuration", "a config group must name one of its files")


def _unreadable(override: str) -> ConfigError:
    name, equals, given = override.partition("=")
    if not equals or not name:
        return ConfigError(f"'{override}'", "must be written name=value")
    quoted = f"'{name}=\"VALUE\"'"
    return ConfigError(
        name, f"cannot read '{given}'; a value with special characters needs quotes of its own: {quoted}"
    )


def _unknown_key(error: OmegaConfBaseException) -> ConfigError:
    parent = error.parent_node
    valid = sorted(str(key) for key in parent if key != "hydra") if isinstance(parent, DictConfig) else []
    close = difflib.get_close_matches(str(error.key), valid, n=1)
    hint = f"did you mean '{close[0]}'? " if close else ""
    known = f"valid keys are {', '.join(valid)}" if valid else "what it is under is a single value"
    return ConfigError(str(error.full_key), f"unknown key; {hint}{known}")
