"""Run one experiment, or a sweep with -m: `python run.py strategy=moelens dataset=mtbench`."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # errors reach `main` as they are, to be told in one line
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

import hydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from harness.config import ConfigError

USAGE_ERROR, RUN_FAILED, INTERRUPTED = 2, 1, 130


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def run(cfg: DictConfig) -> float:
    """One job; the throughput, so that optimising sweepers have something to maximise."""
    from harness.experiment import run_experiment
    from harness.record.terminal import print_summary

    values: Any = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    summary, folder = run_experiment(values)
    print_summary(summary, folder)
    return float(summary["throughput_tok_s"] or 0.0)


def main() -> int:
    """The exit code: 0, 1 for a run that failed, 2 for bad input, 130 for an interruption."""
    from harness.experiment import RunFailed
    from harness.machine.base import MachineError
    from harness.memory.tiers import MemoryCapacityError
    from harness.record.files import RecordError

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends a run as Ctrl-C does: recorded, lanes stopped
    try:
        run()
    except (ConfigError, HydraException, OmegaConfBaseException) as error:
        print(f"error: {_one_line(error)}", file=sys.stderr)
        return USAGE_ERROR
    except RunFailed as error:
        print(f"error: {error}\n  run folder: {error.folder}", file=sys.stderr)
        return RUN_FAILED
    except (MachineError, MemoryCapacityError, MemoryError, RecordError) as error:
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
        return RUN_FAILED
    except KeyboardInterrupt:
        print("interrupted; what was recorded is in the run folder", file=sys.stderr)
        return INTERRUPTED
    return 0


def _one_line(error: BaseException) -> str:
    """Hydra explains itself over several lines; the first ones hold the key and what is available."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:4]) if not isinstance(error, ConfigError) else str(error)


if __name__ == "__main__":
    sys.exit(main())
