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
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu_stages.transformers_peer import RESIDENT_SHARE, generate, likely_batch, limit_device, random_model
from harness.machine.device.pinned import HostMemory
from harness.machine.device.runtime import TorchCudaRuntime


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
    dry = asked["dry"]
    answer: dict[str, Any] = {"system": "transformers, without offload (dry)"}
    if dry:
        model = random_model(asked["config"])
    else:
        runtime, memory = TorchCudaRuntime(), HostMemory()
        tell = partial(print, file=sys.stderr, flush=True)
        model = random_model(asked["config"], lambda nbytes: memory.pinned(nbytes, "accelerate", runtime, tell))
        answer = {
            "system": "accelerate, layers in pinned host memory",
            "cannot": "prefetch: it copies a module's weights when it is called, and waits",
        }
        weights_bytes = asked["device_gb"] * RESIDENT_SHARE * 1e9 + largest_layer_bytes(model)
        asked["prompts"] = asked["prompts"][: likely_batch(asked, weights_bytes)]
        model = offloaded(model, asked["device_gb"])
    answer |= {"weights_source": "random weights, bfloat16", "setup_s": time.perf_counter() - begun_s}
    generate(model, asked, answer, Path(sys.argv[2]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
