"""Random programs on streams: what ran on the device ran in an order that the oracle allows."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.machine.base import CPU, D2H, GPU, H2D, LaneKind, Op, Work
from harness.machine.device.issuing import IssueBoard
from harness.memory.tiers import Buffer
from tests.fake_device import FakeDevice, cuda_machine
from tests.kernels.eventually import eventually
from tests.unit.machine import programs
from tests.unit.machine.ops import Gated, Quick

LANES = programs.LANES
COPY_LANES = (LaneKind.H2D, LaneKind.D2H)


Recorded = programs.Recorded


class OnStream(Recorded):
    """What a copy lane's op leaves in its stream is what counts there, not when its code ran."""

    def run(self, ctx, packet):
        if ctx.lane.kind in COPY_LANES:
            ctx._runtime.launch(ctx._stream, lambda: Recorded.run(self, ctx, packet))
            return self.number
        return Recorded.run(self, ctx, packet)


@settings(max_examples=40)
@given(programs.programs(max_size=16), st.integers(0, 99), st.sampled_from((1, 2, 16)))
def test_every_dependency_and_the_order_of_every_stream(steps, seed, depth):
    device = FakeDevice(seed)
    machine = cuda_machine({}, device=device, copies_in_flight=depth, gpu_ops_in_flight=depth, launch_mb=0.0)
    programs.Recorded = OnStream
    try:
        run = programs.run_program(machine, steps)
    finally:
        programs.Recorded = Recorded
        machine.close()
        device.close()
    programs.check_order(steps, run)
    for lane in range(len(LANES)):
        for urgent in (False, True):
            mine = [n for n, s in enumerate(steps) if (s.lane, s.urgent) == (lane, urgent) and n not in run.cancelled]
            assert run.log.first_packets(mine) == mine, "a FIFO class ran out of order"
            spans = [s for s in machine.spans if s.lane == LANES[lane] and (s.urgent == urgent or lane == 0)]
            spans.sort(key=lambda s: s.start_s)
            assert all(a.end_s <= b.start_s for a, b in pairwise(spans)), "a stream ran two packets at once"


def test_a_device_op_follows_another_before_that_has_ended_and_a_host_op_does_not(cuda, device):
    machine = cuda()
    device.hold(True)
    weights = machine.submit(H2D, Quick(writes=("w",)))
    compute = machine.submit(GPU, Quick(reads=("w",), writes=("x",)))
    back = machine.submit(D2H, Quick(reads=("x",), writes=("h",)))
    host = machine.submit(CPU, Quick(reads=("h",)))
    # Three lanes, each ordered behind the one before by streams alone.
    eventually(lambda: back in machine._launched, meanwhile=machine.now)
    assert not any(t.settled for t in (weights, compute, back, host))
    assert not host.ready
    device.hold(False)
    machine.wait(host)
    machine.drain()  # each lane's thread notes when its own ops ended
    assert weights.finished_s <= compute.started_s + 2 * machine.clock_error_s


class Launches(Quick):
    """Notes each packet's launch in `log`, whenever the device gets to it."""

    def __init__(self, name: str, packets: int, log: list[tuple[str, int]]) -> None:
        super().__init__(name, packets=packets)
        self.log = log

    def run(self, ctx, packet):
        self.log.append((self.result, packet))
        return super().run(ctx, packet)


def test_no_more_packets_are_launched_ahead_than_asked_and_an_urgent_one_passes_those_that_wait(cuda, device):
    machine, log = cuda(copies_in_flight=2, launch_mb=0.0), []
    device.hold(True)
    large = machine.submit(H2D, Launches("large", 10, log))
    stream = stream_of(machine, H2D)
    eventually(lambda: len(stream.under_way) == 2, meanwhile=machine.now)
    urgent = machine.submit(H2D, Launches("urgent", 1, log), urgent=True)
    # On a stream of its own, behind nothing that is under way.
    eventually(lambda: urgent in machine._launched, meanwhile=machine.now)
    assert len(stream.under_way) == 2
    assert log == [("large", 0), ("large", 1), ("urgent", 0)]
    device.hold(False)
    machine.wait(large)
    assert log[3:] == [("large", packet) for packet in range(2, 10)]


def stream_of(machine, lane, *, urgent=False):
    return next(q.stream for q in machine._queues if q._queue is machine._board.lane(lane) and urgent in q._classes)


def test_an_urgent_op_is_launched_while_another_ones_code_runs(cuda):
    """One that gathers on the host keeps no other copy waiting, in either direction of urgency."""
    machine = cuda()
    large, urgent, later, second = Gated(3), Gated(), Gated(), Gated()
    machine.submit(H2D, large)
    large.await_packet(0)
    machine.submit(H2D, urgent, urgent=True)
    urgent.await_packet(0)
    large.open()
    machine.submit(H2D, later)
    later.await_packet(0)
    machine.submit(H2D, second, urgent=True)
    for op in (urgent, later, second):
        op.open()
    machine.drain()
    by_class = [[s.ticket for s in machine.spans if s.urgent is urgent] for urgent in (False, True)]
    assert by_class == [[0, 0, 0, 2], [1, 3]]


