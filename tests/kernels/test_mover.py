"""The mover between places in host memory: every byte arrives, in order, urgent first, never faster than the rate."""

from __future__ import annotations

import itertools
import os
import threading
import time

import pytest
import torch
from eventually import eventually
from hypothesis import given, settings
from hypothesis import strategies as st
from tasks import threads

from kernels import CopyError, CopyTicket, DataMover, Staging

KIB = 1 << 10


def zeros(num_bytes: int) -> torch.Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8)


def noise(num_bytes: int) -> torch.Tensor:
    return torch.randint(1, 256, (num_bytes,), dtype=torch.uint8)


LONG_BYTES = 24_000 * KIB


def slow_mover(**changes) -> DataMover:
    """4 KiB packets of 5 ms each."""
    return DataMover(**{"packet_bytes": 4 * KIB, "rate_bytes_s": 4 * KIB / 5e-3, **changes})


def long_copy(mover: DataMover) -> CopyTicket:
    """A request, under way, that keeps a slow mover busy for half a minute, or until it is closed."""
    ticket = mover.submit([zeros(LONG_BYTES)], [torch.ones(LONG_BYTES, dtype=torch.uint8)])
    eventually(ticket.spans)
    return ticket


REGIONS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 3000), st.integers(0, 500)), max_size=8)
REQUESTS = st.lists(st.tuples(REGIONS, st.booleans()), min_size=1, max_size=6)


