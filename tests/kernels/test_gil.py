"""Kernels run without the GIL: another Python thread gets on meanwhile."""

from __future__ import annotations

import sys
import threading
import time

import pytest
import torch
from eventually import GIVE_UP_S
from paged import paged_case

import kernels


def big_attention():
    case = paged_case([64] * 2)
    tables = case.block_tables[:1, :4].repeat(4000, 250)  # the same 4 blocks again and again
    q, lens = case.q[:1].repeat(4000, 1, 1), torch.full((4000,), 1000, dtype=torch.int32)
    out = torch.empty(q.shape)
    return lambda: kernels.decode_attention(q, case.k_cache, case.v_cache, tables, lens, out, scale=case.scale)


def big_ffn():
    weight, x = torch.ones(1024, 1024).bfloat16(), torch.ones(500, 1024)
    out = torch.empty(x.shape)
    return lambda: kernels.expert_ffn(x, weight, weight, weight, out, method="kernel")


def big_linear():
    weight, x = torch.ones(2048, 2048).bfloat16(), torch.ones(500, 2048)
    out = torch.empty(500, 2048)
    return lambda: kernels.linear(x, weight, out)


def big_append():
    k = torch.ones(40_000, 2, 64)
    caches = [torch.zeros(2500, 2, 16, 64).bfloat16() for _ in range(2)]
    slots = torch.arange(40_000)
    return lambda: kernels.kv_append(k, k, *caches, slots)


def big_gather():
    cache = torch.zeros(2500, 2, 16, 64)
    out, lens = torch.empty(2 * cache.numel()), torch.tensor([40_000], dtype=torch.int32)
    return lambda: kernels.kv_gather([cache, cache], torch.arange(2500, dtype=torch.int32)[None], lens, out)


def paced_copy():
    src, dst = torch.ones(1 << 16, dtype=torch.uint8), torch.zeros(1 << 16, dtype=torch.uint8)
    return lambda: kernels.paced_copy(dst, src, src.nbytes / 0.05, 0.0)


def sleep_until():
    return lambda: kernels.sleep_until(time.monotonic() + 0.05)


@pytest.mark.parametrize("make", [big_attention, big_ffn, big_linear, big_append, big_gather, paced_copy, sleep_until])
def test_another_thread_gets_on_during_a_call(make):
    """No thread is made to give up the GIL for an hour: the other one runs only when the kernel's lets go of it."""
    call = make()
    call()  # the pools and the extension are loaded
    count, stop = [0], threading.Event()

    def other() -> None:
        while not stop.is_set():
            count[0] += 1
            time.sleep(0)  # gives up the GIL

    thread, interval_s = threading.Thread(target=other), sys.getswitchinterval()
    sys.setswitchinterval(3600)
    try:
        thread.start()
        progress, give_up_s = 0, time.monotonic() + GIVE_UP_S / 2
        while not progress and time.monotonic() < give_up_s:  # a busy machine may not run it during one call
            before = count[0]
            call()
            progress = count[0] - before
    finally:
        stop.set()
        sys.setswitchinterval(interval_s)
        thread.join()
    assert progress > 0
