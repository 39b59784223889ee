"""Judge predictors of the next layer's experts on requests that they did not learn from, within a domain and across."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.study.gates import DISTANCES, EXTRA, Gates
from harness.study.prediction import PREDICTORS, Learned, Predictor, hot_hits, random_batches, ranked, right_so_far
from harness.study.recorded import Domain, Text

Floats = NDArray[np.float64]
BATCH = 32  # tokens: PreScope section 6.4
HOT = (2, 3, 4)  # PreScope Table 3
MOST_BATCHES = 200
GATE = "next_gate"


def usable(domains: Mapping[str, Domain]) -> dict[str, Predictor]:
    """Return the predictors for which all domains have what they need."""
    words = all(domain.text.words is not None for domain in domains.values())
    return {name: predictor for name, predictor in PREDICTORS.items() if words or name != "word"}


def within(domain: Domain, predictors: Mapping[str, Predictor], gates: Gates | None) -> dict[str, Any]:
    """Judge each predictor on the domain's test requests, having learned from its other ones."""
    learned, test = Learned(domain.train), domain.test
    found = {name: judged(test, _scores(predictor, learned, test)) for name, predictor in predictors.items()}
    if gates is not None:
        part, places = gates.of(test.numbers)
        if len(places):
            text = test.singles(places)
            found[GATE] = judged(text, list(part.chances.swapaxes(0, 1)), list(part.ahead.swapaxes(0, 1)))
            found[GATE] |= of_routers(text, part)
            for name, predictor in predictors.items():
                scores = [of_layer[places] for of_layer in _scores(predictor, learned, test)]
                found[name]["within_true_top"] = within_true_top(part, [ranked(s, test.k) for s in scores])
    return found


def across(domains: Mapping[str, Domain], predictors: Mapping[str, Predictor]) -> dict[str, Any]:
    """Return which share of the true experts each predictor names with k predictions: [learned from, tested on], means
    over the layers but the first. "all" has learned from all domains."""
    learned = {name: Learned(domain.train) for name, domain in domains.items()}
    found: dict[str, Any] = {"domains": list(domains)}
    for name, predictor in predictors.items():
        if name != "previous_token":  # learns next to nothing
            found[name] = [
                [_coverage(predictor, one, domain.test) for domain in domains.values()] for one in learned.values()
            ]
    return found


def _coverage(predictor: Predictor, learned: Learned, test: Text) -> float:
    k = test.k
    layers = range(1, test.num_layers)
    named = [right_so_far(ranked(predictor(learned, test, at), k), test.chosen(at))[-1] / k for at in layers]
    return float(np.mean(named))


def _scores(predictor: Predictor, learned: Learned, test: Text) -> list[Floats]:
    return [predictor(learned, test, layer) for layer in range(1, test.num_layers)]


def judged(test: Text, scores: list[Any], rankings: list[Any] | None = None) -> dict[str, Any]:
    """Describe predictions for the layers from the second on. `right` [layers - 1, m] is how many of the first m
    predicted experts are chosen: over m it is the share of the predicted that is true, over k the share of the true
    that is named."""
    k, layers = test.k, range(1, test.num_layers)
    ranks = rankings or [ranked(of_layer, k + EXTRA) for of_layer in scores]
    chosen = [test.chosen(layer) for layer in layers]
    right = np.stack([right_so_far(rank, true) for rank, true in zip(ranks, chosen, strict=True)])
    counts = np.arange(1, right.shape[1] + 1)
    found: dict[str, Any] = {
        "predicted_that_are_true": right / counts,
        "true_that_are_predicted": right / k,
    }
    batches = random_batches(test.num_tokens, min(BATCH, test.num_tokens), MOST_BATCHES)
    for top in HOT:
        pairs = [hot_hits(s, true, batches, top, top + EXTRA) for s, true in zip(scores, chosen, strict=True)]
        found[f"hot_{top}"] = [share for share, _ in pairs]
        found[f"hot_{top}_tokens"] = [tokens for _, tokens in pairs]
    return found


def of_routers(text: Text, gates: Gates) -> dict[str, Any]:
    """Say how like the gating inputs of successive layers are, and check the routers against what was recorded."""
    own = gates.own[:, :, : text.k]
    again = (own[:, :, :, None] == text.experts[:, :, None, :]).any(axis=3).mean()
    return {
        "num_tokens": text.num_tokens,
        "cosine": gates.cosine.mean(axis=0, dtype=np.float64),
        # by layers ahead: the share of its k experts that a layer's router names, layer by layer from the first it can
        "named_ahead": {
            str(distance): gates.named_ahead[:, at, distance:].mean(axis=0, dtype=np.float64)
            for at, distance in enumerate(DISTANCES)
            if distance < text.num_layers
        },
        "recorded_again": float(again),  # share of recorded experts that the router gives for its recorded input
        "within_true_top": within_true_top(gates, list(gates.ahead[:, :, : text.k].swapaxes(0, 1))),
    }


def within_true_top(gates: Gates, rankings: list[NDArray[np.integer]]) -> list[float]:
    """Return the share of k predicted experts that the true router ranks among its first k + 2 [layers - 1]."""
    true = gates.own.swapaxes(0, 1)[1:]  # [layers - 1, tokens, k + 2]
    return [float((r[:, :, None] == t[:, None, :]).any(axis=2).mean()) for r, t in zip(rankings, true, strict=True)]
