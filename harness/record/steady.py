"""Measure passes that only decode: there strategies differ, and a run may end once it has enough of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.record.passes import PassRecord


class EnoughPasses(Exception):
    """A run has as many passes that only decode as were asked for."""


def require_more(passes: Sequence[PassRecord], wanted: int | None) -> None:
    """Raise `EnoughPasses` where the last passes, `wanted` and one before them, only decoded. The first of a row may
    still have prefill to get rid of. With None no number is enough."""
    if wanted is not None and len(_last_row(passes)) > wanted:
        raise EnoughPasses(f"after {wanted} passes in a row that only decode, and one before them")


def steady_decode(passes: Sequence[PassRecord]) -> dict[str, Any] | None:
    """Return the rate of the last passes in a row that only decode. The first of them is left out; None where there are
    fewer than two."""
    row = _last_row(passes)
    if len(row) < 2:
        return None
    seconds = row[-1].end_s - row[0].end_s
    rate = sum(record.generated_tokens for record in row[1:]) / seconds if seconds > 0 else None
    return {"passes": len(row) - 1, "pass_s": seconds / (len(row) - 1), "tok_s": rate}


def _last_row(passes: Sequence[PassRecord]) -> list[PassRecord]:
    """Return the last passes in a row that only decode."""
    row: list[PassRecord] = []
    last = row
    for record in passes:
        row = [] if record.num_prefill_tokens else [*row, record]
        last = row or last
    return last
