"""Predictors count what they have seen and nothing of what they are judged on; scores are judged as defined."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, permutations, product
from pathlib import Path

import numpy as np
import pytest

from harness.study.prediction import (
    PREDICTORS,
    Learned,
    being_first,
    by_layer_before,
    by_popularity,
    by_previous_token,
    by_word,
    hot_hits,
    random_batches,
    ranked,
    right_so_far,
)
from harness.study.recorded import Domain, Text
from tests.unit.study.texts import random_text, text_of


def test_right_predictions_are_counted():
    ranking = np.array([[2, 0, 1], [1, 2, 0]])
    chosen = np.array([[True, False, True], [False, False, True]])
    assert right_so_far(ranking, chosen) == pytest.approx([0.5, 1.5, 1.5])


def test_ranks_are_by_score_then_by_number():
    assert ranked(np.array([[0.1, 0.4, 0.4, 0.2]]), 3).tolist() == [[1, 2, 3]]


def test_what_is_popular_is_predicted_for_all():
    train, test = random_text(1, lengths=(40,)), random_text(2)
    rates = [sum(expert in token[1] for token in train.experts) / 40 for expert in range(6)]
    assert by_popularity(Learned(train), test, 1)[0] == pytest.approx(rates)


def test_a_token_keeps_its_predecessors_experts_unless_it_is_the_first():
    train, test = random_text(1, lengths=(40,)), random_text(2)
    learned = Learned(train)
    ranks = ranked(by_previous_token(learned, test, 2), 4)
    popular = ranked(by_popularity(learned, test, 2), 6)[0]
    for at in range(test.num_tokens):
        before = [] if at in test.starts else test.experts[at - 1, 2].tolist()
        assert ranks[at].tolist() == [*before, *(e for e in popular if e not in before)][:4], at


def test_co_activation_is_counted_on_what_was_learned():
    train, test = random_text(3, lengths=(60,)), random_text(4)
    scores = by_layer_before(Learned(train), test, 1)
    rates = by_popularity(Learned(train), test, 1)[0]
    chance = np.zeros((6, 6))
    for one, other in product(range(6), repeat=2):
        had = [token for token in train.experts if one in token[0]]
        chance[one, other] = (sum(other in token[1] for token in had) + rates[other]) / (len(had) + 1)
    for at in range(test.num_tokens):
        expected = combined(chance, rates, test.experts[at, 0])
        assert scores[at] == pytest.approx(expected), at


def combined(chance: np.ndarray, rates: np.ndarray, experts: np.ndarray) -> np.ndarray:
    """Multiply popularity by what each of the experts makes of it."""
    weights = np.array([rates[e] * np.prod([chance[one, e] / rates[e] for one in experts]) for e in range(6)])
    return 1 - np.exp(-2 * weights / weights.sum())


def test_words_are_predicted_by_what_the_same_word_chose():
    train, test = random_text(5, lengths=(60,)), random_text(6)
    test = text_of([test.experts], 6, np.where(np.arange(test.num_tokens) == 0, 99, test.words))
    scores, rates = by_word(Learned(train), test, 2), by_popularity(Learned(train), test, 2)[0]
    assert scores[0] == pytest.approx(rates), "a word that was never seen"
    for at in range(1, test.num_tokens):
        same = train.experts[train.words == test.words[at]]
        found = [(sum(e in token[2] for token in same) + rates[e]) / (len(same) + 1) for e in range(6)]
        assert scores[at] == pytest.approx(found)


@pytest.mark.parametrize("name", PREDICTORS)
def test_predictions_do_not_look_at_what_they_predict(name):
    """With other experts in the layer that is asked about, in the last token, nothing changes."""
    learned, test = Learned(random_text(1, lengths=(40,))), random_text(2)
    before = PREDICTORS[name](learned, test, 1)[-1].copy()
    changed = test.experts.copy()
    changed[-1, 1:] = (changed[-1, 1:] + 1) % 6
    other = text_of(np.split(changed, test.starts[1:-1]), 6, test.words)
    assert PREDICTORS[name](learned, other, 1)[-1] == pytest.approx(before)


def orders(values) -> list[list[int]]:
    """Return every order of columns in which no larger value stands behind a smaller one."""
    columns = range(len(values))
    return [o for o in permutations(columns) if all(values[a] >= values[b] for a, b in pairwise(o))]


@pytest.mark.parametrize("values", [[3, 1, 1, 0], [1, 1, 1, 1], [0, 2, 2, 2], [4, 3, 2, 1]])
def test_equal_ones_share_the_places(values):
    for count in (1, 2, 3):
        found = [np.mean([column in order[:count] for order in orders(values)]) for column in range(4)]
        assert being_first(np.array([values], dtype=float), count)[0] == pytest.approx(found)


def test_hot_experts_are_those_with_most_tokens_of_a_batch():
    rng = np.random.default_rng(0)
    scores, chosen = rng.integers(0, 3, size=(8, 5)).astype(float), rng.random((8, 5)) < 0.4
    batches = random_batches(8, 4, 10)
    assert sorted(batches.ravel()) == list(range(8))
    shares, tokens = [], []
    for batch in batches:
        expected, true = scores[batch].sum(axis=0), chosen[batch].sum(axis=0)
        pairs = list(product(orders(expected), orders(true)))
        shares.append(np.mean([len(set(one[:2]) & set(other[:3])) / 2 for one, other in pairs]))
        most = sum(sorted(true)[-2:])
        tokens.append(np.mean([true[list(one[:2])].sum() for one, _ in pairs]) / most)
    assert hot_hits(scores, chosen, batches, 2, 3) == pytest.approx((np.mean(shares), np.mean(tokens)))


def test_a_prompt_that_is_repeated_counts_once():
    """Else a request could be learned from and tested on."""
    words = np.array([1, 2, 1, 2, 3, 4, 5, 6])
    whole = Text(4, np.arange(0, 10, 2), np.zeros((8, 1, 2), dtype=np.int16), np.arange(8), words)
    ids = np.arange(4)
    domain = Domain("plays", Path(), None, whole, None, np.ones(8, dtype=bool), ids, ids, None)
    assert domain.distinct.tolist() == [0, 2, 3]
    assert domain.train.words.tolist() == [1, 2, 5, 6] and domain.test.words.tolist() == [3, 4]
    assert replace(domain, is_prompt=None).distinct.tolist() == [0, 1, 2, 3]
