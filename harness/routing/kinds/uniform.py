"""Every expert is equally likely; tokens and layers are independent of one another."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from harness.config import config
from harness.routing.base import RoutedModel, Routing, Synthetic
from harness.routing.counters import Stream, stream
from harness.routing.predictors import RoutingConfig
from kernels.routing import draw


@config
class Config(RoutingConfig):
    """Uniform routing has no settings of its own."""


class UniformRouting(Synthetic):
    is_even = True

    def __init__(self, num_experts: int, experts_per_token: int, seed: int) -> None:
        self.source = "synthetic: uniform routing"
        self._num_experts, self._k, self._seed = num_experts, experts_per_token, seed

    def experts(self, request_ids: NDArray[np.int64], positions: NDArray[np.int64], layer: int) -> NDArray[np.int64]:
        return draw(stream(self._seed, Stream.EXPERTS, request_ids, positions, layer), self._num_experts, self._k)


def build(settings: Config, model: RoutedModel, seed: int) -> Routing:
    return UniformRouting(model.num_experts, model.experts_per_token, seed)
