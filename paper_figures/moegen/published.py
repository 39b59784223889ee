"""Hold what MoE-Gen publishes: throughputs, times of whole data sets, policies and claims, each with its table.

Its baselines are of two kinds: programs (llama.cpp, vLLM, DeepSpeed), and those that its authors wrote anew with a
policy that they do not tell (FlexGen, MoE-Lightning; a star in the paper). Values are of C2 where nothing else is said.
The text that was read has lost columns of two tables: DeepSeek's of Table 6, and Mixtral's of Table 9.
"""

from __future__ import annotations

from dataclasses import dataclass

BASELINES = ("llama.cpp", "vLLM", "DeepSpeed", "FlexGen", "MoE-Lightning")
MODEL_BASED = ("DeepSpeed", "FlexGen", "MoE-Lightning")  # the paper's "model-based batching", which its claims are over
OURS = ("MoE-Gen(G)", "MoE-Gen(H)")
SYSTEMS = (*BASELINES, *OURS)


@dataclass(frozen=True, kw_only=True)
class Average:
    """A row of Table 1 for one phase: tokens an expert, its share of the GPU's FLOPs, and tokens a second."""

    tokens_an_expert: float
    utilization: float
    tok_s: float


# Table 1: DeepSeek-V2 on an A5000 with 512 GB, prompts of 512 tokens, 256 to decode.
TABLE1: dict[str, dict[str, Average]] = {
    system: {
        phase: Average(tokens_an_expert=tokens, utilization=share, tok_s=tok_s)
        for phase, (tokens, share, tok_s) in (("prefill", prefill), ("decode", decode))
    }
    for system, prefill, decode in (
        ("DeepSpeed", (153, 0.52, 109), (0.3, 0.001, 1)),
        ("FlexGen", (115, 0.49, 77), (0.3, 0.001, 1)),
        ("MoE-Lightning", (134, 0.50, 98), (0.4, 0.001, 1)),
        ("MoE-Gen", (8192, 1.00, 841), (75, 0.41, 31)),
    )
}

# Section 4.1 and Fig. 3, A5000 on PCIe 4.0 (32 GB/s): tokens an expert that saturate the GPU, and that hide the
# transfer of the next expert.
FIG3_SATURATING_TOKENS, FIG3_HIDING_TOKENS = 2**10, 2**11

# Section 4.2 and Fig. 4: Mixtral-8x7B with 128 GB of KV cache in host memory.
FIG4_KV_GB, FIG4_SAVING, FIG4_WEIGHTS_GB = 128, 20.0, 86

# Table 4: hours for a whole data set, with the loading of the model; Mixtral-8x22B. Beyond 24 hours the paper, too,
# extrapolates. Data set: requests, prompt, tokens to decode.
DATASETS = {
    "MMLU": (116_000, 512, 1),
    "GSM8K": (8_500, 512, 256),
    "Chatbot Arena": (36_000, 256, 512),
}
TABLE4_HOURS: dict[str, dict[str, float]] = {
    system: dict(zip(DATASETS, hours, strict=True))
    for system, hours in (
        ("llama.cpp", (149, 374, 6423)),
        ("vLLM", (112, 303, 5205)),
        ("DeepSpeed", (23, 115, 1710)),
        ("FlexGen", (25, 122, 5132)),
        ("MoE-Lightning", (23, 68, 5123)),
        ("MoE-Gen(G)", (18, 12, 124)),
        ("MoE-Gen(H)", (18, 8, 82)),
    )
}

# Table 5: Mixtral-8x22B, tokens a second, watts and dollars. vLLM has eight A5000, MoE-Gen one; lengths are not told.
TABLE5 = {"vLLM": (140, 1780, 22_300), "MoE-Gen": (143, 380, 4_800)}

# Table 6: decode tokens a second by (model, tokens to decode); prompts of 512 tokens.
_TABLE6_COLUMNS = (("mixtral-8x7b", 256), ("mixtral-8x7b", 1024), ("mixtral-8x22b", 256), ("mixtral-8x22b", 1024))
TABLE6: dict[str, dict[tuple[str, int], float]] = {
    system: dict(zip(_TABLE6_COLUMNS, tok_s, strict=True))
    for system, tok_s in (
        ("llama.cpp", (4, 3, 2, 0.8)),
        ("vLLM", (31, 14, 2, 1)),
        ("DeepSpeed", (27, 26, 4, 3)),
        ("FlexGen", (33, 30, 5, 4)),
        ("MoE-Lightning", (89, 78, 9, 6)),
        ("MoE-Gen(G)", (195, 93, 54, 27)),
        ("MoE-Gen(H)", (469, 283, 91, 57)),
    )
}

