"""A step reaches the GPUs that have the micro-batch, each once and with what is its own, and the next follows all."""

from __future__ import annotations

from itertools import count

import pytest

from harness.engine.engine import Engine
from harness.engine.gpus.fan_out import FanOut, on_each_gpu, on_one_gpu
from harness.engine.in_flight import InFlight
from harness.machine.base import GPU, Lane, LaneKind
from tests.unit.machine.ops import Quick


class Machine:
    """Notes lane, op's result and predecessors of whatever is submitted; a ticket is a number."""

    def __init__(self) -> None:
        self.log, self.numbers = [], count()

    def submit(self, lane, op, *, after=(), urgent=False):
        self.log.append((lane.rank, op.result, tuple(after)))
        return next(self.numbers)


class Steps(FanOut):
    @on_each_gpu
    def twice(self, it, part):
        self.once(it, part)
        return self.once(it, part)

    @on_each_gpu
    def once(self, it, part):
        return self.submit(GPU, Quick((it.batch, self._mine(part))))

    @on_one_gpu
    def fetch(self, it):
        return self.submit(GPU, Quick(it.batch))


def steps(num_gpus: int, *, serial: bool = False) -> tuple[Steps, list]:
    machine, rest = Machine(), {"family": None, "store": None, "resident": None, "kv": None}
    peers = tuple(Engine(machine=machine, spec=None, rank=rank, **rest) for rank in range(1, num_gpus))
    return Steps(Engine(machine=machine, spec=None, peers=peers, **rest), serial=serial), machine.log


def test_gpus_that_share_a_micro_batch_each_take_their_own_part():
    emit, log = steps(3)
    it = InFlight.shared("batch", ["acts 0", "acts 1", "acts 2"])
    assert emit.once(it, ["a", "b", "c"]) == 0, "the first GPU's ticket"
    assert emit.fetch(it) == 3
    assert [each[:2] for each in log] == [(0, ("batch", "a")), (1, ("batch", "b")), (2, ("batch", "c")), (0, "batch")]
    assert all(each.tickets is it.tickets for each in it.gpus)


@pytest.mark.parametrize("present", [(0, 2), (1, 2), (2,)])
def test_gpus_with_micro_batches_of_their_own_leave_out_those_without(present):
    emit, log = steps(3)
    own = [InFlight(f"batch {gpu}", f"acts {gpu}", gpu=gpu) for gpu in present]
    it = InFlight.together(own)
    emit.once(it, ["a", "b", "c"])
    emit.fetch(it)
    steps_of = [(gpu, (f"batch {gpu}", "abc"[gpu])) for gpu in present]
    assert [each[:2] for each in log] == steps_of + [(gpu, f"batch {gpu}") for gpu in present]
    assert len({id(each.tickets) for each in own}) == len(own)


def test_serial_steps_run_side_by_side_on_the_gpus_and_one_after_another():
    emit, log = steps(2, serial=True)
    it = InFlight.shared("batch", ["acts 0", "acts 1"])
    emit.twice(it, "p")  # tickets 0 and 1 on the first GPU, 2 and 3 on the second
    emit.once(it, "p")  # 4 and 5
    emit.fetch(it)
    emit.submit(GPU, Quick())  # 7, on the first GPU alone
    emit.once(it, "p")
    assert [(rank, after) for rank, _, after in log] == [
        *((0, ()), (0, (0,)), (1, ()), (1, (2,))),
        *((0, (1, 3)), (1, (1, 3)), (0, (4, 5)), (0, (6,)), (0, (7,)), (1, (7,))),
    ]


def test_a_stage_has_its_only_gpu_first():
    emit, log = steps(3)
    engine = emit._engine.stages[2]
    Steps(engine).once(InFlight("batch", "acts"), ["a"])
    assert log == [(Lane(LaneKind.GPU, 2).rank, ("batch", "a"), ())]
