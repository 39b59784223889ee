"""Write a comparison as a table for people, as Markdown, and as CSV and JSON for programs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, Literal

import pandas as pd
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.record.comparing.folders import GROUPS, LeftOut
from harness.record.comparing.rows import OLDEST, PLANNING, RATE, TIMES, Comparison
from harness.record.files import plain
from harness.record.terminal import number

_UNLIKE = "*"  # marks a ratio of numbers with different labels
_SOURCES = ("data_source", "weights_source")
_MAX_VALUE, _MAX_CAUSE = 40, 240  # characters; JSON has them all
_UNLIMITED = 10_000
_TIME_NAMES = dict(zip(TIMES, ("first token", "per token", "request"), strict=True))


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column with its texts as they are shown. Those of a `part` stay together; `keys` are repeated wherever a table
    goes on below; settings may be told in lines of one column."""

    name: str
    cells: Sequence[str]
    right: bool = True
    part: Literal["keys", "settings", "rates", "checks", "latencies"] = "rates"


def print_table(comparison: Comparison, console: Console) -> None:
    """Print the table without cutting a word: what the terminal has no room for goes on below, row by row."""
    for line in _shared_lines(comparison):
        console.print(Text(line))
    room = console.width
    for columns in _blocks(_columns(comparison), console):
        table = _table(columns)
        console.width = max(room, _width(table, console))  # lines with a very wide cell go on beyond the edge
        console.print(table)
        console.width = room
    for line in (*_notes(comparison), *_sources(comparison)):
        console.print(Text(line, style="dim"))
    if comparison.baseline == OLDEST:
        console.print(Text("--baseline strategy=NAME or --baseline RUN chooses another baseline", style="dim"))


def print_left_out(left_out: Sequence[LeftOut], console: Console) -> None:
    """Print the runs that are no row: what became of each, and the cause."""
    if left_out:
        console.print(Text(f"\n{len(left_out)} not in the table:"))
        told = Table.grid(padding=(0, 2))
        for run in left_out:
            told.add_row(Text(run.status, style="red"), Text(f"{run.run}: {_shortened(run.cause, _MAX_CAUSE)}"))
        console.print(told)


def as_markdown(comparison: Comparison, left_out: Sequence[LeftOut]) -> str:
    """Write one table, whatever its width, and a line for each note and each run that is no row."""
    table = Table(box=box.MARKDOWN, show_edge=True)
    columns = _columns(comparison)
    for column in columns:
        table.add_column(column.name, justify="right" if column.right else "left", no_wrap=True)
    for cells in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*(Text(cell.replace("|", r"\|")) for cell in cells))
    console = Console(width=_UNLIMITED, color_system=None, markup=False)
    with console.capture() as capture:
        console.print(table)
    lines = [line.strip() for line in capture.get().splitlines() if line.strip()]
    told = [*_shared_lines(comparison), *_notes(comparison), *_sources(comparison)]
    told += [f"not in the table: {run.run}, {run.status}: {run.cause}" for run in left_out]
    return "\n".join([*lines, "", *(f"* {line}" for line in told)]) + "\n"


def as_csv(comparison: Comparison) -> str:
    """Write full names and digits, with a line for each row."""
    table = comparison.exported
    return str(table.assign(runs=table["runs"].map(" ".join)).to_csv(index=False))


def as_json(comparison: Comparison, left_out: Sequence[LeftOut]) -> str:
    """Write what the CSV has, and the runs that are no row."""
    table = comparison.exported.astype(object)
    value = {
        "baseline": comparison.baseline,
        "rows": table.where(table.notna(), None).to_dict("records"),
        "left_out": [{"run": run.run, "status": run.status, "cause": run.cause} for run in left_out],
    }
    return json.dumps(plain(value), indent=2, ensure_ascii=False) + "\n"


