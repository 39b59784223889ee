"""Paced copies: every byte arrives, at the asked rate, without holding the GIL."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels

MIB = 1 << 20


@settings(max_examples=40, deadline=None, derandomize=True)
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


def test_releases_the_gil():
    src, dst = torch.ones(MIB, dtype=torch.uint8), torch.zeros(MIB, dtype=torch.uint8)
    threads = [
        threading.Thread(target=kernels.paced_copy, args=(dst, src, MIB / 1.0, 0.0)),
        threading.Thread(target=kernels.sleep_until, args=(time.monotonic() + 1.0,)),
    ]
    start = time.monotonic()
    for thread in threads:
        thread.start()
    assert time.monotonic() - start < 0.9
    for thread in threads:
        thread.join()
    assert time.monotonic() - start >= 0.99


@pytest.mark.parametrize("call", ["paced_copy(dst, src, 1.0, 0.0)", "sleep_until(time.monotonic() + 3600)"])
def test_ctrl_c_ends_a_long_wait(call):
    code = f"""
import signal, time, torch, kernels
src, dst = (torch.zeros(1000, dtype=torch.uint8) for _ in range(2))
signal.setitimer(signal.ITIMER_REAL, 0.2)
signal.signal(signal.SIGALRM, signal.default_int_handler)
try:
    kernels.{call}
except KeyboardInterrupt:
    print("interrupted")
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout == "interrupted\n", result.stderr


def test_sleep_until():
    deadline = time.monotonic() + 0.02
    kernels.sleep_until(deadline)
    assert time.monotonic() >= deadline
    start = time.monotonic()
    kernels.sleep_until(start - 1)
    assert time.monotonic() - start < 0.5


def test_thread_cpu_time_counts_work_not_sleep():
    start = kernels.thread_cpu_s()
    kernels.sleep_until(time.monotonic() + 0.05)
    assert kernels.thread_cpu_s() - start < 0.02
    wall = time.monotonic()
    while time.monotonic() - wall < 0.05:
        pass
    assert kernels.thread_cpu_s() - start > 0.01
