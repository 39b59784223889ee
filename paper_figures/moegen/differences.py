"""Show where the search's prediction and the simulator differ, by phase and lane.

    python -m paper_figures.moegen.differences strategy=moegen_h model=mixtral-8x7b hardware=a5000 kv_cache_gb=4

Both times are of a pass: of prefill, and of decode averaged over the generation. A lane's is how long it has an op
running. docs/architecture.md says what the differences come from.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.cli.arguments import CommandParser
from harness.config import ConfigError
from harness.interrupts import exit_code
from harness.plan.planning import DoesNotFit
from paper_figures.measuring import batch_passes
from paper_figures.moegen.rows import facts, predicted_passes
from paper_figures.moegen.text import number
from paper_figures.passes import planned
from paper_figures.support import markdown_table

PHASES = ("prefill", "decode")
LANES = ("h2d", "gpu", "cpu", "d2h")
_PASS = "all"


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The seconds that a lane of one phase, or "all", takes for a pass: as the search predicts, and as simulated."""

    phase: str
    lane: str
    predicted_s: float
    simulated_s: float
    share: float  # of the simulated pass, by which the prediction is more


def differences(row: Mapping[str, Any]) -> Iterator[Difference]:
    """Yield what a row of a report tells of its search's passes; nothing where there was no search."""
    for phase in PHASES:
        predicted, simulated = row.get("search"), row.get(phase)
        if not predicted or not simulated or f"{phase}_pass_s" not in predicted:
            continue
        pass_s, busy_s = simulated["pass_s"], predicted[f"{phase}_busy_s"]
        of_lanes = {lane: (busy_s.get(lane, 0.0), simulated["busy"][lane] * pass_s) for lane in LANES}
        for lane, (told_s, took_s) in {_PASS: (predicted[f"{phase}_pass_s"], pass_s), **of_lanes}.items():
            yield Difference(
                phase=phase, lane=lane, predicted_s=told_s, simulated_s=took_s, share=(told_s - took_s) / pass_s
            )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = CommandParser("paper_figures.moegen.differences", __doc__)
    parser.add_overrides()
    return parser.run(_show, arguments, DoesNotFit)


def _show(given: Namespace) -> int:
    plan = planned(given.overrides)
    predicted = predicted_passes(plan.strategy.plan)
    if predicted is None:
        raise ConfigError("strategy", "must be moegen_g or moegen_h, with search=true")
    row = {**facts(plan, batch_passes(plan)), "search": predicted}
    columns = {
        "phase": lambda d: d.phase,
        "lane": lambda d: d.lane,
        "predicted s a pass": lambda d: number(d.predicted_s),
        "simulated s a pass": lambda d: number(d.simulated_s),
        "difference / simulated pass": lambda d: f"{d.share:+.1%}",
    }
    print(markdown_table(columns, list(differences(row))))
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
