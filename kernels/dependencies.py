"""Tie new ops to earlier ones in C++, because a simulated run has millions of them. Torch-free.

What is tied to what is said where it is used, in `harness/machine/hazards.py`; the C++ is in
`csrc/core/dependencies.h`. This module only translates arguments.
"""

from __future__ import annotations

from typing import Any

from kernels._extension import native

NativeDependencies = Any  # Dependencies of the extension


def dependencies(*, blank: Any, touched: type, done: Any, cancelled: Any, sift_from: int) -> NativeDependencies:
    """Build the native half of `Hazards`. It is told a ticket of nothing, which new ones are copies of, the class of
    what is kept by key, two states of tickets, and the length from which a key's readers are sifted."""
    return native().Dependencies(blank=blank, touched=touched, done=done, cancelled=cancelled, sift_from=sift_from)
