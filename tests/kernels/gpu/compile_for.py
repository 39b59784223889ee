"""Compile every kernel of Mixtral-8x7B's shape, and attention of DeepSeek-V2 and V2-Lite.

python compile_for.py CAPABILITY,SHARED_KIB,DTYPE ...

The GPUs need not be here. The kernels are compiled as `warm_up` does on one that is, and what came out is printed as
JSON, a list for each.
"""

from __future__ import annotations

import json
import re
import sys
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from kernels.triton import decode, experts, latent, prefill
from kernels.triton.matrices import ExpertShape
from kernels.triton.tiling import Chip
from kernels.triton.warming import Latent, Shapes, warm_up


class AbsentGpu:
    """The driver of GPUs that are not here answers what Triton's compiler asks of a driver."""

    def __init__(self, number: int, capability: int) -> None:
        self.number, self.capability = number, capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.number  # Triton keeps what it has compiled by this number

    def get_current_stream(self, device: int) -> int:
        return 0


class Compiled:
    """Keeps each kernel that `warm_up` compiles once, with its name, its options and what ptxas reports of it."""

    def __init__(self) -> None:
        self.kernels: dict[int, tuple[str, Any, dict[str, Any], str]] = {}
        self._run = JITFunction.run

    def run(self, kernel: Any, *arguments: Any, **options: Any) -> Any:
        with redirect_stdout(StringIO()) as report:
            found = self._run(kernel, *arguments, **options | {"warmup": True})
        name = f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.fn.__name__}"
        self.kernels.setdefault(id(found), (name, found, options, report.getvalue()))
        return found


def compiled_for(number: int, capability: int, shared_kib: int, dtype: str) -> list[dict[str, Any]]:
    driver.set_active(AbsentGpu(number, capability))
    compiled = Compiled()
    JITFunction.run = lambda self, *arguments, **options: compiled.run(self, *arguments, **options)
    for module in (decode, experts, latent, prefill):
        module.chip = lambda device: Chip(capability // 10, shared_kib << 10, 132)
    shape = ExpertShape(
        hidden=4096, expert_dim=14336, gate_stride=4096, down_stride=14336, has_biases=False,
        dtype=getattr(torch, dtype),
    )  # fmt: skip
    dims = {"num_experts": 8, "top_k": 2, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
    all_dims = [dims]
    latents = Latent(kv_rank=512, rope_dim=64, value_dim=128)
    dims = {**dims, "head_dim": 192, "latent": latents}
    dims |= {"num_groups": 4, "groups_per_token": 2, "group_score_experts": 2}
    for num_heads in (16, 128) if capability == 90 and dtype != "float32" else (16,):
        all_dims.append({**dims, "num_heads": num_heads})
    try:
        for each in all_dims:
            warm_up(Shapes(experts=shape, kv_block_size=16, **each), torch.device("cpu"))
        scored = Shapes(experts=shape, scoring="sigmoid", has_choice_bias=True, **all_dims[0])  # as Moonlight's router
        warm_up(scored, torch.device("cpu"), ["routing"])
    finally:
        JITFunction.run = compiled._run
    return [row_of(*each) for each in compiled.kernels.values()]


def row_of(name: str, kernel: Any, options: dict[str, Any], report: str) -> dict[str, Any]:
    ptx, spills = kernel.asm["ptx"], re.findall(r"(\d+) bytes spill stores", report)
    assert spills, f"ptxas reports nothing of {name}: {report!r}"
    return {
        "kernel": name,
        "tile_rows": options.get("ROWS"),
        "cubin_bytes": len(kernel.asm["cubin"]),
        "shared_bytes": kernel.metadata.shared,
        "spill_bytes": sum(map(int, spills)),
        "copies_of_16_bytes": len(re.findall(r"cp\.async\.cg\.shared\.global", ptx)),
        "loads_of_16_bytes": len(re.findall(r"ld\.global\.v4\.b32", ptx)),
        "loads_of_2_bytes": len(re.findall(r"ld\.global\.b16", ptx)),
        "copies_of_4_bytes": len(re.findall(r"cp\.async\.ca\.shared\.global", ptx)),
        "warp_group_products": len(re.findall(r"wgmma\.mma_async", ptx)),
        "warp_products": len(re.findall(r"mma\.sync", ptx)),
        "tf32": "tf32" in ptx,
        "fused_products": len(re.findall(r"fma\.rn", ptx)),
        "atomics": len(re.findall(r"\b(atom|red)\.(global|gpu|relaxed)", ptx)),
    }


def main(chips: list[str]) -> None:
    knobs.nvidia.dump_ptxas_log = True  # what Triton's own ptxas says of spills
    knobs.compilation.always_compile = True  # which it says only while it compiles
    for number, chip in enumerate(chips):
        capability, shared_kib, dtype = chip.split(",")
        print(json.dumps(compiled_for(number, int(capability), int(shared_kib), dtype)))


if __name__ == "__main__":
    main(sys.argv[1:])
