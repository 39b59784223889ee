"""Make the rows that Weights & Biases plots: one a pass, with rates that `passes.jsonl` holds only the parts of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.record.summary import accuracy


class PassRows:
    """Turns the records of passes, in their order, into rows of history.

    Where the machine has a clock, these are added to each: the pass's own `throughput_tok_s` and `utilization` by lane,
    and of all passes until now `throughput_so_far_tok_s` and, where there is a prediction, its
    `prediction_accuracy_so_far`.
    """

    def __init__(self, predicted_tok_s: float | None, *, timed: bool) -> None:
        self._predicted_tok_s = predicted_tok_s
        self._timed = timed
        self._start_s: float | None = None
        self._num_generated = 0

    def row(self, record: Mapping[str, Any]) -> dict[str, Any]:
        length_s = record["end_s"] - record["start_s"]
        self._start_s = record["start_s"] if self._start_s is None else self._start_s
        self._num_generated += record["generated_tokens"]
        if not self._timed or length_s <= 0.0:
            return dict(record)
        so_far_tok_s = self._num_generated / (record["end_s"] - self._start_s)
        return {
            **record,
            "throughput_tok_s": record["generated_tokens"] / length_s,
            "utilization": {lane: busy_s / length_s for lane, busy_s in record["busy_s"].items()},
            "throughput_so_far_tok_s": so_far_tok_s,
            "prediction_accuracy_so_far": accuracy(self._predicted_tok_s, so_far_tok_s),
        }
