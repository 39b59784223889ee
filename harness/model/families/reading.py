"""Read the entries of a checkpoint's config.json with errors that name the key. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from harness.config import ConfigError
from harness.model.spec import Dtype


def bad_entry(key: str, message: str) -> ConfigError:
    return ConfigError("model.path", f"config.json: {key}: {message}")


class EntriesRead(Mapping[str, Any]):
    """The entries of config.json; `read` collects those that were looked at. Verification gives transformers these
    entries and no others, so that neither side uses an entry that the other one does not know."""

    def __init__(self, entries: Mapping[str, Any]) -> None:
        self._entries = entries
        self.read: dict[str, Any] = {}

    def __getitem__(self, key: str) -> Any:
        self.read[key] = self._entries[key]
        return self.read[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


@dataclass(frozen=True)
class ConfigReader:
    """A reader with typed access to config.json; every accessor raises `ConfigError` on a missing or impossible
    value."""

    entries: Mapping[str, Any]

    def positive_int(self, key: str, default: int | None = None) -> int:
        """Return a positive integer. `default` stands in for an entry that is absent or null, as Hugging Face's configs
        use null."""
        value = self.entries.get(key)
        if value is None:
            value = default
        if value is None:
            raise bad_entry(key, "missing; a positive integer is needed")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise bad_entry(key, f"must be a positive integer, got {value!r}")
        return value

    def optional_positive_int(self, key: str) -> int | None:
        return None if self.entries.get(key) is None else self.positive_int(key)

    def positive_float(self, key: str, default: float) -> float:
        value = self.entries.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise bad_entry(key, f"must be a positive number, got {value!r}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.entries.get(key, default)
        if not isinstance(value, bool):
            raise bad_entry(key, f"must be true or false, got {value!r}")
        return value

    def must_equal(self, key: str, expected: object) -> None:
        """Require an entry's one value that the family's math implements; an absent entry means that value."""
        value = self.entries.get(key, expected)
        if value != expected:
            raise bad_entry(key, f"must be {expected!r}, got {value!r}")

    def rope_theta(self, default: float) -> float:
        """Return the RoPE base frequency: top-level before transformers 5, inside `rope_parameters` since. Scaled RoPE
        is refused."""
        nested = self.entries.get("rope_scaling") or self.entries.get("rope_parameters") or {}
        if not isinstance(nested, Mapping):
            raise bad_entry("rope_parameters", f"must be a mapping, got {nested!r}")
        kind = nested.get("rope_type", nested.get("type", "default"))
        if kind != "default":
            raise bad_entry("rope_parameters.rope_type", f"must be 'default' for this model family, got {kind!r}")
        if "rope_theta" in nested:
            return ConfigReader(nested).positive_float("rope_theta", default)
        return self.positive_float("rope_theta", default)

    def eos_token_id(self, vocab_size: int) -> int | None:
        value = self.entries.get("eos_token_id")
        if isinstance(value, list) and len(value) == 1:
            value = value[0]
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocab_size:
            raise bad_entry("eos_token_id", f"must be one token id below vocab_size {vocab_size}, got {value!r}")
        return value


def checked_dtype(dtype: str) -> Dtype:
    if dtype not in ("float32", "bfloat16"):
        raise ConfigError("model.dtype", f"must be float32 or bfloat16, got {dtype!r}")
    return cast(Dtype, dtype)
