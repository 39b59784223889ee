"""Compile every kernel of Mixtral-8x7B's shape, and attention of DeepSeek-V2 and V2-Lite: python compile_for.py
CAPABILITY SHARED_KIB DTYPE.

The GPU need not be here. The kernels are compiled as `warm_up` does on one that is, and what came out is printed as
JSON.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from kernels.triton import decode, experts, latent, prefill
from kernels.triton.matrices import ExpertShape
from kernels.triton.tiling import Chip
from kernels.triton.warming import Latent, Shapes, warm_up


class AbsentGpu:
    """The driver of a GPU that is not here answers what Triton's compiler asks of a driver."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def spill_bytes(ptx: str, capability: int) -> int:
    """Registers' worth of memory traffic that ptxas reports."""
    target = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)
    assert target is not None, "PTX names what it is for"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [get_ptxas(capability).path, "-v", f"-arch={target[1]}", file.name, "-o", "/dev/null"]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return sum(map(int, re.findall(r"(\d+) bytes spill stores", report)))


def main(capability: int, shared_kib: int, dtype: str) -> None:
    driver.set_active(AbsentGpu(capability))
    compiled: list[tuple[str, Any, dict[str, Any]]] = []
    run = JITFunction.run

    def compile_only(self: Any, *arguments: Any, **options: Any) -> Any:
        kernel = run(self, *arguments, **options | {"warmup": True})
        if not any(kernel is known for _, known, _ in compiled):
            compiled.append((f"{self.fn.__module__.rpartition('.')[2]}.{self.fn.__name__}", kernel, options))
        return kernel

    JITFunction.run = compile_only
    for module in (decode, experts, latent, prefill):
        module.chip = lambda device: Chip(capability // 10, shared_kib << 10)
    shape = ExpertShape(
        hidden=4096, expert_dim=14336, gate_stride=4096, down_stride=14336, has_biases=False,
        dtype=getattr(torch, dtype),
    )  # fmt: skip
    dims = {"num_experts": 8, "top_k": 2, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
    warm_up(Shapes(experts=shape, kv_block_size=16, **dims), torch.device("cpu"))
    latents = Latent(kv_rank=512, rope_dim=64, value_dim=128)
    dims |= {"head_dim": 192, "latent": latents, "num_groups": 4, "groups_per_token": 2, "group_score_experts": 2}
    for num_heads in (16, 128) if dtype != "float32" else (16,):  # tiles of float32 do not depend on it
        warm_up(Shapes(experts=shape, kv_block_size=16, **dims | {"num_heads": num_heads}), torch.device("cpu"))
    rows = []
    for name, kernel, options in compiled:
        ptx = kernel.asm["ptx"]
        found = {
            "kernel": name,
            "tile_rows": options.get("ROWS"),
            "cubin_bytes": len(kernel.asm["cubin"]),
            "shared_bytes": kernel.metadata.shared,
            "spill_bytes": spill_bytes(ptx, capability),
            "copies_of_16_bytes": len(re.findall(r"cp\.async\.cg\.shared\.global", ptx)),
            "loads_of_2_bytes": len(re.findall(r"ld\.global\.b16", ptx)),
            "copies_of_4_bytes": len(re.findall(r"cp\.async\.ca\.shared\.global", ptx)),
            "warp_group_products": len(re.findall(r"wgmma\.mma_async", ptx)),
            "warp_products": len(re.findall(r"mma\.sync", ptx)),
            "tf32": "tf32" in ptx,
            "atomics": len(re.findall(r"\b(atom|red)\.(global|gpu|relaxed)", ptx)),
        }
        rows.append(found)
    print(json.dumps(rows))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
