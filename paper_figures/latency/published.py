"""State what PreScope publishes of Figs. 12 and 14; every number is from its abstract or Sections 6.2.2 and 6.2.3."""

from __future__ import annotations

from collections.abc import Mapping

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
