"""No lane of the emulated machine is ever faster than its stated rate; slower it may be, since cores are shared."""

from __future__ import annotations

import threading
import time

import pytest

from harness.machine.base import CPU, D2H, GPU, H2D, LaneKind, Op, Work
from harness.machine.threads.context import LaneRate
from tests.kernels.eventually import GIVE_UP_S
from tests.unit.machine.ops import FreeOp

RATE_BYTES_S = 50e6
BURST_S = 2.5e-3  # what back-to-back packets may make up for
PACKET_BYTES = 200_000  # 4 ms


class Copy(Op):
    kind = "copy"

    def __init__(self, source, target, packets: int = 1) -> None:
        self.source, self.target, self.packets = source, target, packets
        self.reads, self.writes = (source,), (target,)

    def work(self):
        return Work(link_bytes=self.packets * PACKET_BYTES)

    def run(self, ctx, packet):
        ctx.copy(self.target, self.source, packet * PACKET_BYTES, PACKET_BYTES)


class Move(Copy):
    kind = "move"

    def run(self, ctx, packet):
        ctx.move(*(ctx.tensor(b, (PACKET_BYTES,), "uint8") for b in (self.target, self.source)))


class Fetch(Copy):
    kind = "fetch"

    def imagine(self, world):
        return None

    def run(self, ctx, packet):
        return ctx.host_value(ctx.tensor(self.source, (PACKET_BYTES,), "uint8"))


class Compute(Op):
    kind = "compute"

    def __init__(self, work: Work, packets: int = 1, writes: tuple = ()) -> None:
        self._work, self.packets, self.writes = work, packets, writes

    def work(self):
        return self._work

    def run(self, ctx, packet):
        return None


@pytest.fixture
def linked(emulated):
    machine = emulated(rates={kind: LaneRate(bytes_s=RATE_BYTES_S) for kind in (LaneKind.H2D, LaneKind.D2H)})
    source = machine.tiers["pinned"].reserve("source", 10 * PACKET_BYTES)
    target = machine.tiers["device"].reserve("target", 10 * PACKET_BYTES)
    return machine, source, target


