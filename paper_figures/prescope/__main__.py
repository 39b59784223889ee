"""Make PreScope's reports: `python -m paper_figures.prescope [NAME ...] [--out FOLDER] [--again]`.

A report that was cut off goes on with the cases that are missing in its file. Rows that stand in a committed report
with the same command are taken from there, and keep the commit that computed them; `--again` computes all that this
very code has not. `gap` and `regret` keep nothing.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.interrupts import exit_code
from paper_figures import reports
from paper_figures.drawing import Draw
from paper_figures.prescope import ablation, cpu_rates, gap, hit_rates, launches, measured_rates, regret, throughput
from paper_figures.prescope.cases import FOLDER, NOTE, Case, computed
from paper_figures.reports import Report


def of_cases(
    name: str, wanted: Callable[[], list[Case]], tables: Callable[[dict[str, Any]], str], note: str = NOTE,
    pictures: Mapping[str, Draw] | None = None,
) -> Report:  # fmt: skip
    """Return the report whose rows are those of the cases that `wanted` gives."""

    def compute(out: Path, *, again: bool) -> dict[str, Any]:
        return {"label": "simulated", "rows": computed(name, wanted(), out, again=again)}

    return Report(compute=compute, tables=tables, note=note, folder=FOLDER, pictures=pictures or {}, keeps_rows=True)


REPORTS = {
    "throughput": of_cases(
        "throughput", throughput.wanted, throughput.tables,
        pictures={
            "fig05-13-expert": throughput.draw_expert, "fig12-throughput": throughput.draw_throughput,
            "fig14-latency": throughput.draw_latency,
        },
    ),
    "ablation": of_cases(
        "ablation", ablation.wanted, ablation.tables, pictures={"fig15-ablation": ablation.draw}
    ),
    "cpu-rates": of_cases("cpu-rates", cpu_rates.wanted, cpu_rates.tables),
    "launches": of_cases("launches", launches.wanted, launches.tables),
    "measured-rates": of_cases("measured-rates", measured_rates.wanted, measured_rates.tables),
    "hit-rates": of_cases(
        "hit-rates", hit_rates.wanted, hit_rates.tables, hit_rates.NOTE, pictures={"hit-rates": hit_rates.draw}
    ),
    "regret": Report(compute=regret.compute, tables=regret.tables, note=regret.NOTE, folder=FOLDER),
    "gap": Report(
        compute=gap.compute, tables=gap.tables, note=gap.NOTE, folder=FOLDER, pictures={"fig17-gap": gap.draw}
    ),
}  # fmt: skip


def others(folder: Path) -> None:
    """Draw nothing more: all pictures are those of reports."""


def main(arguments: Sequence[str] | None = None) -> int:
    return reports.main("prescope", REPORTS, others, arguments)


if __name__ == "__main__":
    sys.exit(exit_code(main))