def test_copies_are_launched_though_an_urgent_one_finds_no_room(cuda, device):
    """Two urgent ones stand in their stream behind work of the gpu; weights need not wait for that."""
    machine, log = cuda(copies_in_flight=2, launch_mb=0.0), []
    gate = Gated(writes=("x",))
    machine.submit(GPU, gate)
    gate.await_packet(0)
    for number in range(3):
        machine.submit(H2D, Quick(number, reads=("x",) if number < 2 else ()), urgent=True)
    stream = stream_of(machine, H2D, urgent=True)
    eventually(lambda: len(stream.under_way) == 2, meanwhile=machine.now)
    plain = [machine.submit(H2D, Launches(str(number), 1, log)) for number in range(5)]
    eventually(lambda: all(ticket.settled for ticket in plain), meanwhile=machine.now)
    assert len(stream.under_way) == 2 and not gate._gates[0].is_set()
    gate.open()
    machine.drain()
    assert log == [(str(number), 0) for number in range(5)]


class Copying(Quick):
    """So many bytes over the link."""

    def __init__(self, nbytes: int, packets: int) -> None:
        super().__init__(packets=packets)
        self.nbytes, self.launched = nbytes, []

    def work(self):
        return Work(link_bytes=self.nbytes)

    def run(self, ctx, packet):
        self.launched.append(packet)
        return packet


@pytest.mark.parametrize(("launch_mb", "groups"), [(1.0, [3, 3, 3, 1]), (0.0, [1] * 10), (9.0, [10])])
def test_small_packets_are_launched_together(cuda, launch_mb, groups):
    machine, op = cuda(launch_mb=launch_mb), Copying(3_000_000, 10)
    assert machine.wait(machine.submit(H2D, op)) == 9
    assert op.launched == list(range(10))
    spans = sorted(machine.spans, key=lambda s: s.packet)
    assert [s.work.link_bytes for s in spans] == pytest.approx([300_000 * count for count in groups])
    assert [s.packet for s in spans] == [sum(groups[:i]) for i in range(len(groups))]


def test_readiness_by_issue_counts_every_dependency_once():
    """A gpu op behind a copy (met when issued), a host op (met when done), and one that was issued before it came."""
    board = IssueBoard()
    early = board.submit(H2D, Quick(writes=("a",)), (), urgent=False)
    board.start(early, 0.0)
    assert board.issue(early) == []
    copy = board.submit(H2D, Quick(writes=("b",)), (), urgent=False)
    host = board.submit(CPU, Quick(writes=("c",)), (), urgent=False)
    last = board.submit(GPU, Quick(reads=("a", "b", "c")), (), urgent=False)
    assert (last.num_unmet, last.unmet) == (2, {early, copy, host})
    assert board.finish(early, 1.0) == []
    board.start(host, 1.0)
    assert board.finish(host, 2.0) == []
    board.start(copy, 1.0)
    assert board.issue(copy) == [last]
    assert board.finish(copy, 3.0) == []
    assert last.ready


class Copies(Op):
    """Copies a buffer, packet by packet."""

    def __init__(self, target: Buffer, source: Buffer, packets: int) -> None:
        self.target, self.source, self.packets = target, source, packets
        self.writes = (target,)

    def work(self):
        return Work(link_bytes=self.source.nbytes)

    def run(self, ctx, packet):
        share = self.source.nbytes // self.packets
        ctx.copy(self.target, self.source, packet * share, share)


class SlowCopies(FakeDevice):
    """Copies for a millisecond."""

    def copy(self, dst, src, stream):
        stream.push(lambda: time.sleep(1e-3))
        super().copy(dst, src, stream)


@pytest.mark.parametrize(("small_bytes", "overtakes"), [(100, True), (10_000, False)])
def test_a_large_urgent_copy_waits_for_no_copy_that_was_launched_after_it_began(monkeypatch, small_bytes, overtakes):
    """A device serves its streams as it likes. Small copies go beside others, where a kernel brings them."""
    monkeypatch.setattr("harness.machine.device.context.SMALL_COPY_BYTES", small_bytes)
    device = SlowCopies(longest_pause_s=0.0)
    sizes = {"device": 100_000, "pinned": 200_000}
    machine = cuda_machine(sizes, device=device, poison=False, launch_mb=0.0, copies_in_flight=2, staging_mb=0.01)
    buffers = {tier: [machine.tiers[tier].reserve(f"{tier} {i}", 40_000) for i in (0, 1)] for tier in sizes}
    for buffer in (*buffers["device"], *buffers["pinned"]):
        machine.back(buffer)
    both = list(zip(buffers["device"], buffers["pinned"], strict=True))
    normal = machine.submit(H2D, Copies(*both[0], packets=40))
    eventually(lambda: normal.packets_run >= 3, meanwhile=machine.now)
    urgent = machine.submit(H2D, Copies(*both[1], packets=10), urgent=True)
    machine.drain()
    machine.close()
    device.close()
    beside = [s for s in machine.spans if not s.urgent and urgent.started_s < s.start_s and s.end_s < urgent.finished_s]
    told = "two under way and what was being launched, up to 5 were seen where cores were busy; else 8 or more"
    assert (len(beside) <= 6) == overtakes, told
    assert normal.finished_s > urgent.finished_s
