"""Compute rows of a report, one a case, and keep them in the report's file, where each is found by its case."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.plan.planning import DoesNotFit, Plan
from harness.record.provenance import code_version
from harness.record.summary import accuracy
from paper_figures.measuring import MOVED, Pass, batch_passes, link_gb, over_passes, phase_facts
from paper_figures.moegen.settings import Case
from paper_figures.passes import planned
from paper_figures.pool import each
from paper_figures.support import REFERENCE, read_json

FOLDER = REFERENCE / "moegen-simulated"
Row = dict[str, Any]


def row(case: Case) -> Row:
    """Simulate a case. Where it does not fit, the row says why and has no numbers."""
    began_s = time.monotonic()
    command = f"python -m harness.plan {' '.join(case.overrides)}"
    named = {**_names(case), "code": code_version(), "command": command}
    try:
        plan = planned(case.overrides)
    except DoesNotFit as error:
        needed = {tier: sum(named.values()) / 1e9 for tier, named in error.needed.items()}
        return {**named, "refused": str(error), "needed_gb": needed}
    planned_s = time.monotonic() - began_s
    passes = batch_passes(plan, whole=case.whole)
    took = {"plan_s": round(planned_s, 1), "simulation_s": round(time.monotonic() - began_s - planned_s, 1)}
    return {
        **named,
        "policy": _plain(plan.strategy.plan),
        "search": predicted_passes(plan.strategy.plan),
        **facts(plan, passes, whole=case.whole),
        "host_seconds": took,
    }


def facts(plan: Plan, passes: Sequence[Pass], *, whole: bool = False) -> Row:
    """Sum up a batch: its throughput by phase, and what the strategy's own model says of the whole."""
    prefill = [p for p in passes if p.record.num_prefill_tokens]
    decode = [p for p in passes if p.step is not None]
    begun = over_passes(prefill, lambda p: p.record.num_sequences - p.record.num_decode_tokens)
    num_sequences = len(plan.engine.sequences) if whole else round(begun)  # a run may begin one again
    generated = num_sequences * plan.settings.dataset.max_new_tokens

    prefill_s, decode_s = (over_passes(phase, lambda p: p.length_s) for phase in (prefill, decode))
    tok_s = generated / (prefill_s + decode_s)
    prediction = plan.strategy.prediction
    return {
        "sequences": num_sequences,
        "tok_s": tok_s,
        "prefill_tok_s": over_passes(prefill, lambda p: p.record.num_prefill_tokens) / prefill_s,
        "decode_tok_s": (generated - num_sequences) / decode_s if decode else None,
        "prefill_s": prefill_s,
        "decode_s": decode_s,
        "steps": [] if whole else [[p.step, p.length_s] for p in decode],
        "traffic_gb": {what: over_passes([*prefill, *decode], lambda p, what=what: link_gb(p, what)) for what in MOVED},
        "prefill": phase_facts(plan, prefill),
        "decode": phase_facts(plan, decode),
        "predicted_tok_s": prediction and prediction.throughput_tok_s,
        "accuracy": prediction and accuracy(prediction.throughput_tok_s, tok_s),
    }


def _names(case: Case) -> Row:
    names = ("system", "setting", "model", "prompt", "g", "variant", "num_requests")
    return {name: getattr(case, name) for name in names}


# In this process, by what is simulated, since reports share cases: the case that stands for all of them, and its row.
_first: dict[tuple[object, ...], Case] = {}
_simulated: dict[tuple[object, ...], Row] = {}


def _simulation(case: Case) -> tuple[object, ...]:
    return (*case.overrides, case.whole)


def missing(cases: Iterable[Case]) -> list[Case]:
    """Return what is to be simulated for these cases, once each: cases that differ in their names only are one."""
    firsts = [_first.setdefault(_simulation(case), case) for case in cases]
    return [case for case in dict.fromkeys(firsts) if _simulation(case) not in _simulated]


def computed(cases: Sequence[Case]) -> Iterator[Row]:
    """Yield a row of each case, and tell its result. What another report has simulated is not simulated again."""
    rows = each(row, missing(cases))
    for case in cases:
        if _simulation(case) not in _simulated:
            _simulated[_simulation(case)] = next(rows)
        found = {**_simulated[_simulation(case)], **_names(case)}
        told = found.get("refused") or f"{found['tok_s']:.4g} tok/s, N = {found['sequences']:,}"
        print(f"{case.setting}, {case.model}, {case.prompt}+{case.g}, {case.system} {case.variant}: {told}", flush=True)
        yield found


def stored(name: str, folder: Path = FOLDER) -> list[Row]:
    """Read the rows of a report; none where it was not computed."""
    path = folder / f"{name}.json"
    return list(read_json(path)["rows"]) if path.exists() else []


def find(rows: Iterable[Row], case: Case) -> Row | None:
    """Return the row of a case that has numbers; None where it is missing or the case did not fit."""
    return next((r for r in rows if key_of(r) == case.key and "refused" not in r), None)


def key_of(row: Mapping[str, Any]) -> tuple[object, ...]:
    fields = ("system", "setting", "model", "prompt", "g", "num_requests", "variant")
    return tuple(row[name] for name in fields)


def _plain(plan: Mapping[str, Any]) -> Row:
    """Leave tables and candidates out of a planner's record."""
    return {name: value for name, value in plan.items() if isinstance(value, (int, float, str, bool, type(None)))}


def predicted_passes(plan: Mapping[str, Any]) -> Row | None:
    """Return what a search predicts of its policy's passes; None where nothing was searched."""
    found = plan.get("predicted")
    return found and {name: value for name, value in found.items() if name != "policy"}
