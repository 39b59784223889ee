"""The process of an outside peer: Mixtral of transformers, its layers offloaded to host memory by accelerate.

    python -m benchmarks.gpu_stages.accelerate_peer ASKED.json ANSWER.json

As many layers as fit a quarter of the device memory stay there, the others come over the link with every forward pass,
out of memory that is pinned: that is all that helps here. accelerate cannot prefetch. Its hooks copy a module's weights
when the module is called, wait for each tensor, and give its memory back to the device behind the module. Nor does it
keep keys and values in host memory. So the batch is as large as the device holds: an estimate, halved until it fits.
The answer is written after every token.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_stages.transformers_peer import RESIDENT_SHARE, generate, likely_batch, limit_device, random_model

_LEAST_PINNED_BYTES = 1 << 20  # such tensors have pages of their own

Register = Callable[[int, int], int]  # address and bytes -> CUDA's error, 0 for none


def pinned(model: Any, register: Register) -> dict[str, Any]:
    """Pin the host memory of all large parameters where it lies; tell how much was pinned, and what was refused."""
    nbytes = total = 0
    refused = None
    for parameter in model.parameters():
        total += parameter.nbytes
        if parameter.is_cpu and parameter.nbytes >= _LEAST_PINNED_BYTES:
            error = int(register(parameter.data_ptr(), parameter.nbytes))
            nbytes += 0 if error else parameter.nbytes
            refused = refused or (f"CUDA error {error}" if error else None)
    return {"pinned_share": nbytes / total, "pinning_refused": refused}


def largest_layer_bytes(model: Any) -> int:
    return max(sum(p.nbytes for p in layer.parameters()) for layer in model.model.layers)


def offloaded(model: Any, device_gb: float) -> Any:
    """Place the model on the first GPU within `device_gb`, a quarter of which is for weights that stay."""
    from accelerate import dispatch_model

    limit_device(device_gb)
    return dispatch_model(model, placed(model, device_gb * RESIDENT_SHARE * 1e9), main_device=0)


def placed(model: Any, resident_bytes: float) -> dict[str, Any]:
    """Map whole layers to the GPU as far as `resident_bytes` goes, and the others to host memory. accelerate keeps room
    for the largest layer that is on its way in addition."""
    from accelerate import infer_auto_device_map

    limits = {0: int(resident_bytes) + largest_layer_bytes(model), "cpu": 1 << 42}
    return dict(infer_auto_device_map(model, max_memory=limits, no_split_module_classes=["MixtralDecoderLayer"]))


def main() -> int:
    asked = json.loads(Path(sys.argv[1]).read_text())
    begun_s = time.perf_counter()
    model = random_model(asked["config"])
    dry = asked["dry"]
    answer: dict[str, Any] = {"system": "transformers, without offload (dry)"}
    if not dry:
        answer = {
            "system": "accelerate, layers in pinned host memory",
            "cannot": "prefetch: it copies a module's weights when it is called, and waits",
        }
        answer |= pinned(model, lambda address, nbytes: torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))
        if answer["pinning_refused"]:
            with suppress(RuntimeError):  # CUDA tells a refusal once more, behind the next kernel
                torch.zeros(1, device="cuda")
        weights_bytes = asked["device_gb"] * RESIDENT_SHARE * 1e9 + largest_layer_bytes(model)
        asked["prompts"] = asked["prompts"][: likely_batch(asked, weights_bytes)]
        model = offloaded(model, asked["device_gb"])
    answer |= {"weights_source": "random weights, bfloat16", "setup_s": time.perf_counter() - begun_s}
    generate(model, asked, answer, Path(sys.argv[2]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
