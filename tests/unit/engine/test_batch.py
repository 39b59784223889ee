"""A micro-batch's arrays against an oracle that walks token by token."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.engine.batch import KvReads, MicroBatch, assemble
from harness.engine.sequences import Records, Sequence, State
from harness.memory.kv_cache import BlockAllocator
from harness.workload.request import Request


@st.composite
def batches(draw) -> tuple[list[Sequence], list[Sequence], BlockAllocator]:
    """Prefilling and decoding sequences with scattered blocks; some prefill again after a preemption."""
    block_size = draw(st.sampled_from((1, 3, 4, 16)))
    allocator = BlockAllocator(400, block_size)
    prefill, decode = [], []
    for number in range(draw(st.integers(1, 6))):
        prompt = tuple(draw(st.lists(st.integers(0, 999), min_size=1, max_size=20)))
        one = Sequence(Request(request_id=number, prompt_ids=prompt, max_new_tokens=50, text=None))
        one.partition = draw(st.integers(0, 2))
        one.generated = draw(st.lists(st.integers(0, 999), max_size=9))
        decodes = bool(one.generated) and draw(st.booleans())
        one.num_cached = one.num_tokens - 1 if decodes else 0
        one.state = State.DECODING if decodes else State.PREFILL
        (decode if decodes else prefill).append(one)
    everyone = [*prefill, *decode]
    spare = draw(st.sampled_from((0, 5)))
    for num_tokens in range(1, 40):  # blocks of different sequences alternate
        for one in everyone:
            allocator.grow(one, min(num_tokens, one.num_tokens + spare))
    for one in draw(st.permutations(everyone))[: len(everyone) // 2]:
        kept, one.num_cached = one.num_cached, 0
        allocator.release(one)
        allocator.grow(one, one.num_tokens)
        one.num_cached = kept
    return prefill, decode, allocator


def read_by(reads: KvReads) -> list[tuple[int, tuple[int, ...], int]]:
    """Row, blocks and length of each entry; a table is filled up with zeros, which is nobody's block here."""
    entries = zip(reads.queries.tolist(), reads.tables.tolist(), reads.lens.tolist(), strict=True)
    return [(row, tuple(block for block in table if block), length) for row, table, length in entries]


prompts_and_new = st.lists(st.tuples(st.integers(1, 20), st.integers(2, 9)), min_size=1, max_size=6)


