"""Run one experiment, or a sweep with -m: `python run.py strategy=moelens dataset=mtbench`."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # errors reach `main` as they are, to be told in one line
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from harness.cli.arguments import FAILED, USAGE_ERROR, VERSION, require_known_options
from harness.cli.overrides import choices, explained, left_to_jobs, require_single_choices
from harness.interrupts import interruption_behind, interrupts_kept, leave, told

OPTIONS = (  # Hydra's; --help and --version say what is the project's own
    "--help", "--version", "--multirun", "--run", "--cfg", "--resolve", "--package", "--info", "--hydra-help",
    "--config-dir", "--config-path", "--config-name", "--shell-completion", "--experimental-rerun",
)  # fmt: skip
OmegaConf.register_new_resolver("choices", choices, replace=True)  # for conf/hydra/help/project.yaml


class JobFailed(Exception):
    """A job of a sweep failed and has said so; the argument is the exit code."""


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def run(cfg: DictConfig) -> float:
    """Run one job and return the median throughput of its repeats, so that optimising sweepers have something to
    maximise."""
    from harness.run.experiment import run_experiment
    from harness.settings import repeats_of

    runs: list[tuple[dict[str, Any], Path]] = []
    try:
        require_single_choices(HydraConfig.get().overrides.task)
        values: Any = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
        sweep = Path(HydraConfig.get().sweep.dir).name if HydraConfig.get().mode is RunMode.MULTIRUN else None
        for repeat in repeats_of(values):
            runs.append(run_experiment(repeat, sweep))
            show(*runs[-1])
    except Exception as error:
        code = tell(error)
        if HydraConfig.get().mode is RunMode.MULTIRUN:
            raise JobFailed(code) from error  # the other jobs go on; then Hydra says which job this was
        sys.exit(code)  # an exception would make Hydra put a line of its own in front of ours
    if len(runs) > 1:
        from harness.record import compare

        compare.main([str(folder) for _, folder in runs])
    return median(summary["throughput_tok_s"] or 0.0 for summary, _ in runs)


def show(summary: dict[str, Any], folder: Path) -> None:
    """Print the summary. If printing fails, the run itself still went well, and its folder holds everything."""
    from harness.record.terminal import print_summary

    try:
        print_summary(summary, folder)
    except OSError as error:
        print(f"warning: the summary could not be printed ({error.strerror}); it is in {folder}", file=sys.stderr)


def main() -> int:
    """Return the exit code: 0, 1 for a run that failed, 2 for bad input, 130 for Ctrl-C, 143 for SIGTERM."""
    try:
        # Before Hydra, which would show its usage, and take `--vers` for its own version.
        require_known_options(sys.argv[1:], OPTIONS)
        if "--version" in sys.argv[1:]:
            print(VERSION)
            return 0
        sys.argv[1:] = left_to_jobs(sys.argv[1:])
        with interrupts_kept():
            run()
    except JobFailed as failure:
        return int(failure.args[0])
    except KeyboardInterrupt as interruption:
        return told(interruption)
    except Exception as error:
        if (behind := interruption_behind(error)) is not None:  # it cut Hydra in two while it composed a job
            return told(behind)
        return tell(error)
    return 0


def tell(error: Exception) -> int:
    """Print what went wrong in one line, and return the exit code. An error that nobody foresaw is raised again, with
    its traceback."""
    if (mistake := explained(error, sys.argv[1:])) is not None:
        print(f"error: {mistake}", file=sys.stderr)
        return USAGE_ERROR
    if (plugin := plugin_behind(error)) is not None:  # a launcher whose system is not here, say
        print(f"error: {plugin}: {error}", file=sys.stderr)
        return FAILED
    from harness.record.files import RecordError
    from harness.run.experiment import RunFailed  # takes seconds, for which neither of the above need wait

    match error:
        case RunFailed():
            print(f"error: {error}\n  run folder: {error.folder}", file=sys.stderr)
        case RecordError():
            print(f"error: {error}", file=sys.stderr)
        case OSError(
            errno=errno.EMFILE | errno.ENFILE | errno.ENOSPC | errno.ENOMEM | errno.EAGAIN
        ):  # not ours to mend
            print(f"error: the system has no more: {error}", file=sys.stderr)
        case RuntimeError() if "can't start new thread" in str(error):
            print(f"error: the system has no more: {error}", file=sys.stderr)
        case _:
            raise error
    return FAILED


def plugin_behind(error: Exception) -> str | None:
    """Name the plugin of Hydra (a launcher or a sweeper) that raised the error. Errors of jobs do not come from a
    plugin."""
    modules = [str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(error.__traceback__)]
    return next((name.split(".")[1] for name in reversed(modules) if name.startswith("hydra_plugins.")), None)


if __name__ == "__main__":
    leave(main())
