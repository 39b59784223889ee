"""Run one experiment, or a sweep with -m: `python run.py strategy=moelens dataset=mtbench`."""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # errors reach `main` as they are, to be told in one line
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from harness.command_line import explained, require_single_choices
from harness.interrupts import INTERRUPTED

USAGE_ERROR, RUN_FAILED = 2, 1


class JobFailed(Exception):
    """A job of a sweep failed and has said so; the argument is the exit code."""


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def run(cfg: DictConfig) -> float:
    """One job; the throughput, so that optimising sweepers have something to maximise."""
    from harness.experiment import run_experiment
    from harness.record.terminal import print_summary

    try:
        require_single_choices(HydraConfig.get().overrides.task)
        values: Any = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
        summary, folder = run_experiment(values)
    except Exception as error:
        code = tell(error)
        if HydraConfig.get().mode is RunMode.MULTIRUN:
            raise JobFailed(code) from error  # the other jobs go on; then Hydra says which job this was
        sys.exit(code)  # an exception would make Hydra put a line of its own in front of ours
    try:
        print_summary(summary, folder)
    except OSError as error:  # the run itself went well, and its folder has it all
        print(f"warning: the summary could not be printed ({error.strerror}); it is in {folder}", file=sys.stderr)
    return float(summary["throughput_tok_s"] or 0.0)


def main() -> int:
    """The exit code: 0, 1 for a run that failed, 2 for bad input, 130 for an interruption."""
    try:
        run()
    except JobFailed as failure:
        return int(failure.args[0])
    except KeyboardInterrupt as interruption:
        folder = f"; what was recorded: {interruption}" if str(interruption) else ""
        print(f"interrupted{folder}", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        return tell(error)
    return 0


def tell(error: Exception) -> int:
    """Print what went wrong in one line; the exit code. What nobody foresaw is raised again, with its traceback."""
    from harness.experiment import RunFailed
    from harness.record.files import RecordError

    if (text := explained(error, sys.argv[1:])) is not None:
        print(f"error: {text}", file=sys.stderr)
        return USAGE_ERROR
    match error:
        case RunFailed():
            print(f"error: {error}\n  run folder: {error.folder}", file=sys.stderr)
        case RecordError():
            print(f"error: {error}", file=sys.stderr)
        case _:
            raise error
    return RUN_FAILED


if __name__ == "__main__":
    sys.exit(main())
