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

# Table 3: of a batch of 32, the true tokens of the four experts that are predicted to have most over those of the true
# four. Simulations take it as the chance that one expert of one token is foreseen, at all ranks and layers. That is
# optimistic: results/reference/prescope-prediction has 88 % of a token's experts where this share is 99 %.
TABLE3_TOKENS = {
    "deepseek-v2-lite": 0.95, "mixtral-8x7b": 0.97, "qwen3-30b-a3b": 0.97, "moonlight-16b-a3b": 0.98,
}  # fmt: skip

# Section 6.5 and Fig. 17, Mixtral on the A100: the gap between both sides' times of a layer, in seconds.
FIG17_MEDIAN_GAP_S, FIG17_LARGEST_GAP_S = 8e-3, 14e-3

# Section 6.2.1 and Fig. 13: how long an expert takes on the CPU, in milliseconds by tokens. The picture's values are
# not in the text; these are of LayerScope (nezha-Anonymous, micro*.txt), public code for the same models and batches.
CPU_EXPERT_MS = {
    "deepseek-v2-lite": {1: 0.216, 8: 0.658, 16: 0.923, 32: 1.38, 64: 2.42},
    "mixtral-8x7b": {1: 3.24, 8: 12.9, 16: 17.0, 32: 31.1, 64: 57.9},
    "qwen3-30b-a3b": {1: 0.164, 8: 0.534, 16: 0.685, 32: 1.01, 64: 1.50},
    "moonlight-16b-a3b": {1: 0.192, 8: 0.668, 16: 0.910, 32: 1.43, 64: 2.54},
}
# What the same code takes a small expert to cost on the V100, computed by Hugging Face's modules (tg in deepseek.py).
GPU_EXPERT_MS = 0.95
