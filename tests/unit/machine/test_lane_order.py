"""The two FIFO classes of an emulated lane: what blocks, what overtakes, and what cannot be interrupted."""

from __future__ import annotations

from harness.machine.base import CPU, H2D
from tests.kernels.eventually import eventually
from tests.unit.machine.ops import Gated, Quick


def order(machine) -> list[tuple[int, int]]:
    """(ticket, packet) on the h2d lane in the order in which they ran."""
    return [(s.ticket, s.packet) for s in sorted(machine.spans, key=lambda s: s.start_s) if s.lane == H2D]


def test_a_ready_urgent_op_runs_at_the_next_packet_boundary(emulated):
    machine = emulated()
    large, waiting = Gated(packets=3), Quick()
    machine.submit(H2D, large)
    machine.submit(H2D, waiting)
    large.await_packet(0)
    machine.submit(H2D, Quick(), urgent=True)
    machine.submit(H2D, Quick(), urgent=True)
    large.open()
    machine.drain()
    assert order(machine) == [(0, 0), (2, 0), (3, 0), (0, 1), (0, 2), (1, 0)]


def test_an_urgent_op_that_becomes_ready_late_waits_for_no_op_behind_the_running_one(emulated):
    machine = emulated()
    source, large = Gated(writes=("k",)), Gated(packets=3)
    machine.submit(CPU, source)
    machine.submit(H2D, large)
    urgent = machine.submit(H2D, Quick(reads=("k",)), urgent=True)
    machine.submit(H2D, Quick())
    large.open(0)
    large.await_packet(1)  # the urgent op was not ready at the first boundary
    source.open()
    eventually(lambda: urgent.ready, meanwhile=machine.now)
    large.open(1, 2)
    machine.drain()
    assert order(machine) == [(1, 0), (1, 1), (2, 0), (1, 2), (3, 0)]


def test_one_packet_cannot_be_interrupted(emulated):
    machine = emulated()
    whole = Gated()
    machine.submit(H2D, whole)
    machine.submit(H2D, Quick())
    whole.await_packet(0)
    machine.submit(H2D, Quick(), urgent=True)
    whole.open()
    machine.drain()
    assert order(machine) == [(0, 0), (2, 0), (1, 0)]


def test_urgent_ops_do_not_interrupt_each_other(emulated):
    machine = emulated()
    first = Gated(packets=2)
    machine.submit(H2D, first, urgent=True)
    first.await_packet(0)
    machine.submit(H2D, Quick(), urgent=True)
    first.open()
    machine.drain()
    assert order(machine) == [(0, 0), (0, 1), (1, 0)]


def test_the_head_of_a_class_blocks_its_own_class_only(emulated):
    machine = emulated()
    source = Gated(writes=("k",))
    machine.submit(CPU, source)
    machine.submit(H2D, Quick(reads=("k",)))
    blocked = machine.submit(H2D, Quick("ready, but behind the head"))
    machine.wait(machine.submit(H2D, Quick(), urgent=True))
    assert not blocked.done
    assert order(machine) == [(3, 0)]
    source.open()
    machine.drain()
    assert order(machine) == [(3, 0), (1, 0), (2, 0)]


def test_an_urgent_head_that_is_not_ready_holds_up_urgent_ops_but_not_the_normal_class(emulated):
    machine = emulated()
    source = Gated(writes=("k",))
    machine.submit(CPU, source)
    machine.submit(H2D, Quick(reads=("k",)), urgent=True)
    behind = machine.submit(H2D, Quick(), urgent=True)
    machine.wait(machine.submit(H2D, Quick()))
    assert not behind.done
    source.open()
    machine.drain()
    assert order(machine) == [(3, 0), (1, 0), (2, 0)]


def test_cancelling_the_head_of_a_lane_lets_the_next_op_run(emulated):
    machine = emulated()
    source = Gated(writes=("k",))
    machine.submit(CPU, source)
    head = machine.submit(H2D, Quick(reads=("k",)))
    following = machine.submit(H2D, Quick("follows"))
    assert machine.cancel(head)
    assert machine.wait(following) == "follows"
    source.open()


def test_ranks_have_lanes_of_their_own(emulated):
    from harness.machine.base import Lane, LaneKind

    machine = emulated()
    blocked = Gated()
    machine.submit(Lane(LaneKind.GPU, 0), blocked)
    assert machine.wait(machine.submit(Lane(LaneKind.GPU, 1), Quick("rank 1"))) == "rank 1"
    blocked.open()
