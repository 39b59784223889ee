"""Make PreScope's reports: `python -m paper_figures.prescope [NAME ...] [--out FOLDER]`.

A report that was cut off goes on with the cases that are missing in its file.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from harness.interrupts import exit_code
from paper_figures import reports
from paper_figures.prescope import ablation, cpu_rates, gap, hit_rates, launches, measured_rates, regret, throughput
from paper_figures.prescope.cases import FOLDER, NOTE
from paper_figures.reports import Report

REPORTS = {
    "throughput": Report(
        compute=throughput.compute, tables=throughput.tables, note=NOTE, folder=FOLDER,
        pictures={
            "fig05-13-expert": throughput.draw_expert, "fig12-throughput": throughput.draw_throughput,
            "fig14-latency": throughput.draw_latency,
        },
    ),
    "ablation": Report(
        compute=ablation.compute, tables=ablation.tables, note=NOTE, folder=FOLDER,
        pictures={"fig15-ablation": ablation.draw},
    ),
    "cpu-rates": Report(compute=cpu_rates.compute, tables=cpu_rates.tables, note=NOTE, folder=FOLDER),
    "launches": Report(compute=launches.compute, tables=launches.tables, note=NOTE, folder=FOLDER),
    "measured-rates": Report(compute=measured_rates.compute, tables=measured_rates.tables, note=NOTE, folder=FOLDER),
    "hit-rates": Report(
        compute=hit_rates.compute, tables=hit_rates.tables, note=hit_rates.NOTE, folder=FOLDER,
        pictures={"hit-rates": hit_rates.draw},
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
