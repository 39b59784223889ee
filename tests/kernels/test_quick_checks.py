"""The quick test of a call's tensors accepts what the checks that explain accept, and nothing else."""

from __future__ import annotations

import math
import sys
from contextlib import suppress
from random import Random
from string import ascii_lowercase
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels
from kernels import _tensors

FLOATS = [torch.bfloat16, torch.float16, torch.float32]
DTYPES = [*FLOATS, torch.float64, torch.int32, torch.int64, torch.int16, torch.complex64]
INT32 = torch.int32
DTYPES_OF = {"a": FLOATS, "b": FLOATS, "w": FLOATS[:2], "i": [torch.int64, torch.int32]}

# A tensor's sizes, a letter each, and its dtype: one of its own or that of a letter; with "+", or float32.
PAGES = {"block_tables": ("sm", INT32), "context_lens": ("s", INT32)}
TOKENS = {"x": ("nh", "w+"), "out": ("nh", "w+"), "row_weights": ("n", torch.float32)}
CALLS: dict[str, dict[str, tuple[str, Any]]] = {
    "decode_attention": {
        **{"q": ("shd", "a"), "k_cache": ("bgtd", "b"), "v_cache": ("bgtd", "b"), "out": ("shd", "a+"), **PAGES},
        "sinks": ("h", torch.float32),
    },
    "latent_attention": {"q": ("shd", "a"), "cache": ("btd", "b"), "out": ("shl", "a+"), **PAGES},
    "staged_attention": {
        **{"q": ("shd", "a"), "staging": ("e", "b"), "context_lens": ("s", INT32), "out": ("shd", "a+")},
        "sinks": ("h", torch.float32),
    },
    "staged_latent_attention": {
        **{"q": ("shd", "a"), "staging": ("e", "b"), "context_lens": ("s", INT32), "out": ("shl", "a+")},
    },
    "kv_append": {
        **{"k": ("nhd", "a"), "v": ("nhd", "a"), "k_cache": ("bhtd", "b"), "v_cache": ("bhtd", "b")},
        "slots": ("n", "i"),
    },
    "latent_append": {"latent": ("nd", "a"), "cache": ("btd", "b"), "slots": ("n", "i")},
    "linear": {"x": ("rd", "w+"), "weight": ("od", "w"), "out": ("ro", "w+")},
    "expert_ffn": {"gate": ("eh", "w"), "up": ("eh", "w"), "down": ("he", "w"), **TOKENS},
    "expert_ffns": TOKENS,
}
OPTIONS = {
    "decode_attention": {"scale": 1.0},
    "latent_attention": {"scale": 1.0},
    "staged_attention": {"scale": 1.0},
    "staged_latent_attention": {"scale": 1.0},
    "expert_ffn": {"method": "kernel"},
    "expert_ffns": {"method": "kernel"},
}
FUNCTIONS = {kernel: getattr(kernels, kernel) for kernel in CALLS}
MODULES = [sys.modules[name] for name in sorted({function.__module__ for function in FUNCTIONS.values()})]


class Other(torch.Tensor):
    """Stands for subclasses, which may answer as they please."""


def placed(tensor: torch.Tensor, memory: torch.Tensor, start: int, row_stride: int | None = None) -> torch.Tensor:
    """Return a tensor of this shape in that memory, contiguous but for the stride of the first dimension."""
    strides = [math.prod(tensor.shape[dim + 1 :]) for dim in range(tensor.dim())]
    return memory.as_strided(tensor.shape, [row_stride or strides[0], *strides[1:]], start)


def row_elements(tensor: torch.Tensor) -> int:
    return math.prod(tensor.shape[1:])


def wider(tensor, by):
    stride = row_elements(tensor) + by
    return placed(tensor, torch.zeros(tensor.shape[0] * stride + by, dtype=tensor.dtype), by, stride)


def shrunk(tensor, by):
    """Cut off the end of a tensor's storage, up to two bytes of its own with it, or all."""
    moved = CHANGES["wider" if by % 2 else "offset"](tensor, by)
    num_elements = (
        moved.storage_offset() + 1 + sum((n - 1) * s for n, s in zip(moved.shape, moved.stride(), strict=True))
    )
    moved.untyped_storage().resize_(0 if by == 7 else num_elements * moved.itemsize - by % 3)
    return moved


