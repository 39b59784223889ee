"""Multiply with a matrix of bfloat16 or float16 weights that are read in place."""

from __future__ import annotations

import torch

from kernels import _options
from kernels import _tensors as check
from kernels._extension import native


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    num_threads: int = 1,
) -> torch.Tensor:
    """Compute x @ weight.T with float32 sums.

    x:      [rows, depth] in the weight's dtype or float32; may be strided in dim 0
    weight: [outputs, depth] bfloat16 or float16; may be strided in dim 0
    out:    [rows, outputs] in the weight's dtype or float32, made in x's where it is not given; may be strided in dim 0

    Nothing is widened in memory: for few rows the time is that of reading `weight` once. Denormal numbers may count as
    zeros. `num_threads` is that of `decode_attention`. Raises ValueError naming the argument.
    """
    check.cpu("x", x, 2)
    check.cpu("weight", weight, 2)
    if out is None:
        out = x.new_empty(x.shape[0], weight.shape[0])
    check.cpu("out", out, 2)
    weight_code = check.weight_code("weight", weight)
    check.shape("weight", weight, (weight.shape[0], x.shape[1]))
    check.shape("out", out, (x.shape[0], weight.shape[0]))
    codes = check.sum_code("x", x, weight), weight_code, check.sum_code("out", out, weight)
    num_threads = _options.num_threads(num_threads)
    x_stride, w_stride, out_stride = check.rows("x", x), check.rows("weight", weight), check.rows("out", out)
    check.disjoint("out", check.spans(out=out, x=x, weight=weight))
    if x.shape[1] == 0:
        return out.zero_()
    if out.numel():
        native().linear(
            x.data_ptr(), weight.data_ptr(), out.data_ptr(), *codes, *out.shape, x.shape[1], x_stride, w_stride,
            out_stride, num_threads,
        )  # fmt: skip
    return out
