"""Drives a scheduler with a pipeline that only counts, and checks conservation after every pass."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import strategies as st

from harness.engine.batch import PassPlan
from harness.engine.sequences import Sequence, State
from harness.engine.strategy import Scheduler
from harness.memory.kv_cache import BlockAllocator, Blocks
from harness.memory.split_kv import SplitAllocator
from harness.workload.request import Request

EOS = 2


@dataclass(frozen=True)
class Workload:
    """A workload has (prompt tokens, tokens allowed, tokens until the end token comes or None) of each request, and the
    limits."""

    requests: list[tuple[int, int, int | None]]
    num_blocks: int
    block_size: int
    n_real: int
    max_pass_tokens: int

    def sequences(self) -> list[Sequence]:
        return [
            Sequence(Request(request_id=i, prompt_ids=(7,) * prompt, max_new_tokens=new, text=None))
            for i, (prompt, new, _) in enumerate(self.requests)
        ]

    def num_tokens(self, number: int) -> int:
        """Return how many tokens the request generates."""
        _, new, until_end = self.requests[number]
        return new if until_end is None else min(new, until_end)


@st.composite
def workloads(draw) -> Workload:
    length = st.integers(1, draw(st.sampled_from((3, 12, 40))))
    requests = draw(
        st.lists(st.tuples(length, st.integers(1, 15), st.one_of(st.none(), st.integers(1, 15))), max_size=14)
    )
    n_real = draw(st.integers(1, 60))
    return Workload(
        requests=requests,
        num_blocks=draw(st.integers(1, 30)),
        block_size=draw(st.sampled_from((1, 2, 4, 16))),
        n_real=n_real,
        max_pass_tokens=n_real + draw(st.sampled_from((0, 0, 5, 60))),
    )


class FakeKV:
    """A fake KV cache with `device_blocks` of its blocks on the device."""

    def __init__(self, num_blocks: int, block_size: int, *, device_blocks: int = 0) -> None:
        host = BlockAllocator(num_blocks - device_blocks, block_size)
        device = BlockAllocator(device_blocks, block_size, on_device=True)
        self.allocator: Blocks = SplitAllocator(device, host) if device_blocks else host

    def release(self, sequence: Sequence) -> None:
        self.allocator.release(sequence)


@dataclass(frozen=True)
class Pass:
    """One pass by request numbers, with the situation before it was scheduled."""

    mode: str
    prefill: list[int]
    decode: list[int]
    prefill_tokens: list[int]
    preempted: set[int]
    running_before: list[int]  # decoding sequences, as the scheduler must still have them
    free_before: int
    missing_before: int  # blocks that their next tokens need
    unfinished: list[int]  # not rejected either, after scheduling
    queue_head: int | None  # first waiting request after scheduling


@dataclass
class Record:
    sequences: list[Sequence]
    passes: list[Pass] = field(default_factory=list)


def drive(scheduler: Scheduler, kv: FakeKV, sequences: list[Sequence], workload: Workload) -> Record:
    """Drive to the end. Raises where a pass makes no progress, runs somebody twice, or lacks a block."""
    record, allocator = Record(sequences), kv.allocator
    limit = sum(new for _, new, _ in workload.requests)
    for _ in range(limit + 1):
        before = [s for s in sequences if s.state is State.DECODING]
        free = allocator.num_free
        missing = sum(allocator.missing_blocks(s, s.num_tokens) for s in before)
        plan = scheduler.next_pass()
        if plan is None:
            break
        record.passes.append(_describe(plan, sequences, before, free, missing))
        assert plan.sequences, "a pass without sequences makes no progress"
        assert len(set(plan.sequences)) == len(plan.sequences), "a sequence is twice in a pass"
        assert all(allocator.missing_blocks(s, s.num_tokens) == 0 for s in plan.sequences), "tokens without a block"
        scheduler.retire(plan, _accept(plan, kv, workload))
        allocator.check_integrity(sequences)
    else:
        raise AssertionError("more passes than tokens")
    assert allocator.num_used == 0, "blocks were lost"
    return record


def _accept(plan: PassPlan, kv: FakeKV, workload: Workload) -> list[Sequence]:
    ended = []
    for sequence in plan.sequences:
        _, _, until_end = workload.requests[sequence.request.request_id]
        token = EOS if len(sequence.generated) + 1 == until_end else 9
        if sequence.accept(token, EOS):
            sequence.state = State.FINISHED
            kv.release(sequence)
            ended.append(sequence)
    return ended


def _describe(plan: PassPlan, sequences: list[Sequence], before: list[Sequence], free: int, missing: int) -> Pass:
    def numbers(some: list[Sequence]) -> list[int]:
        return [s.request.request_id for s in some]

    waiting = [s for s in sequences if s.state in (State.QUEUED, State.PREEMPTED)]
    return Pass(
        mode=plan.mode,
        prefill=numbers(plan.prefill),
        decode=numbers(plan.decode),
        prefill_tokens=[s.num_tokens for s in plan.prefill],
        preempted=set(numbers([s for s in before if s.state is State.PREEMPTED])),
        running_before=numbers(before),
        free_before=free,
        missing_before=missing,
        unfinished=[s.request.request_id for s in sequences if s.state not in (State.FINISHED, State.REJECTED)],
        queue_head=waiting[0].request.request_id if waiting else None,
    )


def check_conservation(record: Record, workload: Workload, never_fits) -> None:
    """Check that every request ends finished with exactly its tokens, or rejected with a reason, and only if it could
    not run."""
    for sequence in record.sequences:
        number = sequence.request.request_id
        if never_fits(sequence):
            assert sequence.state is State.REJECTED
            assert sequence.reject_reason
            assert sequence.generated == []
        else:
            assert (sequence.state, sequence.reject_reason) == (State.FINISHED, None)
            assert len(sequence.generated) == workload.num_tokens(number)


def check_first_admissions(record: Record) -> None:
    """Check that first admissions are in the order of arrival."""
    seen: list[int] = []
    for one in record.passes:
        seen += [number for number in one.prefill if number not in seen]
    assert seen == sorted(seen)