@pytest.mark.parametrize(("kind", "lane"), [(Copy, H2D), (Move, H2D), (Move, D2H), (Fetch, D2H)])
@pytest.mark.parametrize("packets", [1, 10])
def test_a_busy_link_never_exceeds_its_rate(linked, kind, lane, packets):
    machine, source, target = linked
    for _ in range(10 // packets):
        machine.submit(lane, kind(source, target, packets))
    machine.drain()
    assert len(machine.spans) == 10
    for first in range(10):
        for last in range(first, 10):
            num_bytes = (last - first + 1) * PACKET_BYTES
            elapsed_s = machine.spans[last].end_s - machine.spans[first].start_s
            assert num_bytes <= RATE_BYTES_S * (elapsed_s + BURST_S)
    total_s = machine.spans[-1].end_s - machine.spans[0].start_s
    assert RATE_BYTES_S * total_s * 1.001 >= 10 * PACKET_BYTES, "after an idle link there is nothing to make up for"


@pytest.mark.parametrize("kind", [Copy, Move])
def test_a_link_that_stood_idle_does_not_make_up_for_it(linked, kind):
    """The bytes were not there while the link waited, so each copy takes its full time even after a short gap."""
    machine, source, target = linked
    for _ in range(10):
        asked_s = time.monotonic()
        ticket = machine.submit(H2D, kind(source, target))
        machine.wait(ticket)
        assert (ticket.finished_s - asked_s) * RATE_BYTES_S >= PACKET_BYTES * 0.999
        time.sleep(2e-4)


@pytest.mark.parametrize("kind", [Copy, Move])
def test_bytes_that_another_op_brings_are_not_made_up_for(linked, kind):
    """As above, where a copy waits for an op of another lane."""
    machine, source, target = linked
    for _ in range(10):
        made = machine.submit(CPU, Compute(Work(), writes=(source,)))
        copied = machine.submit(H2D, kind(source, target))
        machine.wait(copied)
        assert (copied.finished_s - made.finished_s) * RATE_BYTES_S >= PACKET_BYTES * 0.999


@pytest.mark.parametrize("kind", [Copy, Move])
def test_a_link_makes_up_for_no_idleness_that_its_thread_did_not_notice(linked, kind):
    """The next copy is asked for after the link has become free and before its thread looks for more."""
    machine, source, target = linked
    asked: list = []

    class Late(kind):
        def run(self, ctx, packet):
            super().run(ctx, packet)
            time.sleep(1e-3)
            asked.append((time.monotonic(), machine.submit(H2D, kind(source, target))))

    for _ in range(5):
        machine.wait(machine.submit(H2D, Late(source, target)))
        asked_s, ticket = asked.pop()
        machine.wait(ticket)
        assert (ticket.finished_s - asked_s) * RATE_BYTES_S >= PACKET_BYTES * 0.999


def test_the_two_directions_do_not_share_their_rate(linked):
    """PCIe is full duplex: both lanes are busy at the same time."""
    machine, source, target = linked
    back = machine.tiers["pinned"].reserve("back", PACKET_BYTES)
    device = machine.tiers["device"].reserve("device", PACKET_BYTES)

    begun, went_back = threading.Event(), threading.Event()

    class WithTheOtherWay(Copy):
        def run(self, ctx, packet):
            begun.set()
            if packet == 5:
                assert went_back.wait(GIVE_UP_S), "nothing came back while this op was under way"
            super().run(ctx, packet)

    up = machine.submit(H2D, WithTheOtherWay(source, target, 10))
    assert begun.wait(GIVE_UP_S)
    down = machine.submit(D2H, Move(device, back))
    machine.wait(down)
    went_back.set()
    machine.wait(up)
    assert up.started_s <= down.started_s and down.finished_s <= up.finished_s


def test_copies_copy(linked):
    machine, source, target = linked

    class Fill(FreeOp):
        writes = (source,)

        def run(self, ctx, packet):
            ctx.tensor(source, (10, PACKET_BYTES), "uint8").copy_(
                ctx.tensor(source, (10 * PACKET_BYTES,), "uint8").random_(0, 255).view(10, PACKET_BYTES)
            )

    class Same(FreeOp):
        reads = (source, target)

        def run(self, ctx, packet):
            return all(
                bool((ctx.tensor(source, shape, "uint8") == ctx.tensor(target, shape, "uint8")).all())
                for shape in [(10 * PACKET_BYTES,)]
            )

    machine.submit(CPU, Fill())
    machine.submit(H2D, Copy(source, target, 10))
    assert machine.wait(machine.submit(D2H, Same()))


@pytest.mark.parametrize(
    ("lane", "rate", "work", "least_s"),
    [
        (CPU, LaneRate(flops_s=1e9, bytes_s=1e9), Work(flops=3e6, host_bytes=1e6), 3e-3),
        (CPU, LaneRate(flops_s=1e9, bytes_s=1e9), Work(flops=1e6, host_bytes=4e6), 4e-3),
        (CPU, LaneRate(flops_s=1e9), Work(flops=2e6, host_bytes=1e12), 2e-3),
        (GPU, LaneRate(flops_s=1e9), Work(flops=2e6, device_bytes=1e12), 2e-3),
        (GPU, LaneRate(bytes_s=1e9), Work(flops=1e12, device_bytes=2e6, host_bytes=1e12), 2e-3),
        (GPU, LaneRate(link_bytes_s=1e9), Work(flops=1e12, device_bytes=1e12, link_bytes=2e6), 2e-3),
    ],
)
@pytest.mark.parametrize("packets", [1, 4])
def test_a_compute_lane_is_never_faster_than_its_caps(emulated, lane, rate, work, least_s, packets):
    machine = emulated(rates={lane.kind: rate})
    for _ in range(3):
        machine.submit(lane, Compute(work, packets))
    machine.drain()
    assert len(machine.spans) == 3 * packets
    assert all(s.end_s - s.start_s >= least_s / packets for s in machine.spans)
    assert sum(s.work.flops for s in machine.spans) == pytest.approx(3 * work.flops)
    assert sum(s.work.host_bytes for s in machine.spans) == pytest.approx(3 * work.host_bytes)


def test_without_a_rate_nothing_is_held_back(emulated):
    machine = emulated()
    machine.wait(machine.submit(CPU, Compute(Work(flops=1e18, host_bytes=1e18))))  # at any rate it would take years


def test_spans_count_the_processor_time_of_the_lane_alone(emulated):
    """A paced packet sleeps: its wall time is not processor time."""
    machine = emulated(rates={LaneKind.CPU: LaneRate(flops_s=1e9)})
    machine.wait(machine.submit(CPU, Compute(Work(flops=100e6))))
    assert machine.spans[0].end_s - machine.spans[0].start_s >= 0.1
    assert machine.spans[0].cpu_s < 0.09


class Surprised(FreeOp):
    """Expects a day's work, and finds when it runs that there is next to none."""

    flops = 1e14

    def work(self):
        return Work(flops=self.flops)

    def run(self, ctx, packet):
        self.flops = 1e6


def test_a_lane_is_held_to_the_work_that_an_op_has_found(emulated):
    machine = emulated(rates={LaneKind.CPU: LaneRate(flops_s=1e9)})
    machine.wait(machine.submit(CPU, Surprised()))
    assert machine.spans[0].work.flops == 1e6
