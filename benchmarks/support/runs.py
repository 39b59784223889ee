"""Give all reports over whole runs their quiet runs of a configuration, and tables written after every row."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from datetime import date
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from harness.record.provenance import code_version, environment, shown_command
from harness.run.experiment import run_experiment

ROOT = Path(__file__).resolve().parents[2]
QUIET = ("wandb.mode=disabled", "progress=false")
Row = dict[str, Any]


def run(overrides: Iterable[str], results_dir: Path, *, verify: bool = False) -> tuple[dict[str, Any], Path]:
    """Run once in this process, and return the run's summary and folder."""
    checked = () if verify else ("verify=off",)
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        cfg = compose("config", overrides=[*QUIET, *checked, f"results_dir={results_dir}", *overrides])
    values: Any = OmegaConf.to_container(cfg, resolve=True)
    return run_experiment(values)


def lane_times(summary: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds that each lane was busy in the steady window."""
    return {lane: share * summary["window_s"] for lane, share in summary["utilization"].items()}


def markdown(rows: list[Row]) -> str:
    """Write a table of plain values; "-" where a row has none."""

    def cell(value: Any) -> str:
        return "-" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)

    header = list(dict.fromkeys(name for row in rows for name in row))
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    lines += ["| " + " | ".join(cell(row.get(name)) for name in header) + " |" for row in rows]
    return "\n".join(lines)


def report(
    name: str,
    rows: Iterable[Row],
    out: Path | None,
    *,
    script: str,
    arguments: list[str],
    label: str,
    comment: Callable[[list[Row]], str] = lambda rows: "",
) -> None:
    """Print rows as they come and, with `out`, write <name>.json and <name>.md after each: what is cut off leaves what
    was finished."""
    header = {
        "date": date.today().isoformat(),
        "code": code_version(),
        "environment": environment(),
        "command": shown_command(script, arguments),
        "label": label,
    }
    done: list[Row] = []
    for row in rows:
        done.append(row)
        print(row, flush=True)
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            (out / f"{name}.json").write_text(json.dumps({**header, "rows": done}, indent=1) + "\n")
            said = comment(done)
            text = f"# {name} ({label})\n\n{markdown(done)}\n" + (f"\n{said}\n" if said else "")
            (out / f"{name}.md").write_text(text)
    print(markdown(done))
