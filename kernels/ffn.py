"""Compute the gated feed-forward networks of experts on the CPU."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from kernels import _options
from kernels import _tensors as check
from kernels._extension import native
from kernels._tensors import FLOAT32, FLOATS, WEIGHTS, Expected
from kernels.gating import Gating
from kernels.gemm import gemm_ffn, gemm_from_tokens

_METHODS = ("auto", "kernel", "gemm")
_ROW_WEIGHTS = Expected("n", (FLOAT32,), contiguous=True, optional=True)

SILU = Gating()


class ExpertWeights:
    """The matrices of one expert, checked once for any number of calls.

    gate, up: [expert_dim, hidden] bfloat16 or float16; may be strided in dim 0, so that halves of a stacked tensor
              (t[:n], t[n:]) and rows of an interleaved one (t[0::2], t[1::2]) need no copy
    down:     [hidden, expert_dim] in the dtype of gate and up; may be strided in dim 0

    Raises ValueError or TypeError naming the argument.
    """

    __slots__ = ("_matrices", "_memory", "_spans", "_tensors", "biases", "code", "down", "gate", "gating", "kind", "up")

    def __init__(self, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, gating: Gating = SILU) -> None:
        for name, tensor in (("gate", gate), ("up", up), ("down", down)):
            check.cpu(name, tensor, 2)
        self.code = check.weight_code("gate", gate)
        check.dtype("up", up, gate.dtype)
        check.dtype("down", down, gate.dtype)
        expert_dim, hidden = gate.shape
        check.shape("up", up, (expert_dim, hidden))
        check.shape("down", down, (hidden, expert_dim))
        _options.instance("gating", gating, Gating)
        self.gate, self.up, self.down, self.gating = gate, up, down, gating
        self.biases = gating.float_biases(hidden, expert_dim)
        # What experts of one call must have in common.
        self.kind = (expert_dim, hidden, self.code, *gating.checked())
        strides = (check.rows("gate", gate), check.rows("up", up), check.rows("down", down))
        tensors = {"gate": gate, "up": up, "down": down}
        for name, bias in zip(("gate_bias", "up_bias", "down_bias"), self.biases, strict=True):
            if bias is not None:
                tensors[name] = bias
        self._tensors, self._spans = tensors, check.spans(**tensors)
        self._memory: check.Memory | None = None
        names = ("gate", "up", "down", "gate_bias", "up_bias", "down_bias")
        self._matrices = (*[self._spans[name][0] if name in tensors else 0 for name in names], *strides)

    def require_in_place(self) -> None:
        """Raise ValueError where a matrix or a bias was freed or resized since."""
        if self._memory is not None:
            return self._memory.require()
        if check.spans(**self._tensors) != self._spans:
            raise ValueError("gate, up or down: their memory is another since it was checked")
        self._memory = check.Memory(**self._tensors)

    def require_outside(self, out: check.Span) -> None:
        """Raise ValueError where results at `out` would overwrite a matrix or a bias."""
        for start, end in self._spans.values():
            if out[0] < end and start < out[1]:
                check.disjoint("out", {"out": out, **self._spans})

    def arguments(self, first_row: int, num_tokens: int) -> tuple[int, ...]:
        """Return what the extension is told of the expert and of its tokens."""
        return (first_row, num_tokens, *self._matrices)


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

    x, out:         [tokens, hidden] in the weights' dtype or float32 each; may be strided in dim 0
    gate, up, down: as of `ExpertWeights`
    row_weights:    float32 [tokens], the router's weights; 1 where not given

    `method="kernel"` reads every weight once for up to 66 tokens, sums in float32 and rounds only the output (denormal
    numbers may count as zeros); "gemm" is torch's product, on torch's threads, which rounds x and intermediate results
    to the weights' dtype; "auto" takes the kernel unless x is bfloat16 and torch was measured to be faster for so many
    tokens (gemm.py). `num_threads` is that of `decode_attention`. Raises ValueError naming the argument.
    """
    found = _quick_one()(gate, up, down, x, out, row_weights)
    if found is None or not isinstance(gating, Gating) or gating.has_biases:
        check.cpu("x", x, 2)
        check.cpu("gate", gate, 2)
        check.shape("gate", gate, (gate.shape[0], x.shape[1]))
        experts = [ExpertWeights(gate, up, down, gating)]
        return _compute(x, [len(x)], experts, out, row_weights, accumulate, num_threads, method)
    activation = gating.checked()
    num_threads = _checked_options(accumulate, method, num_threads)
    (expert_dim, hidden, num_tokens), (gate_at, up_at, down_at, x_at, out_at, row_weights_at, *others) = found
    w_code, x_code, out_code, gate_stride, up_stride, down_stride, x_stride, out_stride = others
    if not num_tokens or not hidden:
        return None
    least = _least_tokens_of_torch(method, x, num_threads)
    if least is not None and num_tokens >= least:
        return gemm_ffn(x, gate, up, down, out, row_weights, gating, (None, None, None), accumulate)
    native().expert_ffns(
        [(0, num_tokens, gate_at, up_at, down_at, 0, 0, 0, gate_stride, up_stride, down_stride)], expert_dim, hidden,
        w_code, x_at, out_at, row_weights_at, x_code, out_code, x_stride, out_stride, *activation, accumulate,
        num_threads,
    )  # fmt: skip
    return None


