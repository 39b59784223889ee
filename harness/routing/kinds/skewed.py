"""Some experts are popular, other ones in every layer; tokens and layers are independent of one another."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from harness.config import config
from harness.routing.base import RoutedModel, Routing, Synthetic
from harness.routing.counters import Stream, stream
from harness.routing.popularity import Popularity, PopularityConfig, popularity
from harness.routing.remembered import remembered
from kernels.routing import draw


@config
class Config(PopularityConfig):
    """The expert at rank r is drawn with weight r^-s, where s is `zipf_exponent`. `distributions`, where given, names
    a file with each expert's share of its layer's load and comes before the exponent. `model_seed` decides which
    experts are popular: it belongs to the model, while the run's seed decides what the tokens choose."""

    zipf_exponent: float = 1.0
    distributions: str | None = None
    model_seed: int = 0


class SkewedRouting(Synthetic):
    is_even = False

    def __init__(self, popular: Popularity, model: RoutedModel, seed: int) -> None:
        self.source = f"synthetic: {popular.source}, tokens and layers independent"
        self._popular, self._k, self._seed = popular, model.experts_per_token, seed
        self._index = {layer: index for index, layer in enumerate(model.moe_layers)}

    def experts(self, request_ids: NDArray[np.int64], positions: NDArray[np.int64], layer: int) -> NDArray[np.int64]:
        row = self._index[layer]

        def drawn() -> NDArray[np.int64]:
            keys = stream(self._seed, Stream.EXPERTS, request_ids, positions, layer)
            return experts_of(self._popular, keys, row, self._k)

        popular = self._popular.of_layer(row)
        return remembered(drawn, "skewed", self._seed, self._k, *popular, request_ids, positions, layer)


def experts_of(popular: Popularity, keys: NDArray[np.uint64], row: int, k: int) -> NDArray[np.int64]:
    """Draw experts for each key [n] in the `row`-th MoE layer, and return them [n, k]. What is drawn are ranks, so the
    same key in another layer gives experts of similar popularity there."""
    assert row >= 0, "a dense layer has no routing"
    expert_at, weights = popular.of_layer(row)
    return expert_at[draw(keys, len(expert_at), k, weights)]


def build(settings: Config, model: RoutedModel, seed: int) -> Routing:
    return SkewedRouting(popularity(settings, model), model, seed)
