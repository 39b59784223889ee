"""Describe a workload by the few numbers that planners need. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.engine.sequences import Sequence


@dataclass(frozen=True, kw_only=True)
class WorkloadShape:
    """The shape of a workload, for planning; tokens are means over its requests unless said otherwise."""

    num_requests: int
    padded: bool = False  # every prompt counts, and is computed, as the longest
    prompt_tokens: float  # s
    longest_prompt: int
    new_tokens: float  # n
    kv_tokens: float  # that a sequence's whole blocks hold at its end
    longest_kv_tokens: int  # of the longest sequence

    @classmethod
    def of_lengths(
        cls, prompt_tokens: float, new_tokens: float, *, longest_prompt: int, num_requests: int, block_tokens: int = 16
    ) -> WorkloadShape:
        """Derive the shape from averages. The last generated token is never fed back, and blocks are whole: half of one
        is lost."""
        kept = prompt_tokens + new_tokens - 1
        longest = ceil(longest_prompt + new_tokens - 1)
        return cls(
            num_requests=num_requests,
            prompt_tokens=prompt_tokens,
            longest_prompt=longest_prompt,
            new_tokens=new_tokens,
            kv_tokens=kept + (block_tokens - 1) / 2,
            longest_kv_tokens=-(-longest // block_tokens) * block_tokens,
        )

    @classmethod
    def of_sequences(cls, sequences: Iterable[Sequence], *, block_tokens: int, padded: bool = False) -> WorkloadShape:
        """Derive the shape from real requests; with `padded`, as if every prompt were as long as the longest."""
        chosen = list(sequences)
        assert chosen, "an empty workload has no shape"
        longest = max(s.prompt_len for s in chosen)
        prompts = [longest if padded else s.prompt_len for s in chosen]
        new = [s.request.max_new_tokens for s in chosen]
        kept = [-(-(p + n - 1) // block_tokens) * block_tokens for p, n in zip(prompts, new, strict=True)]
        return cls(
            num_requests=len(chosen),
            padded=padded,
            prompt_tokens=sum(prompts) / len(chosen),
            longest_prompt=longest,
            new_tokens=sum(new) / len(chosen),
            kv_tokens=sum(kept) / len(chosen),
            longest_kv_tokens=max(kept),
        )

    def prompts_of(self, micro_batch_size: int) -> float:
        """Return the tokens of mu prompts of mean length, and at least those of the longest prompt."""
        return max(micro_batch_size * self.prompt_tokens, self.longest_prompt)
