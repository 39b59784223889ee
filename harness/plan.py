"""What would happen, without running it: `python -m harness.plan model=mixtral-8x7b hardware=a40 strategy=NAME ...`.

Takes the overrides of run.py. Tells whether the model fits (every tier, by name; exit code 1 where it does not), which
policy the strategy's planner chooses, what throughput its paper's model predicts, and what the simulated machine says.
Two settings of its own:

  simulate=false               everything but the simulation
  max_simulated_ops=500000     where the simulation stops, after a whole pass; what has run until then is told
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console

from harness.command_line import composed_values, explained
from harness.config import ConfigError
from harness.interrupts import exit_code
from harness.plan_tables import does_not_fit_table, memory_and_policy_tables, throughput_table
from harness.planning import DoesNotFit, Plan, draft_plan, make_plan, simulated
from harness.record.terminal import Progress

__all__ = ["DoesNotFit", "Plan", "draft_plan", "main", "make_plan", "simulated"]

MAX_SIMULATED_OPS = 500_000  # some twenty seconds at most


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 2 for bad input, 1 where the plan does not fit."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if any(argument in ("-h", "--help") for argument in given):
        print(__doc__)
        return 0
    own = {"simulate": "true", "max_simulated_ops": str(MAX_SIMULATED_OPS)}
    overrides = []
    for argument in given:
        name, _, value = argument.partition("=")
        if name in own:
            own[name] = value
        else:
            overrides.append(argument)
    try:
        return _show(overrides, simulate=_is_true(own["simulate"]), max_ops=_count(own["max_simulated_ops"]))
    except DoesNotFit as error:
        Console().print(does_not_fit_table(error))
        print(f"does not fit: {error}", file=sys.stderr)
        return 1
    except Exception as error:
        if (text := explained(error, overrides)) is None:
            raise
        print(f"error: {text}", file=sys.stderr)
        return 2


def _show(overrides: Sequence[str], *, simulate: bool, max_ops: int) -> int:
    """The tables at once, the simulation when it is done. 1 where no request can run."""
    errors = Console(stderr=True)
    plan = draft_plan(
        composed_values(["machine=simulated", *overrides]), log=lambda text: errors.print(text, highlight=False)
    )
    Console().print(memory_and_policy_tables(plan))
    if simulate:
        with Progress(console=errors) as progress:
            progress.stage("simulation", plan.settings.dataset.num_requests, rate=f"tok/s {plan.machine.label}")
            plan = simulated(plan, max_ops=max_ops, on_progress=progress.update)
    Console().print(throughput_table(plan))
    return 1 if plan.summary is not None and plan.summary["throughput_tok_s"] is None else 0


def _is_true(text: str) -> bool:
    if text not in ("true", "false"):
        raise ConfigError("simulate", f"must be true or false, got {text}")
    return text == "true"


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError("max_simulated_ops", f"must be a whole number of at least 1, got {text}")
    return int(text)


if __name__ == "__main__":
    sys.exit(exit_code(main))
