"""The mover's CUDA path on a fake runtime: streams, priorities, depth, events and staging, decided without a clock."""

from __future__ import annotations

import ctypes
import itertools

import pytest
import torch
from fake_cuda import NORMAL, PACKET, URGENT, make, submit
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels import CopyError, Staging


def test_two_streams_of_which_urgent_has_the_greater_priority(cuda):
    with make(cuda, device="cuda:1"):
        assert cuda.log() == ["stream 0 priority 0 device 1", "stream 1 priority -5 device 1"]


@settings(
    max_examples=60, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(
    sizes=st.lists(st.tuples(st.lists(st.integers(0, 2500), max_size=5), st.booleans()), max_size=6),
    depth=st.integers(1, 3),
    staging=st.none() | st.builds(Staging, num_slots=st.integers(1, 3), num_threads=st.integers(1, 2)),
)
def test_every_byte_arrives(cuda, sizes, depth, staging):
    with make(cuda, depth=depth, staging=staging) as mover:
        copies = []
        for request, urgent in sizes:
            srcs = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in request]
            dsts = [torch.zeros_like(src) for src in srcs]
            copies.append((mover.submit(dsts, srcs, urgent=urgent), dsts, srcs))
        for ticket, dsts, srcs in copies:
            ticket.wait(60)
            assert all(map(torch.equal, dsts, srcs))
            spans = ticket.spans()
            assert all(a.finish_s <= b.start_s for a, b in itertools.pairwise(spans))


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_at_most_depth_packets_are_in_a_stream(cuda, depth):
    with make(cuda, depth=depth) as mover:
        cuda.hold()
        ticket, dst, src = submit(mover, 10)
        for _ in range(10 - depth):
            cuda.wait_queued(NORMAL, depth)
            cuda.permit(NORMAL, 1)
        cuda.permit(NORMAL, depth)
        ticket.wait(60)
        assert cuda.max_queued(NORMAL) == depth and torch.equal(dst, src)


@pytest.mark.parametrize("depth", [1, 2])
def test_urgent_waits_for_the_packets_in_flight_and_no_other(cuda, depth):
    with make(cuda, depth=depth) as mover:
        cuda.hold()
        normal, _, _ = submit(mover, 20)
        cuda.permit(NORMAL, 5)
        cuda.wait_queued(NORMAL, depth)
        urgent, dst, src = submit(mover, 1, urgent=True)
        cuda.wait_queued(URGENT, 1)
        assert len(cuda.positions("launch 0 1000")) == 5 + depth
        cuda.permit(URGENT, 1)
        urgent.wait(60)
        assert torch.equal(dst, src) and not normal.done
        assert urgent.num_packets_waited == depth
        cuda.hold(False)
        normal.wait(60)


def test_normal_packets_stand_back_while_urgent_ones_are_left(cuda):
    with make(cuda) as mover:
        cuda.hold()
        normal, _, _ = submit(mover, 20)
        cuda.wait_queued(NORMAL, 2)
        urgent, _, _ = submit(mover, 6, urgent=True)
        cuda.wait_queued(URGENT, 2)
        cuda.permit(NORMAL, 2)  # the link's two end, and no other follows
        cuda.permit(URGENT, 4)
        cuda.wait_queued(URGENT, 2)
        cuda.hold(False)
        urgent.wait(60)
        normal.wait(60)
        launches = [line for line in cuda.log() if line.startswith("launch")]
        assert launches == ["launch 0 1000"] * 2 + ["launch 1 1000"] * 6 + ["launch 0 1000"] * 18


def test_an_event_waited_for_may_be_recorded_again_once_all_is_issued(cuda):
    """What `wait_issued` says: the stream's wait for `wait_event` stands in it."""
    event = cuda.event()
    with make(cuda) as mover:
        cuda.hold()
        before, _, _ = submit(mover, 3)
        cuda.wait_queued(NORMAL, 2)
        ticket, _, _ = submit(mover, 1, wait_event=event)
        assert not [line for line in cuda.log() if line.startswith("wait")]
        cuda.hold(False)
        ticket.wait_issued(60)
        assert len([line for line in cuda.log() if line.startswith("wait")]) == 1
        cuda.reach(event)
        before.wait(60)
        ticket.wait(60)
    cuda.library.cudaEventDestroy(ctypes.c_void_p(event))