@settings(max_examples=150, derandomize=True)
@given(
    requests=REQUESTS,
    packet_bytes=st.integers(50, 5000),
    num_threads=st.integers(1, 3),
    staging=st.none() | st.builds(Staging, num_slots=st.integers(1, 3), num_threads=st.integers(1, 2)),
    rate_bytes_s=st.sampled_from([0.0, 50e6]),
)
def test_every_byte_arrives_and_no_other_changes(requests, packet_bytes, num_threads, staging, rate_bytes_s):
    num_bytes = 200 + sum(gap + size for regions, _ in requests for gap, size, _ in regions)
    src, dst = noise(4000), zeros(num_bytes)
    expected, offset, tickets = dst.clone(), 0, []
    with DataMover(
        packet_bytes=packet_bytes, depth=3, num_threads=num_threads, staging=staging, rate_bytes_s=rate_bytes_s
    ) as mover:
        for regions, urgent in requests:
            pairs = []
            for gap, size, start in regions:
                offset += gap
                pairs.append((dst[offset : offset + size], src[start : start + size]))
                expected[offset : offset + size] = src[start : start + size]
                offset += size
            tickets.append(mover.submit([d for d, _ in pairs], [s for _, s in pairs], urgent=urgent))
        for ticket in tickets:
            ticket.wait(60)
        counters = mover.counters()
    assert torch.equal(dst, expected)
    for ticket, (regions, urgent) in zip(tickets, requests, strict=True):
        spans, size = ticket.spans(), sum(size for _, size, _ in regions)
        assert ticket.num_bytes == sum(span.num_bytes for span in spans) == size
        assert len(spans) == max(1, -(-size // packet_bytes)) and all(span.num_bytes <= packet_bytes for span in spans)
        assert all(ticket.submitted_s <= span.start_s <= span.finish_s <= ticket.finished_s for span in spans)
        assert (ticket.urgent, ticket.state, ticket.error) == (urgent, "done", None)
    for name, urgent in (("normal", False), ("urgent", True)):
        mine = [ticket for ticket in tickets if ticket.urgent == urgent]
        assert counters[name].num_requests == counters[name].num_done == len(mine)
        assert counters[name].num_bytes == sum(ticket.num_bytes for ticket in mine)
        assert counters[name].num_packets == sum(len(ticket.spans()) for ticket in mine)
    numbers = sorted(span.number for ticket in tickets for span in ticket.spans())
    assert numbers == list(range(len(numbers)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.bool, torch.complex64])
def test_any_dtype_and_shape(dtype):
    src = torch.randint(0, 2, (3, 5, 7)).to(dtype)
    dst = torch.zeros_like(src)
    with DataMover(packet_bytes=33) as mover:
        mover.submit([dst], [src]).wait(60)
    assert torch.equal(dst, src)


@pytest.mark.parametrize("num_bytes", [0, 63, 16_383, 16_384, 16_500, 100_001])
def test_every_code_path_copies_exactly(isa, num_bytes):
    src, dst = noise(num_bytes + 200), zeros(num_bytes + 200)
    with DataMover() as mover:
        for offset in range(0, 130, 13):
            region = slice(offset, offset + num_bytes)
            mover.submit([dst[region]], [src[130 - offset : 130 - offset + num_bytes]]).wait(60)
            assert torch.equal(dst[region], src[130 - offset : 130 - offset + num_bytes])
            assert not dst[: region.start].any() and not dst[region.stop :].any()
            dst.zero_()


def test_no_regions_still_take_their_turn():
    with slow_mover() as mover:
        first = mover.submit([zeros(8 * KIB)], [noise(8 * KIB)])
        empty = mover.submit([], [])
        empty.wait(60)
        assert first.done and empty.num_bytes == 0 and [span.number for span in empty.spans()] == [2]


@pytest.mark.parametrize("urgent", [False, True])
@pytest.mark.parametrize("staging", [None, Staging()])
def test_a_class_starts_in_the_order_of_submission(urgent, staging):
    with slow_mover(staging=staging, rate_bytes_s=0) as mover:
        tickets = [mover.submit([zeros(9 * KIB)], [noise(9 * KIB)], urgent=urgent) for _ in range(10)]
        tickets[-1].wait(60)
    assert [span.number for ticket in tickets for span in ticket.spans()] == list(range(30))


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("staging", [None, Staging(num_slots=2)])
def test_urgent_waits_at_most_for_the_packets_in_flight(num_threads, staging):
    with slow_mover(num_threads=num_threads, staging=staging) as mover:
        normal = long_copy(mover)
        for _ in range(3):
            urgent = mover.submit([zeros(4 * KIB)], [noise(4 * KIB)], urgent=True)
            urgent.wait(60)
            assert urgent.num_packets_waited is not None and urgent.num_packets_waited <= 2
        assert normal.state == "started"


def test_urgent_requests_run_to_their_end_before_normal_packets():
    with slow_mover() as mover:
        normal = long_copy(mover)
        urgents = [mover.submit([zeros(12 * KIB)], [noise(12 * KIB)], urgent=True) for _ in range(3)]
        urgents[-1].wait(60)
        spans = [urgent.spans() for urgent in urgents]
        for first, second, third in spans:
            assert (second.number, third.number) == (first.number + 1, first.number + 2)
        for urgent, before, mine in zip(urgents[1:], spans, spans[1:], strict=False):
            if urgent.submitted_s < before[-1].start_s:  # else a normal packet may have gone in between
                assert mine[0].number == before[-1].number + 1
        assert not normal.done


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("catch_up_s", [0.0, 0.01])
def test_never_carries_more_than_the_rate_allows(num_threads, catch_up_s):
    rate_bytes_s = 100e6
    with DataMover(
        packet_bytes=300 * KIB, num_threads=num_threads, rate_bytes_s=rate_bytes_s, catch_up_s=catch_up_s
    ) as mover:
        src, dsts = noise(1000 * KIB), [zeros(1000 * KIB) for _ in range(6)]
        tickets = []
        for number, dst in enumerate(dsts):
            tickets.append(mover.submit([dst], [src], urgent=number % 3 == 0))
            if number == 3:
                tickets[-1].wait(60)  # the link is idle: it must not save its time up
                time.sleep(0.03)
        for ticket in tickets:
            ticket.wait(60)
        busy_s = [counters.busy_s for counters in mover.counters().values()]
    spans = [span for ticket in tickets for span in ticket.spans()]
    # Between any two moments: what a thread took before the first of them it may carry late, however late it is.
    for begin_s, end_s in itertools.product((s.start_s for s in spans), (s.finish_s for s in spans)):
        carried_bytes = sum(s.num_bytes for s in spans if begin_s <= s.start_s and s.finish_s <= end_s)
        allowed_s = max(0.0, end_s - begin_s + catch_up_s)
        assert carried_bytes <= rate_bytes_s * allowed_s + num_threads * 300 * KIB
    assert all(0 < seconds <= max(s.finish_s for s in spans) - tickets[0].submitted_s for seconds in busy_s)


def test_cancel_takes_out_only_what_has_not_started():
    with slow_mover() as mover:
        started = long_copy(mover)
        with pytest.raises(TimeoutError, match=f"{LONG_BYTES} bytes"):
            started.wait(0.02)
        dst = zeros(4 * KIB)
        waiting, last = (mover.submit([target], [noise(4 * KIB)]) for target in (dst, zeros(4 * KIB)))
        assert not started.cancel() and waiting.cancel() and not waiting.cancel()
        assert waiting.done and waiting.state == "cancelled" and waiting.finished_s and waiting.started_s is None
        with pytest.raises(CopyError, match="the copy was cancelled"):
            waiting.wait()
        assert last.state == "waiting" and not started.done
        assert last.cancel() and mover.counters()["normal"].num_cancelled == 2
        assert not dst.any() and mover.counters()["normal"].num_failed == 0


def test_a_done_request_cannot_be_cancelled():
    with DataMover() as mover:
        ticket = mover.submit([zeros(10)], [noise(10)])
        ticket.wait(60)
        assert not ticket.cancel() and ticket.state == "done"


def test_the_end_of_a_copy_wakes_every_waiter():
    with slow_mover() as mover:
        ticket = mover.submit([zeros(80 * KIB)], [noise(80 * KIB)])
        threads = [threading.Thread(target=ticket.wait, args=(60,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        ticket.wait(60)
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()


def test_requests_from_several_threads():
    src, dsts = noise(64 * KIB), [zeros(64 * KIB) for _ in range(60)]
    with DataMover(packet_bytes=10_000, num_threads=2) as mover:

        def submit(start: int) -> None:
            tickets = [mover.submit([dst], [src], urgent=i % 2 == 0) for i, dst in enumerate(dsts[start::3])]
            for ticket in tickets:
                ticket.wait(60)

        threads = [threading.Thread(target=submit, args=(start,)) for start in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert sum(counters.num_done for counters in mover.counters().values()) == 60
    assert all(torch.equal(dst, src) for dst in dsts)


def test_threads_run_on_the_given_cores():
    core = min(os.sched_getaffinity(0))
    with DataMover(cores=[core, core], staging=Staging()) as mover:
        mover.submit([zeros(10)], [noise(10)]).wait(60)
        cores = [
            os.sched_getaffinity(task) for task, name in threads().items() if name in ("mover-copy0", "mover-stage0")
        ]
    assert cores == [{core}] * 2


def test_holds_the_tensors_until_the_copy_is_over():
    with slow_mover() as mover:
        dst = zeros(40 * KIB)
        ticket = mover.submit([dst], [noise(40 * KIB)])  # nobody else has the source
        junk = [noise(40 * KIB) for _ in range(20)]
        ticket.wait(60)
        assert dst.all() and junk
