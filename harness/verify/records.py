"""Define what a run hands over for verification, and what verification answers. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class Segment:
    """One life of a sequence's KV cache: from a prefill (the first, or one after a preemption) until the next.

    `routing` int16 [positions, layers, k] holds the expert ids chosen in this life at positions 0, 1, ... of prompt
    plus generated tokens. The tokens from `first_generated_index` up to the next segment's were generated in this life.
    """

    first_generated_index: int
    routing: NDArray[np.int16]


@dataclass(frozen=True, kw_only=True)
class GeneratedSequence:
    """A finished request is verified by its tokens and their routing. The last token was sampled but never fed, so it
    has no routing."""

    request_id: int | str
    prompt_ids: Sequence[int]
    generated_ids: Sequence[int]
    segments: Sequence[Segment]

    def __post_init__(self) -> None:
        starts = [segment.first_generated_index for segment in self.segments]
        valid = bool(starts) and starts[0] == 0 and all(a <= b for a, b in pairwise(starts))
        if not valid or starts[-1] > len(self.generated_ids):
            raise ValueError(
                f"request {self.request_id}: segments: must start at 0 and ascend within "
                f"{len(self.generated_ids)} generated tokens, got {starts}"
            )

    def lives(self) -> list[tuple[Segment, int, int]]:
        """Return (segment, first, end): tokens first..end-1 came from this life. Lives that yielded none are left
        out."""
        starts = [segment.first_generated_index for segment in self.segments]
        ends = [*starts[1:], len(self.generated_ids)]
        return [life for life in zip(self.segments, starts, ends, strict=True) if life[1] < life[2]]


@dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """`mode` says what was compared. `checked`, `mismatched` and `excused` count sequences; an excused one diverges by
    choices within float32's rounding, made no later than where it diverges. Gaps: how far a chosen token lay below the
    reference's best, in standard deviations of the logits, and a chosen expert below the reference's k-th best, as a
    share of that one's router probability. NaN: the reference was not finite."""

    mode: str
    checked: int
    tokens_checked: int
    mismatched: int
    excused: int
    worst_gap: float
    worst_router_gap: float
    first_mismatch: str | None = None

    @property
    def ok(self) -> bool:
        return self.mismatched == 0
