"""Random runs on the shuffled machine, each as the command line that repeats it."""

from __future__ import annotations

import random
import shlex
from pathlib import Path
from typing import Any

from harness.config import ConfigError
from harness.model.checkpoint import Checkpoint
from harness.run.experiment import RunFailed, run_experiment
from tests.composing import composed

MICRO_BATCHED = ("moelightning", "fastdecode", "flexgen_c", "flexgen")
PLACED = ("prescope", "fiddler", "hybrimoe", "klotski", "fate", "expert_cache")  # single experts
ONE_GPU = ("moelens", "llamacpp_split", "moegen_h", *PLACED)
STRATEGIES = (*MICRO_BATCHED, *MICRO_BATCHED, *ONE_GPU, "ondemand", "deepspeed_zero", "vllm_offload")
OWN: dict[str, dict[str, tuple[Any, ...]]] = {
    "prescope": {"schedule": ("presched", "fixed"), "prefetch_slots": (1, 3, "null"), "prefetch_groups": (2, 3)},
    "fiddler": {},
    "hybrimoe": {"prefetch_layers": (1, 3), "score_weight": (0.1, 1.0)},
    "klotski": {"num_batches": (1, 2, 3, "null"), "prefetch_slots": (1, 3, "null")},
    "fate": {"shallow_layers": (0, 1, 9, "null")},
    "expert_cache": {"policy": ("lru", "lfu", "arc"), "cache_slots": (1, 3, "null")},
}
QUIET = ("wandb.mode=disabled", "progress=false")


def command(overrides: list[str]) -> str:
    return f"python run.py {shlex.join(overrides)}"


def run(overrides: list[str], results_dir: Path) -> str:
    """Run once; return "ok", "refused" where the settings are told to be impossible, or what went wrong."""
    try:
        summary, _ = run_experiment(composed(*overrides, *QUIET, f"results_dir={results_dir}"))
    except ConfigError:
        return "refused"
    except RunFailed as failed:
        told = str(failed)
        return "refused" if told.startswith(("MemoryCapacityError", "every request was rejected")) else told
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "ok" if summary["verify"]["checked"] else "nothing was verified"


def draw(rng: random.Random, checkpoint: Checkpoint) -> list[str]:
    """Draw every setting that decides which ops there are, how they are cut, and who waits for whom."""
    strategy, longest, new_tokens = rng.choice(STRATEGIES), rng.choice((1, 8, 20, 40)), rng.choice((1, 2, 5, 9))
    num_gpus = 1 if strategy in ONE_GPU else rng.choice((1, 2, 2, 4))
    own = settings_of(strategy, rng, num_gpus)
    block_tokens = rng.choice((4, 16))
    batches = num_gpus if own.get("parallelism") == "pipeline" else 1
    num_sequences = own.get("policy.batch_size", 1) * batches * rng.choice((1, 1, 2, 8))
    num_blocks = -(-(longest + new_tokens) // block_tokens) * num_sequences + rng.randrange(3)
    values: dict[str, Any] = {
        "strategy": strategy,
        "machine": "shuffled",
        "machine.seed": rng.randrange(1000),
        "machine.poison": rng.random() < 0.5,
        "model": "mixtral-tiny",
        "model.path": checkpoint.folder,
        "dataset": "gsm8k",
        "dataset.min_prompt_tokens": 1,
        "dataset.max_prompt_tokens": longest,
        "dataset.lengths.mean": max(1, longest // 2),
        "dataset.lengths.shape": "max_entropy" if longest > 1 else "constant",
        "dataset.on_too_long": "truncate",
        "dataset.num_requests": rng.choice((1, 3, 7, 12)),
        "dataset.max_new_tokens": new_tokens,
        "kv_block_tokens": block_tokens,
        "kv_cache_gb": f"{(num_blocks * block_tokens * checkpoint.spec.kv_bytes_per_token + 1) * 1e-9:.9f}",
        "hardware.num_gpus": num_gpus,
        "hardware.device_memory_gb": rng.choice((0.0025, 0.004, 0.02)),
        "strategy.packet_mb": rng.choice((0.004, 0.01, 0.05, 1)),
        "verify": "all",
    }
    values |= {f"strategy.{name}": value for name, value in own.items()}
    return [f"{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in values.items()]


def settings_of(strategy: str, rng: random.Random, num_gpus: int) -> dict[str, Any]:
    """Draw the settings of the strategy's own."""
    yes_no = (True, False)
    if strategy == "moelens":
        given = {"overlap_prefill_decode": yes_no, "pipeline": ("vslpipe", "sequential"), "attention": ("cpu", "gpu")}
        given |= {"n_real": (20, 60, 200), "gpu_kv_staging_mb": (0.04, 8)}
    elif strategy == "ondemand":
        given = {"prefetch": yes_no, "max_pass_tokens": (64, "null")}
    elif strategy == "deepspeed_zero":
        given = {"prefetch": yes_no, "batch_size": (1, 2, 3, "null")}
    elif strategy == "llamacpp_split":
        given = {"cpu_moe_layers": (0, 1, 2, "null"), "offload_min_tokens": (1, 4, 16, "null"), "slots": (1, 2, 4)}
        given |= {"batch_tokens": (16, 2048), "micro_batch_tokens": (8, 32, 512)}
    elif strategy == "moegen_h":
        sizes, some = (1, 3, "null"), (0, 3, "null")
        given = {"search": (False,), "prefetch": yes_no, "padding": (False, False, True)}
        given |= {"policy.batch_size": (1, 2, 3, 12), "policy.prefill_batch_size": sizes}
        given |= {"policy.attention_batch": sizes, "policy.prefill_attention_batch": sizes}
        given |= {"policy.expert_batch": sizes, "policy.prefill_expert_batch": sizes}
        given |= {"policy.cpu_attention": (0.0, 0.5, 1.0), "policy.on_device": (*yes_no, "null")}
        given |= {"policy.expert_slots": sizes, "policy.dense_slots": (1, 2, 9), "policy.resident_experts": some}
    elif strategy in PLACED:
        given = {"batch_size": (1, 3, 16), "max_pass_tokens": (8, 64, 4096), "table": ("hot", "random", "none")}
        given |= {"profile_tokens": (1, 16)} | OWN[strategy]
        given |= {"predictor": ("gate", "none")} if strategy in ("prescope", "hybrimoe", "fate") else {}
    elif strategy == "vllm_offload":
        given = {"prefetch": yes_no, "continuous_batching": yes_no, "max_num_seqs": (1, 3, 256)}
        given |= {"max_num_batched_tokens": (20, 8192), "cpu_offload_gb": ("null", 0, 0.0005, 1)}
    else:
        size = rng.choice((1, 1, 2, 3, 6, 12))
        given = {"extended_model": (False,), "staging": yes_no, "padding": (False, False, True)}
        given |= {
            "policy.batch_size": (size,),
            "policy.micro_batch_size": (1, min(2, size), size),
            "policy.gpu_ffn": yes_no if num_gpus == 1 else (True,),
            "policy.resident_weights": (0.0, 0.0, 0.4, 1.0),
            "policy.resident_kv": (0.0, 0.0, 0.5, 1.0) if num_gpus == 1 else (0.0,),
        }
        given |= {"paging": yes_no, "policy.gpu_attention": yes_no} if strategy == "moelightning" else {}
        if strategy in ("flexgen", "flexgen_c"):
            given |= {"parallelism": ("pipeline", "pipeline", "tensor"), "planning": ("best", "as_built")}
    return {name: rng.choice(choices) for name, choices in given.items()}
