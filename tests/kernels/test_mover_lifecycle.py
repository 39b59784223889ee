"""Closing, garbage, forks, signals and the interpreter's end with copies still waiting: errors, never a hang."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest
import torch
from eventually import eventually
from tasks import python, threads

from kernels import CopyError, DataMover, Staging
from kernels import mover as mover_module

SETUP = """
import os, signal, sys, threading, time, torch
from eventually import eventually
from kernels import CopyError, DataMover, Staging
mover = DataMover(packet_bytes=1024, rate_bytes_s=1.0)
src, dst = torch.ones(1 << 20, dtype=torch.uint8), torch.zeros(1 << 20, dtype=torch.uint8)
ticket = mover.submit([dst], [src])
eventually(lambda: ticket.state == "started")
"""


def endless(mover: DataMover, num: int = 1) -> list:
    """Requests that the 1 byte/s of `mover` never gets done."""
    ones = torch.ones(1 << 20, dtype=torch.uint8)
    return [mover.submit([torch.zeros_like(ones)], [ones], urgent=i % 2 == 1) for i in range(num)]


@pytest.mark.parametrize("staging", [None, Staging()])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_close_fails_what_is_left(staging, num_threads):
    mover = DataMover(packet_bytes=1024, rate_bytes_s=1.0, staging=staging, num_threads=num_threads)
    tickets = endless(mover, 5)
    assert not mover.closed and mover.close() and mover.closed and mover.close()
    for ticket in tickets:
        assert ticket.state == "failed" and ticket.finished_s is not None
        with pytest.raises(CopyError, match="the mover was (closed|stopped while it copied)"):
            ticket.wait()
        assert not ticket.cancel()
    with pytest.raises(RuntimeError, match="the mover was closed"):
        endless(mover)
    assert sum(counters.num_failed for counters in mover.counters().values()) == 5


def test_close_keeps_what_is_done():
    with DataMover() as mover:
        src = torch.ones(100)
        ticket = mover.submit([dst := torch.zeros(100)], [src])
        ticket.wait(60)
    assert ticket.state == "done" and ticket.error is None and torch.equal(dst, src)
    ticket.wait()


def test_close_wakes_waiters():
    mover = DataMover(rate_bytes_s=1.0)
    errors: list[str] = []
    (ticket,) = endless(mover)

    def wait() -> None:
        try:
            ticket.wait()
        except CopyError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    mover.close()
    for thread in threads:
        thread.join(60)
    assert len(errors) == 3 and all("the mover was" in error for error in errors)


def test_close_from_many_threads():
    mover = DataMover(rate_bytes_s=1.0)
    endless(mover, 3)
    results: list[bool] = []
    threads = [threading.Thread(target=lambda: results.append(mover.close())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == [True] * 4


def test_a_dropped_mover_ends_its_threads_and_frees_the_tensors():
    mover = DataMover(packet_bytes=1024, rate_bytes_s=1.0)
    src, dst = torch.ones(4096), torch.zeros(4096)
    mover.submit([dst], [src])
    kept = weakref.ref(src)
    del src
    assert kept() is not None
    del mover
    gc.collect()
    assert kept() is None and dst.numel() == 4096
    eventually(lambda: "mover-copy0" not in threads().values())


def test_a_ticket_keeps_its_mover_at_work():
    src, dst = torch.ones(1 << 20), torch.zeros(1 << 20)
    DataMover(packet_bytes=1024).submit([dst], [src]).wait(60)
    assert torch.equal(dst, src)


def test_tensors_of_settled_requests_are_let_go():
    with DataMover() as mover:
        src = torch.ones(1000)
        kept = weakref.ref(src)
        mover.submit([torch.zeros(1000)], [src]).wait(60)
        del src
        assert kept() is None, "waiting for the last request lets go of it"


class Instead:
    """A mover's native part with some of its functions replaced."""

    def __init__(self, native, **functions) -> None:
        self.real = native
        vars(self).update(functions)

    def __getattr__(self, name: str):
        return getattr(self.real, name)


def test_a_mover_that_gives_up_during_a_submit_keeps_the_tensors():
    """It settles a request of which the link has packets just when the next submit looks for settled ones."""
    gave_up = threading.Event()

    class Ticket:
        def settled(self) -> bool:
            gave_up.set()
            return True

    def submit(entry, *_) -> Ticket:
        if hasattr(entry, "tensors"):
            entry.ticket = Ticket()
        return Ticket()

    with DataMover() as mover:
        mover._native = Instead(mover._native, submit=submit, failed=gave_up.is_set)
        src = torch.ones(1000)
        kept = weakref.ref(src)
        mover.submit([torch.zeros(1000)], [src])
        del src
        mover.submit([torch.zeros(1)], [torch.ones(1)])
        assert gave_up.is_set() and kept() is not None
        mover._native = mover._native.real


