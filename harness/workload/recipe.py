"""Turn a row of a dataset into the text of a prompt: one dotted column path and one template, both given in YAML."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from harness.config import ConfigError
from harness.workload.config import PLACEHOLDER, DatasetConfig

Row = Mapping[str, Any]


def prompt_text(config: DatasetConfig, row: Row, where: str) -> str | None:
    """Make the prompt from `row`, or None where its column is empty. `where` names the row in errors."""
    return _filled(config, config.template, "template", row, where)


def shot_text(config: DatasetConfig, row: Row, where: str) -> str | None:
    """Make the row a worked example in front of a prompt, or None where its column is empty."""
    assert config.shot_template is not None
    return _filled(config, config.shot_template, "shot_template", row, where)


def _filled(config: DatasetConfig, template: str, field: str, row: Row, where: str) -> str | None:
    prompt = _value(row, config.column, "column", where)
    for text in config.remove:
        prompt = prompt.replace(text, "") if prompt is not None else None
    prompt = prompt.strip() if prompt is not None else None
    if not prompt:
        return None

    def value_of(match: re.Match[str]) -> str:
        name = match[1]
        return prompt if name == "prompt" else _value(row, name, field, where) or ""

    return PLACEHOLDER.sub(value_of, template)  # one pass: braces inside a value stay as they are


def _value(row: Row, path: str, field: str, where: str) -> str | None:
    """Return the text at `path`, or None where the row has the column but nothing in it (null, or too short a list)."""
    value: Any = row
    for depth, key in enumerate(path.split(".")):
        if isinstance(value, Mapping):
            if key not in value:
                parent = ".".join(path.split(".")[:depth])
                inside = f" in '{parent}'" if parent else ""
                available = ", ".join(map(str, value)) or "none"
                raise ConfigError(field, f"{where} has no column '{key}'{inside}; available columns: {available}")
            value = value[key]
        elif value is None:
            return None
        elif isinstance(value, Sequence) and not isinstance(value, str) and key.isdigit():
            if int(key) >= len(value):
                return None
            value = value[int(key)]
        else:
            raise ConfigError(field, f"{where}: '{path}' asks for '{key}' of a {type(value).__name__}")
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    raise ConfigError(field, f"{where}: '{path}' is a {type(value).__name__}, not text; name a part of it: '{path}.0'")
