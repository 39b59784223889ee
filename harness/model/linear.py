"""`linear`: x @ weight.T in the way that is fastest for bfloat16 on this CPU.

Cores with bfloat16 matrix units (AMX) run the native GEMM about 4x faster than a float32 one; on cores without, it is
about 3x slower than converting both operands to float32 at every call, from 8 rows on. So one short measurement per
process decides. The result is rounded to bfloat16 either way; the two differ only in the order of float32 sums.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from functools import lru_cache

import torch
import torch.nn.functional as F

METHOD_VARIABLE = "MOE_HARNESS_BF16_LINEAR"  # "native" or "cast": overrides the measurement
CAST_FROM_ROWS = 8  # below this many rows the conversion of the weight costs more than it saves
PANEL_BYTES = 1 << 20  # float32 copy of so much of the weight at a time, so that it stays in a core's L2 cache
_scratch = threading.local()  # one panel a thread: fresh memory for each would cost more in page faults than the copy


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[m, n_in] times a weight [n_out, n_in] of the same dtype -> [m, n_out] in that dtype."""
    if x.device.type != "cpu" or x.dtype != torch.bfloat16 or x.shape[0] < CAST_FROM_ROWS:
        return F.linear(x, weight)
    return cast_linear(x, weight) if bf16_method() == "cast" else F.linear(x, weight)


def cast_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The product in float32, rounded to x's dtype; the weight is converted panel by panel of its rows."""
    wide, (num_rows, width) = x.float(), weight.shape
    panel_rows = max(64, PANEL_BYTES // (4 * width))
    out = x.new_empty(x.shape[0], num_rows)
    for start in range(0, num_rows, panel_rows):
        rows = weight[start : start + panel_rows]
        panel = _panel(rows.numel()).view(rows.shape)
        out[:, start : start + panel_rows] = F.linear(wide, panel.copy_(rows))
    return out


def _panel(num_values: int) -> torch.Tensor:
    """The calling thread's scratch memory, grown where it is too small."""
    scratch: torch.Tensor | None = getattr(_scratch, "values", None)
    if scratch is None or scratch.numel() < num_values:
        with torch.inference_mode(False):  # a tensor born in inference mode could not be written to outside it
            scratch = _scratch.values = torch.empty(num_values)
    return scratch[:num_values]


@lru_cache(maxsize=1)
def bf16_method() -> str:
    """Either "native" or "cast": measured at the first call (about 30 ms) unless the environment variable says."""
    asked = os.environ.get(METHOD_VARIABLE)
    if asked:
        if asked not in ("native", "cast"):
            raise ValueError(f"{METHOD_VARIABLE}: must be native or cast, got {asked!r}")
        return asked
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 768, generator=generator).bfloat16()
    weight = torch.randn(1024, 768, generator=generator).bfloat16()
    return "cast" if _best_s(cast_linear, x, weight) < _best_s(F.linear, x, weight) else "native"


def _best_s(multiply: Callable[..., torch.Tensor], x: torch.Tensor, weight: torch.Tensor) -> float:
    """Shortest of a few runs: the minimum is what a stolen core disturbs least."""
    times_s = []
    for _ in range(5):
        start_s = time.perf_counter()
        multiply(x, weight)
        times_s.append(time.perf_counter() - start_s)
    return min(times_s)
