"""Define what a strategy is asked after each router, and what it answers. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from harness.memory.expert_slots import Key


@dataclass(frozen=True, eq=False)
class Forecast:
    """Holds what was predicted of a later layer's routing: experts of each token and their probabilities, both
    [tokens, predicted]."""

    ids: NDArray[np.int64]
    chances: NDArray[np.float64]
    num_experts: int

    @cached_property
    def expected(self) -> NDArray[np.float64]:
        """The tokens [experts] that each expert is expected to get."""
        found = np.bincount(self.ids.ravel(), weights=self.chances.ravel(), minlength=self.num_experts)
        return np.asarray(found, dtype=np.float64)

    @cached_property
    def likely(self) -> NDArray[np.float64]:
        """The probability [experts] that any token chooses the expert, as if tokens chose independently."""
        with np.errstate(divide="ignore"):  # a certain choice
            misses = np.bincount(
                self.ids.ravel(), weights=np.log1p(-self.chances.ravel().clip(0, 1)), minlength=self.num_experts
            )
        return np.asarray(1 - np.exp(misses))


@dataclass(frozen=True, eq=False, kw_only=True)
class LayerView:
    """Holds what is known of a layer once its router has chosen, over all micro-batches of the pass.

    `there` has the active experts that the device holds, with True, or that are on their way to it, with False. What
    had been prefetched for this layer and had not begun is withdrawn by then. `link_busy_s` tells how long the link is
    still bound by transfers that have begun, if it takes so many seconds for an expert, and `num_queued` how many
    prefetches have not.
    """

    layer: int
    num_layers: int
    num_experts: int
    is_prefill: bool
    ids: NDArray[np.int64]  # [tokens, experts_per_token]
    weights: NDArray[np.float32]  # the router's, of the same shape
    there: Mapping[int, bool]
    holds: Callable[[Key], bool] = lambda key: False  # of any layer: whether it is on the device or on its way
    link_busy_s: Callable[[float], float] = lambda expert_s: 0.0
    num_queued: Callable[[], int] = lambda: 0
    ahead: Mapping[int, Forecast] = field(default_factory=dict)  # by layer: what is predicted of later ones

    @cached_property
    def tokens(self) -> NDArray[np.int64]:
        """The tokens [experts] that the router sends to each expert."""
        return np.bincount(self.ids.ravel(), minlength=self.num_experts)

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    @cached_property
    def active(self) -> list[int]:
        """The experts that have tokens, ascending."""
        found: list[int] = np.flatnonzero(self.tokens).tolist()
        return found

    @cached_property
    def absent(self) -> list[int]:
        """The active experts that are neither on the device nor on their way, by tokens, the fewest first."""
        tokens = self.tokens.tolist()
        missing = [expert for expert in self.active if expert not in self.there]
        return sorted(missing, key=lambda expert: (tokens[expert], expert))

    @cached_property
    def ready_first(self) -> list[int]:
        """The active experts of `there`, those that have arrived before those on their way."""
        return sorted(self.there, key=lambda expert: (not self.there[expert], expert))


@dataclass(frozen=True, eq=False, kw_only=True)
class Placement:
    """A placement says where each active expert of a layer runs, and what to bring for later layers.

    `on_gpu` and `on_cpu` together have each active expert once, in the order in which each side runs them; where those
    that have arrived run together, they come first. An expert of `on_gpu` that is not there is brought on demand, ahead
    of all prefetches. `prefetch` has experts of later layers, the most wanted first; those that are there already are
    left out, and those that find no free slot are dropped.
    """

    on_gpu: Sequence[int]
    on_cpu: Sequence[int] = ()
    prefetch: Sequence[Key] = ()


class Placer(Protocol):
    """Decides after each router. `looks_ahead` says for how many later layers it wants predictions; 0 is none."""

    @property
    def looks_ahead(self) -> int: ...

    def place(self, view: LayerView) -> Placement: ...
