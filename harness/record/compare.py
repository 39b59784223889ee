"""A table of finished runs: `python -m harness.record.compare RUN_DIR ...` (run folders, or a results folder)."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from harness.record.files import RecordError
from harness.record.store import Run, list_runs, read_run
from harness.record.terminal import number

_WIDE = 80  # characters, from which there is space between columns
_UNLIMITED = 1000
_NAMES = ("strategy", "model", "dataset", "machine", "hardware")
_NOT_SETTINGS = ("results_dir", "progress", "wandb", "experiment")
_SOURCES = ("data_source", "weights_source")  # long texts: below the table where they differ


def compare_table(runs: Sequence[Run], *, narrow: bool = False) -> Group:
    """One row a run; the ratio is to the first run that ended well. What all runs share is above the table, and the
    settings in which they differ are below it. Words stay whole; `narrow` leaves less space between columns."""
    rows = [_facts(run) for run in runs]
    shared = [fact for fact in (*_NAMES[1:], "label", *_SOURCES) if len({row[fact] for row in rows if row[fact]}) == 1]
    varying = [fact for fact in (*_NAMES[1:], "label") if fact not in shared and any(row[fact] for row in rows)]
    observed_tok_s = [
        row.get("throughput_tok_s") if run.status == "ok" else None for run, row in zip(runs, rows, strict=True)
    ]
    base = next(filter(None, observed_tok_s), None)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0 if narrow else 1))
    for fact in ("strategy", *varying):
        table.add_column(fact, no_wrap=True)
    for name in ("tok/s", "ratio"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("busiest lane", no_wrap=True)
    table.add_column("accuracy", justify="right", no_wrap=True)
    table.add_column("verify", no_wrap=True)
    table.add_column("run", no_wrap=True, style="dim")
    for run, row, observed in zip(runs, rows, observed_tok_s, strict=True):
        table.add_row(
            *(Text(row[fact] or "-") for fact in ("strategy", *varying)),
            number(observed) if run.status == "ok" else Text(run.status, style="red"),
            f"{observed / base:.2f}x" if observed and base else "-",
            _busiest(row.get("utilization") or {}),
            "-" if row.get("prediction_accuracy") is None else f"{row['prediction_accuracy']:.1%}",
            _verify(row.get("verify") or {}),
            _short(run.run_id),
        )
    title = [Text(f"{fact.replace('_', ' ')}: {next(row[fact] for row in rows if row[fact])}") for fact in shared]
    return Group(*title, table, *_setting_lines(runs), *_differing_sources(runs, rows, shared))


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 2 where an argument is no run."""
    asked = list(sys.argv[1:] if arguments is None else arguments)
    if any(argument in ("-h", "--help") for argument in asked):
        print(__doc__)
        return 0
    if not asked:
        print("usage: python -m harness.record.compare RUN_DIR ...", file=sys.stderr)
        return 2
    try:
        runs = [run for folder in asked for run in _runs(Path(folder))]
        _print(runs)
    except RecordError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _print(runs: Sequence[Run]) -> None:
    """Where a terminal has no room for all columns, lines go on beyond its edge: better than cut words."""
    console = Console()
    if not runs:
        console.print("no runs")
        return
    room = console.width
    for part in compare_table(runs, narrow=room < _WIDE).renderables:
        unlimited = console.options.update(max_width=_UNLIMITED)
        console.width = max(room, console.measure(part, options=unlimited).maximum if isinstance(part, Table) else 0)
        console.print(part)


def _runs(folder: Path) -> list[Run]:
    return list_runs(folder) if (folder / "runs").is_dir() else [read_run(folder)]


def _facts(run: Run) -> dict[str, Any]:
    """The run's summary; where it did not get that far, what its configuration asked for."""
    found: dict[str, Any] = dict.fromkeys((*_NAMES, "label", *_SOURCES))
    for name in _NAMES:
        group = run.config.get(name)
        asked = group.get("name") if isinstance(group, dict) else group
        found[name] = None if asked is None else str(asked)
    return found | (run.summary or {})


def _differing_settings(runs: Sequence[Run]) -> dict[str, dict[str, str]]:
    """Setting -> run -> value, for the settings in which runs differ. Where a whole group was exchanged its name is a
    column already, and what comes with it is not told."""
    flat = {run.run_id: _leaves(run.config) for run in runs}
    exchanged = {group for group in _NAMES if len({values.get(f"{group}.name") for values in flat.values()}) > 1}
    names = dict.fromkeys(name for values in flat.values() for name in values)
    found: dict[str, dict[str, str]] = {}
    for name in names:
        values = {run_id: leaves.get(name, "-") for run_id, leaves in flat.items()}
        if name.partition(".")[0] not in (*exchanged, *_NOT_SETTINGS) and len(set(values.values())) > 1:
            found[name] = values
    return found


def _leaves(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            found |= _leaves(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = str(value)
    return found


def _setting_lines(runs: Sequence[Run]) -> list[Text]:
    settings = _differing_settings(runs)
    if not settings:
        return []
    short = [name.rpartition(".")[2] for name in settings]
    names = dict(zip(settings, short, strict=True)) if len(set(short)) == len(short) else {n: n for n in settings}
    told = [", ".join(f"{names[n]}={values[run.run_id]}" for n, values in settings.items()) for run in runs]
    return [Text(f"{_short(run.run_id)} {line}", style="dim") for run, line in zip(runs, told, strict=True)]


def _differing_sources(runs: Sequence[Run], rows: Sequence[dict[str, Any]], shared: Sequence[str]) -> list[Text]:
    return [
        Text(f"{_short(run.run_id)} {fact.replace('_', ' ')}: {row[fact]}", style="dim")
        for fact in _SOURCES
        for run, row in zip(runs, rows, strict=True)
        if fact not in shared and row[fact]
    ]


def _short(run_id: str) -> str:
    """The hash, which tells runs of one table apart, with the number of a repetition."""
    found = re.search(r"[0-9a-f]{8}(-\d+)?$", run_id)
    return found[0] if found else run_id


def _busiest(utilization: dict[str, float]) -> str:
    if not utilization or not any(utilization.values()):
        return "-"
    lane = max(utilization, key=lambda name: utilization[name])
    return f"{lane} {utilization[lane]:.1%}"


def _verify(verify: dict[str, Any]) -> str:
    if not verify.get("checked"):
        return "no"
    return (
        f"{verify['checked']} ok"
        if not verify.get("mismatched")
        else f"{verify['mismatched']} of {verify['checked']} WRONG"
    )


if __name__ == "__main__":
    sys.exit(main())