def _columns(comparison: Comparison) -> list[Column]:
    rows, settings = comparison.measured, comparison.settings
    shown = list(dict.fromkeys(["strategy.name", *comparison.shown]))

    def column(name: str, cell: Callable[[pd.Series], str], **how: Any) -> Column:
        return Column(name=name, cells=[cell(row) for _, row in rows.iterrows()], **how)

    found = [Column(name="", cells=[str(index) for index in rows.index], part="keys")]
    found += [
        Column(
            name=comparison.names[name],
            cells=[_shortened(value) for value in settings[name]],
            right=pd.api.types.is_numeric_dtype(settings[name]),
            part="keys" if name == "strategy.name" else "settings",
        )
        for name in shown
    ]
    found.append(Column(name="runs", cells=[str(count) for count in rows["num_runs"]]))
    found.append(column("tok/s", lambda row: _with_spread(row, RATE, number)))
    if comparison.baseline is not None:
        found.append(column("ratio", _ratio))
    found.append(Column(name="label", cells=list(rows["label"]), right=False, part="keys"))
    if rows["num_disturbed"].any():
        found.append(column("disturbed", lambda row: f"{row['num_disturbed']} of {row['num_runs']}", part="keys"))
    found.append(column("busiest lane", _busiest, part="checks"))
    if rows["prediction_accuracy"].notna().any():
        found.append(column("accuracy", _accuracy, part="checks"))
    found.append(column("verified", _verified, part="checks"))
    found.append(column("run", lambda row: _short(row["runs"]), right=False, part="checks"))
    for time in TIMES:
        if f"{time}_p50" in rows:
            found.append(column(f"{_TIME_NAMES[time]} s", partial(_time, time=time), part="latencies"))
    return found


def _blocks(columns: Sequence[Column], console: Console) -> list[list[Column]]:
    """Put all columns beside each other if there is room; else settings in one column, and what does not fit below."""
    if _fits(columns, console):
        return [list(columns)]
    keys = [column for column in columns if column.part == "keys"]
    others = [column for column in columns if column.part != "keys"]
    blocks = [keys]
    for _, part in groupby(_settings_together(others), key=lambda column: column.part):
        together = list(part)
        if len(blocks[-1]) > len(keys) and not _fits([*blocks[-1], *together], console):
            blocks.append(keys)
        for column in together:
            if len(blocks[-1]) > len(keys) and not _fits([*blocks[-1], column], console):
                blocks.append(keys)
            blocks[-1] = [*blocks[-1], column]
    return blocks


def _settings_together(columns: Sequence[Column]) -> list[Column]:
    """Join the settings' columns to one, with a line for each setting that a row has."""
    settings = [column for column in columns if column.part == "settings"]
    if not settings:
        return list(columns)
    lines = [
        "\n".join(f"{column.name}={cell}" for column, cell in zip(settings, cells, strict=True) if cell)
        for cells in zip(*(column.cells for column in settings), strict=True)
    ]
    rest = [column for column in columns if column.part != "settings"]
    return [Column(name="settings", cells=lines, right=False), *rest]


def _fits(columns: Sequence[Column], console: Console) -> bool:
    return _width(_table(columns), console) <= console.width


def _width(table: Table, console: Console) -> int:
    return console.measure(table, options=console.options.update(max_width=_UNLIMITED)).maximum


def _table(columns: Sequence[Column]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column.name, justify="right" if column.right else "left", no_wrap=True)
    for cells in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*map(Text, cells))
    return table


def _shared_lines(comparison: Comparison) -> list[str]:
    """Write what all rows have in common, so that no row repeats it."""
    rows, settings = comparison.measured, comparison.settings
    same = [
        f"{group} {settings[f'{group}.name'].iloc[0]}"
        for group in GROUPS[1:]
        if f"{group}.name" not in comparison.shown
    ]
    if rows["planning"].nunique() == 1 and PLANNING not in comparison.shown:
        same.append(f"planned {rows['planning'].dropna().iloc[0]}")
    lines = [", ".join(same)] if same else []
    return lines + [f"{name.split('_')[0]}: {rows[name].iloc[0]}" for name in _SOURCES if rows[name].nunique() == 1]


def _sources(comparison: Comparison) -> list[str]:
    """Tell where prompts and weights came from, row by row where rows differ in it."""
    rows = comparison.measured
    return [
        f"{name.split('_')[0]} of {_rows(of_source.index)}: {source}"
        for name in _SOURCES
        if rows[name].nunique() > 1
        for source, of_source in rows.groupby(name, sort=False)
    ]


