"""How a routing spreads the load over experts: what hot-expert tables and skewed imitations are made from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from harness.routing.base import Routing

Tokens = tuple[NDArray[np.int64], NDArray[np.int64]]  # request ids and positions, each [tokens]


@dataclass(frozen=True, eq=False)
class LoadStatistics:
    """Rows are those of `layers`. `counts` / its row's sum is what `popularity.write_shares` writes."""

    layers: tuple[int, ...]
    counts: NDArray[np.int64]  # [layers, experts], how many tokens chose the expert

    @property
    def shares(self) -> NDArray[np.float64]:
        """[layers, experts], of all choices in the layer."""
        return np.asarray(self.counts / self.counts.sum(axis=1, keepdims=True))

    @property
    def imbalance(self) -> NDArray[np.float64]:
        """[layers]: the busiest expert's load over the mean load; 1 is balanced."""
        return np.asarray(self.counts.max(axis=1) / self.counts.mean(axis=1))

    @property
    def entropy_bits(self) -> NDArray[np.float64]:
        """[layers], of the shares; log2 of the number of experts is balanced."""
        shares = self.shares
        logs = np.log2(shares, where=shares > 0, out=np.zeros_like(shares))
        return np.asarray(-(shares * logs).sum(axis=1))

    def hottest(self, m: int) -> NDArray[np.int64]:
        """[layers, m]: the most chosen experts, the hottest first, equals by id."""
        assert 0 <= m <= self.counts.shape[1], m
        return np.argsort(-self.counts, axis=1, kind="stable")[:, :m]

    def hit_rate(self, hot: NDArray[np.int64]) -> NDArray[np.float64]:
        """[layers]: the share of choices that fall on the `hot` experts [layers, m]. A table made from the same tokens
        flatters itself; take `hottest` of others."""
        return np.asarray(np.take_along_axis(self.shares, hot, axis=1).sum(axis=1))


def load_statistics(routing: Routing, layers: Iterable[int], tokens: Tokens, *, num_experts: int) -> LoadStatistics:
    """Where the given tokens go in the given layers. There must be at least one of each."""
    asked = tuple(layers)
    assert asked and len(tokens[0]), "statistics of nothing"
    counts = [np.bincount(routing.experts(*tokens, layer).ravel(), minlength=num_experts) for layer in asked]
    return LoadStatistics(asked, np.stack(counts).astype(np.int64))


def all_tokens(num_requests: int, num_positions: int) -> Tokens:
    """The first positions of the first requests, request by request."""
    requests, positions = np.divmod(np.arange(num_requests * num_positions, dtype=np.int64), num_positions)
    return requests, positions
