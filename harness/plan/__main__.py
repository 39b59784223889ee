"""Plan without running: `python -m harness.plan model=mixtral-8x7b hardware=a40 strategy=NAME ...` says what would
happen.

Takes the overrides of run.py, which would run the same requests. Tells whether the model fits (every tier, by name;
exit code 1 where it does not), which policy the strategy's planner chooses, what throughput its paper's model predicts,
and what the simulated machine says.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from typing import Any

from rich.console import Console

from harness.cli.arguments import FAILED, CommandParser, whole_number
from harness.cli.overrides import composed_values
from harness.interrupts import exit_code
from harness.plan.planning import DoesNotFit, Plan, draft_plan, make_plan, simulated
from harness.plan.tables import does_not_fit_table, memory_and_policy_tables, throughput_table
from harness.record.terminal import Progress

__all__ = ["DoesNotFit", "Plan", "draft_plan", "main", "make_plan", "simulated"]

MAX_SIMULATED_OPS = 500_000  # some twenty seconds at most


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 2 for bad input, 1 where the plan does not fit."""
    parser = CommandParser("harness.plan", __doc__)
    parser.add_overrides()
    parser.add_argument("--no-simulation", action="store_true", help="tell everything but what the simulation says")
    parser.add_argument(
        "--max-simulated-ops", type=whole_number(1), default=MAX_SIMULATED_OPS, metavar="N",
        help="where the simulation stops, after a whole pass; what has run until then is told (default: %(default)s)",
    )  # fmt: skip
    return parser.run(_show, arguments)


def _show(given: Namespace) -> int:
    """Print tables at once, the simulation when it is done. 1 where the model does not fit or no request can run."""
    errors = Console(stderr=True)
    try:
        plan = draft_plan(planned_values(given.overrides), log=partial(errors.print, highlight=False))
    except DoesNotFit as error:
        Console().print(does_not_fit_table(error))
        print(f"does not fit: {error}", file=sys.stderr)
        return FAILED
    Console().print(memory_and_policy_tables(plan))
    if not given.no_simulation:
        with Progress(console=errors) as progress:
            progress.stage("simulation", plan.settings.dataset.num_requests, rate=f"tok/s {plan.machine.label}")
            plan = simulated(plan, max_ops=given.max_simulated_ops, on_progress=progress.update)
    Console().print(throughput_table(plan))
    return FAILED if plan.summary is not None and plan.summary["throughput_tok_s"] is None else 0


def planned_values(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the configuration of a plan: that of a run with these overrides, on the simulated machine."""
    return composed_values(["machine=simulated", *overrides])


if __name__ == "__main__":
    sys.exit(exit_code(main))