@settings(max_examples=100)
@given(prompts_and_new, st.sampled_from((1, 3, 4, 16)))
def test_padding_follows_the_prompt_and_lies_behind_all_that_is_to_come(sizes, block_size):
    allocator, longest = BlockAllocator(400, block_size, order=range(1, 400)), max(prompt for prompt, _ in sizes)
    padded = [
        Sequence(Request(request_id=i, prompt_ids=(7,) * prompt, max_new_tokens=new, text=None), State.PREFILL)
        for i, (prompt, new) in enumerate(sizes)
    ]
    for one in padded:
        one.padding = longest - one.prompt_len
        allocator.grow(one, one.max_tokens + one.padding)
    batch = assemble(0, padded, [], allocator)
    assert batch.prefill_lens == (longest,) * len(padded)
    assert batch.num_padding_tokens == sum(one.padding for one in padded)
    assert len(set(batch.slots.tolist())) == batch.num_tokens, "two tokens in one place of the cache"
    slots = batch.slots.reshape(len(padded), longest)
    for number, (one, own) in enumerate(batch.rows_of()):
        start = number * longest
        assert (own.start, own.stop - 1) == (start, batch.last_rows[number])
        assert batch.token_ids[own].tolist() == [7] * one.prompt_len
        assert batch.positions[start : start + longest].tolist() == list(range(longest))
        behind = range(one.max_tokens, one.max_tokens + one.padding)
        places = [one.blocks[at // block_size] * block_size + at % block_size for at in behind]
        assert slots[number, one.prompt_len :].tolist() == places
    for one in padded:
        one.accept(9, None)
    decoding = assemble(0, [], padded, allocator)
    reads = decoding.on_host.reads
    assert decoding.on_host.read_lens.tolist() == [longest + 1] * len(padded)
    assert read_by(reads) == [
        *((row, tuple(one.blocks), one.prompt_len + 1) for row, one in enumerate(padded)),
        *(
            (r, tuple(one.blocks[one.max_tokens // block_size :]), one.padding)
            for r, one in enumerate(padded)
            if one.padding
        ),
    ]
    for start in range(len(padded)):
        some = reads.among(start, len(padded) - 1)
        whole = [entry for entry in read_by(reads) if start <= entry[0] < len(padded) - 1]
        assert [(row + start, blocks, length) for row, blocks, length in read_by(some)] == whole
        assert some.num_rows == max(0, len(padded) - 1 - start)
    used = [block for one in padded for block in one.blocks[: -(-(one.prompt_len + 1) // block_size)]]
    assert decoding.on_host.flat_blocks.tolist() == used, "of contexts alone"


@settings(max_examples=100)
@given(batches())
def test_arrays_against_an_oracle(case):
    prefill, decode, allocator = case
    batch, size = assemble(4, prefill, decode, allocator), allocator.block_size
    rows, last_rows = [], []
    for one in (*prefill, *decode):
        text = [*one.request.prompt_ids, *one.generated]
        for position in range(one.num_cached, len(text)):
            rows.append((text[position], position, one.blocks[position // size] * size + position % size))
        last_rows.append(len(rows) - 1)
    assert list(zip(batch.token_ids, batch.positions, batch.slots, strict=True)) == rows
    assert batch.last_rows.tolist() == last_rows
    assert list(zip(*batch.rows[:3].tolist(), strict=True)) == rows, "what the device gets"
    assert batch.rows[3].tolist() == last_rows + [0] * (len(rows) - len(last_rows))
    assert len(set(batch.slots.tolist())) == batch.num_tokens, "two tokens in one place of the cache"
    assert batch.index == 4
    assert batch.num_tokens == len(rows)
    assert batch.num_prefill_tokens == sum(batch.prefill_lens) == sum(one.num_tokens for one in prefill)
    assert batch.sequences == (*prefill, *decode)
    assert batch.partitions == tuple(sorted({one.partition for one in (*prefill, *decode)}))
    assert batch.on_host.num_context_tokens == sum(one.num_tokens for one in decode)


@settings(max_examples=50)
@given(batches())
def test_block_tables_lead_to_every_cached_token(case):
    """Walk a decoding sequence's context through its table, as attention does."""
    _, decode, allocator = case
    if not decode:
        return
    batch, size = assemble(0, [], decode, allocator), allocator.block_size
    reads = batch.kv_reads
    assert reads.queries.tolist() == list(range(len(decode))), "without padding there are no shadows"
    assert reads.lens.tolist() == [one.num_tokens for one in decode]
    for row, one in enumerate(decode):
        for position in range(int(reads.lens[row])):
            assert reads.tables[row, position // size] == one.blocks[position // size]
        newest = reads.tables[row, (one.num_tokens - 1) // size] * size + (one.num_tokens - 1) % size
        assert newest == batch.slots[row], "the new token is the last of its own context"
    used = [block for one in decode for block in one.blocks[: -(-one.num_tokens // size)]]
    assert batch.on_host.flat_blocks.tolist() == used, "without the blocks that hold nothing yet"
    assert not len(batch.on_device.flat_blocks)
    assert reads.tables.shape[1] == max(len(one.blocks) for one in decode)


@settings(max_examples=50)
@given(batches())
def test_what_lies_where_does_not_change_with_its_sequences(case):
    """An op may ask for the blocks of its micro-batch when the next pass is scheduled already: sequences have grown,
    and others have ended and given their blocks back."""
    prefill, decode, allocator = case
    now, later = (assemble(0, prefill, decode, allocator) for _ in range(2))
    slots, tables, flat = now.slots.tolist(), now.kv_reads.tables.tolist(), now.on_host.flat_blocks.tolist()
    for number, one in enumerate((*prefill, *decode)):
        if number % 2 and allocator.num_free:
            allocator.grow(one, (len(one.blocks) + 1) * allocator.block_size)
        else:
            allocator.release(one)
    assert (later.slots.tolist(), later.kv_reads.tables.tolist()) == (slots, tables)
    assert later.on_host.flat_blocks.tolist() == flat


@settings(max_examples=40)
@given(batches())
def test_rows_of_each_sequence(case):
    prefill, decode, allocator = case
    batch = assemble(0, prefill, decode, allocator)
    covered = []
    for one, rows in batch.rows_of():
        assert batch.token_ids[rows].tolist() == list(one.pending_ids())
        covered += range(batch.num_tokens)[rows]
    assert covered == list(range(batch.num_tokens))


def decoding(num_cached: int) -> tuple[Sequence, BlockAllocator]:
    one = Sequence(Request(request_id=0, prompt_ids=(1, 2, 3), max_new_tokens=9, text=None), generated=[4, 5])
    allocator = BlockAllocator(9, 4)
    allocator.grow(one, 5)
    one.num_cached = num_cached
    return one, allocator


def test_dtypes_are_those_of_the_kernels():
    one, allocator = decoding(4)
    batch = assemble(0, [], [one], allocator)
    int64 = (batch.token_ids, batch.positions, batch.slots, batch.last_rows)
    assert {a.dtype for a in int64} == {np.dtype(np.int64)}
    assert {a.dtype for a in (batch.kv_reads.lens, batch.kv_reads.tables, batch.on_host.flat_blocks)} == {
        np.dtype(np.int32)
    }


def test_a_batch_cannot_be_changed():
    one, allocator = decoding(4)
    batch = assemble(0, [], [one], allocator)
    with pytest.raises(FrozenInstanceError):
        batch.index = 1
    here = batch.on_host
    reads = here.reads
    derived = (batch.slots, batch.rows, batch.request_ids, here.read_lens, reads.tables, reads.lens, here.flat_blocks)
    arrays = [value for value in (*vars(batch).values(), *vars(batch.kv_reads).values()) if hasattr(value, "dtype")]
    assert len(arrays) >= 5
    for array in (*arrays, *derived):
        with pytest.raises(ValueError, match="read-only"):
            array[:] = 0


@pytest.mark.parametrize("num_cached", [0, 3, 5])
def test_a_decoding_sequence_has_exactly_one_new_token(num_cached):
    one, allocator = decoding(num_cached)
    with pytest.raises(AssertionError, match="exactly one new token"):
        assemble(0, [], [one], allocator)


def test_a_prefill_starts_from_an_empty_cache():
    one, allocator = decoding(4)
    with pytest.raises(AssertionError, match="empty cache"):
        assemble(0, [one], [], allocator)


def test_tokens_without_a_block_are_an_error():
    one, allocator = decoding(4)
    one.blocks.pop()
    with pytest.raises(IndexError):
        assemble(0, [], [one], allocator)


def test_routing_is_recorded_if_any_sequence_wants_it():
    one, allocator = decoding(4)
    batch: MicroBatch = assemble(0, [], [one], allocator)
    assert not batch.records_routing
    one.records = Records()
    assert assemble(0, [], [one], allocator).records_routing
    assert not assemble(0, [], [one], allocator).records_weights
    one.records = Records(weights=True)
    assert assemble(0, [], [one], allocator).records_weights


def sampling(divisor: int):
    return lambda request_ids, positions: (7 * request_ids + positions) % divisor == 0


def check_sampled_rows(batch: MicroBatch, divisor: int) -> None:
    expected = [
        row
        for sequence, rows in batch.rows_of()
        for row in range(rows.start, rows.stop)
        if (7 * sequence.request.request_id + batch.positions[row]) % divisor == 0
    ]
    assert batch.sampled_rows.tolist() == expected
    assert [row for run in batch.sampled_runs for row in range(run.start, run.stop)] == expected
    assert all(one.stop < two.start for one, two in pairwise(batch.sampled_runs)), "as few slices as can be"


@settings(derandomize=True)
@given(case=batches(), divisor=st.integers(1, 5))
def test_sampled_rows_are_those_of_sampled_tokens(case, divisor):
    (prefill, decode, allocator), records = case, Records(sample=sampling(divisor))
    for one in (*prefill, *decode):
        one.records = records
    check_sampled_rows(assemble(0, prefill, decode, allocator), divisor)


@settings(derandomize=True)
@given(sizes=prompts_and_new, divisor=st.integers(1, 5))
def test_padding_is_never_sampled(sizes, divisor):
    allocator, longest = BlockAllocator(400, 4, order=range(1, 400)), max(prompt for prompt, _ in sizes)
    padded = [
        Sequence(Request(request_id=i, prompt_ids=(7,) * prompt, max_new_tokens=new, text=None), State.PREFILL)
        for i, (prompt, new) in enumerate(sizes)
    ]
    records = Records(sample=sampling(divisor))
    for one in padded:
        one.records, one.padding = records, longest - one.prompt_len
        allocator.grow(one, one.max_tokens + one.padding)
    check_sampled_rows(assemble(0, padded, [], allocator), divisor)