def resized(tensor, by):
    dim, change = by % tensor.dim(), 1 if by % 2 else -1
    sizes = [max(0, size + change) if at == dim else size for at, size in enumerate(tensor.shape)]
    return torch.zeros(sizes, dtype=tensor.dtype)


CHANGES = {
    "wider": wider,
    "offset": lambda t, by: placed(t, torch.zeros(t.numel() + 2 * by, dtype=t.dtype), by),
    "skewed": lambda t, by: t.transpose(by % t.dim(), -1).contiguous().transpose(by % t.dim(), -1),
    "stepped": lambda t, by: t.repeat_interleave(2, by % t.dim()).unfold(by % t.dim(), 1, 2)[..., 0],
    "thin": lambda t, by: t.as_strided(t.shape, [s + by * (n == 1) for n, s in zip(t.shape, t.stride(), strict=True)]),
    "expanded": lambda t, by: t[:1].expand(t.shape) if len(t) else t,
    "resized": resized,
    "ranked": lambda t, by: t[None] if by % 2 else t.flatten(),
    "retyped": lambda t, by: t.to(DTYPES[by % len(DTYPES)]),
    "negated": lambda t, by: torch._neg_view(t),
    "conjugated": lambda t, by: t.to(torch.complex64).conj(),
    "imaginary": lambda t, by: torch.zeros(t.shape, dtype=torch.complex64).conj().imag,
    "differentiable": lambda t, by: t.requires_grad_() if t.dtype in FLOATS else t,
    "parameter": lambda t, by: torch.nn.Parameter(t, requires_grad=False),
    "subclassed": lambda t, by: t.as_subclass(Other),
    "meta": lambda t, by: t.to("meta"),
    "sparse": lambda t, by: t.to_sparse(),
    "mkldnn": lambda t, by: torch.zeros(t.shape).to_mkldnn(),
    "functional": lambda t, by: torch._to_functional_tensor(t) if t.numel() else t,  # an empty one may pass
    "an array": lambda t, by: torch.zeros(t.shape).numpy(),
    "none": lambda t, by: None,
}


