"""Multiply with a matrix of bfloat16 or float16 weights that are read in place."""

from __future__ import annotations

import functools

import torch

from kernels import _options
from kernels import _tensors as check
from kernels._extension import native
from kernels._tensors import FLOAT32, WEIGHTS, Expected


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
    if out is None:
        check.cpu("x", x, 2)
        check.cpu("weight", weight, 2)
        out = x.new_empty(x.shape[0], weight.shape[0])
    sizes, places = _quick()(weight, x, out) or _checked(weight, x, out)
    num_threads = _options.num_threads(num_threads)
    num_outputs, depth, num_rows = sizes
    if depth == 0:
        return out.zero_()
    if num_outputs and num_rows:
        native().linear(*sizes, *places, num_threads)
    return out


@functools.cache
def _quick() -> check.Quick:
    return check.quick(
        weight=Expected("od", WEIGHTS),
        x=Expected("rd", (FLOAT32,), like="weight"),
        out=Expected("ro", (FLOAT32,), like="weight", written=True),
    )


def _checked(weight: torch.Tensor, x: torch.Tensor, out: torch.Tensor) -> check.Found:
    check.cpu("x", x, 2)
    check.cpu("weight", weight, 2)
    check.cpu("out", out, 2)
    weight_code = check.weight_code("weight", weight)
    (num_rows, depth), num_outputs = x.shape, weight.shape[0]
    check.shape("weight", weight, (num_outputs, depth))
    check.shape("out", out, (num_rows, num_outputs))
    codes = weight_code, check.sum_code("x", x, weight), check.sum_code("out", out, weight)
    places = check.places({"weight": weight, "x": x, "out": out}, codes)
    return (num_outputs, depth, num_rows), places
