"""Tokens may keep their predecessor's experts here, and layers may follow the layer before; popularity is as in
`skewed`.

Nothing is remembered: a token looks back, draw by draw, to the token whose draw it shares (its anchor), then from
layer to layer at that token. Both walks read draws that belong to (request, position) or (request, position, layer), so
every token that looks at a draw finds the same.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from harness.config import config, require
from harness.routing.base import RoutedModel, Routing, Synthetic
from harness.routing.counters import Stream, derive, fractions, stream
from harness.routing.kinds.skewed import experts_of
from harness.routing.popularity import Popularity, PopularityConfig, popularity
from harness.routing.remembered import remembered


@config
class Config(PopularityConfig):
    """`keep_token` is the probability that a token has, in all layers, the experts of the token before it in its
    request. `follow_layer` is the probability that a token's experts are the image of its experts one layer before
    under that layer's fixed mapping, from each expert to the one of equal popularity rank. Among any `lookback`
    successive tokens, one surely does not keep its predecessor's experts. The other settings are as in `skewed`."""

    keep_token: float = 0.2
    follow_layer: float = 0.4
    lookback: int = 64
    zipf_exponent: float = 0.0
    distributions: str | None = None
    model_seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(2 <= self.lookback <= 4096, "lookback", f"must lie between 2 and 4096, got {self.lookback}")
        most = 1.0 - 1.0 / self.lookback
        limit = f"must lie between 0 and 1 - 1/lookback = {most:g}, got {self.keep_token:g}"
        require(0 <= self.keep_token <= most, "keep_token", limit)
        require(0 <= self.follow_layer <= 1, "follow_layer", f"must lie between 0 and 1, got {self.follow_layer:g}")


class CorrelatedRouting(Synthetic):
    is_even = False

    def __init__(self, settings: Config, popular: Popularity, model: RoutedModel, seed: int) -> None:
        self.source = (
            f"synthetic: {popular.source}, {settings.keep_token:g} of tokens keep their predecessor's experts, "
            f"{settings.follow_layer:g} of layers follow the one before"
        )
        self._settings, self._popular, self._k, self._seed = settings, popular, model.experts_per_token, seed
        self._layers = model.moe_layers
        self._index = {layer: index for index, layer in enumerate(self._layers)}
        # One in `lookback` tokens must not keep; the others keep more often, so that the mean is as asked.
        self._keep = settings.keep_token * settings.lookback / (settings.lookback - 1)

    def experts(self, request_ids: NDArray[np.int64], positions: NDArray[np.int64], layer: int) -> NDArray[np.int64]:
        def drawn() -> NDArray[np.int64]:
            anchors = self._anchor_positions(np.asarray(request_ids), np.asarray(positions))
            layers = self._anchor_layers(np.asarray(request_ids), anchors, layer)
            keys = stream(self._seed, Stream.EXPERTS, request_ids, anchors, layers)
            return experts_of(self._popular, keys, self._index[layer], self._k)

        follows = self._keep, self._settings.lookback, self._settings.follow_layer, self._layers
        popular = self._popular.of_layer(self._index[layer])
        return remembered(drawn, "correlated", self._seed, self._k, *follows, *popular, request_ids, positions, layer)

    def _anchor_positions(self, request_ids: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return for each token [tokens] the last position up to it that did not keep its predecessor's experts. It may
        lie before position 0, where no token is: the draw is then as fresh as any."""
        anchors = positions.astype(np.int64)
        lookback = self._settings.lookback
        phases = (stream(self._seed, Stream.RENEWAL, request_ids) % np.uint64(lookback)).astype(np.int64)
        keys = stream(self._seed, Stream.KEEP, request_ids)
        rows = np.arange(len(anchors))
        for _ in range(lookback):
            at = anchors[rows]
            keeps = (fractions(derive(keys[rows], at)) < self._keep) & ((at - phases[rows]) % lookback != 0)
            rows = rows[keeps]
            if not len(rows):
                break
            anchors[rows] -= 1
        return anchors

    def _anchor_layers(
        self, request_ids: NDArray[np.int64], anchors: NDArray[np.int64], layer: int
    ) -> NDArray[np.int64]:
        """Return for each token [tokens] the last layer up to this one in which the anchor did not follow the layer
        before."""
        layers = np.full(len(anchors), layer, dtype=np.int64)
        keys = stream(self._seed, Stream.FOLLOW, request_ids, anchors)
        rows = np.arange(len(anchors))
        for index in range(self._index[layer], 0, -1):
            draws = fractions(derive(keys[rows], self._layers[index]))
            rows = rows[draws < self._settings.follow_layer]
            if not len(rows):
                break
            layers[rows] = self._layers[index - 1]
        return layers


def build(settings: Config, model: RoutedModel, seed: int) -> Routing:
    return CorrelatedRouting(settings, popularity(settings, model), model, seed)
