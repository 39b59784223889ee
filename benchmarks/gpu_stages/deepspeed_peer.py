"""The process of an outside peer: Mixtral of transformers under DeepSpeed's ZeRO-Inference, its weights in host memory.

    python -m benchmarks.gpu_stages.deepspeed_peer ASKED.json ANSWER.json

The settings are those of DeepSpeed's documentation of ZeRO stage 3 ("Parameter offloading": `offload_param` to the CPU,
with `pin_memory`) and of its example of ZeRO-Inference, but for the two that count parameters: these have room for a
layer that is computed and for the next one, which comes meanwhile. The example's sizes are for a dense layer and would
bring none of Mixtral's ahead. Keys and values stay on the device, as transformers has them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_stages.transformers_peer import config_of, fill, generate, likely_batch, limit_device

_LAYERS_ON_DEVICE = 2  # the one that is computed, and the next


def layer_parameters(entries: dict[str, Any]) -> int:
    """Return the parameters of a layer, by the entries of config.json."""
    hidden, experts = entries["hidden_size"], entries["num_local_experts"]
    heads = 2 * entries["num_attention_heads"] + 2 * entries["num_key_value_heads"]
    return hidden * (heads * entries["head_dim"] + experts * (3 * entries["intermediate_size"] + 1) + 2)


def settings(entries: dict[str, Any], batch: int) -> dict[str, Any]:
    """Return DeepSpeed's configuration for ZeRO-Inference from pinned host memory."""
    layer = layer_parameters(entries)
    return {
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "cpu", "pin_memory": True},
            "stage3_prefetch_bucket_size": layer,
            "stage3_max_live_parameters": _LAYERS_ON_DEVICE * layer,
            "stage3_max_reuse_distance": 0,  # a layer is used once a pass
            "stage3_param_persistence_threshold": entries["hidden_size"],  # norms stay
        },
        "train_batch_size": batch,
        "train_micro_batch_size_per_gpu": batch,
        "steps_per_print": 1 << 30,
        "wall_clock_breakdown": False,
    }


def offloaded(entries: dict[str, Any], batch: int) -> Any:
    """Make the model parameter by parameter, each in pinned host memory as soon as it is there, and fill it there."""
    import deepspeed
    from transformers import AutoModelForCausalLM
    from transformers.integrations.deepspeed import HfDeepSpeedConfig

    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1")):
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", "29517")
    deepspeed.init_distributed("nccl")
    configuration = settings(entries, batch)
    known_to_transformers = HfDeepSpeedConfig(configuration)  # from_config asks it, as long as it lives
    model = AutoModelForCausalLM.from_config(config_of(entries), dtype=torch.bfloat16)
    parameters = [(parameter.ds_tensor, len(parameter.ds_shape) == 1) for parameter in model.parameters()]
    fill(((tensor.data, is_norm) for tensor, is_norm in parameters), entries["hidden_size"])
    engine = deepspeed.initialize(model=model, config=configuration)[0]
    del known_to_transformers
    return engine.module.eval()


def main() -> int:
    asked = json.loads(Path(sys.argv[1]).read_text())
    begun_s = time.perf_counter()
    entries = asked["config"]
    limit_device(asked["device_gb"])
    ends_bytes = 4 * entries["vocab_size"] * entries["hidden_size"]
    weights_bytes = 2 * (_LAYERS_ON_DEVICE + 1) * layer_parameters(entries) + ends_bytes
    asked["prompts"] = asked["prompts"][: likely_batch(asked, weights_bytes)]
    model = offloaded(entries, len(asked["prompts"]))
    answer = {
        "system": "DeepSpeed ZeRO-Inference, weights in pinned host memory",
        "weights_source": "random weights, bfloat16",
        "setup_s": time.perf_counter() - begun_s,
    }
    generate(model, asked, answer, Path(sys.argv[2]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
