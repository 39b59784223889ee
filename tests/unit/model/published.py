"""The facts published about the papers' models: entries of config.json that decide the architecture, and sizes."""

from __future__ import annotations

from typing import Any, NamedTuple


class Published(NamedTuple):
    config: dict[str, Any]  # of config.json
    billions: float  # parameters, from the model's card or paper
    active_billions: float
    counts_embedding: bool  # whether the active parameters include the embedding


def deepseek(model_type: str, **entries: Any) -> dict[str, Any]:
    latent = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    heads = {"num_key_value_heads": entries["num_attention_heads"]}
    positions = {"max_position_embeddings": 163840, "rope_theta": 10000, "rms_norm_eps": 1e-06}
    same = {"tie_word_embeddings": False, "hidden_act": "silu", "moe_layer_freq": 1}
    return {"model_type": model_type, **same, **latent, **heads, **positions, **entries}


def yarn(mscale: float) -> dict[str, Any]:
    ramp = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "original_max_position_embeddings": 4096, "type": "yarn"}
    return {**ramp, "mscale": mscale, "mscale_all_dim": mscale}


def mixtral(**entries: Any) -> dict[str, Any]:
    shared = {"num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000}
    shared |= {"rope_theta": 1e6, "rms_norm_eps": 1e-5, "eos_token_id": 2, "sliding_window": None}
    return {"model_type": "mixtral", "tie_word_embeddings": False, **shared, **entries}


DEEPSEEK_V3 = deepseek(
    "deepseek_v3",
    hidden_size=7168,
    intermediate_size=18432,
    moe_intermediate_size=2048,
    num_hidden_layers=61,
    num_attention_heads=128,
    n_shared_experts=1,
    n_routed_experts=256,
    num_experts_per_tok=8,
    first_k_dense_replace=3,
    q_lora_rank=1536,
    n_group=8,
    topk_group=4,
    topk_method="noaux_tc",
    scoring_func="sigmoid",
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
    rope_scaling=yarn(1.0),
    eos_token_id=1,
    vocab_size=129280,
)

PUBLISHED = {
    "mixtral-8x7b": Published(
        mixtral(
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            max_position_embeddings=32768,
        ),
        *(46.7, 12.9, True),
    ),
    "mixtral-8x22b": Published(
        mixtral(
            hidden_size=6144,
            intermediate_size=16384,
            num_hidden_layers=56,
            num_attention_heads=48,
            max_position_embeddings=65536,
        ),
        *(140.6, 39, True),
    ),
    "dbrx": Published(
        {
            "model_type": "dbrx",
            "d_model": 6144,
            "n_heads": 48,
            "n_layers": 40,
            "max_seq_len": 32768,
            "vocab_size": 100352,
            "attn_config": {"clip_qkv": 8, "kv_n_heads": 8, "model_type": "", "rope_theta": 500000},
            "ffn_config": {
                "ffn_hidden_size": 10752,
                "model_type": "",
                "moe_jitter_eps": 0.01,
                "moe_loss_weight": 0.05,
                "moe_num_experts": 16,
                "moe_top_k": 4,
            },
            "tie_word_embeddings": False,
        },
        *(131.6, 36, True),
    ),
    "deepseek-v2": Published(
        deepseek(
            "deepseek_v2",
            hidden_size=5120,
            intermediate_size=12288,
            moe_intermediate_size=1536,
            num_hidden_layers=60,
            num_attention_heads=128,
            n_shared_experts=2,
            n_routed_experts=160,
            num_experts_per_tok=6,
            first_k_dense_replace=1,
            q_lora_rank=1536,
            topk_method="group_limited_greedy",
            n_group=8,
            topk_group=3,
            scoring_func="softmax",
            norm_topk_prob=False,
            routed_scaling_factor=16.0,
            rope_scaling=yarn(0.707),
            eos_token_id=100001,
            vocab_size=102400,
        ),
        *(235.7, 21, True),
    ),
    "deepseek-v2-lite": Published(
        deepseek(
            "deepseek_v2",
            hidden_size=2048,
            intermediate_size=10944,
            moe_intermediate_size=1408,
            num_hidden_layers=27,
            num_attention_heads=16,
            n_shared_experts=2,
            n_routed_experts=64,
            num_experts_per_tok=6,
            first_k_dense_replace=1,
            q_lora_rank=None,
            topk_method="greedy",
            n_group=1,
            topk_group=1,
            scoring_func="softmax",
            norm_topk_prob=False,
            routed_scaling_factor=1.0,
            rope_scaling=yarn(0.707),
            eos_token_id=100001,
            vocab_size=102400,
        ),
        *(15.7, 2.4, False),
    ),
    "deepseek-v3": Published(DEEPSEEK_V3, 671, 37, False),
    "deepseek-r1": Published(DEEPSEEK_V3, 671, 37, False),
    "qwen3-30b-a3b": Published(
        {
            "model_type": "qwen3_moe",
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "attention_bias": False,
            "sliding_window": None,
            "use_sliding_window": False,
            "max_window_layers": 48,
            "max_position_embeddings": 40960,
            "rope_theta": 1000000.0,
            "rope_scaling": None,
            "rms_norm_eps": 1e-06,
            "eos_token_id": 151645,
            "vocab_size": 151936,
            "tie_word_embeddings": False,
        },
        *(30.5, 3.3, True),
    ),
    "moonlight-16b-a3b": Published(
        deepseek(
            "deepseek_v3",
            hidden_size=2048,
            intermediate_size=11264,
            moe_intermediate_size=1408,
            num_hidden_layers=27,
            num_attention_heads=16,
            n_shared_experts=2,
            n_routed_experts=64,
            num_experts_per_tok=6,
            first_k_dense_replace=1,
            q_lora_rank=None,
            n_group=1,
            topk_group=1,
            topk_method="noaux_tc",
            scoring_func="sigmoid",
            norm_topk_prob=True,
            routed_scaling_factor=2.446,
            max_position_embeddings=8192,
            rope_theta=50000.0,
            rope_scaling=None,
            rms_norm_eps=1e-05,
            eos_token_id=163585,
            vocab_size=163840,
        ),
        *(16.0, 2.9, True),  # "3B" in its name; 2.24B without embedding and head in its report
    ),
    "qwen2-57b-a14b": Published(
        {
            "model_type": "qwen2_moe",
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "moe_intermediate_size": 2560,
            "shared_expert_intermediate_size": 20480,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
            "decoder_sparse_step": 1,
            "sliding_window": 131072,
            "use_sliding_window": False,
            "max_window_layers": 28,
            "max_position_embeddings": 131072,
            "rope_theta": 1000000.0,
            "rms_norm_eps": 1e-06,
            "eos_token_id": 151643,
            "vocab_size": 151936,
            "tie_word_embeddings": False,
        },
        *(57.4, 14, False),
    ),
    "olmoe-1b-7b": Published(
        {
            "model_type": "olmoe",
            "hidden_size": 2048,
            "intermediate_size": 1024,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
            "attention_bias": False,
            "clip_qkv": None,
            "max_position_embeddings": 4096,
            "rope_theta": 10000.0,
            "rope_scaling": None,
            "rms_norm_eps": 1e-05,
            "eos_token_id": 50279,
            "vocab_size": 50304,
            "tie_word_embeddings": False,
        },
        *(6.9, 1.3, True),
    ),
    "gpt-oss-120b": Published(
        {
            "model_type": "gpt_oss",
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 36,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "attention_bias": True,
            "experts_per_token": 4,
            "eos_token_id": 200002,
            "hidden_act": "silu",
            "initial_context_length": 4096,
            "layer_types": ["sliding_attention", "full_attention"] * 18,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_scaling": {
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 32.0,
                "original_max_position_embeddings": 4096,
                "rope_type": "yarn",
                "truncate": False,
            },
            "rope_theta": 150000,
            "swiglu_limit": 7.0,
            "vocab_size": 201088,
            "sliding_window": 128,
            "tie_word_embeddings": False,
        },
        *(116.8, 5.1, False),
    ),
}
