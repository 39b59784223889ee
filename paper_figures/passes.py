"""Simulate runs pass by pass: what happened in each and how long every lane was busy, without keeping their spans."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from harness.engine import loop
from harness.engine.garbage import let_go
from harness.plan.planning import Plan, make_plan
from harness.record.meter import PassMeter
from harness.record.passes import PassRecord
from harness.record.store import Run
from paper_figures.support import composed

LANES = ("gpu", "cpu", "h2d", "d2h")


def planned(arguments: Sequence[str]) -> Plan:
    """Plan what `python -m harness.plan` would be given, without simulating it yet. Keep the plan for as long as any
    part of it is used: with it engine, machine, pipeline and scheduler forget all they hold, whoever has them."""
    plan = make_plan(composed(*arguments), simulate=False)
    engine, strategy = plan.engine, plan.strategy
    parts = (strategy.pipeline, strategy.scheduler, engine, engine.machine, *engine.machine.tiers.values())
    weakref.finalize(plan, let_go, *parts)
    return plan


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


def columns(rows: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Return one list for each fact, over passes, with seconds to the millisecond."""
    counts = ("num_prefill_tokens", "num_decode_tokens", "num_preemptions", "kv_blocks_used", "generated_tokens")
    found: dict[str, list[float]] = {"end_s": [round(row["end_s"], 3) for row in rows]}
    found |= {name: [row[name] for row in rows] for name in counts}
    for lane in LANES:
        found[f"{lane}_busy_s"] = [round(row["busy_s"][lane], 3) for row in rows]
    return {"start_s": [round(rows[0]["start_s"], 3)] if rows else [], **found}


def records_of(run: Run) -> list[PassRecord]:
    """Return the passes that a run has recorded."""
    names = [each.name for each in fields(PassRecord)]
    return [PassRecord(**{name: line[name] for name in names}) for line in run.passes]