def test_an_urgent_request_whose_event_has_not_come_holds_nobody_up(cuda):
    event = cuda.event()
    with make(cuda) as mover:
        urgent, dst, _ = submit(mover, 6, urgent=True, wait_event=event)
        cuda.wait_queued(URGENT, 2)
        normal, _, _ = submit(mover, 20)
        normal.wait(60)
        assert urgent.spans() == [] and not dst.any() and cuda.max_queued(URGENT) == 2
        assert mover.counters()["urgent"].busy_s == 0
        cuda.reach(event)
        urgent.wait(60)
        assert cuda.positions("event")[0] < cuda.positions("start 1 1000")[0]
        assert urgent.started_s >= normal.finished_s
    cuda.library.cudaEventDestroy(ctypes.c_void_p(event))


def test_an_event_is_recorded_behind_the_last_byte(cuda):
    event = cuda.event()
    cuda.reach(event)
    with make(cuda) as mover:
        cuda.hold()
        ticket, _, _ = submit(mover, 5, record_event=event)
        cuda.wait_queued(NORMAL, 2)
        with pytest.raises(TimeoutError, match="not issued"):
            ticket.wait_issued(0.02)
        assert cuda.num_recorded(event) == 1
        cuda.permit(NORMAL, 3)
        ticket.wait_issued(60)
        assert cuda.num_recorded(event) == 2 and not ticket.done
        assert cuda.library.cudaEventQuery(ctypes.c_void_p(event)) == 600  # not ready: two copies are still to run
        cuda.permit(NORMAL, 2)
        ticket.wait(60)
        assert cuda.library.cudaEventQuery(ctypes.c_void_p(event)) == 0
    cuda.library.cudaEventDestroy(ctypes.c_void_p(event))


def test_cancel_leaves_no_trace_in_the_streams(cuda):
    event = cuda.event()
    with make(cuda) as mover:
        cuda.hold()
        first, _, _ = submit(mover, 3)
        cuda.wait_queued(NORMAL, 2)
        second, dst, _ = submit(mover, 3, record_event=event)
        assert second.cancel() and not first.cancel()
        with pytest.raises(CopyError, match="cancelled"):
            second.wait_issued()
        cuda.hold(False)
        first.wait(60)
        third, _, _ = submit(mover, 1)
        third.wait(60)
        assert len(cuda.positions("launch 0 1000")) == 4 and not dst.any() and cuda.num_recorded(event) == 1
    cuda.library.cudaEventDestroy(ctypes.c_void_p(event))


def test_staging_fills_the_next_slot_while_the_link_copies(cuda):
    with make(cuda, staging=Staging(num_slots=2)) as mover:
        assert mover.pinned_bytes == 4 * PACKET
        cuda.hold()
        ticket, dst, src = submit(mover, 8)
        for _ in range(6):
            cuda.wait_queued(NORMAL, 2)  # both slots are filled and launched, though nothing has ended
            cuda.permit(NORMAL, 1)
        cuda.hold(False)
        ticket.wait(60)
        assert torch.equal(dst, src) and cuda.max_queued(NORMAL) == 2


def test_staged_urgent_packets_have_slots_of_their_own(cuda):
    with make(cuda, staging=Staging(num_slots=2)) as mover:
        cuda.hold()
        normal, _, _ = submit(mover, 20)
        cuda.wait_queued(NORMAL, 2)
        urgent, dst, src = submit(mover, 3, urgent=True)
        cuda.permit(URGENT, 3)
        urgent.wait(60)
        assert torch.equal(dst, src) and urgent.num_packets_waited == 2 and normal.spans() == []
        cuda.hold(False)


def test_small_regions_share_packets(cuda):
    with make(cuda) as mover:
        srcs = [torch.full((300,), i, dtype=torch.uint8) for i in range(10)]
        dsts = [torch.zeros_like(src) for src in srcs]
        ticket = mover.submit(dsts, srcs)
        ticket.wait(60)
        assert [span.num_bytes for span in ticket.spans()] == [1000, 1000, 1000]
        launches = [line.split()[2] for line in cuda.log() if line.startswith("launch")]
        assert launches == ["300", "300", "300", "100", "200", "300", "300", "200", "100", "300", "300", "300"]
        assert all(map(torch.equal, dsts, srcs))


def test_memory_must_be_pinned_except_for_staged_sources(cuda, monkeypatch):
    monkeypatch.setattr("kernels._mover_arguments.is_pinned", lambda tensor: False)
    with make(cuda) as mover, pytest.raises(ValueError, match=r"^dsts\[0\]: expected pinned memory"):
        submit(mover, 1)
    monkeypatch.setattr("kernels._mover_arguments.is_pinned", lambda tensor: bool((tensor == 0).all()))  # destinations
    with make(cuda) as mover, pytest.raises(ValueError, match=r"^srcs\[0\]: expected pinned memory"):
        submit(mover, 1)
    with make(cuda, staging=Staging()) as mover:
        ticket, dst, src = submit(mover, 3)
        ticket.wait(60)
        assert torch.equal(dst, src)
