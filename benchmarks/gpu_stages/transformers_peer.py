"""The outside peers share this: Mixtral of transformers with random weights generates within a time."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

RESIDENT_SHARE = 0.25  # of the device memory, for weights that stay
_ALIGNED_BYTES = 4096
_ROWS_OF_A_TOKEN = 24  # that a prompt's token takes at its peak, each as wide as the hidden states, in bfloat16


def config_of(entries: dict[str, Any]) -> Any:
    return AutoConfig.for_model("mixtral", **entries)


def random_model(entries: dict[str, Any], take: Callable[[int], torch.Tensor] | None = None) -> Any:
    """Make a model in bfloat16 whose parameters lie in one area of host memory: what `take` returns for its bytes,
    uint8; pageable memory without."""
    config = config_of(entries)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.to_empty(device="cpu")
    parameters = list(model.parameters())
    ends = list(accumulate(-(-parameter.nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES for parameter in parameters))
    area = take(ends[-1]) if take else torch.empty(ends[-1], dtype=torch.uint8)
    for parameter, start in zip(parameters, [0, *ends], strict=False):
        parameter.data = area[start : start + parameter.nbytes].view(parameter.dtype).view(parameter.shape)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # the only buffers: computed, not loaded
    fill(((parameter.data, parameter.dim() == 1) for parameter in parameters), entries["hidden_size"])
    return model.eval()


def fill(parameters: Iterable[tuple[torch.Tensor, bool]], hidden: int) -> None:
    """Fill every matrix from one random block; the others are norms, which are 1."""
    block = torch.rand(1 << 24).sub_(0.5).mul_((12 / hidden) ** 0.5).bfloat16()

    def fill_one(given: tuple[torch.Tensor, bool]) -> None:
        flat, is_norm = given[0].view(-1), given[1]
        if is_norm:
            flat.fill_(1.0)
            return
        for start in range(0, flat.numel(), block.numel()):
            piece = flat[start : start + block.numel()]
            piece.copy_(block[: piece.numel()])

    with ThreadPoolExecutor(16, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        list(pool.map(fill_one, parameters))


def limit_device(device_gb: float) -> None:
    memory = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, device_gb * 1e9 / memory), 0)


def likely_batch(asked: dict[str, Any], weights_bytes: float) -> int:
    """Estimate how many of the prompts fit the device at once.

    Beside the weights each takes its keys and values, padded to the longest prompt, and its activations. An attempt
    with too many costs a pass, which is all that a bad estimate does.
    """
    config, prompts = asked["config"], asked["prompts"]
    width = max(len(prompt) for prompt in prompts)
    kv_bytes = 4 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    each_bytes = (width + asked["max_new_tokens"]) * kv_bytes
    each_bytes += width * 2 * _ROWS_OF_A_TOKEN * config["hidden_size"]
    room_bytes = asked["device_gb"] * 1e9 - weights_bytes
    return int(max(1, min(len(prompts), room_bytes // each_bytes)))


def left_padded(prompts: list[list[int]], device: str) -> dict[str, torch.Tensor]:
    width = max(len(prompt) for prompt in prompts)
    ids = torch.zeros(len(prompts), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


class Watch(StoppingCriteria):
    """Writes what has been reached after every token, and stops when the time is over."""

    def __init__(self, answer: dict[str, Any], path: Path, box_s: float) -> None:
        self._answer, self._path, self._begun_s, self._box_s = answer, path, time.perf_counter(), box_s
        self._num_steps = 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if input_ids.is_cuda:
            torch.cuda.synchronize()
        seconds, self._num_steps = time.perf_counter() - self._begun_s, self._num_steps + 1
        generated = self._num_steps * len(input_ids)
        reached = {"generated_tokens": generated, "generation_s": seconds, "throughput_tok_s": generated / seconds}
        self._path.write_text(json.dumps({**self._answer, **reached, "steps": self._num_steps}))
        return torch.full((len(input_ids),), seconds > self._box_s, dtype=torch.bool, device=input_ids.device)


def generate(model: Any, asked: dict[str, Any], answer: dict[str, Any], path: Path) -> None:
    """Generate for as many of the prompts at once as the device's memory holds: halve them until they fit."""
    prompts, device = asked["prompts"], "cpu" if asked["dry"] else "cuda"
    while not _fits(model, prompts, device, asked, Watch({**answer, "batch": len(prompts)}, path, asked["box_s"])):
        if len(prompts) == 1:
            raise MemoryError("not even one sequence fits")
        prompts = prompts[: len(prompts) // 2]
        print(f"   out of device memory; now with {len(prompts)} sequences", file=sys.stderr, flush=True)
        if device == "cuda":
            torch.cuda.empty_cache()


def _fits(model: Any, prompts: list[list[int]], device: str, asked: dict[str, Any], watch: Watch) -> bool:
    try:
        with torch.inference_mode():
            model.generate(
                **left_padded(prompts, device),
                max_new_tokens=asked["max_new_tokens"],
                min_new_tokens=asked["max_new_tokens"],
                do_sample=False,
                pad_token_id=0,
                stopping_criteria=StoppingCriteriaList([watch]),
            )
    except torch.OutOfMemoryError:  # what the error holds is gone when this returns
        return False
    return True