# Table 7: prefill tokens a second, prompts of 512 tokens. None: "Fail". Both variants of MoE-Gen are the same here.
_TABLE7_MODELS = ("mixtral-8x7b", "mixtral-8x22b", "deepseek-v2", "deepseek-r1")
TABLE7: dict[str, dict[str, float | None]] = {
    system: dict(zip(_TABLE7_MODELS, tok_s, strict=True))
    for system, tok_s in (
        ("llama.cpp", (328, 110, 23, 6)),
        ("vLLM", (1347, 147, 97, None)),
        ("DeepSpeed", (2621, 710, 109, None)),
        ("FlexGen", (2199, 655, 77, None)),
        ("MoE-Lightning", (2237, 702, 98, None)),
        ("MoE-Gen(G)", (2790, 907, 787, 204)),
        ("MoE-Gen(H)", (2790, 907, 787, 204)),
    )
}

# Table 8: (prefill, decode) tokens a second on C1, Mixtral-8x7B, by (prompt, tokens to decode, sequences).
TABLE8_SHAPES = ((16384, 8192, 50), (8192, 16384, 50), (8192, 4096, 100), (4096, 2048, 200))
TABLE8: dict[str, tuple[tuple[float, float], ...]] = {  # at TABLE8_SHAPES
    "vLLM": ((1182, 1), (1329, 1), (1325, 1), (1359, 1)),
    "DeepSpeed": ((2617, 1), (2621, 1), (2621, 2), (2653, 3)),
    "FlexGen": ((2173, 2), (2187, 2), (2187, 3), (2192, 5)),
    "MoE-Lightning": ((2218, 2), (2221, 2), (2221, 4), (2232, 6)),
    "MoE-Gen(H)": ((2662, 13), (2684, 13), (2686, 20), (2667, 50)),
}

# Table 9: decode tokens a second of DeepSeek-V2-Lite by sequences in the batch; prompts of 512 tokens, 32 to decode.
TABLE9_BATCHES = (1, 32)
TABLE9: dict[str, tuple[float, float]] = {  # at TABLE9_BATCHES
    "vLLM": (2.1, 28),
    "llama.cpp": (0.4, 30),
    "DeepSpeed": (1.3, 41),
    "FlexGen": (0.9, 35),
    "MoE-Lightning": (1.0, 37),
    "MoE-Gen(G)": (5.0, 35),
}

# Fig. 7: Mixtral-8x7B, prompts of 256 tokens, 32 to decode. The picture's values are not in the text.
FIG7_SEQUENCES, FIG7_BEST_SHARE = 3640, 0.6
FIG7_SHAPE = (256, 32)

# Table 10: the share of the batch that the CPU attends to, by model and setting; prompts of 512 tokens, 256 to decode.
TABLE10: dict[tuple[str, str], float] = {
    ("mixtral-8x7b", "C1"): 0.6,
    ("mixtral-8x7b", "C2"): 0.6,
    ("mixtral-8x7b", "C3"): 0.3,
    ("mixtral-8x22b", "C2"): 0.7,
    ("mixtral-8x22b", "C3"): 0.2,
    ("deepseek-v2", "C2"): 0.0,
    ("deepseek-v2", "C3"): 0.0,
}

SECTION53_C1_TOK_S = 364  # decode, Mixtral-8x7B on C1, prompts of 512 tokens, 256 to decode


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A claim of the abstract or the introduction: how many times better than model-based batching."""

    name: str
    low: float
    high: float
    source: str


CLAIMS = {
    "time": Claim(name="less time for a data set", low=9, high=63, source="section 1"),
    "decode": Claim(name="higher decode throughput", low=16, high=33, source="section 1"),
    "prefill": Claim(name="higher prefill throughput, DeepSeek-V2", low=7.7, high=11, source="section 1"),
    "long": Claim(name="higher throughput with long contexts", low=7, high=13, source="section 1"),
    "traffic": Claim(name="less fetch traffic", low=1, high=FIG4_SAVING, source="section 4.2, Fig. 4"),
}

# Where the paper disagrees with itself; reports that show one of these figures say so beside it.
INCONSISTENT = {
    "r1": (
        "Tables 6 and 7 have DeepSeek-R1 on C2, whose weights take more than 512 GB even as FP8, as published; how it "
        "ran is not said."
    ),
    "prefill": "MoE-Gen's prefill of DeepSeek-V2 is 841 tok/s in Table 1 and 787 in Table 7, in the same setting.",
    "decode": "MoE-Gen's decode of Mixtral-8x22B is 143 tok/s in Table 5 and 91 in Table 6; Table 5 tells no lengths.",
    "claim": (
        "The claimed 16 to 33 times the decode throughput leave MoE-Lightning out: Table 6 has 3.6 to 10 times over "
        "it. The claimed 9 to 63 times less time leave MMLU out: Table 4 has 1.3 to 1.4 times there."
    ),
    "lightning": (
        "MoE-Lightning decodes 6 to 9 tok/s of Mixtral-8x22B in Table 6, but Chatbot Arena's 5,123 hours in Table 4 "
        "are 1.0 tok/s."
    ),
    "setting": "Fig. 7 is of C1 by its caption and of C2 by the text.",
    "batch": (
        "Table 1's 75 tokens an expert need 2,000 sequences, whose latents do not fit 512 GB beside bfloat16 weights."
    ),
}
