"""Make reports by name: numbers and what made them in a JSON file, tables (also on the terminal), and pictures.

python -m paper_figures.PAPER                       # every picture that its committed numbers allow
python -m paper_figures.PAPER NAME ... --out FOLDER # compute these reports again
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

from harness.cli.arguments import CommandParser
from harness.config import ConfigError
from harness.model.cache import make_writable
from harness.record.provenance import code_version, environment, shown_command
from paper_figures.drawing import Draw
from paper_figures.support import FIGURES, read_json, save, write_json


@dataclass(frozen=True, kw_only=True)
class Report:
    """`compute` gives the numbers with their `label`; `tables` writes them as Markdown; `pictures` draws them.

    `folder` is where the committed numbers lie, and where new ones go unless it is said otherwise. With `keeps_rows`,
    `compute` takes the folder to write to and whether to compute all rows `again`; else it takes nothing.
    """

    compute: Callable[..., dict[str, Any]]
    tables: Callable[[dict[str, Any]], str]
    note: str
    folder: Path
    pictures: Mapping[str, Draw] = field(default_factory=dict)
    keeps_rows: bool = False


def made_by(command: str) -> dict[str, Any]:
    """Say how the numbers of a report were made, which stands at their beginning."""
    return {"date": date.today().isoformat(), "code": code_version(), "command": command, "environment": environment()}


def written_with(command: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Say how a report was made that keeps rows: which commits computed them, each for itself.

    The day is that on which they were written together, since rows may be older.
    """
    head = made_by(command)
    commits = ", ".join(sorted({row["code"] for row in rows}))
    return {"written": head["date"], "code": commits, "command": command, "environment": head["environment"]}


def run(name: str, report: Report, out: Path, command: str, *, again: bool = False) -> None:
    """Compute, write <name>.json, <name>.md and pictures to `out`, and print the tables.

    Where a report keeps rows that it has, `again` has them computed too.
    """
    if report.keeps_rows:
        data = report.compute(out, again=again)
        data = {**written_with(command, data["rows"]), **data}
    else:
        data = {**made_by(command), **report.compute()}
    write_json(out / f"{name}.json", data)
    written = read_json(out / f"{name}.json")
    text = report.tables(written)
    (out / f"{name}.md").write_text(text, encoding="utf-8")
    print(text)
    draw(report, written, out)


def draw(report: Report, data: dict[str, Any], out: Path) -> None:
    for picture, function in report.pictures.items():
        save(function(data), out / f"{picture}.png", label=data["label"], note=report.note)
        print(out / f"{picture}.png")


def main(
    paper: str, reports: Mapping[str, Report], others: Callable[[Path], None], arguments: Sequence[str] | None = None
) -> int:
    """Compute the reports that are named; without a name, draw what is committed again, and `others` into a folder."""
    parser = CommandParser(f"paper_figures.{paper}", __doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"what to compute: {', '.join(reports)}")
    parser.add_argument("--out", type=Path, default=None, metavar="FOLDER", help="default: where the report belongs")
    if any(report.keeps_rows for report in reports.values()):
        told = "compute all rows of other code; else those that are there with the same command are kept"
        parser.add_argument("--again", action="store_true", help=told)
    return parser.run(partial(_make, paper, reports, others), arguments)


def _make(paper: str, reports: Mapping[str, Report], others: Callable[[Path], None], given: Namespace) -> int:
    if unknown := [name for name in given.names if name not in reports]:
        raise ConfigError("NAME", f"must be one of {', '.join(reports)}, got {', '.join(unknown)}")
    again = getattr(given, "again", False)
    if again and not given.names:
        raise ConfigError("--again", f"computes the reports that are named: {', '.join(reports)}")
    folders = {given.out or reports[name].folder for name in given.names} or {given.out or FIGURES / paper}
    for folder in folders:
        make_writable(folder, "--out")  # before minutes of work
    for name in given.names:
        command = shown_command(f"-m paper_figures.{paper}", [name])
        run(name, reports[name], given.out or reports[name].folder, command, again=again)
    if not given.names:
        (folder,) = folders
        for name, report in reports.items():
            if (numbers := report.folder / f"{name}.json").exists():
                draw(report, read_json(numbers), folder)
        others(folder)
    return 0
