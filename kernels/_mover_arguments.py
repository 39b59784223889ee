"""Checks of the data mover's arguments: each raises a `ValueError` (`TypeError` for a wrong type) that names it."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

import torch

from kernels import _tensors as check
from kernels._extension import native


def device(name: str, value: torch.device | str) -> torch.device:
    """CUDA devices get an index: the first one without."""
    try:
        result = torch.device(value)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"{name}: expected cpu or cuda:<index>, got {value!r}") from error
    if result.type not in ("cpu", "cuda"):
        raise ValueError(f"{name}: expected cpu or cuda:<index>, got {value!r}")
    return torch.device("cuda", result.index or 0) if result.type == "cuda" else torch.device("cpu")


def positive(name: str, value: int, *, at_most: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an integer, got {value!r}")
    if value < 1:
        raise ValueError(f"{name}: must be at least 1, got {value}")
    if at_most is not None and value > at_most:
        raise ValueError(f"{name}: must be at most {at_most}, got {value}")


def copy_threads(device: torch.device, num_threads: int, depth: int) -> None:
    positive("num_threads", num_threads)
    if device.type == "cuda" and num_threads > 1:
        raise ValueError(f"num_threads: a CUDA device's copies are launched by 1 thread, got {num_threads}")
    if num_threads > depth:
        raise ValueError(f"num_threads: at most depth = {depth} packets are under way at once, got {num_threads}")


def rate(device: torch.device, rate_bytes_s: float) -> None:
    if not 0 <= rate_bytes_s < math.inf:
        raise ValueError(f"rate_bytes_s: expected 0 (unpaced) or more, got {rate_bytes_s}")
    if rate_bytes_s and device.type == "cuda":
        raise ValueError(f"rate_bytes_s: a CUDA device's link has its own speed; expected 0, got {rate_bytes_s}")


def seconds(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name}: expected 0 or more seconds, got {value}")


def cores(name: str, cores: Sequence[int], num_threads: int, num_staging_threads: int) -> None:
    num_expected = num_threads + num_staging_threads
    if cores and len(cores) != num_expected:
        threads = f"{num_threads} copying and {num_staging_threads} staging"
        raise ValueError(f"{name}: expected none or {num_expected} cores ({threads} threads), got {len(cores)}")
    allowed = os.sched_getaffinity(0)
    for core in cores:
        if core not in allowed:
            raise ValueError(f"{name}: this process may not run on core {core}; it has {sorted(allowed)}")


def request(device: torch.device, dsts: Sequence[torch.Tensor], srcs: Sequence[torch.Tensor], *, staged: bool) -> None:
    for name, tensors in (("dsts", dsts), ("srcs", srcs)):
        if not isinstance(tensors, (list, tuple)):
            raise TypeError(f"{name}: expected a list or tuple of tensors, got {type(tensors).__name__}")
    if len(dsts) != len(srcs):
        raise ValueError(f"dsts: expected as many as srcs, {len(srcs)}, got {len(dsts)}")
    for i, (dst, src) in enumerate(zip(dsts, srcs, strict=True)):
        _tensor(f"dsts[{i}]", dst, device, pageable=False)
        _tensor(f"srcs[{i}]", src, device, pageable=staged)
        check.dtype(f"dsts[{i}]", dst, src.dtype)
        check.shape(f"dsts[{i}]", dst, tuple(src.shape))
        if staged and not src.is_cpu:
            raise ValueError(f"srcs[{i}]: staging reads host memory, got a tensor on {src.device}")


def _tensor(name: str, tensor: torch.Tensor, device: torch.device, *, pageable: bool) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
    if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        raise ValueError(f"{name}: expected a dense tensor without lazy conjugation or negation")
    if not tensor.is_cpu and tensor.device != device:
        expected = "a CPU tensor" if device.type == "cpu" else f"one on the CPU or {device}"
        raise ValueError(f"{name}: expected {expected}, got one on {tensor.device}")
    check.contiguous(name, tensor)
    if device.type == "cuda" and tensor.is_cpu and not pageable and tensor.numel() and not is_pinned(tensor):
        raise ValueError(f"{name}: expected pinned memory (tensor.pin_memory()), or a mover with staging for sources")


def is_pinned(tensor: torch.Tensor) -> bool:
    return tensor.is_pinned()


def events(device: torch.device, **events: int) -> None:
    for name, event in events.items():
        if isinstance(event, bool) or not isinstance(event, int) or event < 0:
            raise TypeError(f"{name}: expected an integer (torch.cuda.Event.cuda_event), got {event!r}")
        if event and device.type != "cuda":
            raise ValueError(f"{name}: only a CUDA device's mover has events")


def disjoint(dsts: list[int], srcs: list[int], sizes_bytes: list[int]) -> None:
    """Start addresses and sizes of regions, of which no destination may share bytes with another one or a source."""
    overlap = native().find_overlap(dsts, srcs, sizes_bytes)
    if overlap is not None:
        dst, with_dst, other = overlap
        raise ValueError(f"dsts[{dst}]: overlaps {'dsts' if with_dst else 'srcs'}[{other}] in memory")
