"""List the entries of config.json that change nothing of what is computed here, each with the reason. Torch-free."""

from __future__ import annotations

_KEYS_BY_REASON = {
    "says where the checkpoint comes from": "architectures auto_map transformers_version _name_or_path name_or_path",
    "chooses code of transformers; the reference's is chosen here": """
        attn_implementation _attn_implementation experts_implementation _experts_implementation return_dict
    """,
    "is read with the files": "dtype torch_dtype quantization_config",
    "counts in training": """
        attention_dropout attn_pdrop emb_pdrop resid_pdrop initializer_range router_jitter_noise moe_jitter_eps
        router_aux_loss_coef moe_loss_weight aux_loss_alpha seq_aux pretraining_tp ep_size
    """,
    "adds to what transformers returns": "output_router_logits output_hidden_states output_attentions",
    "saves time or memory in transformers": "use_cache chunk_size_feed_forward",
    "is for classifiers": "id2label label2id num_labels problem_type",
    "is added by the tokenizer, or fills batches up": "bos_token_id pad_token_id",
    "is for sampling; the run takes the likeliest token": "do_sample temperature top_k top_p typical_p",
}
HARMLESS = {key: reason for reason, keys in _KEYS_BY_REASON.items() for key in keys.split()}
