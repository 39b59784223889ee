"""Plan without running: `python -m harness.plan model=mixtral-8x7b hardware=a40 strategy=NAME ...` says what would
happen.

Takes the overrides of run.py. On the profile of a real machine the number of requests is the paper's, where the dataset
states it for these lengths and nothing asks for another. Tells whether the model fits (every tier, by name; exit code 1
where it does not), which policy the strategy's planner chooses, what throughput its paper's model predicts, and what
the simulated machine says.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf
from rich.console import Console

from harness.cli.arguments import FAILED, CommandParser, whole_number
from harness.cli.overrides import CONF, composed_values
from harness.interrupts import exit_code
from harness.plan.planning import DoesNotFit, Plan, draft_plan, make_plan, simulated
from harness.plan.tables import does_not_fit_table, memory_and_policy_tables, throughput_table
from harness.record.terminal import Progress

__all__ = ["DoesNotFit", "Plan", "draft_plan", "main", "make_plan", "simulated"]

MAX_SIMULATED_OPS = 500_000  # some twenty seconds at most
_LENGTHS = ("max_new_tokens", "min_prompt_tokens", "max_prompt_tokens", "lengths")  # a paper's number is for these


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
    """Return the configuration of a plan. Datasets' default number of requests is a laptop's; real machines get a
    paper's, where the lengths are those that the paper states it for."""
    values = composed_values(["machine=simulated", *overrides])
    dataset = dict(values["dataset"])
    if dataset["published_requests"] is not None and not _has_published_lengths(dataset):
        dataset["published_requests"] = None
    if values["hardware"]["gpu"] is not None and not _number_is_asked_for(overrides):
        dataset["num_requests"] = dataset["published_requests"] or dataset["num_requests"]
    return {**values, "dataset": dataset}


def _has_published_lengths(dataset: Mapping[str, Any]) -> bool:
    name = dataset["name"]
    if not (CONF / "dataset" / f"{name}.yaml").is_file():
        return False
    published = _published(CONF, name)
    return all(dataset[key] == published[key] for key in _LENGTHS)


@cache
def _published(conf: Path, name: str) -> Mapping[str, Any]:
    """Return a dataset's settings as its file in the folder `conf` has them."""
    dataset: Mapping[str, Any] = composed_values([f"dataset={name}"])["dataset"]
    return dataset


def _number_is_asked_for(overrides: Sequence[str]) -> bool:
    """Tell whether an override, or the file of a chosen experiment, states the number of requests, even if it is the
    default one."""
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        key, value = override.key_or_group, override.value()
        if key == "dataset.num_requests" or (key == "dataset" and isinstance(value, dict) and "num_requests" in value):
            return True
        if key == "experiment":
            for name in value if isinstance(value, list) else [value]:
                experiment = OmegaConf.load(CONF / "experiment" / f"{name}.yaml")
                if OmegaConf.select(experiment, "dataset.num_requests") is not None:
                    return True
    return False


if __name__ == "__main__":
    sys.exit(exit_code(main))
