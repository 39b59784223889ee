"""Predict the experts of a layer before its router is asked, in several ways that learn from other requests.

A predictor gives each expert of each token a score, and the best scores are its prediction. Scores are probabilities
that the router chooses the expert, as far as the predictor can tell.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from harness.study.correlation import chosen_rates, together
from harness.study.recorded import Text

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
_PRIOR = 1.0  # tokens: so much does popularity count beside what was seen
_LEAST = 1e-6  # probability of what was never seen


class Learned:
    """Predictors learn from this: what was seen in other requests."""

    def __init__(self, train: Text) -> None:
        self.train = train
        self.rates = chosen_rates(train)  # [layers, experts]

    @cached_property
    def follows(self) -> list[Floats]:
        """The probability, for each layer but the first, that a token with one expert in the layer before [experts]
        chooses another here [experts]."""
        found = []
        for layer in range(1, self.train.num_layers):
            counts, seen = together(self.train, layer - 1), self.rates[layer - 1] * self.train.num_tokens
            found.append((counts + _PRIOR * self.rates[layer]) / (seen + _PRIOR)[:, None])
        return found

    @cached_property
    def by_word(self) -> tuple[Ints, list[Floats]]:
        """The token ids that were seen, ascending, and for each layer the probability [ids, experts] that a token of an
        id chooses an expert."""
        assert self.train.words is not None
        ids, which = np.unique(self.train.words, return_inverse=True)
        seen = np.bincount(which, minlength=len(ids))[:, None]
        found = []
        for layer in range(self.train.num_layers):
            counts = np.zeros((len(ids), self.train.num_experts))
            np.add.at(counts, which, self.train.chosen(layer))
            found.append((counts + _PRIOR * self.rates[layer]) / (seen + _PRIOR))
        return ids, found


Predictor = Callable[[Learned, Text, int], Floats]  # scores [tokens, experts] for a layer


def by_popularity(learned: Learned, test: Text, layer: int) -> Floats:
    """Return as scores the share of tokens that chose each expert, alike for all tokens."""
    return np.broadcast_to(learned.rates[layer], (test.num_tokens, test.num_experts))


def by_previous_token(learned: Learned, test: Text, layer: int) -> Floats:
    """Return the highest scores for the experts that the token before had in this layer, in its router's order.

    The others go by popularity. A request's first token has none before it."""
    order = np.linspace(1.001, 1.0, test.k)
    had = np.zeros((test.num_tokens, test.num_experts))
    np.put_along_axis(had[1:], test.experts[:-1, layer].astype(np.int64), order[None], axis=1)
    had[test.starts[:-1]] = 0.0
    return np.asarray(np.where(had > 0, had, by_popularity(learned, test, layer) * (1 - 1e-6)))


def by_layer_before(learned: Learned, test: Text, layer: int) -> Floats:
    """Return scores by how often experts were chosen along with the token's experts one layer before (co-activation).

    Each of these multiplies an expert's popularity by as much as it makes the expert likelier (naive Bayes). Of what
    comes out a token's experts get k in all; 1 - exp(-x) then keeps every score below 1 and in its order.
    """
    rates = np.maximum(learned.rates[layer], _LEAST)
    lifts = np.log(np.maximum(learned.follows[layer - 1], _LEAST) / rates)  # [experts before, experts]
    logs = np.log(rates) + lifts[test.experts[:, layer - 1].astype(np.int64)].sum(axis=1)
    weights = np.exp(logs - logs.max(axis=1, keepdims=True))
    return np.asarray(-np.expm1(-test.k * weights / weights.sum(axis=1, keepdims=True)))


def by_word(learned: Learned, test: Text, layer: int) -> Floats:
    """Return scores by how often tokens of the same id chose experts; an id that was never seen goes by popularity."""
    assert test.words is not None
    ids, rates = learned.by_word
    places = np.minimum(np.searchsorted(ids, test.words), len(ids) - 1)
    known = ids[places] == test.words
    return np.asarray(np.where(known[:, None], rates[layer][places], learned.rates[layer]))


PREDICTORS: dict[str, Predictor] = {
    "popularity": by_popularity,
    "previous_token": by_previous_token,
    "layer_before": by_layer_before,
    "word": by_word,
}


def ranked(scores: Floats, count: int) -> Ints:
    """Return the `count` experts with the best scores [tokens, count], the best first, equal ones by id."""
    return np.asarray(np.argsort(-scores, axis=1, kind="stable")[:, :count])


def right_so_far(ranking: NDArray[np.integer], chosen: NDArray[np.bool_]) -> Floats:
    """Return how many of the first m predicted experts the router chose, for m = 1, 2, ...: mean over tokens [m]."""
    right = np.take_along_axis(chosen, ranking.astype(np.int64), axis=1)
    return np.asarray(right.mean(axis=0).cumsum())


def hot_hits(scores: Floats, chosen: NDArray[np.bool_], batches: Ints, top: int, within: int) -> tuple[float, float]:
    """Compare the experts that a predictor expects most tokens for with those that get most, batch by batch.

    Returns the share of the predicted `top` experts that are among the true `within`, and the tokens of the predicted
    `top` over those of the true `top`; means over batches. `batches` is [batches, tokens]. Among experts with equally
    many tokens every order is equally likely.
    """
    predicted = scores[batches].sum(axis=1)  # [batches, experts]
    true = chosen[batches].sum(axis=1).astype(np.float64)
    named = being_first(predicted, top)
    share = (named * being_first(true, within)).sum(axis=1) / top
    tokens = (named * true).sum(axis=1) / np.sort(true, axis=1)[:, -top:].sum(axis=1)
    return float(share.mean()), float(tokens.mean())


def being_first(values: Floats, count: int) -> Floats:
    """Return the probability [rows, columns] that a column is among the `count` largest of its row if every order of
    equal ones is equally likely."""
    larger = (values[:, None, :] > values[:, :, None]).sum(axis=2)
    equal = (values[:, None, :] == values[:, :, None]).sum(axis=2)
    return np.asarray(np.clip((count - larger) / equal, 0.0, 1.0))


def random_batches(num_tokens: int, size: int, most: int, seed: int = 0) -> Ints:
    """Return batches [batches, size] of tokens that are drawn at random, none twice; at most `most` batches."""
    order = np.random.default_rng(seed).permutation(num_tokens)
    count = min(most, num_tokens // size)
    return np.asarray(order[: count * size].reshape(count, size))
