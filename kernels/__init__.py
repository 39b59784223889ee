"""The C++ kernels of the cpu and link lanes take torch CPU tensors and release the GIL.

Importing this package never fails and loads nothing: transformers looks for a package of this name and reads its
`__version__` (which is below any it accepts, so it leaves ours alone). The extension is loaded by the first call.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "decode_attention": "attention",
    "latent_attention": "attention",
    "staged_attention": "attention",
    "staged_latent_attention": "attention",
    "kv_append": "cache",
    "kv_gather": "cache",
    "latent_append": "cache",
    "linear": "linear",
    "ExpertWeights": "ffn",
    "expert_ffn": "ffn",
    "expert_ffns": "ffn",
    "Gating": "gating",
    "paced_copy": "link",
    "sleep_until": "link",
    "stream_copy": "link",
    "isa": "cpu",
    "num_cores": "cpu",
    "thread_cpu_s": "cpu",
}

__all__ = [*_HOMES, "__version__"]

if TYPE_CHECKING:
    from kernels.attention import decode_attention as decode_attention
    from kernels.attention import latent_attention as latent_attention
    from kernels.attention import staged_attention as staged_attention
    from kernels.attention import staged_latent_attention as staged_latent_attention
    from kernels.cache import kv_append as kv_append
    from kernels.cache import kv_gather as kv_gather
    from kernels.cache import latent_append as latent_append
    from kernels.cpu import isa as isa
    from kernels.cpu import num_cores as num_cores
    from kernels.cpu import thread_cpu_s as thread_cpu_s
    from kernels.ffn import ExpertWeights as ExpertWeights
    from kernels.ffn import expert_ffn as expert_ffn
    from kernels.ffn import expert_ffns as expert_ffns
    from kernels.gating import Gating as Gating
    from kernels.linear import linear as linear
    from kernels.link import paced_copy as paced_copy
    from kernels.link import sleep_until as sleep_until
    from kernels.link import stream_copy as stream_copy


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kernels' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"kernels.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
