"""Reasoning problems are sound: four different rules, one of which, and only one, gives the result."""

from itertools import islice

from hypothesis import example, given, settings
from hypothesis import strategies as st

from harness.workload.reasoning import LETTERS, NUM_SHOTS, OPERATORS, WORDS, fits, problem, reasoning_prompts
from harness.workload.streams import Stream, generator


def fits_by_search(rule: tuple[str, ...], words: tuple[str, ...], chosen: dict[str, tuple[str, ...]]) -> bool:
    """Oracle: tries one and two words for every letter."""
    if not rule:
        return not words
    symbol, rest = rule[0], rule[1:]
    if symbol not in LETTERS:
        return bool(words) and words[0] == symbol and fits_by_search(rest, words[1:], chosen)
    for num in (1, 2):
        taken = words[:num]
        possible = len(taken) == num and all(word in WORDS for word in taken) and chosen.get(symbol, taken) == taken
        if possible and fits_by_search(rest, words[num:], {**chosen, symbol: taken}):
            return True
    return False


RULES = st.lists(st.sampled_from(LETTERS + OPERATORS), min_size=1, max_size=6).map(tuple)


@settings(max_examples=150)
@example(("X",), ("X", "Y"), [["bear", "wolf"], ["wolf"], ["bear"]])  # three words are too many for one letter
@example(("X", "X"), ("X", "Y"), [["bear"], ["wolf"], ["bear"]])  # the same letter, the same words
@given(RULES, RULES, st.lists(st.lists(st.sampled_from(WORDS[:2]), min_size=1, max_size=2), min_size=3, max_size=3))
def test_fits_agrees_with_a_search(rule: tuple[str, ...], other: tuple[str, ...], fillers: list[list[str]]) -> None:
    by_letter = dict(zip(LETTERS, fillers, strict=True))
    for origin in (rule, other):
        words = tuple(word for symbol in origin for word in by_letter.get(symbol, [symbol]))
        assert fits(rule, " ".join(words)) == fits_by_search(rule, words, {})
        assert origin is not rule or fits(rule, " ".join(words))


@settings(max_examples=60)
@given(st.integers(0, 2**32))
def test_a_problem_has_exactly_one_answer(seed: int) -> None:
    item = problem(generator(seed, Stream.REASONING))
    assert len(set(item.rules)) == 4
    assert len({tuple(sorted(rule)) for rule in item.rules}) == 1  # the same symbols in other orders
    words = tuple(item.result.split())
    assert [rule for rule in item.rules if fits_by_search(rule, words, {})] == [item.answer]


def test_prompts_share_their_examples_and_end_with_an_open_problem() -> None:
    prompts = list(islice(reasoning_prompts(3), 20))
    assert len(set(prompts)) == 20
    heads = {prompt.rsplit("Rules:", 1)[0] for prompt in prompts}
    assert len(heads) == 1 and heads == {next(reasoning_prompts(4)).rsplit("Rules:", 1)[0]}
    assert heads.pop().count("Rule: ") == NUM_SHOTS
    assert all(prompt.endswith("\nRule:") for prompt in prompts)
    assert prompts == list(islice(reasoning_prompts(3), 20)) != list(islice(reasoning_prompts(4), 20))
