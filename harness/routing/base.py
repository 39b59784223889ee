"""What every kind of routing answers."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class RoutedModel(Protocol):
    """What routing has to know of a model; a `ModelSpec` is one."""

    @property
    def num_layers(self) -> int: ...

    @property
    def num_dense_layers(self) -> int:
        """Leading layers without a router."""

    @property
    def num_experts(self) -> int: ...

    @property
    def experts_per_token(self) -> int: ...


class Routing(Protocol):
    """The experts of any token in any layer: a pure function of (seed, request, position, layer), whatever was asked
    before and whichever tokens are asked for together. So strategies that batch differently see the same routing."""

    @property
    def source(self) -> str:
        """Where the routing comes from, for labels: begins "synthetic:" or "recorded:"."""

    @property
    def is_even(self) -> bool:
        """Every expert is equally likely for every token, whatever its neighbours chose."""

    @property
    def predictions(self) -> Predictor | None:
        """What was recorded beside the routing, if anything was."""

    def experts(self, request_ids: NDArray[np.int64], positions: NDArray[np.int64], layer: int) -> NDArray[np.int64]:
        """[tokens] and [tokens] -> [tokens, experts_per_token], distinct in a row, the router's favourite first.

        `layer` counts all layers of the model, from 0; leading dense layers have no routing and must not be asked.
        """


class Predictor(Protocol):
    """Which experts a token is thought to go to, said before the layer's router is asked. Like a `Routing`, a pure
    function of the token."""

    @property
    def source(self) -> str:
        """What made the predictions, for labels."""

    def experts(
        self, request_ids: NDArray[np.int64], positions: NDArray[np.int64], layer: int, distance: int = 1
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return experts of `layer` [tokens, predicted], distinct in a row, and the probability that the router chooses
        each, same shape. It is what is known once layer `layer - distance` has been computed; [tokens, 0] where nothing
        is."""


def moe_layers(model: RoutedModel) -> range:
    """The layers that have a router."""
    return range(model.num_dense_layers, model.num_layers)
