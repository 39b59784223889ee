"""Calibrate this computer on first use, and keep the table in the cache folder by hardware, model and versions."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from harness.calibration.costs import CalibratedCosts
from harness.calibration.measure import measure_all
from harness.calibration.table import CalibrationTable
from harness.config import file_name, require
from harness.hardware.constants import Constant
from harness.hardware.profile import HardwareConfig
from harness.machine.base import LaneKind
from harness.machine.build import load_machine
from harness.machine.emulated import resource
from harness.machine.simulated import SimulatedMachine
from harness.machine.turn import Turn
from harness.memory.weights import stored_bytes
from harness.model.cache import cache_folder, make_writable
from harness.model.loading import LoadedModel
from harness.model.spec import ModelSpec
from harness.record.provenance import code_version, environment, fingerprint
from harness.run.session import Session
from harness.settings import Settings

Log = Callable[[str], None]
PACKET_BYTES = 1_000_000
KV_TOKENS = 32_768  # in the KV cache that is measured, where pinned memory has room for it
LINK_GB_S = 0.7  # of the link that is busy while ops are measured, in the middle of what one core can sustain
# What the measured ops depend on; the links' rates do not belong to it, since the table holds what comes beyond them.
_RATES = ("cpu_gflop_s", "cpu_gb_s", "gpu_gflop_s")
# The code that is measured, and the code that measures it.
_SOURCES = (
    *("kernels", "harness/bench", "harness/calibration", "harness/engine", "harness/memory", "harness/model/families"),
    *("harness/model/functional.py", "harness/model/linear.py"),
    *("harness/machine/threads", *(f"harness/machine/{name}.py" for name in ("base", "emulated", "hazards", "queues"))),
)


def identity(settings: Settings, spec: ModelSpec) -> dict[str, Any]:
    """Return what two measurements must share to be interchangeable. Capacities decide which sizes of micro-batches and
    of the KV cache can be measured. A run's own cache, of `kv_cache_gb`, is another one and decides nothing."""
    facts = environment()
    return {
        "processor": facts["processor"],
        "num_cores": facts["num_cores"],
        "packages": {name: facts["packages"].get(name) for name in ("torch", "numpy")},
        "sources": fingerprint(_SOURCES),
        "model": {key: value for key, value in asdict(spec).items() if key != "name"},
        "rates": {name: getattr(settings.hardware, name) for name in _RATES},
        "capacities_bytes": settings.hardware.capacities_bytes,
        "kv_block_tokens": settings.kv_block_tokens,
        "kv_tokens": KV_TOKENS,
    }


def table_path(settings: Settings, spec: ModelSpec) -> Path:
    text = json.dumps(identity(settings, spec), sort_keys=True, default=str)
    key = hashlib.sha256(text.encode()).hexdigest()[:12]
    return cache_folder() / "calibration" / f"{file_name(spec.name)}-{key}.json"


def local_table(settings: Settings, spec: ModelSpec, log: Log = print) -> CalibrationTable:
    """Return the table from the cache, or measure it now. It takes two minutes, while nothing else should run."""
    path = table_path(settings, spec)
    if not _is_readable(path):
        make_writable(path.parent)  # before minutes of work
        log("calibrating this computer, some two minutes; it should do nothing else meanwhile")
        measure(settings, log).write(path)
    return CalibrationTable.read(path)


def _is_readable(path: Path) -> bool:
    """Return whether the file holds a table of this version. A table of an older version, or a broken one, is measured
    again."""
    try:
        CalibrationTable.read(path)
    except ValueError:
        return False
    return True


def measure(settings: Settings, log: Log = print) -> CalibrationTable:
    """Measure the emulated machine of these settings. Needs a model that can run, and waits for its turn."""
    with Turn(resource(), "calibration", exclusive=settings.exclusive) as turn:
        table = _measured(settings, log)
        beside = [f"everything: {other} ran beside it" for other in turn.beside()]
        return replace(table, meta={**table.meta, "disturbed": [*table.meta["disturbed"], *beside]})


def _measured(settings: Settings, log: Log) -> CalibrationTable:
    with Session(settings, load_machine({"name": "emulated"})) as session:
        model = session.load_model()
        session.settings = settings = _with_measured_sizes(session.settings, model)
        machine, facts = session.build_machine(), environment()
        return measure_all(
            session.build_engine(),
            link_bytes_s=link_rates(settings.hardware),
            packet_bytes=PACKET_BYTES,
            ram_bytes=facts["memory_bytes"],
            meta={
                "code": code_version(), "environment": facts, "label": machine.label, "link_gb_s": LINK_GB_S,
                "identity": identity(settings, model.spec),
            },
            log=log,
        )  # fmt: skip


def _with_measured_sizes(settings: Settings, model: LoadedModel) -> Settings:
    """Return the settings with the link that is busy while ops are measured, and with the KV cache that is measured."""
    rate = Constant(LINK_GB_S)
    left_gb = settings.hardware.pinned_memory_gb - stored_bytes(model.source) / 1e9
    wanted_gb = KV_TOKENS * model.spec.kv_bytes_per_token / 1e9
    kv_cache_gb = min(wanted_gb, left_gb / 2) if left_gb > 0 else wanted_gb
    hardware = replace(settings.hardware, h2d_gb_s=rate, d2h_gb_s=rate)
    return replace(settings, hardware=hardware, kv_cache_gb=kv_cache_gb)


def link_rates(hardware: HardwareConfig) -> dict[LaneKind, float]:
    """Return the bytes per second of every link whose rate is stated. Raises ConfigError where h2d or d2h has none."""
    rates = {LaneKind(name): float(rate) * 1e9 for name, rate in hardware.link_ceilings_gb_s.items()}
    for kind in (LaneKind.H2D, LaneKind.D2H):
        require(kind in rates, f"hardware.{kind}_gb_s", "must be stated: measured costs are those beyond bytes / rate")
    return rates


def calibrate(machine: SimulatedMachine, settings: Settings, spec: ModelSpec, log: Log = print) -> None:
    """Give `machine` the costs that were measured on this computer; measure them now if they never were."""
    table = local_table(settings, spec, log)
    costs = CalibratedCosts(table, link_rates(settings.hardware), machine.is_busy, machine.strategy_left_s)
    machine.calibrate(costs, table.slowdowns(), table.host, launches_ahead=bool(table.ahead))
