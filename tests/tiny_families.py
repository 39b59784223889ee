"""Make a tiny checkpoint folder of each model family by transformers' own classes, for tests.

Nothing in it is neutral: norms, biases, sinks and correction biases are random, groups of experts change the choice,
clipping clips, windows are shorter than the tests' prompts. So code that leaves one of them out gives other tokens.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.model import families
from harness.model.cache import cache_folder, make_once
from harness.model.checkpoint import Checkpoint

if TYPE_CHECKING:
    from torch import Tensor

VOCAB_SIZE = 384
MATRIX_STD = 0.15  # with 64 hidden dimensions large enough that a stale or swapped expert changes the tokens
NORM_STD, BIAS_STD = 0.2, 0.5
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 1e4}

_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 0.1,  # far from every default, so that another one changes the tokens
    "rope_parameters": PLAIN_ROPE,
    "num_experts_per_tok": 4,
}
_QWEN = _COMMON | {"num_experts": 16, "moe_intermediate_size": 48, "intermediate_size": 96}
_DEEPSEEK = _COMMON | {
    "num_key_value_heads": 4,
    "n_routed_experts": 16,
    "moe_intermediate_size": 32,
    "intermediate_size": 96,
    "first_k_dense_replace": 1,
    "n_shared_experts": 2,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "v_head_dim": 32,
    "rope_parameters": YARN | {"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
}
_GROUPS = {"n_group": 4, "topk_group": 2}
_V3 = _DEEPSEEK | _GROUPS | {"model_type": "deepseek_v3", "norm_topk_prob": True, "routed_scaling_factor": 2.5}
_DBRX = {
    "model_type": "dbrx",
    "vocab_size": VOCAB_SIZE,
    "d_model": 64,
    "n_heads": 4,
    "n_layers": 3,
    "max_seq_len": 4096,
    "attn_config": {"kv_n_heads": 2, "clip_qkv": 1.5, "rope_theta": 5e5},
    "ffn_config": {
        "ffn_hidden_size": 48,
        "moe_num_experts": 16,
        "moe_top_k": 4,
        "moe_normalize_expert_weights": 1.0,
        "ffn_act_fn": {"name": "silu"},
    },
    "rope_parameters": PLAIN_ROPE | {"rope_theta": 5e5},
}

VARIANTS: dict[str, dict[str, Any]] = {  # name -> entries of config.json; a family's first variant has its plain name
    "mixtral": _COMMON
    | {"model_type": "mixtral", "intermediate_size": 48, "num_local_experts": 8, "num_experts_per_tok": 2}
    | {"sliding_window": 12},
    "qwen3_moe": _QWEN | {"model_type": "qwen3_moe", "head_dim": 24, "norm_topk_prob": True, "mlp_only_layers": [1]},
    "qwen3_moe-every-second": _QWEN
    | {"model_type": "qwen3_moe", "head_dim": 16, "norm_topk_prob": False, "attention_bias": True}
    | {"num_hidden_layers": 4, "decoder_sparse_step": 2, "tie_word_embeddings": True}
    | {"use_sliding_window": True, "sliding_window": 12, "rope_parameters": YARN},
    "olmoe": _COMMON | {"model_type": "olmoe", "num_experts": 16, "intermediate_size": 48},
    "olmoe-clipped": _COMMON
    | {"model_type": "olmoe", "num_experts": 16, "intermediate_size": 48, "norm_topk_prob": True}
    | {"attention_bias": True, "clip_qkv": 1.2},
    "qwen2_moe": _QWEN | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 64, "mlp_only_layers": [1]},
    "qwen2_moe-every-second": _QWEN
    | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 64, "norm_topk_prob": True}
    | {"num_hidden_layers": 4, "decoder_sparse_step": 2, "qkv_bias": False}
    | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3},
    "dbrx": _DBRX,
    "deepseek_v2": _DEEPSEEK
    | _GROUPS
    | {"model_type": "deepseek_v2", "q_lora_rank": 40, "routed_scaling_factor": 3.0}
    | {"topk_method": "group_limited_greedy"},
    "deepseek_v2-lite": _DEEPSEEK
    | {"model_type": "deepseek_v2", "q_lora_rank": None, "topk_method": "greedy"}
    | {"rope_parameters": _DEEPSEEK["rope_parameters"] | {"mscale": 1.0, "mscale_all_dim": 0.5}},  # cos and sin scaled
    "deepseek_v3": _V3 | {"q_lora_rank": 40},
    "deepseek_v3-moonlight": _V3 | {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "rope_parameters": PLAIN_ROPE},
    "gpt_oss": _COMMON
    | {"model_type": "gpt_oss", "num_hidden_layers": 4, "head_dim": 16, "intermediate_size": 64}
    | {"num_local_experts": 16, "sliding_window": 8, "swiglu_limit": 0.8}
    | {"rope_parameters": YARN | {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}},
}


def runnable() -> list[str]:
    """Return the variants whose family the harness has."""
    available = families.available()
    return [name for name, entries in VARIANTS.items() if entries["model_type"] in available]


def tiny_family(name: str, dtype: str = "float32") -> Checkpoint:
    """Open the checkpoint of a variant, stored in `dtype`; it is made on first use."""
    return Checkpoint(folder_of(name, dtype))


def folder_of(name: str, dtype: str = "float32") -> Path:
    """Return the checkpoint's folder in the cache. The key covers this file, so that an edit makes it again."""
    from importlib.metadata import version

    entries = VARIANTS[name] | {"dtype": dtype, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
    content = json.dumps([entries, version("transformers"), _this_file()], sort_keys=True)
    key = hashlib.sha256(content.encode()).hexdigest()[:12]
    return make_once(cache_folder() / "models" / f"tiny-{name}-{key}", lambda folder: _make(entries, folder))


@cache
def _this_file() -> str:
    return Path(__file__).read_text(encoding="utf-8")


def _make(entries: dict[str, Any], folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    from harness.model.quiet import quiet_transformers
    from harness.model.zoo import BOS, EOS, train_tokenizer

    with quiet_transformers():
        config = AutoConfig.for_model(**entries)
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, entries["dtype"]))
        for name, tensor in model.state_dict(keep_vars=True).items():  # a head tied to the embedding comes last
            values = random_values(name, tensor.shape)
            tensor.data = values if name.endswith("correction_bias") else values.to(tensor.dtype)  # float32 everywhere
        model.save_pretrained(folder)
        tokenizer = train_tokenizer(VOCAB_SIZE)
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS).save_pretrained(folder)


def random_values(name: str, shape: tuple[int, ...]) -> Tensor:
    """Draw a tensor from a stream of its own, keyed by its name, with the spread of its kind."""
    import torch

    values = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
    neutral, std = kind_of(name, len(shape))
    return neutral + std * values


def kind_of(name: str, dims: int) -> tuple[float, float]:
    """Return the neutral value of a tensor, which would make it of no effect, and its standard deviation."""
    last = name.removesuffix(".weight").rsplit(".", 1)[-1]
    if "norm" in last:
        return 1.0, NORM_STD
    if last in ("embed_tokens", "wte"):
        return 0.0, 1.0
    if last == "e_score_correction_bias":
        return 0.0, 0.3
    if "bias" in last or last == "sinks":
        return 0.0, BIAS_STD
    assert dims > 1, f"{name}: say what is neutral for it"
    return 0.0, MATRIX_STD
