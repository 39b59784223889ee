"""VSLPipe's halves: nobody lost, nobody twice, and each load balanced as well as whole sequences allow."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from harness.engine.batch import PassPlan
from harness.engine.sequences import Sequence
from harness.workload.request import Request
from strategies.moelens.vslpipe import split


def sequences(lengths: list[int], first: int = 0) -> list[Sequence]:
    return [
        Sequence(Request(request_id=first + i, prompt_ids=(7,) * length, max_new_tokens=5, text=None))
        for i, length in enumerate(lengths)
    ]


def halves_of(prefill: list[int], decode: list[int]) -> list[tuple[list[int], list[int]]]:
    """Lengths by half: (prefills, decode contexts)."""
    plan = PassPlan(sequences(prefill), sequences(decode, 1000), "normal")
    halves = split(plan)
    everyone = [s.request.request_id for half in halves for s in (*half[0], *half[1])]
    assert sorted(everyone) == sorted(s.request.request_id for s in plan.sequences)
    assert all(s in plan.prefill for half in halves for s in half[0])
    assert all(s in plan.decode for half in halves for s in half[1])
    return [([s.num_tokens for s in half[0]], [s.num_tokens for s in half[1]]) for half in halves]


lengths = st.lists(st.integers(1, 60), max_size=20)


@settings(max_examples=150)
@given(lengths, lengths)
def test_halves_are_balanced(prefill, decode):
    halves = halves_of(prefill, decode)
    assert len(halves) == min(2, len(prefill) + len(decode))
    assert all(half[0] or half[1] for half in halves)
    if len(halves) < 2:
        return
    (prefill_a, decode_a), (prefill_b, decode_b) = halves
    assert abs(len(decode_a) - len(decode_b)) <= 1
    assert abs(sum(decode_a) - sum(decode_b)) <= max(decode, default=0), "contexts, which attention reads"
    assert abs(sum(prefill_a) - sum(prefill_b)) <= max(prefill, default=0) + 1
    largest = max([*prefill, 1]) + 1
    assert abs(sum(prefill_a) + len(decode_a) - sum(prefill_b) - len(decode_b)) <= largest, "tokens, which GEMMs see"


@given(st.integers(1, 50))
def test_equal_prompts_split_evenly(count):
    halves = halves_of([10] * count, [])
    assert sorted(len(half[0]) for half in halves) == ([1] if count == 1 else [count // 2, count - count // 2])


def test_one_decoding_and_one_prefilling_sequence_take_a_half_each():
    assert sorted(halves_of([9], [30])) == [([], [30]), ([9], [])]


def test_one_sequence_is_one_half():
    assert halves_of([9], []) == [([9], [])]
    assert halves_of([], [9]) == [([], [9])]
    assert halves_of([], []) == []
