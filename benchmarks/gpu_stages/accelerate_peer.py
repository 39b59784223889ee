"""The process of the outside peer: Mixtral of transformers, its layers offloaded to host memory by accelerate.

    python -m benchmarks.gpu_stages.accelerate_peer ASKED.json ANSWER.json

As many layers as fit a quarter of the device memory stay there, the others come over the link with every forward pass,
which is how accelerate is used where a model does not fit. The rest is for the sequences: as many at once as are asked
for, or half of them, and so on, until they fit. The answer is written after every token.
"""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList


def random_model(entries: dict[str, Any]) -> Any:
    """Make a model in bfloat16 in pageable host memory. Every matrix is filled from one random block; norms are 1."""
    config = AutoConfig.for_model("mixtral", **entries)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.to_empty(device="cpu")
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # the only buffers: computed, not loaded
    block = torch.rand(1 << 24).sub_(0.5).mul_((12 / entries["hidden_size"]) ** 0.5).bfloat16()

    def fill(parameter: Any) -> None:
        flat = parameter.data.view(-1)
        if parameter.dim() == 1:
            flat.fill_(1.0)
            return
        for start in range(0, flat.numel(), block.numel()):
            piece = flat[start : start + block.numel()]
            piece.copy_(block[: piece.numel()])

    with ThreadPoolExecutor(16, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        list(pool.map(fill, model.parameters()))
    return model.eval()


def offloaded(model: Any, device_gb: float) -> Any:
    """Place the model on the first GPU within `device_gb`, a quarter of which is for weights that stay."""
    from accelerate import dispatch_model

    memory = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, device_gb * 1e9 / memory), 0)
    return dispatch_model(model, placed(model, device_gb * 0.25e9), main_device=0)


def placed(model: Any, resident_bytes: float) -> dict[str, Any]:
    """Map whole layers to the GPU as far as `resident_bytes` goes, and the others to host memory."""
    from accelerate import infer_auto_device_map

    limits = {0: int(resident_bytes), "cpu": 1 << 42}
    return dict(infer_auto_device_map(model, max_memory=limits, no_split_module_classes=["MixtralDecoderLayer"]))


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


def main() -> int:
    asked = json.loads(Path(sys.argv[1]).read_text())
    begun_s = time.perf_counter()
    model = random_model(asked["config"])
    dry = asked["dry"]
    if not dry:
        model = offloaded(model, asked["device_gb"])
    answer = {
        "system": "transformers, without offload (dry)" if dry else "accelerate, layers in host memory",
        "weights_source": "random weights, bfloat16",
        "setup_s": time.perf_counter() - begun_s,
    }
    generate(model, asked, answer, Path(sys.argv[2]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
