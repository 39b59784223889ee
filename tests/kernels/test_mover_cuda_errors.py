"""Faults of a fake CUDA runtime: each fails what it must, with its text, and nothing else; nothing hangs."""

from __future__ import annotations

import ctypes
import gc
import threading

import pytest
import torch
from eventually import eventually
from fake_cuda import NORMAL, PACKET, library_path, make, submit
from tasks import python

from kernels import CopyError, DataMover, Staging
from kernels import mover as mover_module


def check_next_is_fine(mover: DataMover) -> None:
    for urgent in (False, True):
        ticket, dst, src = submit(mover, 5, urgent=urgent)
        ticket.wait(60)
        assert torch.equal(dst, src)


@pytest.mark.parametrize("staging", [None, Staging()])
def test_a_refused_copy_fails_its_request_alone(cuda, staging):
    with make(cuda, staging=staging) as mover:
        cuda.hold()
        before, _, _ = submit(mover, 3)
        cuda.wait_queued(NORMAL, 2)
        cuda.fail("cudaMemcpyAsync", nth=4)  # the third packet of `before`, two of the next, then this
        srcs = [torch.ones(2 * PACKET, dtype=torch.uint8), torch.ones(3 * PACKET, dtype=torch.uint8)]
        failed = mover.submit([torch.zeros_like(src) for src in srcs], srcs)
        after, dst, src = submit(mover, 3)
        cuda.hold(False)
        pattern = (
            r"^cudaMemcpyAsync of region 1 \(1000 bytes, 0x[0-9a-f]+\.\.0x[0-9a-f]+ to 0x[0-9a-f]+\.\.0x[0-9a-f]+\) "
            r"failed: invalid argument$"
        )
        with pytest.raises(CopyError, match=pattern):
            failed.wait(60)
        before.wait(60)
        after.wait(60)
        assert torch.equal(dst, src) and failed.state == "failed" and len(failed.spans()) == 2
        assert mover.counters()["normal"].num_failed == 1
        check_next_is_fine(mover)


def test_a_failing_request_is_settled_only_when_its_copies_are_over(cuda):
    with make(cuda, depth=3) as mover:
        cuda.hold()
        cuda.fail("cudaMemcpyAsync", nth=3)
        ticket, dst, _ = submit(mover, 10)
        cuda.wait_queued(NORMAL, 2)
        cuda.permit(NORMAL, 1)
        with pytest.raises((TimeoutError, CopyError)):
            ticket.wait(0.05)
        assert not ticket.done, "a copy is still under way and writes the destination"
        cuda.hold(False)
        with pytest.raises(CopyError, match="cudaMemcpyAsync of region 0"):
            ticket.wait(60)
        assert dst[: 2 * PACKET].all() and not dst[2 * PACKET :].any()
        check_next_is_fine(mover)


@pytest.mark.parametrize("staging", [None, Staging()])
def test_a_copy_that_fails_when_it_runs_fails_its_request_alone(cuda, staging):
    with make(cuda, staging=staging) as mover:
        cuda.fail_copy(nth=2)
        failed, _, _ = submit(mover, 4)
        with pytest.raises(CopyError, match=r"^packet 1 \(from byte 1000 of region 0\) failed: unspecified"):
            failed.wait(60)
        check_next_is_fine(mover)


@pytest.mark.parametrize(
    ("function", "nth", "text"),
    [
        ("cudaStreamWaitEvent", 1, "cudaStreamWaitEvent for wait_event failed: invalid argument"),
        ("cudaEventRecord", 1, "cudaEventRecord behind wait_event failed: invalid argument"),
        ("cudaEventRecord", 2, "cudaEventRecord of record_event failed: invalid argument"),
        ("cudaEventRecord", 3, "cudaEventRecord failed: invalid argument"),
    ],
)
def test_event_errors(cuda, function, nth, text):
    wait, record = cuda.event(), cuda.event()
    cuda.reach(wait)
    with make(cuda) as mover:
        cuda.fail(function, nth)
        ticket, _, _ = submit(mover, 1, wait_event=wait, record_event=record)
        with pytest.raises(CopyError, match=f"^{text}$"):
            ticket.wait(60)
        with pytest.raises(CopyError):
            ticket.wait_issued(60)
        check_next_is_fine(mover)
    for event in (wait, record):
        cuda.library.cudaEventDestroy(ctypes.c_void_p(event))


def test_a_copy_without_its_event_is_waited_for(cuda):
    with make(cuda) as mover:
        cuda.hold()
        cuda.fail("cudaEventRecord")
        ticket, dst, src = submit(mover, 1)
        cuda.wait_queued(NORMAL, 1)
        with pytest.raises((TimeoutError, CopyError)):
            ticket.wait(0.05)
        assert not ticket.done, "the copy still writes the destination"
        cuda.hold(False)
        with pytest.raises(CopyError, match="^cudaEventRecord failed: invalid argument$"):
            ticket.wait(60)
        assert torch.equal(dst, src)