def share_memory(arguments: dict[str, Any], name: str, other: str, by: int) -> None:
    """Lay two tensors into one memory, one up to two elements too near the end of the other."""
    one, two = arguments[name], arguments[other]
    if torch.is_tensor(one) and torch.is_tensor(two) and name != other:
        memory = torch.zeros(one.numel() * one.itemsize + two.numel() + 8, dtype=two.dtype)
        arguments[other] = placed(two, memory, 0)
        arguments[name] = placed(one, memory.view(one.dtype), max(0, two.nbytes // one.itemsize + by - 2))


def alternate_rows(arguments: dict[str, Any], name: str, other: str, by: int) -> None:
    """Lay two tensors of one shape into one memory, row by row in turn, too near or at unequal strides or neither."""
    one, two = arguments[name], arguments[other]
    if torch.is_tensor(one) and torch.is_tensor(two) and one.shape == two.shape and name != other:
        row, is_unequal = row_elements(two), by > 5
        memory, stride = torch.zeros(3 * row * len(two) + 64, dtype=two.dtype), 2 * row + by % 2
        start = row if is_unequal else max(0, row + by // 2 - 1)
        arguments[other] = placed(two, memory, 0, stride)
        arguments[name] = placed(one, memory.view(one.dtype), start, stride + is_unequal)


def drawn_sizes(chance: Random) -> dict[str, int]:
    """Return a size for each letter, in most cases such that heads and dimensions fit each other."""
    sizes = {letter: chance.randint(1, 4) for letter in ascii_lowercase}
    sizes["h"] *= sizes["g"]
    sizes["l"] = chance.randint(1, sizes["d"])
    return {letter: chance.randint(0, 4) if chance.random() < 0.03 else size for letter, size in sizes.items()}


def drawn_arguments(chance: Random, kernel: str) -> dict[str, Any]:
    expected, sizes = CALLS[kernel], drawn_sizes(chance)
    dtypes = {letter: chance.choice(among) for letter, among in DTYPES_OF.items()}

    def made(dims: str, dtype: Any) -> torch.Tensor:
        if isinstance(dtype, str):
            dtype = torch.float32 if dtype[1:] and chance.random() < 0.5 else dtypes[dtype[0]]
        return torch.zeros([sizes[letter] for letter in dims], dtype=dtype)

    arguments: dict[str, Any] = {name: made(*each) for name, each in expected.items()}
    others = dict(OPTIONS.get(kernel, {}))
    if kernel == "staged_attention":
        others["num_kv_heads"] = sizes["g"]
    if kernel == "expert_ffns":
        gate = torch.zeros(2, sizes["h"], dtype=dtypes["w"])
        others |= {"experts": [kernels.ExpertWeights(gate, gate, gate.T.contiguous())], "counts": [sizes["n"]]}
    written = {"kv_append": ["k_cache", "v_cache"], "latent_append": ["cache"]}.get(kernel, ["out"])
    twins = [(a, b) for a in written for b in expected if a != b and expected[a][0] == expected[b][0]]
    for _ in range(chance.randint(0, 2)):
        name, other, by = chance.choice(list(arguments)), chance.choice(list(arguments)), chance.randint(0, 7)
        what = chance.choice(["change", "change", "share", "alternate"])
        with suppress(RuntimeError, TypeError, AttributeError, IndexError, ZeroDivisionError):  # not with such a one
            if what == "change":
                arguments[name] = CHANGES[chance.choice(list(CHANGES))](arguments[name], by)
            elif what == "share":
                share_memory(arguments, name, other, by)
            elif twins:
                alternate_rows(arguments, *chance.choice(twins), by)
    if chance.random() < 0.15:  # last: nothing may read it after that
        name = chance.choice(list(arguments))
        if torch.is_tensor(arguments[name]) and arguments[name].numel():
            arguments[name] = shrunk(arguments[name], chance.randint(0, 7))
    if kernel == "linear" and arguments["out"] is None:
        arguments["out"] = 0  # None asks for a new tensor, which lies elsewhere each time
    return {**arguments, **others}


class Calls(list):
    """Takes the place of the extension and notes what it is called with."""

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self.append((name, arguments))


def outcome(monkeypatch: pytest.MonkeyPatch, kernel: str, arguments: dict[str, Any]) -> Any:
    """Return what the extension is called with, or the error, of this call."""
    calls = Calls()
    for module in MODULES:
        monkeypatch.setattr(module, "native", lambda: calls)
    try:
        FUNCTIONS[kernel](**arguments)
    except Exception as error:  # torch raises what it likes where a tensor has no memory
        return f"{type(error).__name__}: {error}"
    return list(calls)


def outcomes(kernel: str, arguments: dict[str, Any]) -> tuple[Any, Any, bool]:
    """Return the outcome as it is and without quick tests, and whether checks that explain were asked in the first."""
    asked = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        cpu = _tensors.cpu
        monkeypatch.setattr(_tensors, "cpu", lambda *given: (asked.append(given), cpu(*given))[1])
        found = outcome(monkeypatch, kernel, arguments)
    with pytest.MonkeyPatch.context() as monkeypatch:
        for module in MODULES:
            for name in [name for name in vars(module) if name.startswith("_quick")]:
                monkeypatch.setattr(module, name, lambda *_: lambda *_: None)
        return found, outcome(monkeypatch, kernel, arguments), bool(asked)


def is_plain(arguments: dict[str, Any]) -> bool:
    """Tell whether the quick test must know the call if it is right: no subclass, and `kv_append` has tokens."""
    tensors = [value for value in arguments.values() if torch.is_tensor(value)]
    has_tokens = "slots" not in arguments or any(len(tensor) for tensor in tensors if tensor is arguments["slots"])
    return has_tokens and all(type(tensor) in (torch.Tensor, torch.nn.Parameter) for tensor in tensors)


needs_dlpack = pytest.mark.skipif(
    not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"), reason="this torch knows no quick test"
)


@needs_dlpack
@pytest.mark.parametrize("kernel", CALLS)
@settings(max_examples=300, derandomize=True)
@given(seed=st.integers(0, 2**32))
def test_the_quick_test_and_the_checks_agree(kernel, seed):
    arguments = drawn_arguments(Random(seed), kernel)
    found, expected, asked = outcomes(kernel, arguments)
    must_be_known = not isinstance(expected, str) and is_plain(arguments)
    assert found == expected
    assert not (asked and must_be_known)


def test_memory_that_is_to_be_copied_on_write_is_copied():
    whole, weight = torch.zeros(16, 16), torch.ones(16, 16).bfloat16()
    out = torch._lazy_clone(whole)
    kernels.linear(torch.ones(16, 16), weight, out)
    assert (out == 16).all() and not whole.any()
