"""Several batches in flight, or side by side: whose turn it is, and what each may take."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.engine import loop
from harness.engine.strategy import Strategy
from harness.memory.kv_cache import BlockAllocator
from strategies.common.side_by_side import SideBySide
from strategies.common.static_batches import StaticBatches
from strategies.offloading.batches_in_flight import BlockShare, TakingTurns, dealt_out
from strategies.offloading.request_batching import BatchScheduler
from tests.unit.engine.fakes import FakePipeline, engine, sequences
from tests.unit.memory.test_kv_cache import sequence

work = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 5)), max_size=12)


def scheduler_of(requests, blocks) -> BatchScheduler:
    return BatchScheduler(
        requests, blocks, num_micro_batches=2, micro_batch_size=2, micro_batch_prompt_tokens=20, prompt_tokens=40
    )


class Watching(FakePipeline):
    """Notes which sequences are in the passes under way, from the call to the wait for them."""

    def __init__(self, on, order: list[list[int]]) -> None:
        super().__init__(on)
        self.order = order

    def run(self, plan):
        self.order.append(sorted(s.request.request_id for s in plan.sequences))
        return super().run(plan)


@settings(max_examples=60)
@given(requests=work, count=st.integers(1, 4))
def test_no_batch_has_two_passes_under_way_and_all_requests_end(requests, count):
    on = engine(sequences(*requests), num_blocks=24)
    batches = [scheduler_of(*share) for share in dealt_out(on.sequences, on.kv.allocator, count)]
    order: list[list[int]] = []
    strategy = Strategy(scheduler=TakingTurns(batches), pipeline=Watching(on, order), passes_in_flight=count)
    passes = []
    loop.run(on, strategy, passes.append, check=True)  # checks that nothing is lost
    assert [p.index for p in passes] == list(range(len(order)))
    for start in range(len(order)):
        together = [number for one in order[start : start + count] for number in set(one)]
        waits = len(together) - len(set(together))
        assert not waits or len(order[start : start + count]) > 1
    generated = {s.request.request_id: len(s.generated) for s in on.sequences if s.generated}
    assert sum(map(len, order)) == sum(generated.values())


def test_passes_of_several_batches_are_under_way_together_and_end_in_order():
    on = engine(sequences((3, 3), (3, 3), (3, 2)), num_blocks=24)
    batches = [scheduler_of(*share) for share in dealt_out(on.sequences, on.kv.allocator, 3)]
    events: list[tuple[str, int]] = []

    class Noting(FakePipeline):
        def run(self, plan):
            number = self.passes
            events.append(("began", number))
            result = super().run(plan)
            result.complete = lambda: events.append(("ended", number))
            return result

    strategy = Strategy(scheduler=TakingTurns(batches), pipeline=Noting(on), passes_in_flight=3)
    loop.run(on, strategy, lambda record: None, check=True)
    began = [number for what, number in events if what == "began"]
    ended = [number for what, number in events if what == "ended"]
    assert began == ended == list(range(8)), "3 + 3 + 2 tokens, one a pass"
    assert [what for what, _ in events[:4]] == ["began", "began", "began", "ended"]


@given(num_blocks=st.integers(2, 12), steps=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 30)), max_size=25))
def test_shares_never_take_more_than_is_theirs(num_blocks, steps):
    """Two shares of one allocator; a sequence that is touched again gives its blocks back."""
    allocator = BlockAllocator(num_blocks, 4)
    shares = [BlockShare(allocator, num_blocks // 2) for _ in range(2)]
    requests = [sequence(number) for number in range(4)]
    for which, num_tokens in steps:
        one, share = requests[which], shares[which % 2]
        if one.blocks:
            allocator.release(one)
        elif share.missing_blocks(one, num_tokens) <= share.free_for(one):
            share.grow(one, num_tokens)
        else:
            with pytest.raises(AssertionError, match="more blocks"):
                share.grow(one, num_tokens)
        for number, share in enumerate(shares):
            held = sum(len(s.blocks) for s in requests[number::2])
            assert (share.num_used, share.num_free) == (held, num_blocks // 2 - held)
            share.check_integrity(requests)


def test_requests_are_dealt_out_by_length():
    allocator = BlockAllocator(9, 4)
    dealt = list(dealt_out([sequence(n, length) for n, length in enumerate((1, 5, 3, 9, 2))], allocator, 2))
    assert [[s.prompt_len for s in requests] for requests, _ in dealt] == [[9, 3, 1], [5, 2]]
    assert [share.num_blocks for _, share in dealt] == [4, 4]


@settings(max_examples=60)
@given(requests=work, count=st.integers(1, 3))
def test_schedulers_side_by_side_lose_nobody(requests, count):
    on = engine(sequences(*requests), num_blocks=60)
    shares = [BlockShare(on.kv.allocator, 20) for _ in range(count)]
    parts = [StaticBatches(on.sequences[n::count], share, max_pass_tokens=30) for n, share in enumerate(shares)]
    order: list[list[int]] = []
    passes = []
    loop.run(on, Strategy(scheduler=SideBySide(parts), pipeline=Watching(on, order)), passes.append, check=True)
    longest = [max((new for _, new in requests[n::count]), default=0) for n in range(count)]
    assert len(passes) >= max(longest, default=0)
    assert all(len(one) == len(set(one)) for one in order)