def expert_ffns(
    x: torch.Tensor,
    counts: Sequence[int],
    experts: Sequence[ExpertWeights],
    out: torch.Tensor,
    *,
    row_weights: torch.Tensor | None = None,
    accumulate: bool = False,
    num_threads: int = 1,
    method: str = "auto",
) -> None:
    """Compute `expert_ffn` of several experts of one size in one call, whose threads go from expert to expert without
    waiting for each other.

    x, out, row_weights: as for `expert_ffn`; the tokens of one expert after those of another
    counts:              tokens of each expert, 0 and more

    Each expert's outputs are the same, bit for bit, as those of a call with that expert alone. Raises ValueError or
    TypeError naming the argument; of an expert's tensors by their names in `ExpertWeights`.
    """
    for expert in experts:
        expert.require_in_place()
    _compute(x, counts, experts, out, row_weights, accumulate, num_threads, method)


def _compute(
    x: torch.Tensor, counts: Sequence[int], experts: Sequence[ExpertWeights], out: torch.Tensor,
    row_weights: torch.Tensor | None, accumulate: bool, num_threads: int, method: str,
) -> None:  # fmt: skip
    """Check the rest and compute, with experts whose memory was just looked at."""
    found = _quick_tokens()(x, out, row_weights) or _checked_tokens(x, out, row_weights)
    (num_tokens, hidden), tokens = found
    if len(counts) != len(experts) or sum(counts) != num_tokens or min(counts, default=0) < 0:
        raise ValueError(f"counts: expected the tokens of {len(experts)} experts, {num_tokens} in all, got {counts}")
    num_threads = _checked_options(accumulate, method, num_threads)
    if not experts:
        return
    first, (_, out_at, *_, out_stride) = experts[0], tokens
    check.sum_code("x", x, first.gate)
    check.sum_code("out", out, first.gate)
    num_elements = (num_tokens - 1) * out_stride + hidden if num_tokens and hidden else 0
    _check_experts(experts, hidden, (out_at, out_at + num_elements * out.itemsize))
    if not num_tokens or not hidden:
        return
    least = _least_tokens_of_torch(method, x, num_threads)
    mine, start = [], 0
    for expert, count in zip(experts, counts, strict=True):
        if count and least is not None and count >= least:
            _by_torch(x, expert, out, row_weights, slice(start, start + count), accumulate)
        elif count:
            mine.append(expert.arguments(start, count))
        start += count
    if mine:
        native().expert_ffns(mine, *first.kind[:3], *tokens, *first.kind[3:], accumulate, num_threads)


def _checked_options(accumulate: bool, method: str, num_threads: int) -> int:
    _options.instance("accumulate", accumulate, bool)
    _options.one_of("method", method, _METHODS)
    return _options.num_threads(num_threads)


@functools.cache
def _quick_one() -> check.Quick:
    return check.quick(
        gate=Expected("eh", WEIGHTS),
        up=Expected("eh", like="gate"),
        down=Expected("he", like="gate"),
        x=Expected("nh", (FLOAT32,), like="gate"),
        out=Expected("nh", (FLOAT32,), like="gate", written=True),
        row_weights=_ROW_WEIGHTS,
    )


@functools.cache
def _quick_tokens() -> check.Quick:
    return check.quick(x=Expected("nh", FLOATS), out=Expected("nh", FLOATS, written=True), row_weights=_ROW_WEIGHTS)


def _checked_tokens(x: torch.Tensor, out: torch.Tensor, row_weights: torch.Tensor | None) -> check.Found:
    """Make the checks that need no weights; the codes mean nothing where the dtypes are no floats."""
    check.cpu("x", x, 2)
    check.cpu("out", out, 2)
    num_tokens, hidden = x.shape
    check.shape("out", out, (num_tokens, hidden))
    if row_weights is not None:
        check.cpu("row_weights", row_weights, 1)
        check.dtype("row_weights", row_weights, FLOAT32)
        check.shape("row_weights", row_weights, (num_tokens,))
        check.contiguous("row_weights", row_weights)
    codes = check.DTYPE_CODES.get(x.dtype, -1), check.DTYPE_CODES.get(out.dtype, -1)
    tensors = {"x": x, "out": out, "row_weights": row_weights}
    return (num_tokens, hidden), check.places(tensors, codes, contiguous=("row_weights",))


def _check_experts(experts: Sequence[ExpertWeights], hidden: int, out: check.Span) -> None:
    """Check that experts can be computed in one call and do not lie where the results go."""
    for expert in experts:
        if expert.kind != experts[0].kind:
            raise ValueError("experts: expected the same sizes, dtypes and activation in one call")
        expert.require_outside(out)
    if hidden != experts[0].kind[1]:
        raise ValueError(f"x: expected rows of {experts[0].kind[1]} elements as the experts have, got {hidden}")


def _by_torch(
    x: torch.Tensor, expert: ExpertWeights, out: torch.Tensor, row_weights: torch.Tensor | None, rows: slice,
    accumulate: bool,
) -> None:  # fmt: skip
    """Compute the rows of one expert by torch's products."""
    weights = None if row_weights is None else row_weights[rows]
    gemm_ffn(x[rows], expert.gate, expert.up, expert.down, out[rows], weights, expert.gating, expert.biases, accumulate)


def _least_tokens_of_torch(method: str, x: torch.Tensor, num_threads: int) -> int | None:
    """Return from how many tokens on torch computes an expert; None where the kernel always does."""
    if method == "gemm":
        return 0
    return gemm_from_tokens(num_threads) if method == "auto" and x.dtype is torch.bfloat16 else None
