"""Train a small model from scratch until its routing is learned: `python -m harness.training training=mixtral ...`.

Takes settings of conf/train.yaml as overrides: which model, which text, how many minutes. The folder `out` becomes an
ordinary Hugging Face folder, which runs here with `model=checkpoint model.path=FOLDER`. Beside the weights it has
training.json (the text, the losses, the load of the experts), metrics.jsonl (the curves) and held_out/ (prompts that
the model has not seen). resume=true goes on with a training that was interrupted.
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
from harness.record.files import RecordError
from harness.record.provenance import shown_command, without_folders
from harness.record.wandb_sink import WandbSink
from harness.training.process import prepare_process
from harness.training.settings import TrainingSettings, parse_training, require_domains

_MODEL_FILES = ("config.json", "tokenizer.json", "*.safetensors", "*.safetensors.index.json")  # would be overwritten


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 2 for bad input, 1 where the training failed."""
    parser = CommandParser("harness.training", __doc__)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings of conf/train.yaml")
    given = sys.argv[1:] if arguments is None else arguments
    command = shown_command("-m harness.training", without_folders(given))
    return parser.run(partial(_train, command), arguments)


def _train(command: str, given: Namespace) -> int:
    settings = parse_training(composed_values(given.overrides, root="train"))
    folder = _folder(settings)
    prepare_process()
    import torch

    from harness.training.progress import TrainingProgress

    torch.set_num_threads(settings.threads or len(os.sched_getaffinity(0)))
    sink = WandbSink(settings.wandb, folder, rows="training")
    with TrainingProgress(Console(stderr=True), shown=settings.progress) as progress:
        sink.start(asdict(settings), {"experiment": None})
        status: dict[str, Any] = {"status": "failed"}
        try:
            status = {"status": "ok", **_trained(settings, folder, command, sink, progress)}
        except (ArithmeticError, OSError, RecordError) as error:  # it diverged, or the disk failed
            progress.note(f"failed: {error}")
        except KeyboardInterrupt:
            progress.note(f"interrupted; resume=true goes on from the last checkpoint in {folder}")
            raise
        finally:
            progress.note(f"wandb {sink.finish(status)}")
    return 0 if status["status"] == "ok" else FAILED


def _trained(settings: TrainingSettings, folder: Path, command: str, sink: WandbSink, progress: Any) -> dict[str, Any]:
    """Do the training, write its result, and return figures for W&B's summary."""
    from harness.training.checkpoints import STATE_FILE, identity
    from harness.training.loop import Trainer
    from harness.training.result import report, told, write_held_out, write_model, write_report
    from harness.training.texts import read_domains
    from harness.training.tokens import token_streams, tokenizer_for

    progress.note("reading text")
    domains, sources = read_domains(
        settings.text,
        settings.held_out,
        share=settings.held_out_share,
        max_bytes=int(settings.max_domain_mb * 1e6),
        seed=settings.seed,
    )
    require_domains(settings, [domain.name for domain in domains])
    tokenizer = tokenizer_for(domains, settings.training.recipe.vocab_size)
    streams = token_streams(domains, tokenizer, settings.sequence_tokens)
    sizes = ", ".join(f"{stream.name} {len(stream.training):,}" for stream in streams)
    progress.note(f"tokens to train on: {sizes}")
    trainer = Trainer(settings, streams, folder)
    same = identity(settings, [asdict(source) for source in sources])
    if settings.resume:
        found = trainer.resume(same)
        progress.note(f"going on after {trainer.told}" if found else "no checkpoint yet: begins anew")
    write_held_out(folder, domains)
    sink.settle()

    def show(row: dict[str, Any]) -> None:
        sink.log_pass({"index": row["step"], **row})
        progress.update(row, trainer.progress)

    trainer.run(same, show)
    write_model(trainer, tokenizer)
    content = report(trainer, tokenizer, domains, sources, command)
    write_report(folder, content)
    (folder / STATE_FILE).unlink(missing_ok=True)
    for line in told(content):
        print(line)
    print(f"model in {folder}")
    kept = ("steps", "tokens_seen", "seconds", "parameters", "held_out_loss_nats_per_token")
    return {key: content[key] for key in kept}


def _folder(settings: TrainingSettings) -> Path:
    """Make the folder of the result. Raises ConfigError where it holds another result, or another model."""
    folder = Path(settings.out).expanduser()
    if (folder / "training.json").exists():
        raise ConfigError("out", f"'{folder}' holds a finished model; choose another folder or remove it")
    begun = any((folder / name).exists() for name in ("metrics.jsonl", "training_state.safetensors"))
    if begun and not settings.resume:
        raise ConfigError("out", f"'{folder}' holds a training; resume=true goes on with it, or choose another folder")
    if not begun and (others := [each for name in _MODEL_FILES for each in sorted(folder.glob(name))]):
        raise ConfigError("out", f"'{folder}' holds another model's {others[0].name}; choose another folder")
    return made_folder("out", settings.out)


if __name__ == "__main__":
    sys.exit(exit_code(main))
