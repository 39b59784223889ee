"""Write what a training made: a Hugging Face folder, what was trained on, and prompts from held-out text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from harness.model.trained import REPORT_FILE, TRAINED_HERE
from harness.model.zoo import save_checkpoint
from harness.record.provenance import code_version, environment
from harness.training.evaluation import held_out_losses, routing_figures, samples, unigram_loss
from harness.training.loop import METRICS_FILE, Trainer, untrained
from harness.training.settings import licence_of
from harness.training.texts import Domain, Source
from harness.training.tokens import domain_shares

HELD_OUT_FOLDER = "held_out"


def write_held_out(folder: Path, domains: Sequence[Domain]) -> None:
    """Write each domain's held-out documents as prompts, to be used as `dataset=file dataset.path=FILE`."""
    (folder / HELD_OUT_FOLDER).mkdir(exist_ok=True)
    for domain in domains:
        rows = (
            {"prompt": each.text[: each.prompt_chars].rstrip(), "continuation": each.text[each.prompt_chars :]}
            for each in domain.held_out
        )
        lines = [json.dumps(row, ensure_ascii=False) for row in rows if row["prompt"]]
        path = folder / HELD_OUT_FOLDER / f"{domain.name}.jsonl"
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def write_model(trainer: Trainer, tokenizer: Tokenizer) -> None:
    """Save the model for transformers, which keeps the way of computing experts to itself."""
    save_checkpoint(trainer.model, tokenizer, trainer.folder)


def report(
    trainer: Trainer, tokenizer: Tokenizer, domains: Sequence[Domain], sources: Sequence[Source], command: str
) -> dict[str, Any]:
    """Return all that is known of a finished training: its text, its budget, and whether the model has learned."""
    settings, streams = trainer.settings, trainer.streams
    windows, vocab_size = trainer.windows, trainer.spec.vocab_size
    first, _ = untrained(settings)
    trained_losses, first_losses = held_out_losses(trainer.model, windows), held_out_losses(first, windows)
    losses = {
        stream.name: {
            "trained": trained_losses[stream.name],
            "untrained": first_losses[stream.name],
            "unigram": unigram_loss(stream.training, windows[stream.name], vocab_size),
            "tokens": windows[stream.name][:, 1:].numel(),
        }
        for stream in streams
    }
    rows = (trainer.folder / METRICS_FILE).read_text(encoding="utf-8").splitlines() if trainer.tokens_seen else []
    shown = {key: value for key, value in asdict(settings).items() if key not in ("text", "held_out", "out", "wandb")}
    shares = domain_shares(streams, settings.evenness)
    return {
        "what": TRAINED_HERE,
        "model": settings.training.name,
        "parameters": sum(each.numel() for each in trainer.model.parameters()),
        "balancing": settings.training.chosen_balancing,
        "command": command,
        "steps": trainer.position.step,
        "tokens_seen": trainer.tokens_seen,
        "seconds": round(trainer.position.seconds, 1),
        "last_training_loss": round(json.loads(rows[-1])["loss"], 5) if rows else None,
        "held_out_loss_nats_per_token": losses,
        "held_out_load": _by_layer(trainer, routing_figures(trainer.model, trainer.routers, windows)),
        "domains": {
            stream.name: {
                "share_of_windows": round(float(share), 4),
                "training_tokens": len(stream.training),
                "held_out_tokens": len(stream.held_out),
                "licence": licence_of(settings, stream.name),
            }
            for stream, share in zip(streams, shares, strict=True)
        },
        "texts": [asdict(source) for source in sources],
        "samples": samples(trainer.model, tokenizer, domains),
        "settings": shown,
        "code": code_version(),
        "environment": environment(),
    }


def write_report(folder: Path, content: Mapping[str, Any]) -> None:
    text = json.dumps(content, indent=1, ensure_ascii=False)
    (folder / REPORT_FILE).write_text(f"{text}\n", encoding="utf-8")


def told(content: Mapping[str, Any]) -> list[str]:
    """Return the lines that say at the end what came of the training."""
    lines = [
        f"{content['parameters'] / 1e6:.1f} million parameters, {content['steps']} steps, {content['tokens_seen']:,} "
        f"tokens in {content['seconds']:.0f} s ({content['tokens_seen'] / max(content['seconds'], 1e-9):,.0f} tok/s)"
    ]
    for name, losses in content["held_out_loss_nats_per_token"].items():
        lines.append(
            f"held-out loss of {name}: {losses['trained']:.3f} nats a token; untrained {losses['untrained']:.3f}, "
            f"unigram {losses['unigram']:.3f}"
        )
    for layer, figures in content["held_out_load"]["all"].items():
        lines.append(
            f"load of layer {layer}: busiest {figures['max_over_mean']:.2f} and idlest "
            f"{figures['min_over_mean']:.2f} times the mean, entropy {figures['load_entropy']:.3f} of an even one"
        )
    for sample in content["samples"]:
        lines += [f"[{sample['domain']}] {sample['prompt'][-160:]!r}", f"  -> {sample['model']!r}"]
    return lines


def _by_layer(trainer: Trainer, figures: Mapping[str, list[dict[str, float]]]) -> dict[str, dict[str, Any]]:
    layers = [f"{layer:02d}" for layer in trainer.spec.moe_layers]
    return {name: dict(zip(layers, of_layers, strict=True)) for name, of_layers in figures.items()}
