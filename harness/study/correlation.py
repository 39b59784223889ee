"""Measure how far a token's experts follow from those of the token before it, and from those one layer before."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from harness.study.recorded import Text

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
LAGS = (1, 2, 4, 8, 16, 32)  # tokens back


def kept_shares(text: Text, lags: tuple[int, ...] = LAGS) -> dict[str, Any]:
    """Return the share of a token's experts that an earlier token of its request had too [lags, layers].

    Beside it stands what independent tokens with the same popularity would share [layers]. None where no request is
    long enough."""
    rates = chosen_rates(text)
    return {
        "lags": list(lags),
        "kept": [kept_share(text, lag) for lag in lags],
        "independent": (rates**2).sum(axis=1) / text.k,
    }


def kept_share(text: Text, lag: int, which: NDArray[np.bool_] | None = None) -> Floats | None:
    """Return the share [layers] of experts that the token `lag` positions before had as well. `which` says for which
    tokens this is asked. None where there are none."""
    later = np.flatnonzero((text.offsets >= lag) & (True if which is None else which))
    if not len(later):
        return None
    same = np.zeros(text.num_layers)
    for layer in range(text.num_layers):
        one, other = text.experts[later, layer], text.experts[later - lag, layer]
        same[layer] = (one[:, :, None] == other[:, None, :]).any(axis=2).mean()
    return same


def chosen_rates(text: Text) -> Floats:
    """Return the share of tokens [layers, experts] that choose each expert."""
    return np.stack([text.chosen(layer).mean(axis=0) for layer in range(text.num_layers)])


def followed_shares(train: Text, test: Text) -> dict[str, Any]:
    """Return the share of a layer's experts in `test` that are images of the token's experts one layer before.

    The mapping is the best one-to-one mapping that `train` shows. Beside it stands what independent layers with the
    same popularity give. Both are [layers - 1]."""
    rates, found, by_chance = chosen_rates(test), [], []
    for layer in range(test.num_layers - 1):
        image = best_mapping(together(train, layer))
        mapped = image[test.experts[:, layer]]
        found.append(float((mapped[:, :, None] == test.experts[:, layer + 1][:, None, :]).any(axis=2).mean()))
        by_chance.append(float((rates[layer] * rates[layer + 1][image]).sum() / test.k))
    return {"followed": found, "independent": by_chance}


def together(text: Text, layer: int) -> Floats:
    """Return how many tokens [experts, experts] choose one expert in a layer and another in the next layer."""
    here, there = text.chosen(layer).astype(np.float32), text.chosen(layer + 1).astype(np.float32)
    return (here.T @ there).astype(np.float64)


def best_mapping(counts: Floats) -> Ints:
    """Return for each expert the one of the next layer, no two alike, with which tokens choose it most often in all."""
    return np.asarray(linear_sum_assignment(counts, maximize=True)[1], dtype=np.int64)


def favourites_information(text: Text, seed: int = 0) -> dict[str, Any]:
    """Return the information in bits [layers - 1] that a token's favourite carries about its favourite one layer later.

    Beside it stand what is left of it in shuffled tokens (which is the estimate's bias), and the most that there could
    be."""
    favourites = text.experts[:, :, 0].astype(np.int64)
    shuffle = np.random.default_rng(seed).permutation(len(favourites))
    pairs = range(text.num_layers - 1)
    joint = [_joint(favourites[:, at], favourites[:, at + 1], text.num_experts) for at in pairs]
    mixed = [_joint(favourites[shuffle, at], favourites[:, at + 1], text.num_experts) for at in pairs]
    return {
        "bits": [mutual_information_bits(counts) for counts in joint],
        "shuffled_bits": [mutual_information_bits(counts) for counts in mixed],
        "entropy_bits": [entropy_bits(counts.sum(axis=0)) for counts in joint],
    }


def _joint(one: Ints, other: Ints, size: int) -> Floats:
    return np.bincount(one * size + other, minlength=size * size).reshape(size, size).astype(np.float64)


def mutual_information_bits(counts: Floats) -> float:
    """Return the mutual information of two variables that were counted together."""
    return entropy_bits(counts.sum(axis=0)) + entropy_bits(counts.sum(axis=1)) - entropy_bits(counts.ravel())


def entropy_bits(counts: Floats) -> float:
    """Return the entropy of the distribution that counts show."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log2(shares)).sum())
