"""Train predictors of experts, one layer ahead: `python -m harness.llapor data=[NAME:RUN_FOLDER,...] out=FOLDER ...`.

Takes settings of conf/llapor.yaml as overrides. Recordings are of runs with record_routing=weights record_hidden=true.
The folder `out` gets predictors.json (from what they were trained, how good they are), predictors.safetensors and
tables.safetensors (for strategy.predictor_path), hit_rates.json (for routing.hit_rates_path) and metrics.jsonl (the
curves). Texts in `test` are other ones than those in `data`, and share no prompt with them.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from harness.cli.arguments import FAILED, CommandParser
from harness.cli.overrides import composed_values, made_folder
from harness.config import ConfigError
from harness.interrupts import exit_code
from harness.llapor.files import DESCRIPTION, METRICS
from harness.llapor.settings import LlaporSettings, parse_llapor
from harness.record.provenance import shown_command, without_folders
from harness.record.wandb_sink import WandbSink


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 2 for bad input, 1 where the training failed."""
    parser = CommandParser("harness.llapor", __doc__)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings of conf/llapor.yaml")
    given = sys.argv[1:] if arguments is None else arguments
    command = shown_command("-m harness.llapor", without_folders(given))
    return parser.run(partial(_learn, command), arguments)


def _learn(command: str, given: Namespace) -> int:
    settings = parse_llapor(composed_values(given.overrides, root="llapor"))
    folder = _folder(settings)
    import torch

    from harness.llapor.whole import Learning, read_all  # brings torch

    torch.set_num_threads(settings.threads or len(os.sched_getaffinity(0)))
    texts = read_all(settings)  # before anything is recorded: mistakes leave nothing behind
    sink = WandbSink(settings.wandb, folder, rows="training")
    console = Console(stderr=True)
    sink.start(asdict(settings), {"experiment": None})
    status: dict[str, Any] = {"status": "failed"}
    try:
        sink.settle()
        learning = Learning(settings, texts, folder, console, sink.log_pass)
        status = {"status": "ok", **learning.run(command)}
    except (ArithmeticError, OSError) as error:  # it diverged, or the disk failed
        console.print(f"failed: {error}", highlight=False, markup=False)
    finally:
        console.print(f"wandb {sink.finish(status)}", highlight=False, markup=False, soft_wrap=True)
    return 0 if status["status"] == "ok" else FAILED


def _folder(settings: LlaporSettings) -> Path:
    """Return the folder of the result. Raises ConfigError where it holds another one, or nothing can be written."""
    folder = Path(settings.out).expanduser()
    for name in (DESCRIPTION, METRICS):
        if (folder / name).exists():
            raise ConfigError("out", f"'{folder}' holds other predictors; choose another folder or remove it")
    return made_folder("out", settings.out)


if __name__ == "__main__":
    sys.exit(exit_code(main))
