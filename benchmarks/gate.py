"""Measures the kernels and fails where one has become slower than its committed reference.

    python benchmarks/gate.py                          # some minutes on 2 cores; exit code 1 below 0.9
    python benchmarks/gate.py --only linear --least 0.8

Compared are ratios taken within one run, of a ceiling's or another implementation's time over ours, with those in
results/reference/kernels from the same model of processor and code path: seconds would tell of the machine's other
guests. What is below is measured once more, and its better run counts. A processor without a reference is told and
passes, and so does a row whose read or copy ceiling is another one than the reference's: what a kernel reaches of it
depends on how fast memory is beside arithmetic.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.report_kernels import OUT, PARTS, folder_of, measure  # noqa: E402
from benchmarks.support.computer import machine_facts  # noqa: E402
from benchmarks.support.tables import table  # noqa: E402
from harness.cli.arguments import CommandParser, whole_number  # noqa: E402

ROUNDS = 9  # of 27
SAME_CEILING = 1.25  # most times that one ceiling is the other
Ratios = dict[tuple[str, str], float]  # by test and contestant: its time over ours
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Compared:
    """A ratio beside the reference's."""

    test: str
    contestant: str
    ratio: float
    reference: float
    ceilings_gb_s: tuple[float, float] | None = None  # now and the reference's

    @property
    def share(self) -> float:
        """The share of the reference's ratio that is left."""
        return self.ratio / self.reference

    @property
    def is_skipped(self) -> bool:
        """Return whether the ceilings are too far apart to compare."""
        return self.ceilings_gb_s is not None and max(self.ceilings_gb_s) > SAME_CEILING * min(self.ceilings_gb_s)

    def is_below(self, least: float) -> bool:
        """Return whether the kernel has become slower than `least` of its reference."""
        return not self.is_skipped and self.share < least


def ratios(rows: Iterable[Mapping[str, Any]]) -> Ratios:
    """Return the ratios of a part's rows."""
    return {(row["test"], contestant): value for row in rows for contestant, value in row["ratio"].items()}


def ceilings(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return each row's ceiling of memory in GB/s, where it has one."""
    found = {row["test"]: row.get("read_ceiling_gb_s", row.get("copy_ceiling_gb_s")) for row in rows}
    return {test: value for test, value in found.items() if value is not None}


def compared(now: Rows, reference: Rows) -> list[Compared]:
    """Return what both have, the worst first."""
    mine, others, at, was = ratios(now), ratios(reference), ceilings(now), ceilings(reference)
    both = [
        Compared(*key, mine[key], others[key], (at[key[0]], was[key[0]]) if key[0] in at and key[0] in was else None)
        for key in mine.keys() & others.keys()
    ]
    return sorted(both, key=lambda each: (each.share, each.test, each.contestant))


def gate(part: str, reference: Rows, arguments: list[str], least: float) -> list[Compared]:
    """Measure a part, and once more if anything is below; return each comparison's better run."""
    found: dict[tuple[str, str], Compared] = {}
    for _ in range(2):
        result = measure(part, arguments)
        for each in compared(result["rows"] if result else [], reference):
            key = (each.test, each.contestant)
            found[key] = max(found.get(key, each), each, key=lambda one: (not one.is_skipped, one.share))
        if not any(each.is_below(least) for each in found.values()):
            break
    return sorted(found.values(), key=lambda each: each.share)


def verdict(each: Compared, least: float) -> str:
    """Return what the table's last column says."""
    if each.is_skipped and each.ceilings_gb_s is not None:
        now, then = each.ceilings_gb_s
        return f"SKIPPED: the ceiling is {now:.1f} GB/s, the reference's {then:.1f}"
    return "**below**" if each.share < least else "ok"


def told(found: Iterable[Compared], least: float) -> str:
    rows = [
        [each.test, each.contestant, f"{each.ratio:.2f}", f"{each.reference:.2f}", f"{each.share:.2f}",
         verdict(each, least)]
        for each in found
    ]  # fmt: skip
    return table([["benchmark", "time of / ours", "now", "reference", "share", f"at least {least:g}"], *rows])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = CommandParser("benchmarks/gate.py", __doc__)
    parser.add_argument("--only", choices=sorted(PARTS), action="append", help="parts to run (default: all)")
    parser.add_argument("--least", type=float, default=0.9, help="share of the reference's ratio (default: 0.9)")
    parser.add_argument(
        "--rounds", type=whole_number(1), default=ROUNDS, help=f"rounds of each measurement (default: {ROUNDS})"
    )
    parser.add_argument("--reference", type=Path, default=OUT, help="folder with <machine>/<part>.json")
    return parser.run(judge, arguments)


def judge(given: Namespace) -> int:
    """Return 1 where a kernel is below its reference, else 0."""
    folder = given.reference / folder_of(machine_facts())
    if not folder.is_dir():
        known = ", ".join(sorted(path.name for path in given.reference.iterdir() if path.is_dir()))
        print(f"SKIPPED: no reference for {folder.name} (there are {known}); benchmarks/report_kernels.py makes one")
        return 0
    found, below = [], False
    for part in given.only or PARTS:
        path = folder / f"{part}.json"
        if not path.exists():
            print(f"SKIPPED {part}: {folder.name} has no reference of it")
            continue
        found = gate(part, json.loads(path.read_text())["rows"], ["--rounds", str(given.rounds)], given.least)
        print(f"## {part}\n\n{told(found, given.least)}\n" if found else f"SKIPPED {part}: nothing to compare")
        below = below or any(each.is_below(given.least) for each in found)
    print(f"below {given.least:g} of the reference" if below else "no kernel is below its reference")
    return int(below)


if __name__ == "__main__":
    sys.exit(main())
