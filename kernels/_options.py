"""Check arguments that are no tensors: each check raises a TypeError or ValueError that names the argument."""

from __future__ import annotations

import operator
from collections.abc import Collection
from numbers import Real
from typing import Any

_INT32_MAX = 2**31 - 1
MAX_THREADS = 1024  # more than any machine has cores; each is really started
_FLOAT32_MAX = (2.0 - 2.0**-23) * 2.0**127


def integer(name: str, value: Any, least: int, hint: str = "", *, most: int = _INT32_MAX) -> int:
    """Check for an integer from `least` to `most`, by default what the extension's 32 bits hold. `hint` says what
    `least` means."""
    if type(value) is int and least <= value <= most:
        return value
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: expected an integer, got {value!r}") from None
    if number < least:
        raise ValueError(f"{name}: expected {least}{hint} or more, got {number}")
    if number > most:
        raise ValueError(f"{name}: expected at most {most}, got {number}")
    return number


def finite(name: str, value: Any) -> None:
    """Check for a number that is finite in float32 too."""
    if type(value) is float and -_FLOAT32_MAX <= value <= _FLOAT32_MAX:
        return
    if not isinstance(value, Real):
        raise TypeError(f"{name}: expected a number, got {value!r}")
    magnitude: Any = abs(value)
    if not magnitude <= _FLOAT32_MAX:  # NaN too
        raise ValueError(f"{name}: expected a finite float32, got {value}")


def at_least_zero(name: str, value: Any) -> None:
    """Check for a number from 0 on, infinity included."""
    if type(value) is float and value >= 0:
        return
    if not isinstance(value, Real):
        raise TypeError(f"{name}: expected a number, got {value!r}")
    if not float(value) >= 0:  # NaN too
        raise ValueError(f"{name}: expected 0 or more, got {value}")


def instance(name: str, value: Any, kind: type) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"{name}: expected a {kind.__name__}, got {value!r}")


def one_of(name: str, value: Any, choices: Collection[str]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(choices)}, got {value!r}")


def num_threads(value: Any) -> int:
    """Return the number of threads that a kernel's call may use, after checking it."""
    return integer("num_threads", value, 1, most=MAX_THREADS)
