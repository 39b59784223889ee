"""Bring prompts into the allowed lengths, and count what that took, for the workload's label."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from harness.config import ConfigError, require
from harness.workload.config import DatasetConfig
from harness.workload.tokens import Candidate


class Prompt(NamedTuple):
    ids: tuple[int, ...]
    text: str | None  # None: no longer, or never, what the ids say


@dataclass(slots=True)
class LengthLimits:
    """The allowed prompt lengths: `shortest` to `longest` tokens, both included."""

    config: DatasetConfig
    shortest: int
    longest: int
    bounded_by: str
    counts: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, config: DatasetConfig, max_positions: int) -> LengthLimits:
        """Derive the limits. Prompt and generated tokens together must fit the model's positions."""
        room = max_positions - config.max_new_tokens
        require(
            room >= 1,
            "max_new_tokens",
            f"must leave room for a prompt in the model's {max_positions} positions, got {config.max_new_tokens}",
        )
        require(
            config.min_prompt_tokens <= room,
            "min_prompt_tokens",
            f"must be {room} or less ({max_positions} positions of the model - max_new_tokens "
            f"{config.max_new_tokens}), got {config.min_prompt_tokens}",
        )
        if config.max_prompt_tokens is not None and config.max_prompt_tokens <= room:
            return cls(config, config.min_prompt_tokens, config.max_prompt_tokens, "max_prompt_tokens")
        reason = f"{max_positions} positions of the model - max_new_tokens {config.max_new_tokens}"
        return cls(config, config.min_prompt_tokens, room, reason)

    def too_long(self, what: str, num_tokens: int, field: str = "max_prompt_tokens") -> ConfigError:
        message = f"{what} has {num_tokens} tokens, {self.longest} are allowed ({self.bounded_by})"
        return ConfigError(field, f"{message}; on_too_long=truncate cuts it")

    def apply(self, candidate: Candidate) -> Prompt | None:
        """Return the prompt, cut, repeated or as it is; None where it is to be left out."""
        where, ids, text = candidate
        if not ids:
            raise ConfigError("column", f"{where} has no tokens")
        if len(ids) > self.longest:
            if self.config.on_too_long == "error":
                raise self.too_long(where, len(ids))
            self.counts[f"cut to {self.longest} tokens"] += 1
            return Prompt(tuple(ids[: self.longest]), None)
        if len(ids) >= self.shortest:
            return Prompt(tuple(ids), text)
        if self.config.on_too_short == "error":
            raise ConfigError(
                "min_prompt_tokens",
                f"{where} has {len(ids)} tokens, {self.shortest} are needed; on_too_short=skip leaves it out, "
                "on_too_short=repeat repeats it",
            )
        if self.config.on_too_short == "skip":
            self.counts[f"left out below {self.shortest} tokens"] += 1
            return None
        self.counts[f"repeated up to {self.shortest} tokens"] += 1
        repeated = tuple(ids) * -(-self.shortest // len(ids))
        return Prompt(repeated[: self.shortest], None)

    def notes(self) -> str:
        """Say what was changed, for the label: empty, or "; 3 prompts cut to 480 tokens"."""
        return "".join(f"; {num} prompt{'s' * (num > 1)} {what}" for what, num in self.counts.items())
