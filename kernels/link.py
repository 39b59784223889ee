"""Copy at an emulated link's speed, and wait without the GIL."""

from __future__ import annotations

import math

import torch

from kernels import _tensors as check
from kernels._extension import native


def paced_copy(dst: torch.Tensor, src: torch.Tensor, rate_bytes_s: float, deadline_s: float) -> float:
    """Copy uint8 `src` to `dst` (both 1-D, contiguous) at `rate_bytes_s`; 0 means as fast as memory allows.

    Starts when the link is free, at max(now, `deadline_s`) on time.monotonic()'s scale, and returns when the last
    byte's time has come. The result is the link's next free time: pass it to the next copy over the same link. A copy
    that follows within 150 us (and a tenth of its own duration) counts as back to back, so that the hand-over in
    Python does not slow the link down; over any stretch of time it still carries no more than its rate. Ctrl-C ends it.
    """
    _check_copy(dst, src)
    if not 0 <= rate_bytes_s < math.inf:
        raise ValueError(f"rate_bytes_s: expected 0 (unpaced) or more, got {rate_bytes_s}")
    if not math.isfinite(deadline_s):
        raise ValueError(f"deadline_s: expected a time of time.monotonic(), got {deadline_s}")
    return native().paced_copy(dst.data_ptr(), src.data_ptr(), src.numel(), rate_bytes_s, deadline_s)


def stream_copy(dst: torch.Tensor, src: torch.Tensor, *, num_threads: int = 1) -> None:
    """Copy uint8 `src` to `dst` (both 1-D, contiguous) past the caches, as fast as so many threads can."""
    _check_copy(dst, src)
    native().stream_copy(dst.data_ptr(), src.data_ptr(), src.numel(), num_threads)


def sleep_until(deadline_s: float) -> None:
    """Return at `deadline_s` of time.monotonic(), at once if it has passed; other Python threads run meanwhile."""
    if not math.isfinite(deadline_s):
        raise ValueError(f"deadline_s: expected a time of time.monotonic(), got {deadline_s}")
    native().sleep_until(deadline_s)


def _check_copy(dst: torch.Tensor, src: torch.Tensor) -> None:
    for name, tensor in (("dst", dst), ("src", src)):
        check.cpu(name, tensor, 1)
        check.dtype(name, tensor, torch.uint8)
        check.contiguous(name, tensor)
    check.shape("dst", dst, tuple(src.shape))
    check.disjoint("dst", check.spans(dst=dst, src=src))
