"""Hold what PreScope publishes in words and tables; the values of its pictures are not in the text that was read."""

from __future__ import annotations

# Section 6.2.2: tokens a second of PreScope on the A100 at batch 64, by model.
THROUGHPUT_A100_64 = {"deepseek-v2-lite": 37.4, "qwen3-30b-a3b": 13.3, "moonlight-16b-a3b": 47.6}

# Section 6.2.3: seconds per output token on the V100, by (model, batch).
LATENCY_V100 = {("deepseek-v2-lite", 4): 0.37, ("qwen3-30b-a3b", 64): 5.05, ("mixtral-8x7b", 64): 2.79}

# Section 6.3 and Fig. 15: throughput lost without a part, by (GPU, model, batch, variant).
LOST = {
    ("V100", "deepseek-v2-lite", 4, "without table"): 0.222,
    ("A100", "mixtral-8x7b", 64, "without PreSched"): 0.541,
    ("A100", "moonlight-16b-a3b", 32, "without LLaPor"): 0.202,
    ("A100", "mixtral-8x7b", 64, "without AsyncIO"): 0.493,
}

# Table 2: experts of a token.
ACTIVE = {"deepseek-v2-lite": 6, "mixtral-8x7b": 2, "qwen3-30b-a3b": 8, "moonlight-16b-a3b": 6}

# Table 3: tokens of the predicted experts that the router sends there too; stated here as the predictor's hit rate.
TABLE3_TOKENS = {
    "deepseek-v2-lite": 0.95, "mixtral-8x7b": 0.97, "qwen3-30b-a3b": 0.97, "moonlight-16b-a3b": 0.98,
}  # fmt: skip

# Section 6.5 and Fig. 17, Mixtral on the A100: the gap between both sides' times of a layer, in seconds.
FIG17_MEDIAN_GAP_S, FIG17_LARGEST_GAP_S = 8e-3, 14e-3