def test_an_interrupted_submit_keeps_the_tensors_of_what_it_began():
    mover = DataMover(packet_bytes=1024, rate_bytes_s=1.0)
    real = mover._native

    def submit(*arguments):
        real.submit(*arguments)
        raise KeyboardInterrupt

    mover._native = Instead(real, submit=submit)
    src = torch.ones(4096)
    kept = weakref.ref(src)
    with pytest.raises(KeyboardInterrupt):
        mover.submit([torch.zeros(4096)], [src])
    del src
    gc.collect()
    assert mover.counters()["normal"].num_requests == 1 and kept() is not None
    mover._native = real
    assert mover.close()
    gc.collect()
    assert kept() is None


def test_an_interrupted_close_keeps_the_tensors():
    mover = DataMover(packet_bytes=1024, rate_bytes_s=1.0)
    real, num_kept = mover._native, len(mover_module._never_freed)

    def close(timeout_s: float) -> bool:
        raise KeyboardInterrupt

    src = torch.ones(4096)
    kept = weakref.ref(src)
    mover.submit([torch.zeros(4096)], [src])
    del src
    mover._native = Instead(real, close=close)
    with pytest.raises(KeyboardInterrupt):
        mover.close()
    assert mover._finalizer.alive and mover_module._never_freed[num_kept:] == [mover._held]
    mover._native = real
    del mover
    gc.collect()
    assert real.stopped() and kept() is None, "its finalizer closed it, and then nothing is written any more"
    del mover_module._never_freed[num_kept:]


def test_a_refused_submit_keeps_nothing():
    mover = DataMover()
    mover.close()
    src = torch.ones(10)
    kept = weakref.ref(src)
    with pytest.raises(RuntimeError, match="the mover was closed"):
        mover.submit([torch.zeros(10)], [src])
    del src
    gc.collect()
    assert kept() is None and mover.closed


def test_a_forked_child_gets_errors_and_leaves_the_parent_alone():
    result = python(
        SETUP
        + """
small = mover.submit([dst[:0]], [src[:0]], urgent=True)
pid = os.fork()
if pid == 0:
    for call in (lambda: mover.submit([dst], [src]), ticket.wait, ticket.cancel, ticket.spans, mover.counters):
        try:
            call()
            os._exit(1)
        except RuntimeError as error:
            assert "forked child" in str(error), error
    assert mover.close()
    del mover, ticket, small
    fresh = DataMover()
    fresh.submit([dst], [src]).wait(60)
    assert dst.numpy().all()  # torch's own threads do not survive a fork
    sys.exit(0)
assert os.waitpid(pid, 0)[1] == 0
assert ticket.state == "started" and not dst[1024:].any()
print("parent")
"""
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "parent\n"


def test_the_interpreter_ends_with_copies_and_waiters_left():
    result = python(
        SETUP
        + """
def wait():
    try:
        ticket.wait()
    except CopyError:
        pass
for _ in range(4):
    threading.Thread(target=wait, daemon=True).start()
time.sleep(0.1)
other = DataMover(rate_bytes_s=1.0, staging=Staging())
other.submit([dst.clone()], [src])
print("end")
"""
    )
    assert result.returncode == 0, result.stderr
    assert (result.stdout, result.stderr) == ("end\n", "")


def test_a_signal_interrupts_wait():
    result = python(
        SETUP
        + """
def ring(*_):
    raise KeyboardInterrupt
signal.signal(signal.SIGALRM, ring)
try:
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    ticket.wait()
except KeyboardInterrupt:
    print("interrupted", ticket.state)
"""
    )
    assert result.stdout == "interrupted started\n", result.stderr


def test_wait_timeouts():
    with DataMover(rate_bytes_s=1.0) as mover:
        (ticket,) = endless(mover)
        start_s = time.monotonic()
        with pytest.raises(TimeoutError, match="was not done within 0.02 s"):
            ticket.wait(0.02)
        assert time.monotonic() - start_s >= 0.02
        with pytest.raises(TimeoutError):
            ticket.wait(0)
        with pytest.raises(ValueError, match=r"^timeout_s"):
            ticket.wait(-1)
        with pytest.raises(ValueError, match=r"^timeout_s"):
            mover.close(float("nan"))


def test_many_movers_come_and_go():
    before = threads().keys()
    src = torch.ones(5000)
    for _ in range(30):
        with DataMover(packet_bytes=1000, num_threads=2, staging=Staging()) as mover:
            mover.submit([torch.zeros(5000)], [src])
    eventually(lambda: threads().keys() <= before)
