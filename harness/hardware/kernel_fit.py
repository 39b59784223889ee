"""Fit rates of a machine to published kernel latencies. Torch-free.

MoE-Lightning Fig. 9 gives three latencies of one layer of Mixtral-8x7B in decode, by micro-batch and context: the copy
of the KV cache to the GPU, attention on the CPU, and the experts on the GPU. Each is bound by one memory or link, so
latency = fixed part + bytes / rate. `conf/hardware/l4.yaml` has the rates that `fit_latencies` finds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.model.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class RateFit:
    """A rate is fitted to points; `worst_error` is the largest |fitted - given| / given of them."""

    gb_s: float
    latency_us: float
    worst_error: float


def fit_rate(points: Sequence[tuple[float, float]], *, with_latency: bool) -> RateFit:
    """Fit a rate by least squares of the relative errors over (bytes, seconds); without a fixed part unless
    `with_latency`. Raises ValueError where the points do not determine a positive rate."""
    # seconds = a + b * bytes; divided by the given seconds, every point weighs the same.
    rows = [(1 / seconds if with_latency else 0.0, nbytes / seconds) for nbytes, seconds in points]
    aa, ab, bb = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a1, b1 = sum(row[0] for row in rows), sum(row[1] for row in rows)
    determinant = aa * bb - ab * ab if with_latency else bb
    if determinant <= 1e-12 * bb * max(aa, 1.0):
        raise ValueError("the points determine no rate: sizes must differ")
    latency_s = (a1 * bb - b1 * ab) / determinant if with_latency else 0.0
    s_per_byte = (aa * b1 - ab * a1) / determinant if with_latency else b1 / bb
    if s_per_byte <= 0:
        raise ValueError("larger transfers take no longer: no rate fits")
    errors = [abs(latency_s + s_per_byte * nbytes - seconds) / seconds for nbytes, seconds in points]
    return RateFit(gb_s=1e-9 / s_per_byte, latency_us=latency_s * 1e6, worst_error=max(errors))


def fit_latencies(table: Mapping[str, Any], spec: ModelSpec) -> dict[str, RateFit]:
    """Fit the rates to a table of latencies; return them by profile field.

    `table` has `ctx_len` (tokens), `kv_transfer_h2d` and `cpu_attention` (micro-batch -> seconds by context) and
    `moe_ffn_gpu` (micro-batch -> seconds), of one layer of `spec`.
    """

    def by_kv_bytes(kernel: str) -> list[tuple[float, float]]:
        per_token = spec.kv_bytes_per_token_layer
        return [
            (micro_batch * context * per_token, seconds)
            for micro_batch, row in table[kernel].items()
            for context, seconds in zip(table["ctx_len"], row, strict=True)
        ]

    # Every micro-batch of the table reaches all experts, so their weights are read once, whatever its size.
    experts_bytes = spec.num_experts * spec.components["expert"].nbytes
    return {
        "h2d_gb_s": fit_rate(by_kv_bytes("kv_transfer_h2d"), with_latency=True),
        "cpu_gb_s": fit_rate(by_kv_bytes("cpu_attention"), with_latency=True),
        "device_gb_s": fit_rate([(experts_bytes, s) for s in table["moe_ffn_gpu"].values()], with_latency=False),
    }
