"""Run one experiment, or a sweep with -m: `python run.py strategy=moelens dataset=mtbench`."""

from __future__ import annotations

import difflib
import os
import sys
from typing import Any

os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # errors reach `main` as they are, to be told in one line
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from harness.config import ConfigError

USAGE_ERROR, RUN_FAILED, INTERRUPTED = 2, 1, 130


class JobFailed(Exception):
    """A job of a sweep failed and has said so; the argument is the exit code."""


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def run(cfg: DictConfig) -> float:
    """One job; the throughput, so that optimising sweepers have something to maximise."""
    from harness.experiment import run_experiment
    from harness.record.terminal import print_summary

    try:
        values: Any = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
        summary, folder = run_experiment(values)
    except Exception as error:
        code = tell(error)
        if HydraConfig.get().mode is RunMode.MULTIRUN:
            raise JobFailed(code) from error  # the other jobs go on; then Hydra says which job this was
        sys.exit(code)  # an exception would make Hydra put a line of its own in front of ours
    print_summary(summary, folder)
    return float(summary["throughput_tok_s"] or 0.0)


def main() -> int:
    """The exit code: 0, 1 for a run that failed, 2 for bad input, 130 for an interruption."""
    try:
        run()
    except JobFailed as failure:
        return int(failure.args[0])
    except KeyboardInterrupt:
        print("interrupted; what was recorded is in the run folder", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        return tell(error)
    return 0


def tell(error: Exception) -> int:
    """Print what went wrong in one line; the exit code. What nobody foresaw is raised again, with its traceback."""
    from harness.experiment import RunFailed
    from harness.machine.base import MachineError
    from harness.memory.tiers import MemoryCapacityError
    from harness.record.files import RecordError

    match error:
        case ConfigError() | HydraException() | OmegaConfBaseException():
            print(f"error: {_one_line(error)}", file=sys.stderr)
            return USAGE_ERROR
        case RunFailed():
            print(f"error: {error}\n  run folder: {error.folder}", file=sys.stderr)
        case MachineError() | MemoryCapacityError() | MemoryError() | RecordError():
            print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
        case _:
            raise error
    return RUN_FAILED


def _one_line(error: Exception) -> str:
    """The field and what is valid. Hydra says less, over more lines, and advises to append a misspelt key."""
    if isinstance(error, ConfigError):
        return str(error)
    cause = error.__cause__
    if isinstance(error, ConfigCompositionException) and isinstance(cause, OmegaConfBaseException):
        return _unknown_key(cause)
    if isinstance(error, MissingConfigException) and error.options:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        valid = [option for option in error.options if not option.startswith("_")]
        return f"{group}: there is no '{name}'; valid are {', '.join(valid)}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, OmegaConfBaseException):
        return f"{error.full_key}: {lines[0]}"
    return " ".join(line for line in lines if not line.startswith("See http"))


def _unknown_key(error: OmegaConfBaseException) -> str:
    parent = error.parent_node
    valid = sorted(str(key) for key in parent if key != "hydra") if isinstance(parent, DictConfig) else []
    close = difflib.get_close_matches(str(error.key), valid, n=1)
    hint = f"did you mean '{close[0]}'? " if close else ""
    known = f"valid keys are {', '.join(valid)}" if valid else "what it is under is a single value"
    return f"{error.full_key}: unknown key; {hint}{known}"


if __name__ == "__main__":
    sys.exit(main())
