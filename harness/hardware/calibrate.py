"""Measure this computer for `hardware=local`: `python -m harness.hardware.calibrate [overrides of run.py]`.

It takes two minutes, in which nothing else should run; measurements during which others had the cores are repeated,
and named where that did not help.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from harness.bench.fitting import typical_by_features
from harness.calibration.local import measure, table_path
from harness.calibration.table import ALONE, BESIDE_GPU, BESIDE_GPU_AND_LINK, BESIDE_LINK, CalibrationTable, Company
from harness.cli.arguments import CommandParser
from harness.cli.overrides import composed_values
from harness.interrupts import exit_code
from harness.machine.base import LaneKind
from harness.model.cache import CACHE_VARIABLE, make_writable
from harness.model.planned import planned_model
from harness.settings import parse_settings

_COMPANIES = {"beside h2d": BESIDE_LINK, "beside gpu": BESIDE_GPU, "beside both": BESIDE_GPU_AND_LINK}
_MAX_NAMED = 5


def report(table: CalibrationTable) -> Group:
    """Report what was measured.

    That is each kind of op with range, spread, the worst error of its fits and what company costs it; lanes together;
    host memory; times of the strategy's thread; and what stayed disturbed.
    """
    return Group(_ops(table), _together(table), Text(_memory(table)), Text(_host(table)), _disturbed(table))


def _ops(table: CalibrationTable) -> Table:
    ops = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("op", "points", "fastest", "slowest", "spread", "worst fit", *_COMPANIES):
        ops.add_column(name, justify="left" if name == "op" else "right")
    spread, worst = table.spread(), table.worst_fit()
    for key, points in table.samples[ALONE].items():
        typical = sorted(typical_by_features(points).values())
        shortest, longest = f"{typical[0] * 1e3:.3g} ms", f"{typical[-1] * 1e3:.3g} ms"
        beside = [_times_longer(table, key, company) for company in _COMPANIES.values()]
        ops.add_row(key, str(len(typical)), shortest, longest, f"{spread[key]:.0%}", f"{worst[key]:.0%}", *beside)
    return ops


def _times_longer(table: CalibrationTable, key: str, company: Company) -> str:
    """Tell the median, over the points, of the time in company relative to the time alone."""
    alone = typical_by_features(table.samples[ALONE][key])
    beside = typical_by_features(table.samples.get(company, {}).get(key, []))
    ratios = [beside[features] / seconds for features, seconds in alone.items() if features in beside and seconds > 0]
    return f"{median(ratios):.2f}x" if ratios else "-"


def _together(table: CalibrationTable) -> Table:
    kinds = [str(kind) for kind in LaneKind if any(str(kind) in factors for factors in table.together.values())]
    lanes = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("lanes together", *kinds):
        lanes.add_column(name, justify="left" if name == "lanes together" else "right")
    for group, factors in table.together.items():
        lanes.add_row(group, *(f"{factors[lane]:.2f}x" if lane in factors else "-" for lane in kinds))
    return lanes


def _memory(table: CalibrationTable) -> str:
    rates = [
        f"{name.replace('_', ' ')} {median(values):.1f} GB/s"
        for name, values in table.memory.items()
        if name != "working_set_gb"
    ]
    return f"host memory over {median(table.memory['working_set_gb']):.2f} GB: {', '.join(rates)}"


def _host(table: CalibrationTable) -> str:
    host = table.host
    return (
        f"a submission takes {host.submit_s * 1e6:.0f} us, a wake-up {host.wake_s * 1e6:.0f} us, "
        f"a hand-over {host.handover_s * 1e6:.0f} us and beside another lane {host.handover_beside_s * 1e6:.0f}, "
        f"a pass {host.pass_s * 1e3:.2f} ms and {host.sequence_s * 1e6:.0f} us a sequence; "
        f"{table.meta['rejected']} disturbed measurements were repeated"
    )


def _disturbed(table: CalibrationTable) -> Text:
    names = table.meta["disturbed"]
    if not names:
        return Text("no measurement stayed disturbed")
    shown = "; ".join(names[:_MAX_NAMED]) + (f"; and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else "")
    return Text(f"DISTURBED all the same, {len(names)}: {shown}", style="bold yellow")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = CommandParser("harness.hardware.calibrate", __doc__)
    parser.add_overrides()
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the table goes (default: the cache folder)")
    return parser.run(_calibrate, arguments)


def _calibrate(given: Namespace) -> int:
    console = Console(stderr=True)
    settings = parse_settings(composed_values(given.overrides))
    path = given.out or table_path(settings, planned_model(settings.model).spec)
    make_writable(path.parent, "--out" if given.out else CACHE_VARIABLE)  # before minutes of work
    table = measure(settings, log=lambda text: console.print(text, highlight=False, style="dim"))
    table.write(path)
    Console().print(report(table))
    print(f"table  {path}")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
