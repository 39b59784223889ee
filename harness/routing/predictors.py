"""A predictor whose hit rates are stated, so that it computes nothing."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from harness.config import config, require
from harness.routing.base import RoutedModel, Routing
from harness.routing.counters import Stream, derive, fractions, stream
from harness.routing.sampling import race


@config
class RoutingConfig:
    """Every kind of routing has this setting. `hit_rates` states a predictor: row d - 1 is for predictions made d
    layers ahead. It holds the probability that a token's expert is foreseen, one for each rank that the router gives
    experts, or one for all ranks."""

    hit_rates: tuple[tuple[float, ...], ...] | None = None

    def __post_init__(self) -> None:
        for row in self.hit_rates or ():
            valid = bool(row) and all(0 <= rate <= 1 for rate in row)
            require(valid, "hit_rates", f"each row must have probabilities between 0 and 1, got {list(row)}")


class StatedPredictor:
    """Names as many experts as a token has; of these the router chooses as many as `hit_rates` states.

    An expert of rank r is named with the probability stated for r, independently of all others. Where it is not, an
    expert that the router does not choose is named in its place, each equally likely. The place's probability is also
    the confidence, so the confidence tells nothing about the token. A rate of 1 for all ranks is an oracle.
    """

    def __init__(
        self, routing: Routing, hit_rates: tuple[tuple[float, ...], ...], model: RoutedModel, seed: int
    ) -> None:
        k, self._num_experts = model.experts_per_token, model.num_experts
        for row in hit_rates:
            require(len(row) in (1, k), "hit_rates", f"each row must have 1 rate or {k}, got {len(row)}")
        told = f"needs {2 * k} experts or more where {k} are chosen and all may be missed, got {self._num_experts}"
        require(2 * k <= self._num_experts, "hit_rates", told)
        self._routing, self._k, self._seed = routing, k, seed
        self._hit_rates = [np.broadcast_to(np.asarray(row, dtype=np.float64), (k,)) for row in hit_rates]
        rates = "; ".join(" ".join(f"{rate:g}" for rate in row) for row in hit_rates)
        self.source = f"stated: hit rates by rank, one layer ahead and more: {rates}"

    def experts(
        self, request_ids: NDArray[np.int64], positions: NDArray[np.int64], layer: int, distance: int = 1
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        if not 1 <= distance <= min(len(self._hit_rates), layer):
            return no_experts(len(request_ids))
        k, rates = self._k, self._hit_rates[distance - 1]
        chosen = self._routing.experts(request_ids, positions, layer)  # [tokens, k]
        keys = stream(self._seed, Stream.PREDICTION, request_ids, positions, layer, distance)
        is_hit = fractions(derive(keys[:, None], np.arange(k))) < rates
        # Among any 2 k experts, k or more are not chosen.
        drawn = race(derive(keys, k), self._num_experts, 2 * k)
        is_chosen = (drawn[:, :, None] == chosen[:, None, :]).any(axis=2)
        wrong = np.take_along_axis(drawn, np.argsort(is_chosen, axis=1, kind="stable")[:, :k], axis=1)
        return np.where(is_hit, chosen, wrong), np.tile(rates, (len(chosen), 1))


def no_experts(num_tokens: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return no predicted experts for each token, and their confidence: both [tokens, 0]."""
    return np.empty((num_tokens, 0), dtype=np.int64), np.empty((num_tokens, 0))
