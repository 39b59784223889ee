"""The costs of this computer's machine as a table for `hardware=local`, and what the simulator says with it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_stages.plan import Scale
from benchmarks.gpu_stages.runs import strategy_overrides
from harness.calibration.local import identity, link_rates, table_path
from harness.calibration.measure import measure_all
from harness.cli.overrides import composed_values
from harness.machine.base import LaneKind
from harness.machine.build import load_machine
from harness.model.planned import planned_model
from harness.plan.planning import make_plan
from harness.record.provenance import code_version, environment
from harness.record.summary import accuracy
from harness.run.session import Session
from harness.settings import parse_settings

_KV_GB = 4.0  # the longest contexts that are probed take 3.3


def calibrate(scale: Scale, rates: Sequence[str], out: Path, more: Sequence[str] = ()) -> dict[str, Any]:
    """Measure every op, lane by lane and together, on the machine of the runs, and copy the table to the results."""
    cache = f"kv_cache_gb={min(scale.kv_gb, _KV_GB):g}"  # the table does not depend on it, and it has to be filled
    overrides = [*scale.workload(), cache, *rates, "model.path=random", f"machine={scale.machine}", *more]
    settings = parse_settings(composed_values(overrides))
    with Session(settings, load_machine(settings.machine)) as session:
        model, machine = session.load_model(), session.build_machine()
        engine = session.build_engine()
        links = {LaneKind(name): rate * 1e9 for name, rate in (machine.link_ceilings_gb_s or {}).items()}
        links = links or link_rates(settings.hardware)
        facts = environment()
        table = measure_all(
            engine,
            link_bytes_s=links,
            packet_bytes=int(scale.packet_mb * 1e6),
            ram_bytes=facts["memory_bytes"],
            meta={
                "code": code_version(), "environment": facts, "label": machine.label,
                "identity": identity(settings, model.spec),
            },
            repeats=1,
            log=lambda text: print(f"   {text}", flush=True),
        )  # fmt: skip
    for path in (table_path(settings, model.spec), out / "calibration.json"):
        table.write(path)
    return {
        "ops": len(table.samples), "together": table.together, "worst_fit": table.worst_fit(),
        "links": {f"{lane}_gb_s": links[lane] / 1e9 for lane in (LaneKind.H2D, LaneKind.D2H)},
    }  # fmt: skip


def simulate(
    scale: Scale,
    rates: Sequence[str],
    runs: dict[str, dict[str, Any]],
    steady: dict[str, dict[str, Any]],
    kernels: Sequence[str] = (),
) -> dict[str, Any]:
    """Simulate each measured strategy with the table; accuracy = 1 - |simulated - measured| / measured. `kernels` are
    the overrides by which the simulated plans count the temporaries that the measured ones did.

    Passes that only decode are compared where `steady` has some, whole runs where `runs` has one that came to its end.
    A run that was cut off had another mix of passes than the whole workload: its accuracy says nothing, and is null.
    """
    rows = {}
    settings = parse_settings(composed_values([*scale.workload(), *rates, "machine=simulated"]))
    if not table_path(settings, planned_model(settings.model).spec).exists():
        raise FileNotFoundError("there is no table of this computer for these sizes: the stage calibrate makes it")
    for name, values in scale.strategies.items():
        measured = runs.get(name) or {}
        overrides = [*strategy_overrides(name, values, scale), *scale.workload(), *rates, "machine=simulated", *kernels]
        rows[name] = {}
        if observed := (steady.get(name, {}).get("steady_decode") or {}).get("tok_s"):
            found = _simulated([*overrides, scale.stop]).get("steady_decode") or {}
            rows[name] |= {
                "steady_tok_s": found.get("tok_s"),
                "steady_accuracy": accuracy(found.get("tok_s"), observed),
            }
        if name in runs or not observed:
            simulated, whole = _simulated(overrides)["throughput_tok_s"], measured.get("status") == "ok"
            observed = measured.get("throughput_tok_s") if whole else None
            rows[name] |= {"simulated_tok_s": simulated, "accuracy": accuracy(simulated, observed)}
        print(f"   {name}: {json.dumps(rows[name])}", flush=True)
    return {"runs": rows}


def _simulated(overrides: Sequence[str]) -> dict[str, Any]:
    plan = make_plan(composed_values(list(overrides)), log=lambda text: None)
    assert plan.summary is not None
    return plan.summary
