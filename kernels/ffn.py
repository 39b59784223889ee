"""Compute the gated feed-forward network of one expert on the CPU."""

from __future__ import annotations

import torch

from kernels import _options
from kernels import _tensors as check
from kernels._extension import native
from kernels.gating import ACTIVATIONS, Gating
from kernels.gemm import gemm_ffn, gemm_is_faster

_METHODS = ("auto", "kernel", "gemm")


SILU = Gating()


def expert_ffn(
    x: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    out: torch.Tensor,
    *,
    row_weights: torch.Tensor | None = None,
    gating: Gating = SILU,
    accumulate: bool = False,
    num_threads: int = 1,
    method: str = "auto",
) -> None:
    """Compute out = row_weights * down(gating(gate(x), up(x))), or += with `accumulate`, for the tokens of one expert.

    x, out:      [tokens, hidden] in the weights' dtype or float32 each; may be strided in dim 0
    gate, up:    [expert_dim, hidden] bfloat16 or float16; may be strided in dim 0, so that halves of a stacked tensor
                 (t[:n], t[n:]) and rows of an interleaved one (t[0::2], t[1::2]) need no copy
    down:        [hidden, expert_dim] in the dtype of gate and up; may be strided in dim 0
    row_weights: float32 [tokens], the router's weights; 1 where not given

    `method="kernel"` reads every weight once for up to 66 tokens, sums in float32 and rounds only the output (denormal
    numbers may count as zeros); "gemm" is torch's product, on torch's threads, which rounds x and intermediate results
    to the weights' dtype; "auto" takes the kernel unless x is bfloat16 and torch was measured to be faster for so many
    tokens (gemm.py). `num_threads` is that of `decode_attention`. Raises ValueError naming the argument.
    """
    codes = _check_types(x, gate, up, down, out)
    num_tokens, hidden = x.shape
    expert_dim = gate.shape[0]
    check.shape("gate", gate, (expert_dim, hidden))
    check.shape("up", up, (expert_dim, hidden))
    check.shape("down", down, (hidden, expert_dim))
    check.shape("out", out, (num_tokens, hidden))
    _options.instance("gating", gating, Gating)
    _options.instance("accumulate", accumulate, bool)
    biases = gating.float_biases(hidden, expert_dim)
    if row_weights is not None:
        check.cpu("row_weights", row_weights, 1)
        check.dtype("row_weights", row_weights, torch.float32)
        check.shape("row_weights", row_weights, (num_tokens,))
        check.contiguous("row_weights", row_weights)
    _options.one_of("method", method, _METHODS)
    num_threads = _options.num_threads(num_threads)
    tensors = {"x": x, "gate": gate, "up": up, "down": down, "out": out}
    strides = [check.rows(name, tensor) for name, tensor in tensors.items()]
    optional = {"row_weights": row_weights, "gate_bias": biases[0], "up_bias": biases[1], "down_bias": biases[2]}
    _check_overlap({**tensors, **optional})
    if not out.numel():
        return
    if method == "gemm" or (method == "auto" and x.dtype is torch.bfloat16 and gemm_is_faster(num_tokens, num_threads)):
        return gemm_ffn(x, gate, up, down, out, row_weights, gating, biases, accumulate)
    native().expert_ffn(
        *(tensor.data_ptr() for tensor in tensors.values()), *map(_address, (*biases, row_weights)), *codes,
        num_tokens, hidden, expert_dim, *strides, ACTIVATIONS[gating.activation], gating.alpha, gating.limit,
        accumulate, num_threads,
    )  # fmt: skip


def _check_types(
    x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, out: torch.Tensor
) -> tuple[int, int, int]:
    for name, tensor in {"x": x, "gate": gate, "up": up, "down": down, "out": out}.items():
        check.cpu(name, tensor, 2)
    weight_code = check.weight_code("gate", gate)
    for name, tensor in {"up": up, "down": down}.items():
        check.dtype(name, tensor, gate.dtype)
    return check.sum_code("x", x, gate), weight_code, check.sum_code("out", out, gate)


def _check_overlap(tensors: dict[str, torch.Tensor | None]) -> None:
    check.disjoint("out", check.spans(**{name: tensor for name, tensor in tensors.items() if tensor is not None}))


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