@pytest.mark.parametrize(
    ("function", "nth", "staging"),
    [
        ("cudaSetDevice", 1, None),
        ("cudaDeviceGetStreamPriorityRange", 1, None),
        ("cudaStreamCreateWithPriority", 2, None),
        ("cudaEventCreateWithFlags", 3, None),
        ("cudaHostAlloc", 1, Staging()),
    ],
)
def test_what_a_mover_cannot_get_is_an_error_and_leaves_nothing(cuda, function, nth, staging):
    cuda.fail(function, nth, code=2)
    with pytest.raises(RuntimeError, match=f"^{function} failed: out of memory$"):
        make(cuda, staging=staging)
    assert cuda.num_live == 0


def test_an_unknown_device_is_an_error(cuda):
    with pytest.raises(RuntimeError, match="^cudaSetDevice failed: invalid device ordinal$"):
        make(cuda, device="cuda:7")


@pytest.mark.parametrize("nth", [2, 3, 4])  # the first is the constructor's, then one a thread
def test_a_thread_that_fails_fails_everything(cuda, nth):
    cuda.hold()
    cuda.fail("cudaSetDevice", nth, code=2)
    mover = make(cuda)
    tickets = []
    for _ in range(3):
        try:
            tickets.append(submit(mover, 3)[0])
        except RuntimeError as error:
            assert "the mover failed in its thread mover-" in str(error)
    text = "the mover failed in its thread mover-[a-z]+: cudaSetDevice failed: out of memory"
    for ticket in tickets:
        with pytest.raises(CopyError, match=text):
            ticket.wait(60)
    eventually(lambda: mover.closed)
    with pytest.raises(RuntimeError, match=text):
        submit(mover, 1)
    cuda.hold(False)
    assert mover.close()
    mover_module._never_freed.clear()


def test_close_ends_the_packets_in_flight_and_fails_the_rest(cuda):
    mover = make(cuda)
    cuda.hold()
    first, dst, src = submit(mover, 2)
    second, untouched, _ = submit(mover, 2)
    cuda.wait_queued(NORMAL, 2)
    cuda.library.fake_delay_copies(1000)

    def let_go() -> None:
        eventually(lambda: mover.closed)
        cuda.hold(False)

    threading.Thread(target=let_go).start()
    assert mover.close()
    assert first.state == "done" and torch.equal(dst, src)
    with pytest.raises(CopyError, match="the mover was closed"):
        second.wait()
    assert not untouched.any()


def test_close_gives_up_on_an_event_that_never_comes(cuda):
    event = cuda.event()
    mover = make(cuda)
    num_kept = len(mover_module._never_freed)
    ticket, dst, _ = submit(mover, 3, wait_event=event)
    cuda.wait_queued(NORMAL, 2)
    assert not mover.close(0.05)
    with pytest.raises(CopyError, match=r"the mover was closed"):
        ticket.wait()
    assert len(mover_module._never_freed) == num_kept + 1
    cuda.reach(event)  # let the abandoned threads end
    del mover, ticket, mover_module._never_freed[num_kept:]
    gc.collect()
    eventually(lambda: cuda.num_live == 1)  # streams and events go when the last thread that used them ends
    assert dst[: 2 * PACKET].all(), "the device wrote on"
    cuda.library.cudaEventDestroy(ctypes.c_void_p(event))


def test_uses_the_runtime_that_the_process_has_loaded():
    result = python(f"""
import ctypes, torch
from kernels import DataMover
library = ctypes.CDLL({str(library_path())!r})
mover = DataMover(device="cuda:0")
library.fake_log.restype = ctypes.c_char_p
print(library.fake_log().decode().splitlines()[0])
""")
    assert result.stdout == "stream 0 priority 0 device 0\n", result.stderr


def has_runtime() -> bool:
    for number in (13, 12, 11):
        try:
            ctypes.CDLL(f"libcudart.so.{number}")
        except OSError:
            continue
        return True
    return torch.version.cuda is not None


def test_without_a_runtime_the_error_says_what_was_tried():
    if has_runtime():
        pytest.skip("this machine has a CUDA runtime")
    result = python("from kernels import DataMover\nDataMover(device='cuda:0')")
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("RuntimeError: no CUDA runtime could be loaded: libcudart.so.13: cannot open")
    assert "libcudart.so.11" in last


def test_a_library_that_is_no_runtime_is_an_error():
    with pytest.raises(RuntimeError, match=r"^the CUDA runtime libc.so.6 has no function cudaSetDevice$"):
        DataMover(device="cuda:0", cuda_runtime="libc.so.6")
