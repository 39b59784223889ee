"""A training of seconds has a tiny model, and made-up text of two domains."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from harness.cli.overrides import composed_values

_NOUNS = "apples pears trains boxes songs rivers clouds stones".split()


def write_texts(folder: Path) -> list[str]:
    """Write sums and rhymes, and return them as training texts."""
    rng = random.Random(7)
    sums, rhymes = [], []
    for _ in range(100):
        first, second = rng.randint(2, 40), rng.randint(2, 40)
        noun = rng.choice(_NOUNS)
        sums.append(
            f'{{"question": "Ann has {first} {noun} and gets {second}. How many?", '
            f'"answer": "{first} + {second} = {first + second}. She has {first + second} {noun}."}}\n'
        )
        start = rng.randrange(len(_NOUNS))
        rhymes.append(" ".join((_NOUNS * 15)[start : start + 60]) + ".\n\n")
    (folder / "sums.jsonl").write_text("".join(sums))
    (folder / "rhymes.txt").write_text("".join(rhymes))
    return [f"sums:{folder / 'sums.jsonl'}", f"verses:{folder / 'rhymes.txt'}"]


MIXTRAL = {
    "num_layers": 2, "hidden_dim": 32, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "num_experts": 4,
    "expert_dim": 32, "vocab_size": 300, "max_positions": 512, "dtype": "float32",
    "init_std": 0.1,
}  # fmt: skip
DEEPSEEK = {
    "num_layers": 3, "hidden_dim": 32, "num_heads": 2, "num_kv_heads": 2, "head_dim": 16, "num_experts": 8,
    "experts_per_token": 2, "expert_dim": 16, "shared_expert_dim": 16, "dense_dim": 32, "vocab_size": 300,
    "max_positions": 512, "latent.kv_rank": 16, "latent.nope_dim": 8, "latent.rope_dim": 8, "latent.value_dim": 16,
}  # fmt: skip


def values(texts: list[str], out: Path, model: str, recipe: dict[str, Any], *overrides: str) -> list[str]:
    """Return the command line of a tiny training."""
    return [
        f"training={model}",
        *(f"training.recipe.{key}={value}" for key, value in recipe.items()),
        "training.learning_rate=1e-2",
        f"text=[{','.join(texts)}]",
        f"out={out}",
        *("minutes=null", "held_out_share=0.2", "batch_sequences=4", "sequence_tokens=32", "warmup_steps=2"),
        *("evaluate_windows=4", "log_steps=1", "threads=1", "wandb.mode=disabled", "progress=false"),
        *overrides,
    ]


def composed(texts: list[str], out: Path, model: str, recipe: dict[str, Any], *overrides: str) -> dict[str, Any]:
    """Return the composed settings of a tiny training."""
    return composed_values(values(texts, out, model, recipe, *overrides), root="train")
