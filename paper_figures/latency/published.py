"""State what PreScope publishes of Figs. 12 and 14; every number is from its abstract or Sections 6.2.2 and 6.2.3."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

# PreScope, Section 6.2.2: tok/s on the A100 with batches of 64, by model.
A100_BATCH_64_TOK_S: Mapping[str, float] = {
    "deepseek-v2-lite": 37.4, "qwen3-30b-a3b": 13.3, "moonlight-16b-a3b": 47.6,
}  # fmt: skip
# Section 6.2.3: seconds per output token on the V100: (model, batch) -> PreScope's.
V100_TOKEN_S: Mapping[tuple[str, int], float] = {
    ("deepseek-v2-lite", 4): 0.37, ("qwen3-30b-a3b", 64): 5.05, ("mixtral-8x7b", 64): 2.79,
}  # fmt: skip
# Abstract and Sections 6.2.2 and 6.2.3: the largest gains of PreScope, in percent: throughput, and time per token.
MOST_GAINED: Mapping[str, tuple[float, float]] = {
    "fate": (264.0, 68.2), "fiddler": (129.0, 72.3), "klotski": (141.0, 74.6), "hybrimoe": (70.8, 42.1),
}  # fmt: skip


class Gain(NamedTuple):
    """A published gain of PreScope is over one system in one place, in percent: of throughput, or of time per token."""

    fact: str  # "throughput" or "time per token", as in MOST_GAINED
    gpu: str
    model: str
    batch: int
    over: str
    percent: float


def _gains(fact: str, gpu: str, batch: int, over: str, **by_model: float) -> list[Gain]:
    return [Gain(fact, gpu, _NAMES[model], batch, over, percent) for model, percent in by_model.items()]


_NAMES = {
    "deepseek": "deepseek-v2-lite",
    "qwen3": "qwen3-30b-a3b",
    "moonlight": "moonlight-16b-a3b",
    "mixtral": "mixtral-8x7b",
}
# Sections 6.2.2 and 6.2.3: all gains that the text states for one place.
GAINS: Sequence[Gain] = [
    *_gains("throughput", "V100", 64, "klotski", deepseek=61.4, qwen3=66.2, moonlight=67.6),
    *_gains("throughput", "V100", 64, "fate", deepseek=129, qwen3=108, moonlight=114),
    *_gains("throughput", "A100", 64, "hybrimoe", deepseek=58.7, qwen3=37.6, moonlight=55.1, mixtral=32),
    *_gains("throughput", "A100", 64, "fiddler", deepseek=71.0, qwen3=59.6, moonlight=97.4, mixtral=88),
    *_gains("throughput", "V100", 8, "klotski", mixtral=82.9),
    *_gains("throughput", "V100", 8, "fate", mixtral=213),
    *_gains("throughput", "V100", 64, "klotski", mixtral=14.1),
    *_gains("throughput", "V100", 64, "fate", mixtral=44.3),
    *_gains("time per token", "V100", 4, "hybrimoe", deepseek=42.1),
    *_gains("time per token", "V100", 4, "fiddler", deepseek=72.3),
    *_gains("time per token", "V100", 64, "klotski", qwen3=74.6, mixtral=53.9),
    *_gains("time per token", "V100", 64, "fate", qwen3=46.7, mixtral=30.5),
]
