"""Turn plain mappings into frozen dataclasses, with errors that name the field.

Every configuration class of the harness carries the `config` decorator: an ordinary frozen, keyword-only dataclass.
`parse` checks types strictly (no silent "8" -> 8), rejects unknown keys with the nearest valid name, and lets
`__post_init__` reject impossible values by raising `ConfigError` with a field name relative to the class.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from math import inf
from typing import Any, TypeVar, dataclass_transform, get_args, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

T = TypeVar("T")
_LARGEST = 1e15  # number in a configuration: products of two of them still fit a float, and counts are exact


class ConfigError(ValueError):
    """Bad user input: one line that names the field and says what is valid. `run.py` turns it into exit code 2."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, str]]:
        """Return what makes the error again in another process."""
        return ConfigError, (self.field, self.message)

    def below(self, prefix: str) -> ConfigError:
        """Return this error with its field seen from the enclosing configuration."""
        return ConfigError(f"{prefix}.{self.field}" if prefix else self.field, self.message)


@dataclass_transform(frozen_default=True, kw_only_default=True)
def config(cls: type[T]) -> type[T]:
    """Make the class a frozen, keyword-only dataclass that `parse` validates strictly, at any nesting depth."""
    cls.__pydantic_config__ = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)  # type: ignore[attr-defined]
    return dataclass(frozen=True, kw_only=True)(cls)


def parse(cls: type[T], values: Mapping[str, Any], path: str = "") -> T:
    """Make the frozen dataclass `cls` from `values`; `path` is the prefix that error messages show (e.g. "dataset")."""
    for key in values:
        if key not in {f.name for f in fields(cls)}:  # type: ignore[arg-type]
            raise ConfigError(key, _unknown_key(cls, key)).below(path)
    for field, value in _leaves(values):
        if isinstance(value, str) and not is_unicode(value):
            raise ConfigError(field, f"must be text that UTF-8 can hold, got {value!a}").below(path)
    try:  # JSON mode: strict, yet mappings may stand for nested dataclasses
        parsed: T = _adapter(cls).validate_json(json.dumps(dict(values)))  # type: ignore[arg-type]
    except ConfigError as error:
        raise error.below(path) from None
    except ValidationError as error:
        raise _first_error(cls, error, path) from None
    for field, value in _leaves(values):
        if isinstance(value, int | float) and _LARGEST < abs(value) < inf:
            raise ConfigError(field, f"must lie between -{_LARGEST:g} and {_LARGEST:g}").below(path)
    return parsed


def _leaves(value: Any, field: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value in nested mappings and lists, with its field."""
    if isinstance(value, Mapping | list | tuple):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _leaves(item, f"{field}.{key}" if field else str(key))
    else:
        yield field, value


def is_unicode(text: str) -> bool:
    """Tell whether a text is Unicode. One with half a surrogate pair is not: bytes that are no UTF-8 become that on a
    command line."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


@cache
def _adapter(cls: Any) -> TypeAdapter[Any]:
    """Build the type's validator once: it takes milliseconds."""
    return TypeAdapter(cls)


def require(condition: bool, field: str, message: str) -> None:
    """Raise `ConfigError(field, message)` unless `condition` holds."""
    if not condition:
        raise ConfigError(field, message)


def require_name(text: str, field: str = "name") -> None:
    """Raise `ConfigError` where a name is empty."""
    require(bool(text.strip()), field, "must be a name, got an empty text")


def file_name(name: str) -> str:
    """Make the name a part of a file's name: short, and without characters that lead out of a folder. The result may be
    empty."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", name).strip("._-")[:40]


def load_json(text: str | bytes) -> Any:
    """Load what the JSON `text` holds. Raises ValueError, also where lists or objects are nested beyond Python's
    depth."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _unknown_key(cls: type, key: str) -> str:
    names = [f.name for f in fields(cls)]
    close = difflib.get_close_matches(key, names, n=1)
    hint = f"did you mean '{close[0]}'? " if close else ""
    return f"unknown key; {hint}valid keys are {', '.join(sorted(names))}"


def _first_error(cls: Any, error: ValidationError, path: str) -> ConfigError:
    first = error.errors()[0]
    nested = first.get("ctx", {}).get("error")
    field = ".".join(str(part) for part in first["loc"])
    if isinstance(nested, ConfigError):
        return nested.below(field).below(path)
    match first["type"]:
        case "missing":
            text = "missing; a value is needed"
        case "unexpected_keyword_argument":
            text = _unknown_key(_class_at(cls, first["loc"][:-1]), str(first["loc"][-1]))
        case _:
            text = f"must be {first['msg'].removeprefix('Input should be ')}, got {first['input']!r}"
    return ConfigError(field, text).below(path)


def _class_at(cls: Any, location: tuple[int | str, ...]) -> Any:
    """Find the configuration class of a nested field, which may be optional."""
    for name in location:
        annotated = get_type_hints(cls)[str(name)]
        cls = next(kind for kind in (annotated, *get_args(annotated)) if is_dataclass(kind))
    return cls
