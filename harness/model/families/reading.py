"""Read the entries of a checkpoint's config.json with errors that name the key. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, cast

from harness.config import ConfigError, parse
from harness.model.dimensions import Yarn
from harness.model.families.harmless import HARMLESS, NEUTRAL
from harness.model.spec import DTYPE_NAMES, DTYPES, Dtype, ModelSpec

if TYPE_CHECKING:
    from harness.model.families import FamilyLayout

ROPE_ENTRIES = ("rope_type", "type", "rope_theta", "partial_rotary_factor", *(field.name for field in fields(Yarn)))


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


def read_spec(
    family: FamilyLayout, config: Mapping[str, Any], name: str, dtype: str
) -> tuple[ModelSpec, dict[str, Any]]:
    """Return the model of a config.json, and the entries that it comes from. `ConfigError` names an entry that is
    missing, impossible, or unknown: what it changes is not known here either."""
    entries = EntriesRead(config)
    ConfigReader(entries).must_equal("is_encoder_decoder", False)
    for key, neutral in NEUTRAL.items():
        if config.get(key) is not None:
            ConfigReader(config).must_equal(key, neutral)
    spec = family.spec_from_config(entries, name, dtype)
    refuse_unknown(entries, {*entries.read, *family.harmless, *NEUTRAL})
    return spec, entries.read


def refuse_unknown(entries: Mapping[str, Any], known: Collection[str], prefix: str = "") -> None:
    """Raise `ConfigError` naming an entry, not null, that is neither `known` nor harmless. `prefix` comes before its
    name in the error."""
    for key, value in entries.items():
        if value is not None and key not in known and key not in HARMLESS:
            raise bad_entry(f"{prefix}{key}", f"unknown, and so is what it changes; got {value!r}")


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

    def optional_positive_int(self, key: str, default: int | None = None) -> int | None:
        """Return a positive integer, or None for null; `default` stands in for an entry that is absent."""
        value = self.entries.get(key, default)
        return None if value is None else self.positive_int(key, default)

    def ints_below(self, key: str, limit: int) -> list[int]:
        """Return a list of integers from 0 to below the limit; an entry that is absent or null means an empty one."""
        values = self.entries.get(key)
        values = [] if values is None else values
        if not isinstance(values, list) or any(type(value) is not int or not 0 <= value < limit for value in values):
            raise bad_entry(key, f"must be a list of integers from 0 to {limit - 1}, got {values!r}")
        return values

    def name_of(self, other: str, name: str) -> str:
        """Return under which of two names config.json has an entry: `name`, unless only the other one is there. Where
        both are, they must agree."""
        if self.entries.get(other) is None:
            return name
        if self.entries.get(name) not in (None, self.entries[other]):
            raise bad_entry(name, f"must agree with {other} {self.entries[other]!r}, got {self.entries[name]!r}")
        return other

    def non_negative_int(self, key: str, default: int) -> int:
        """Return an integer from 0 on; `default` stands in for an entry that is absent."""
        value = self.entries.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise bad_entry(key, f"must be an integer from 0 on, got {value!r}")
        return value

    def positive_float(self, key: str, default: float) -> float:
        value = self.entries.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise bad_entry(key, f"must be a positive number, got {value!r}")
        return float(value)

    def optional_positive_float(self, key: str) -> float | None:
        return None if self.entries.get(key) is None else self.positive_float(key, 1.0)

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

    def rope(self, default_theta: float, *, max_positions: int) -> dict[str, Any]:
        """Return `rope_theta` and `yarn` as fields of `ModelSpec`, from `rope_scaling` or, as transformers 5 writes it,
        from `rope_parameters`. The base frequency may stand beside or inside. Other scaling than YaRN's is refused."""
        key = "rope_scaling" if self.entries.get("rope_scaling") else "rope_parameters"
        nested = self.entries.get(key) or {}
        if not isinstance(nested, Mapping) or any(isinstance(value, Mapping) for value in nested.values()):
            raise bad_entry(key, f"must be a mapping, the same for all layers, got {nested!r}")
        refuse_unknown(nested, ROPE_ENTRIES, prefix=f"{key}.")
        kind = nested.get("rope_type", nested.get("type", "default"))
        if kind not in ("default", "yarn"):
            raise bad_entry(f"{key}.rope_type", f"must be 'default' or 'yarn', got {kind!r}")
        for entries, name in ((self.entries, "partial_rotary_factor"), (nested, f"{key}.partial_rotary_factor")):
            if (part := entries.get("partial_rotary_factor", 1.0)) not in (None, 1):
                raise bad_entry(name, f"must be 1 (RoPE turns all of a head), got {part!r}")
        theta = ConfigReader(nested if "rope_theta" in nested else self.entries).positive_float(
            "rope_theta", default_theta
        )
        return {"rope_theta": theta, "yarn": self._yarn(key, nested, theta, max_positions) if kind == "yarn" else None}

    def _yarn(self, key: str, nested: Mapping[str, Any], theta: float, max_positions: int) -> Yarn:
        positions = "original_max_position_embeddings"
        outside = self.entries.get(positions)  # transformers: this one counts where both are there
        given = {positions: max_positions} | {
            name: value for name, value in nested.items() if value is not None or name == "truncate"
        }
        given |= {positions: outside} if outside is not None else {}
        for name in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim"):  # 0 is as good as absent there
            if given.get(name) == 0:
                del given[name]
        if theta <= 1:
            raise bad_entry("rope_theta", f"must be above 1 with YaRN, got {theta}")
        try:
            return parse(Yarn, {field.name: given[field.name] for field in fields(Yarn) if field.name in given})
        except ConfigError as error:
            raise bad_entry(f"{key}.{error.field}", error.message) from None

    def eos_token_id(self, vocab_size: int) -> int | None:
        """Return the end token; None where config.json names none, or several: no run can stop at those."""
        value = self.entries.get("eos_token_id")
        if value is None:
            return None
        ids = value if isinstance(value, list) else [value]
        if not ids or any(type(each) is not int or not 0 <= each < vocab_size for each in ids):
            told = f"must be a token id, or a list of them, below vocab_size {vocab_size}, got {value!r}"
            raise bad_entry("eos_token_id", told)
        return ids[0] if len(ids) == 1 else None


def checked_dtype(dtype: str) -> Dtype:
    if dtype not in DTYPES:
        raise ConfigError("model.dtype", f"must be {DTYPE_NAMES}, got {dtype!r}")
    return cast(Dtype, dtype)
