"""The GPU kernels in Triton compute routing, grouped experts, attention and norms, and bring rows out of pinned memory.

Triton is optional. Nothing here imports it before the first kernel is called; `serves` says whether a tensor's device
has a kernel, and is what ops ask before they use one. `choose` leaves some out, so that a fault can be looked for. None
of the kernels waits for the device: grids come from upper bounds that the host knows, and whatever depends on routing
or lengths is read from memory. None uses atomics: every result is the same bit for bit in every run. Tile sizes
are fixed tables (`tiling.py`); nothing is tuned, and after `warm_up` nothing is compiled, inside a pass.

With TRITON_INTERPRET=1 in the environment when Triton is first imported, the kernels run on CPU tensors, slowly.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

# By what they do. decode: attention over any kind of cache; copies: small and scattered rows out of pinned memory;
# rows: norms, rotary embedding, and rows kept in a cache
KERNELS = ("routing", "experts", "prefill", "decode", "copies", "rows")
_chosen = frozenset(KERNELS)
_HOMES = {
    "Activation": "matrices",
    "ExpertMatrices": "matrices",
    "address_table": "matrices",
    "choose_experts": "routing",
    "foresee_experts": "foresee",
    "expert_scratch_bytes": "experts",
    "grouped_experts": "experts",
    "grouped_experts_bytes": "sizes",
    "causal_attention": "prefill",
    "append_rows": "rows",
    "rms_norm": "rows",
    "rotate": "rows",
    "bring": "copies",
    "gather_kv": "copies",
    "gather_numbers": "copies",
    "keep": "copies",
    "paged_decode_attention": "decode",
    "staged_decode_attention": "decode",
    "paged_latent_attention": "latent",
    "staged_latent_attention": "latent",
    "Latent": "warming",
    "Shapes": "warming",
    "warm_up": "warming",
}

__all__ = [*_HOMES, "KERNELS", "available", "choose", "serves"]

if TYPE_CHECKING:
    from kernels.triton.copies import bring as bring
    from kernels.triton.copies import gather_kv as gather_kv
    from kernels.triton.copies import gather_numbers as gather_numbers
    from kernels.triton.copies import keep as keep
    from kernels.triton.decode import paged_decode_attention as paged_decode_attention
    from kernels.triton.decode import staged_decode_attention as staged_decode_attention
    from kernels.triton.experts import expert_scratch_bytes as expert_scratch_bytes
    from kernels.triton.experts import grouped_experts as grouped_experts
    from kernels.triton.foresee import foresee_experts as foresee_experts
    from kernels.triton.latent import paged_latent_attention as paged_latent_attention
    from kernels.triton.latent import staged_latent_attention as staged_latent_attention
    from kernels.triton.matrices import Activation as Activation
    from kernels.triton.matrices import ExpertMatrices as ExpertMatrices
    from kernels.triton.matrices import address_table as address_table
    from kernels.triton.prefill import causal_attention as causal_attention
    from kernels.triton.routing import choose_experts as choose_experts
    from kernels.triton.rows import append_rows as append_rows
    from kernels.triton.rows import rms_norm as rms_norm
    from kernels.triton.rows import rotate as rotate
    from kernels.triton.sizes import grouped_experts_bytes as grouped_experts_bytes
    from kernels.triton.warming import Latent as Latent
    from kernels.triton.warming import Shapes as Shapes
    from kernels.triton.warming import warm_up as warm_up


@lru_cache(maxsize=1)
def available() -> bool:
    """Return whether Triton is installed: PyTorch for CUDA brings it along, and without a GPU the extra `test` does."""
    return find_spec("triton") is not None


def choose(kernels: Iterable[str]) -> None:
    """Let these of `KERNELS` work in this process from now on; what the others would do is done in torch."""
    global _chosen
    _chosen = frozenset(kernels)
    assert _chosen <= set(KERNELS), f"unknown kernels among {sorted(_chosen)}"


def serves(tensor: Any, kernel: str) -> bool:
    """Return whether one of `KERNELS` works on this tensor: it is chosen, the tensor lies on a GPU, and Triton is
    installed."""
    return kernel in _chosen and bool(tensor.is_cuda) and available()


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kernels.triton' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"kernels.triton.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
