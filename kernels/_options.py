"""Checks of arguments that are no tensors: each raises a TypeError or ValueError that names the argument."""

from __future__ import annotations

import operator
from collections.abc import Collection
from numbers import Real
from typing import Any

from kernels import threads

_INT32_MAX = 2**31 - 1
_FLOAT32_MAX = (2.0 - 2.0**-23) * 2.0**127


def integer(name: str, value: Any, least: int, hint: str = "") -> int:
    """From `least` to what the extension's 32 bits hold; `hint` says what `least` means."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: expected an integer, got {value!r}") from None
    if number < least:
        raise ValueError(f"{name}: expected {least}{hint} or more, got {number}")
    if number > _INT32_MAX:
        raise ValueError(f"{name}: expected at most {_INT32_MAX}, got {number}")
    return number


def finite(name: str, value: Any) -> None:
    """A number that is finite in float32 too."""
    if not isinstance(value, Real):
        raise TypeError(f"{name}: expected a number, got {value!r}")
    magnitude: Any = abs(value)
    if not magnitude <= _FLOAT32_MAX:  # NaN too
        raise ValueError(f"{name}: expected a finite float32, got {value}")


def one_of(name: str, value: Any, choices: Collection[str]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(choices)}, got {value!r}")


def native_pool(pool: threads.ThreadPool | None, num_threads: Any) -> Any:
    """What the extension takes for a kernel's `pool` and `num_threads` arguments, after checking them."""
    num_threads = integer("num_threads", num_threads, 1)
    if pool is not None and num_threads != 1:
        raise ValueError(f"num_threads: give either num_threads or pool, got {num_threads} and a pool")
    return threads.native_pool(pool, num_threads)
