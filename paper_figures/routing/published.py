"""Hold what papers publish about the routing of large models, as far as their texts have numbers.

All of it is from "PreScope: Unleashing the Power of Prefetching for Resource-Constrained MoE Inference". Its Fig. 2, 6
and 16 are drawings; what its text says about them is here. Of Fate it quotes no number. MoE-Lens, MoE-Lightning and
MoE-Gen publish no statistics of routing.
"""

from __future__ import annotations

# Table 3: hot Top-m of LLaPor, a trained predictor, within the true Top-(m + 2), experts ranked by token volume.
TABLE3: dict[str, dict[int | str, float]] = {
    "DeepSeek-V2-Lite": {2: 1.00, 3: 0.97, 4: 0.94, "tokens": 0.95},
    "Mixtral-8x7B": {2: 1.00, 3: 1.00, 4: 0.99, "tokens": 0.97},
    "Qwen3-30B-A3B": {2: 1.00, 3: 0.99, 4: 0.97, "tokens": 0.97},
    "Moonlight-16B-A3B": {2: 1.00, 3: 1.00, 4: 0.99, "tokens": 0.98},
}
TABLE3_COST = {  # of one layer's predictor: its memory in MB from the smallest to the largest, and its time in ms
    "DeepSeek-V2-Lite": ("0.6-2.7 MB", "0.48 ms"),
    "Mixtral-8x7B": ("0.5-2.5 MB", "0.15 ms"),
    "Qwen3-30B-A3B": ("0.5-2.8 MB", "0.12 ms"),
    "Moonlight-16B-A3B": ("0.6-2.7 MB", "0.48 ms"),
}
FORMS = {  # experts and experts a token; Table 2
    "DeepSeek-V2-Lite": (64, 6),
    "Mixtral-8x7B": (8, 2),
    "Qwen3-30B-A3B": (128, 8),
    "Moonlight-16B-A3B": (64, 6),
}
LLAPOR_LEAST_HIT_RATE = 0.80  # Fig. 16 and section 6.4: top-k of a token, any model, any layer
LLAPOR_OVER_GATE = (0.15, 0.684)  # section 6.4: "improves accuracy by 15%-68.4%" over gate-based prediction
HOT_TABLE_LOSS = (0.30, 0.40)  # section 6.3: cache hit rates lost without the hot-expert table, batches below 16
SIDA_HIT_RATE = 0.90  # section 2: SiDA on Switch-Base-128, as PreScope quotes it

STATEMENTS = (  # (where, what the paper says of large models)
    ("PreScope Fig. 2, section 3.1 (Mixtral-8x7B)", "layers near input and output: routing correlates from layer to "
     "layer, and few experts have most of the weight; middle layers: gating inputs are alike and hot experts dominate"),
    ("PreScope Fig. 6, section 3.2 (DeepSeek, Moonlight)", "popularity predicts in middle layers only; the next "
     "layer's gate best in middle layers, a little less at both ends; token-based prediction best at both ends"),
    ("PreScope section 2, of Fate", "successive layers' gating inputs are alike, so the next gate predicts"),
)  # fmt: skip
