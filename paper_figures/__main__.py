"""Compute all simulated reports of results/reference anew: `python -m paper_figures [STEP ...]`.

    python -m paper_figures --list      # the steps, in their order: some read what others have written
    python -m paper_figures             # all of them; a quarter of an hour on two cores
    python -m paper_figures moelens.workloads latency

Rows are computed side by side, one process a core. Each file says which commit made it, so nothing but results may
differ from one. What was cut off is started again by naming its step and those behind it.
"""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

from rich.console import Console
from rich.table import Table

from harness.cli.arguments import CommandParser
from harness.config import ConfigError
from harness.interrupts import exit_code
from harness.record.provenance import code_version
from paper_figures.latency import __main__ as latency
from paper_figures.latency import caches, grid
from paper_figures.latency import part as latency_part
from paper_figures.moegen import __main__ as moegen
from paper_figures.moegen import part as moegen_part
from paper_figures.moegen import rows
from paper_figures.moegen.settings import Case
from paper_figures.moelens import __main__ as moelens
from paper_figures.moelens import simulate, simulated, speed_up, workloads
from paper_figures.moelightning import __main__ as moelightning
from paper_figures.moelightning import several_gpus
from paper_figures.pool import begin, end, num_cores
from paper_figures.prescope import __main__ as prescope

_EMULATED = {"fig6", "emulated"}  # they need a machine of their own


def _missing(cases: Callable[[], list[Case]]) -> list[Case]:
    return rows.missing(cases())


def _names(reports: Mapping[str, object]) -> list[str]:
    return [name for name in reports if name not in _EMULATED]


STEPS: Mapping[str, Callable[[], int]] = {
    "moelens.runs": partial(simulate.main, []),
    "moelens.summary": partial(simulated.main, []),
    "moelens.speed_up": partial(speed_up.main, []),
    "moelens.workloads": partial(workloads.main, []),
    **{f"moelens.{name}": partial(moelens.main, [name]) for name in _names(moelens.REPORTS)},
    **{f"moelightning.{name}": partial(moelightning.main, [name]) for name in _names(moelightning.REPORTS)},
    **{f"moegen.{name}": partial(moegen.main, [name]) for name in _names(moegen.REPORTS)},
    # Rows that reports of PreScope share are computed once, by the first of them.
    "prescope": partial(prescope.main, [*prescope.REPORTS, "--again"]),
    **{f"latency.{name}": partial(latency.main, [name]) for name in _names(latency.REPORTS)},
}
# What a step's `each` will be asked for, with its function. Cores that find nothing more to do in one step go on with
# the next one, so that none waits for a step's last rows and pictures.
AHEAD: Mapping[str, tuple[Callable[[Any], Any], Callable[[], Sequence[Hashable]]]] = {
    "moelightning.several_gpus": (several_gpus.row_of, several_gpus.cells),
    **{f"moegen.{name}": (rows.row, partial(_missing, cases)) for name, cases in moegen_part.CASES.items()},
    **{f"latency.{name}": (grid.row, cases) for name, cases in latency_part.CASES.items()},
    "latency.caches": (caches.rows, caches.cases),
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = CommandParser("paper_figures", __doc__)
    parser.add_argument("steps", nargs="*", metavar="STEP", help="default: all; a paper's name stands for all of its")
    parser.add_argument("--list", action="store_true", help="name the steps and do nothing")
    return parser.run(_make, arguments)


def chosen(given: Sequence[str]) -> list[str]:
    """Return the steps that are named, each alone or by its paper, in their order. Raises ConfigError."""
    papers = list(dict.fromkeys(step.partition(".")[0] for step in STEPS))
    if unknown := [name for name in given if name not in (*STEPS, *papers)]:
        raise ConfigError("STEP", f"must be one of {', '.join((*papers, *STEPS))}, got {', '.join(unknown)}")
    return [step for step in STEPS if not given or step in given or step.partition(".")[0] in given]


def _make(given: Namespace) -> int:
    steps = chosen(given.steps)
    if given.list:
        print("\n".join(steps))
        return 0
    began = code_version()
    try:
        took_s = _made(steps, began)
    finally:
        end()  # whatever of the next step has begun
    if took_s is None:
        return 1
    table = Table(title=f"{num_cores()} cores, code {began}", caption="rows that begin ahead count before their step")
    for heading in ("step", "seconds"):
        table.add_column(heading, justify="right" if heading == "seconds" else "left")
    for step, seconds in (took_s | {"all": sum(took_s.values())}).items():
        table.add_row(step, f"{seconds:,.0f}")
    Console().print(table)
    return 0


def _made(steps: Sequence[str], code: str) -> dict[str, float] | None:
    """Make the steps and return what each took, in seconds; None where one has failed. Raises ConfigError where the
    code changes meanwhile."""
    took_s = {}
    for step, following in zip_longest(steps, steps[1:]):
        began_s = time.monotonic()
        for ahead in (step, following) if step in AHEAD else ():
            if ahead in AHEAD:
                row, cases = AHEAD[ahead]
                begin(row, cases())
        if STEPS[step]():
            return None
        took_s[step] = time.monotonic() - began_s
        if (now := code_version()) != code:
            raise ConfigError("STEP", f"the code changed from {code} to {now} while {step} was computed: begin again")
    return took_s


if __name__ == "__main__":
    sys.exit(exit_code(main))
