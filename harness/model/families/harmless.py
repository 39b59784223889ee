"""List the entries of config.json that change nothing of what is computed here, each with the reason. Torch-free.

Older versions of transformers, and programs that work on its files, write more of them than transformers does now.
"""

from __future__ import annotations

_KEYS_BY_REASON = {
    "says where the checkpoint comes from": """
        architectures auto_map transformers_version _name_or_path name_or_path _commit_hash
        unsloth_fixed unsloth_version
    """,
    "chooses code of transformers; the reference's is chosen here": """
        attn_implementation _attn_implementation _attn_implementation_autoset _attn_implementation_internal
        use_flash_attention_2 _flash_attn_2_enabled experts_implementation _experts_implementation
        torchscript return_dict
    """,
    "is read with the files": "dtype torch_dtype quantization_config",
    "counts in training": """
        attention_dropout attn_pdrop emb_pdrop resid_pdrop initializer_range router_jitter_noise moe_jitter_eps
        router_aux_loss_coef moe_loss_weight aux_loss_alpha seq_aux pretraining_tp ep_size gradient_checkpointing
    """,
    "adds to what transformers returns": """
        output_router_logits output_hidden_states output_attentions output_scores return_dict_in_generate
    """,
    "saves time or memory in transformers": "use_cache chunk_size_feed_forward",
    "is for classifiers": "id2label label2id num_labels problem_type finetuning_task",
    "is for TensorFlow": "tf_legacy_loss use_bfloat16",
    "is for pipelines, each of one task": "task_specific_params",
    "is added by the tokenizer, or fills batches up": "bos_token_id pad_token_id sep_token_id tokenizer_class",
    "is for sampling; the run takes the likeliest token": "do_sample temperature top_k top_p typical_p",
    "counts with several beams": "num_beam_groups diversity_penalty early_stopping length_penalty",
    "ends a text; how long it gets is said by the run": "max_length",
}
HARMLESS = {key: reason for reason, keys in _KEYS_BY_REASON.items() for key in keys.split()}

NEUTRAL = {  # entry -> the one value that changes nothing, which older versions of transformers write
    "is_decoder": False,
    "add_cross_attention": False,
    "tie_encoder_decoder": False,
    "pruned_heads": {},
    "num_beams": 1,
    "num_return_sequences": 1,
    "min_length": 0,
    "repetition_penalty": 1,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "remove_invalid_values": False,
}
