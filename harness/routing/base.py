"""Every kind of routing has this interface."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class RoutedModel(Protocol):
    """Routing has to know these numbers of a model; a `ModelSpec` has them all."""

    @property
    def num_layers(self) -> int: ...

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """The layers that have a router, ascending."""

    @property
    def num_experts(self) -> int: ...

    @property
    def experts_per_token(self) -> int: ...


class Routing(Protocol):
    """A routing tells the experts of any token in any layer. It is a pure function of (seed, request, position, layer):
    earlier questions do not matter, nor which tokens one question asks for together. So strategies that batch
    differently see the same routing."""

    @property
    def source(self) -> str:
        """The origin of the routing, for labels: begins "synthetic:" or "recorded:"."""

    @property
    def is_even(self) -> bool:
        """True where every expert is equally likely for every token, whichever experts other tokens have."""

    @property
    def predictions(self) -> Predictor | None:
        """The predictions that were recorded with the routing; None where there are none."""

    def num_shared(self, request_ids: NDArray[np.int64], others: NDArray[np.int64]) -> int:
        """Return how many of the requests have the routing of one of the others."""

    def experts(self, request_ids: NDArray[np.int64], positions: NDArray[np.int64], layer: int) -> NDArray[np.int64]:
        """Return the experts of each token [tokens, experts_per_token], distinct in a row, the router's favourite
        first.

        `request_ids` and `positions` are each [tokens]. `layer` counts all layers of the model, from 0; dense layers
        have no routing and must not be asked.
        """


class Predictor(Protocol):
    """A predictor names the experts that a token probably goes to, before the layer's router is asked. Like a
    `Routing`, it is a pure function of the token."""

    @property
    def source(self) -> str:
        """The origin of the predictions, for labels."""

    def experts(
        self,
        request_ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        layer: int,
        distance: int = 1,
        chosen: Callable[[], NDArray[np.int64]] | None = None,
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return experts of `layer` [tokens, predicted], distinct in a row, and the probability that the router chooses
        each, same shape. These are the predictions that are known once layer `layer - distance` has been computed;
        [tokens, 0] where there are none. `chosen` gives what the routing has for these tokens, for one who has drawn it
        anyway."""


class Synthetic:
    """A synthetic routing is drawn for each request by itself, and predicts nothing."""

    predictions: Predictor | None = None

    def num_shared(self, request_ids: NDArray[np.int64], others: NDArray[np.int64]) -> int:
        return int(np.isin(request_ids, others).sum())