def _notes(comparison: Comparison) -> list[str]:
    """Write what must be known to read the numbers."""
    rows, notes = comparison.measured, []
    if (rows["num_runs"] > 1).any():
        notes.append("several runs in a row: the median (smallest-largest)")
    if comparison.baseline is not None:
        notes.append(f"ratio: of tok/s to {comparison.baseline}")
        if (rows["num_runs"] > 1).any():
            notes[-1] += "; its extremes: slowest run to fastest of the baseline, and the other way round"
        unlike = rows[rows["ratio_to_label"].notna() & (rows["ratio_to_label"] != rows["label"])]
        notes += [
            f"{_UNLIKE} row {index} is {row['label']}, its baseline {row['ratio_to_label']}: not like with like"
            for index, row in unlike.iterrows()
        ]
        notes += [
            f"{_UNLIKE} row {index} is planned {row['planning']}, its baseline {row['ratio_to_planning']}: "
            "not like with like"
            for index, row in rows[_unlike_planning(rows)].iterrows()
        ]
        if len(alone := rows[rows["ratio_to_row"].isna()]):
            notes.append(f"{_rows(alone.index)}: no baseline agrees in all else, so there is no ratio")
    if rows["planning"].nunique() > 1:
        told = [f"{_rows(of.index)} {value}" for value, of in rows.groupby("planning", sort=False)]
        notes.append(f"planned: {', '.join(told)}; a speed-up is of rows planned alike")
    if any(f"{time}_p50" in rows for time in TIMES):
        notes.append("latencies: median / 99th percentile of requests, all of which arrive at time 0")
        if len(simulated := rows[rows["label"] == "simulated"]):
            notes[-1] += f"; seconds of {_rows(simulated.index)} are simulated"
    if len(predicted := rows[rows["prediction_accuracy"].notna()]):
        told = [f"{_rows(of.index)} {label}" for label, of in predicted.groupby("label", sort=False)]
        notes.append(f"accuracy: of what the strategy's model predicts, against throughput: {', '.join(told)}")
    if (rows["prediction_accuracy"] < 0).any():
        notes[-1] += "; below zero: how many times the observed throughput the prediction is"
    for reason, of_reason in rows.groupby("disturbed", sort=False):
        notes.append(f"disturbed, {_rows(of_reason.index)}: {reason}; no time or rate there counts")
    return notes


def _unlike_planning(rows: pd.DataFrame) -> pd.Series:
    """Tell which rows are planned as built where their baseline is not, or the other way round."""
    return (rows[["planning", "ratio_to_planning"]].notna().all(axis="columns")) & (
        rows["planning"] != rows["ratio_to_planning"]
    )


def _rows(numbers: Sequence[int]) -> str:
    return f"row{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _shortened(value: object, at_most: int = _MAX_VALUE) -> str:
    if pd.isna(value):
        return ""
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= at_most else f"{text[: at_most - 3]}..."


def _with_spread(row: pd.Series, name: str, told: Callable[[float], str]) -> str:
    """Write the median, and the extremes where there are several runs."""
    if pd.isna(row[name]):
        return "-"
    spread = f" ({told(row[f'{name}_min'])}-{told(row[f'{name}_max'])})" if row["num_runs"] > 1 else ""
    return f"{told(row[name])}{spread}"


def _ratio(row: pd.Series) -> str:
    if pd.isna(row["ratio"]):
        return "-"
    planned = {planning for planning in (row["planning"], row["ratio_to_planning"]) if pd.notna(planning)}
    unlike = "" if row["ratio_to_label"] == row["label"] and len(planned) < 2 else _UNLIKE
    spread = "" if row["ratio_min"] == row["ratio_max"] else f" ({row['ratio_min']:.2f}-{row['ratio_max']:.2f})"
    return f"{row['ratio']:.2f}x{unlike}{spread}"


def _busiest(row: pd.Series) -> str:
    return f"{row['busiest_lane']} {row['busiest_share']:.1%}" if row["busiest_share"] else "-"


def _accuracy(row: pd.Series) -> str:
    """Write an accuracy: below zero, where a percentage would read like a fault, as the ratio that it is."""
    accuracy = row["prediction_accuracy"]
    if pd.isna(accuracy):
        return "-"
    return f"{accuracy:.1%}" if accuracy >= 0 else f"{2 - accuracy:.1f}x"


def _verified(row: pd.Series) -> str:
    if row["num_mismatched"]:
        return f"{row['num_mismatched']} of {row['num_verified']} WRONG"
    return f"{row['num_verified']} ok" if row["num_verified"] else "no"


def _time(row: pd.Series, time: str) -> str:
    return f"{number(row[f'{time}_p50'])} / {number(row[f'{time}_p99'])}" if pd.notna(row[f"{time}_p50"]) else "-"


def _short(runs: Sequence[str]) -> str:
    """Shorten the names of runs to the first run's hash, which tells runs of one table apart, with the number of a
    repetition."""
    found = re.search(r"[0-9a-f]{8}(-\d+)?$", runs[0])
    return f"{found[0] if found else runs[0]}{f' +{len(runs) - 1}' if len(runs) > 1 else ''}"
