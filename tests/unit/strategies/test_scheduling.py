"""No block lost, no request lost, no starvation: both schedulers over random requests, capacities and limits."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from harness.engine.sequences import Sequence
from strategies.common.continuous_batches import ContinuousBatches
from strategies.common.static_batches import StaticBatches
from tests.unit.strategies.driving import (
    FakeKV,
    Record,
    Workload,
    check_conservation,
    check_first_admissions,
    drive,
    workloads,
)


def run_moelens(load: Workload) -> Record:
    kv, sequences = FakeKV(load.num_blocks, load.block_size), load.sequences()
    scheduler = ContinuousBatches(sequences, kv, fill_to=load.n_real, max_pass_tokens=load.max_pass_tokens)
    return drive(scheduler, kv, sequences, load)


def run_static(load: Workload) -> Record:
    kv, sequences = FakeKV(load.num_blocks, load.block_size), load.sequences()
    return drive(StaticBatches(sequences, kv.allocator, max_pass_tokens=load.max_pass_tokens), kv, sequences, load)


def too_large(load: Workload, sequence: Sequence) -> bool:
    return blocks_of(load, sequence) > load.num_blocks


@settings(max_examples=200)
@given(workloads())
def test_moelens_keeps_its_rules(load):
    record = run_moelens(load)
    check_conservation(record, load, lambda s: too_large(load, s) or s.max_tokens > load.max_pass_tokens)
    check_first_admissions(record)
    for one in record.passes:
        starves_nobody(one)
        is_filled_up_to_n_real(one, load)
        preempts_the_newest_and_no_more_than_it_must(one)


def starves_nobody(one) -> None:
    """The oldest unfinished request is in every pass, and every pass gives each of its sequences a token: so a request
    waits at most for the tokens of those before it."""
    assert min(one.unfinished) in (*one.prefill, *one.decode)
    assert one.decode == sorted(one.decode), "older sequences come first"


def is_filled_up_to_n_real(one, load) -> None:
    """More only for a single prefill beside fewer decoding sequences than n_real; never more than the buffers hold."""
    num_tokens = len(one.decode) + sum(one.prefill_tokens)
    assert num_tokens <= load.max_pass_tokens
    if num_tokens > load.n_real:
        alone = len(one.prefill) == 1 and len(one.decode) < load.n_real
        assert alone or not one.prefill
    if not one.preempted:
        assert one.decode == one.running_before[: load.max_pass_tokens], "in normal mode all decoding sequences run"


def preempts_the_newest_and_no_more_than_it_must(one) -> None:
    assert one.mode == ("preemption" if one.preempted else "normal")
    assert bool(one.preempted) == (one.missing_before > one.free_before)
    if one.preempted:
        assert one.prefill == [], "nobody is admitted in a preemption pass"
        count = len(one.preempted)
        assert one.preempted == set(one.running_before[-count:]), "the newest give their blocks back"
        assert one.queue_head == min(one.preempted), "they are first in the queue, the oldest in front"


@settings(max_examples=200)
@given(workloads(), st.integers(1, 5))
def test_a_limit_on_sequences_holds_and_starves_nobody(load, limit):
    kv, sequences = FakeKV(load.num_blocks, load.block_size), load.sequences()
    tokens = load.max_pass_tokens
    scheduler = ContinuousBatches(sequences, kv, fill_to=tokens, max_pass_tokens=tokens, max_sequences=limit)
    record = drive(scheduler, kv, sequences, load)
    check_conservation(record, load, lambda s: too_large(load, s) or s.max_tokens > tokens)
    check_first_admissions(record)
    for one in record.passes:
        starves_nobody(one)
        preempts_the_newest_and_no_more_than_it_must(one)
        assert len(one.prefill) + len(one.running_before) - len(one.preempted) <= limit
        assert sum(one.prefill_tokens) + len(one.decode) <= tokens


@settings(max_examples=200)
@given(workloads())
def test_static_batches_keep_their_rules(load):
    record = run_static(load)
    check_conservation(record, load, lambda s: too_large(load, s) or s.prompt_len > load.max_pass_tokens)
    check_first_admissions(record)
    assert all(not one.preempted for one in record.passes)
    keep_the_phases_apart(record, load)
    decode_in_turns(record)


def keep_the_phases_apart(record, load) -> None:
    """A batch is prefilled completely before it decodes, and decodes to its end before the next is admitted."""
    generated: dict[int, int] = {}
    for one in record.passes:
        assert bool(one.prefill) != bool(one.decode)
        assert one.mode == ("prefill" if one.prefill else "decode")
        assert sum(one.prefill_tokens) + len(one.decode) <= load.max_pass_tokens
        if one.prefill and one.running_before:
            assert all(generated[n] == 1 for n in one.running_before), "a decoding batch was joined"
        for number in (*one.prefill, *one.decode):
            generated[number] = generated.get(number, 0) + 1


def decode_in_turns(record) -> None:
    """Where a pass cannot hold all of a batch, nobody gets a second token before everybody had a first."""
    generated: dict[int, int] = {}
    for one in record.passes:
        for number in one.decode:
            generated[number] = generated.get(number, 0) + 1
        waiting = [n for n in one.running_before if n not in one.decode]
        assert all(generated[a] <= generated.get(b, 0) + 1 for a in one.decode for b in waiting)


@given(st.integers(1, 40), st.integers(1, 40))
def test_a_lone_request_always_runs_or_is_told_why(prompt, n_real):
    load = Workload([(prompt, 5, None)], num_blocks=10, block_size=4, n_real=n_real, max_pass_tokens=n_real)
    (sequence,) = run_moelens(load).sequences
    if prompt + 4 > 40:
        assert sequence.reject_reason == "needs 11 KV blocks, the cache has 10"
    elif prompt + 4 > n_real:
        assert sequence.reject_reason == f"{prompt + 4} tokens exceed the {n_real} that one pass can hold"
    else:
        assert len(sequence.generated) == 5


@settings(max_examples=200)
@given(workloads(), st.integers(1, 30))
def test_each_memory_has_blocks_for_its_own_sequences(load, device_blocks):
    """Free blocks on the host are of no use to a sequence on the device: there the newest gives its blocks back."""
    device_blocks = min(device_blocks, load.num_blocks - 1)
    kv, sequences = FakeKV(load.num_blocks, load.block_size, device_blocks=device_blocks), load.sequences()
    tokens = load.max_pass_tokens
    record = drive(ContinuousBatches(sequences, kv, fill_to=tokens, max_pass_tokens=tokens), kv, sequences, load)
    most = max(device_blocks, load.num_blocks - device_blocks) * load.block_size
    check_conservation(record, load, lambda s: s.max_tokens > tokens or blocks_of(load, s) * load.block_size > most)
    check_first_admissions(record)


def blocks_of(load: Workload, sequence: Sequence) -> int:
    return -(-sequence.max_tokens // load.block_size)


def test_preemption_mode_by_hand():
    """8 blocks of 2 tokens, three prompts of 4 and one of 2: all start, then the caches outgrow the blocks."""
    load = Workload([(4, 6, None)] * 3 + [(2, 6, None)], num_blocks=8, block_size=2, n_real=100, max_pass_tokens=100)
    passes = run_moelens(load).passes
    first, second, third = passes[:3]
    assert (first.prefill, first.decode) == ([0, 1, 2, 3], [])
    assert (second.mode, second.decode, second.preempted) == ("preemption", [0, 1], {2, 3})
    assert (third.mode, third.prefill, third.decode) == ("normal", [], [0, 1])
    assert (passes[5].mode, passes[5].decode, passes[5].preempted) == ("preemption", [0], {1})
    assert (passes[6].mode, passes[6].prefill, passes[6].decode) == ("normal", [1, 2], [])
    assert passes[6].prefill_tokens == [9, 5], "prompts and the tokens they had generated"
