"""The loop hands out tokens, frees blocks in time, records passes, and loses nobody silently."""

from __future__ import annotations

import gc

import pytest

from harness.engine import loop
from harness.engine.batch import PassPlan
from harness.engine.sequences import State
from harness.engine.strategy import PassResult, Strategy
from harness.memory.occupancy import Places
from strategies.common.continuous_batches import ContinuousBatches
from strategies.common.static_batches import StaticBatches
from tests.unit.engine.fakes import FakePipeline, engine, sequences


def run(on, scheduler=None, pipeline=None, *, check: bool = True):
    scheduler = scheduler or StaticBatches(on.sequences, on.kv.allocator, max_pass_tokens=30)
    strategy, passes = Strategy(scheduler=scheduler, pipeline=pipeline or FakePipeline(on)), []
    loop.run(on, strategy, passes.append, check=check)
    assert strategy.pipeline.finished
    return passes


def test_tokens_go_to_the_sequences_that_they_were_sampled_for():
    on = engine(sequences((3, 3), (5, 1), (2, 2)))
    run(on)
    assert [s.generated for s in on.sequences] == [[0, 10, 20], [1], [2, 12]]
    assert {s.state for s in on.sequences} == {State.FINISHED}
    assert on.kv.released == [1, 2, 0]
    assert [s.finished_pass for s in on.sequences] == [2, 0, 1]


def test_a_run_leaves_the_search_for_garbage_as_it_was():
    on = engine(sequences((3, 3)))
    gc.freeze()  # as pytest's start does, unless a run has undone it
    before = gc.get_threshold()
    run(on)
    assert gc.get_threshold() == before
    assert gc.get_freeze_count(), "what was frozen is still left out"


def test_an_end_token_ends_a_sequence_early():
    on = engine(sequences((3, 5), (5, 5)), eos=11)
    run(on)
    assert [s.generated for s in on.sequences] == [[0, 10, 20, 30, 40], [1, 11]]


def test_passes_are_recorded():
    on = engine(sequences((3, 3), (5, 1), (9, 2)), num_blocks=5)
    passes = run(on)
    assert [p.mode for p in passes] == ["prefill", "decode", "decode", "prefill", "decode"]
    assert [p.num_prefill_tokens for p in passes] == [8, 0, 0, 9, 0]
    assert [p.num_decode_tokens for p in passes] == [0, 1, 1, 0, 1]
    assert [p.generated_tokens for p in passes] == [2, 1, 1, 1, 1]
    assert [p.num_finished for p in passes] == [1, 0, 1, 0, 1]
    assert [p.num_waiting for p in passes] == [1, 1, 1, 0, 0]
    assert [p.kv_blocks_used for p in passes] == [4, 2, 2, 3, 3]
    assert {p.kv_blocks_total for p in passes} == {5}
    assert [p.index for p in passes] == list(range(5))
    assert all(p.start_s <= p.end_s for p in passes)


def test_padding_is_told_apart_from_what_was_prefilled():
    """Three tokens of each prompt: computed and cached, and nobody's."""

    class Padding(StaticBatches):
        def next_pass(self) -> PassPlan | None:
            plan = super().next_pass()
            for sequence in plan.prefill if plan is not None else ():
                sequence.padding = 3
                on.kv.allocator.grow(sequence, sequence.max_tokens + 3)
            return plan

    on = engine(sequences((3, 2), (5, 1)))
    passes = run(on, Padding(on.sequences, on.kv.allocator, max_pass_tokens=30))
    assert [(p.num_prefill_tokens, p.num_padding_tokens, p.num_decode_tokens) for p in passes] == [(8, 6, 0), (0, 0, 1)]


@pytest.mark.parametrize("check", [True, False])
def test_places_of_device_memory_are_checked_after_each_pass(check):
    """A pipeline's second pass puts two parts into one place."""
    on = engine(sequences((3, 3)))
    places = Places[str](on.machine, "device")
    slot = places.reserve("slot", {0: 64})[0]

    class Overwriting(FakePipeline):
        def run(self, plan: PassPlan) -> PassResult:
            if self.passes == 1:
                places.take("one")
                places._free[slot] = None
                places.take("other")
            return super().run(plan)

    pipeline = Overwriting(on)
    if not check:
        run(on, pipeline=pipeline, check=False)
        return
    with pytest.raises(AssertionError, match="given twice"):
        run(on, pipeline=pipeline)
    assert pipeline.passes == 2


def test_a_scheduler_that_loses_a_request_is_found_out():
    """Its run would otherwise only look fast."""

    class Forgetful(StaticBatches):
        def next_pass(self) -> PassPlan | None:
            self._waiting._queue.clear()
            return super().next_pass()

    on = engine(sequences((3, 3), (5, 1)))
    with pytest.raises(AssertionError, match="2 requests unfinished, the first is 0"):
        run(on, Forgetful(on.sequences, on.kv.allocator, max_pass_tokens=30))


def test_a_corrupt_block_table_is_found_after_the_pass_that_made_it():
    class Corrupting(FakePipeline):
        def run(self, plan):
            result = super().run(plan)
            if self.passes == 2:
                plan.sequences[0].blocks.append(on.kv.allocator._free[0])
            return result

    on = engine(sequences((3, 6), (5, 6)))
    with pytest.raises(AssertionError, match="block tables differ"):
        run(on, pipeline=Corrupting(on))


def test_every_life_of_a_cache_is_noted():
    on = engine(sequences((3, 3)))
    run(on)
    assert [life.first_generated for life in on.sequences[0].lives] == [0]


def test_a_life_after_a_preemption_begins_with_the_tokens_that_are_there():
    began: list[int] = []

    class Noting(ContinuousBatches):
        def next_pass(self) -> PassPlan | None:
            plan = super().next_pass()
            began.extend(len(s.generated) for s in plan.prefill if s is on.sequences[1]) if plan is not None else None
            return plan

    on = engine(sequences((3, 8), (3, 8)), num_blocks=4)
    run(on, Noting(on.sequences, on.kv, fill_to=20, max_pass_tokens=20))
    assert [life.first_generated for life in on.sequences[1].lives] == began
    assert len(began) == 2 and began[1] > 0


def test_an_empty_workload_is_no_pass():
    assert run(engine([])) == []


def test_a_pipeline_that_forgets_the_head_is_found_out():
    class Headless(FakePipeline):
        def run(self, plan):
            result = super().run(plan)
            result.in_flight[0].tickets.sampled = None
            return result

    on = engine(sequences((3, 3)))
    with pytest.raises(AssertionError, match="no head was submitted for micro-batch 0"):
        run(on, pipeline=Headless(on))
