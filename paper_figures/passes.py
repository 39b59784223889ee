"""Simulate runs pass by pass: what happened in each and how long every lane was busy, without keeping their spans."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from harness.engine import loop
from harness.plan.planning import Plan, make_plan
from harness.record.meter import PassMeter
from harness.record.passes import PassRecord
from harness.record.store import Run
from paper_figures.support import composed

LANES = ("gpu", "cpu", "h2d", "d2h")


def planned(arguments: Sequence[str]) -> Plan:
    """Plan what `python -m harness.plan` would be given, without simulating it yet."""
    return make_plan(composed(*arguments), simulate=False)


class _Enough(Exception):
    """The signal that nothing behind this pass is asked for."""


def simulated_passes(plan: Plan, *, until: Callable[[PassRecord], bool] = lambda record: False) -> list[dict[str, Any]]:
    """Simulate all passes, or those before the first one for which `until` holds. A plan is simulated once.

    Rows are those of `PassMeter`: what happened in each pass, and how long each lane was busy.
    """
    plan.machine.drain()
    plan.machine.spans.clear()  # set-up is not part of what is simulated
    meter = PassMeter(plan.machine.spans, clears=True)  # a run has millions of spans
    rows: list[dict[str, Any]] = []

    def on_pass(record: PassRecord) -> None:
        rows.extend(meter.add(record))
        if until(record):
            raise _Enough

    try:
        loop.run(plan.engine, plan.strategy, on_pass)
    except _Enough:
        return rows
    return rows + meter.finish()


def continued_s(simulated_s: Sequence[float], num_steps: int, *, fitted: int) -> float:
    """Return the seconds of all decode steps. Beyond the simulated ones they go on as the last `fitted` of those do,
    linear in the context."""
    missing = np.arange(len(simulated_s), num_steps)
    if not len(missing):
        return float(sum(simulated_s))
    last = np.arange(len(simulated_s))[-fitted:]
    slope, start = np.polyfit(last, np.array(simulated_s)[last], 1)
    return float(sum(simulated_s) + (start + slope * missing).sum())


def columns(rows: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Return one list for each fact, over passes, with seconds to the millisecond."""
    counts = ("num_prefill_tokens", "num_decode_tokens", "num_preemptions", "kv_blocks_used", "generated_tokens")
    found: dict[str, list[float]] = {"end_s": [round(row["end_s"], 3) for row in rows]}
    found |= {name: [row[name] for row in rows] for name in counts}
    for lane in LANES:
        found[f"{lane}_busy_s"] = [round(row["busy_s"][lane], 3) for row in rows]
    return {"start_s": [round(rows[0]["start_s"], 3)] if rows else [], **found}


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One batch of static batching: a prefill, then a decode step for every further token.

    `decode_s` are the steps that were simulated; `num_steps` all of them. Busy shares are those of the simulated time.
    """

    num_sequences: int
    prefill_tokens: int
    prefill_s: float
    decode_s: tuple[float, ...]
    num_steps: int
    prefill_busy: Mapping[str, float]
    decode_busy: Mapping[str, float]

    @property
    def all_decode_s(self) -> float:
        return continued_s(self.decode_s, self.num_steps, fitted=_FITTED_STEPS)

    @property
    def throughput_tok_s(self) -> float:
        """Generated tokens over the time of prefill and decode, as MoE-Lightning section 5.1 counts."""
        return self.num_sequences * (self.num_steps + 1) / (self.prefill_s + self.all_decode_s)


_FITTED_STEPS = 16  # a KV block's tokens: a step that opens blocks counts as often as it happens


def first_batch(plan: Plan, *, max_steps: int | None = None) -> Batch:
    """Simulate the first batch of a plan whose scheduler runs one batch after another.

    All of its requests generate the same number of tokens. Null `max_steps` simulates all its decode steps, otherwise
    so many of them.
    """
    passes: list[PassRecord] = []

    def is_over(record: PassRecord) -> bool:
        passes.append(record)
        decoding = [p for p in passes if p.num_decode_tokens]
        return bool(decoding and record.num_prefill_tokens) or (max_steps is not None and len(decoding) > max_steps)

    rows = simulated_passes(plan, until=is_over)
    prefill = [row for row in rows if row["num_prefill_tokens"]]
    decode = [row for row in rows if row["num_decode_tokens"]]
    assert not {row["index"] for row in prefill} & {row["index"] for row in decode}, "not a static batch"
    num_steps = plan.settings.dataset.max_new_tokens - 1
    assert len(decode) == num_steps or max_steps is not None, f"{len(decode)} steps of {num_steps}"
    return Batch(
        num_sequences=sum(row["num_sequences"] for row in prefill),
        prefill_tokens=sum(row["num_prefill_tokens"] for row in prefill),
        prefill_s=sum(_length_s(row) for row in prefill),
        decode_s=tuple(_length_s(row) for row in decode),
        num_steps=num_steps,
        prefill_busy=_busy(prefill),
        decode_busy=_busy(decode),
    )


def _length_s(row: Mapping[str, Any]) -> float:
    return float(row["end_s"] - row["start_s"])


def _busy(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the busy share of each lane over these passes; 0 over none."""
    length_s = sum(map(_length_s, rows))
    return {lane: sum(row["busy_s"][lane] for row in rows) / length_s if rows else 0.0 for lane in LANES}


def records_of(run: Run) -> list[PassRecord]:
    """Return the passes that a run has recorded."""
    names = [each.name for each in fields(PassRecord)]
    return [PassRecord(**{name: line[name] for name in names}) for line in run.passes]
