"""Paced copies: every byte arrives, at the asked rate, without holding the GIL."""

from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tasks import python

import kernels

MIB = 1 << 20


@settings(max_examples=40, derandomize=True)
@given(num_bytes=st.integers(0, 600_000), dst_offset=st.integers(0, 70), src_offset=st.integers(0, 70))
def test_copies_every_byte_and_no_other(num_bytes, dst_offset, src_offset):
    src = torch.randint(0, 256, (num_bytes + 200,), dtype=torch.uint8)
    dst = torch.full((num_bytes + 200,), 77, dtype=torch.uint8)
    region = slice(dst_offset, dst_offset + num_bytes)
    kernels.paced_copy(dst[region], src[src_offset : src_offset + num_bytes], 0.0, 0.0)
    assert torch.equal(dst[region], src[src_offset : src_offset + num_bytes])
    assert torch.all(dst[: region.start] == 77) and torch.all(dst[region.stop :] == 77)


@pytest.mark.parametrize("rate_bytes_s", [0.2e9, 0.5e9])
def test_back_to_back_copies_never_exceed_the_rate(rate_bytes_s):
    """How close they come to it is a benchmark's business: a neighbour may steal this core at any moment."""
    src, dst = torch.ones(4 * MIB, dtype=torch.uint8), torch.zeros(4 * MIB, dtype=torch.uint8)
    start = free = time.monotonic()
    for number in range(1, 6):
        free = kernels.paced_copy(dst, src, rate_bytes_s, free)
        assert free >= start + number * 4 * MIB / rate_bytes_s - 1e-6
        assert time.monotonic() >= start + number * 4 * MIB / rate_bytes_s - 1e-6


def test_waits_for_the_link_to_be_free():
    src, dst = torch.ones(1024, dtype=torch.uint8), torch.zeros(1024, dtype=torch.uint8)
    start = time.monotonic()
    free = kernels.paced_copy(dst, src, 1024 / 0.02, start + 0.03)
    assert free >= start + 0.05 - 1e-6
    assert time.monotonic() >= start + 0.05 - 1e-6


def test_a_late_deadline_starts_now():
    src, dst = torch.ones(1024, dtype=torch.uint8), torch.zeros(1024, dtype=torch.uint8)
    start = time.monotonic()
    assert kernels.paced_copy(dst, src, 1024 / 0.01, start - 5) >= start + 0.01 - 1e-6


@pytest.mark.parametrize("call", ["paced_copy(dst, src, 1.0, 0.0)", "sleep_until(time.monotonic() + 3600)"])
def test_ctrl_c_ends_a_long_wait(call):
    result = python(f"""
import signal, time, torch, kernels
src, dst = (torch.zeros(1000, dtype=torch.uint8) for _ in range(2))
signal.signal(signal.SIGALRM, signal.default_int_handler)
try:
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    kernels.{call}
except KeyboardInterrupt:
    print("interrupted")
""")
    assert result.stdout == "interrupted\n", result.stderr


def test_sleep_until():
    deadline = time.monotonic() + 0.02
    kernels.sleep_until(deadline)
    assert time.monotonic() >= deadline
    kernels.sleep_until(time.monotonic() - 3600)  # has passed: it returns at once, or pytest ends an hour's sleep


def test_thread_cpu_time_counts_work_not_sleep():
    """As Python's own clock of the thread has it."""

    def between() -> None:
        before_s, found_s = time.thread_time(), kernels.thread_cpu_s()
        assert before_s - 1e-6 <= found_s <= time.thread_time() + 1e-6

    between()
    kernels.sleep_until(time.monotonic() + 0.05)
    between()
    sum(range(1_000_000))
    between()


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("nbytes", [0, 1, 4097, 3_000_001])
def test_a_copy_by_several_threads_brings_every_byte_and_no_other(nbytes, num_threads):
    room = torch.zeros(nbytes + 2, dtype=torch.uint8)
    source = torch.randint(1, 255, (nbytes,), dtype=torch.uint8)
    kernels.stream_copy(room[1:-1], source, num_threads=num_threads)
    assert torch.equal(room[1:-1], source) and room[0] == room[-1] == 0
    with pytest.raises(ValueError, match="dst"):
        kernels.stream_copy(room, source)
