"""Measure how a routing spreads the load over experts, for hot-expert tables and for skewed imitations."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from harness.routing.base import Routing

Tokens = tuple[NDArray[np.int64], NDArray[np.int64]]  # request ids and positions, each [tokens]


@dataclass(frozen=True, eq=False)
class LoadStatistics:
    """The load of experts in some layers: its rows are the layers of `layers`. `counts` divided by each row's sum is
    what `popularity.write_shares` writes."""

    layers: tuple[int, ...]
    counts: NDArray[np.int64]  # [layers, experts], how many tokens chose the expert

    @property
    def shares(self) -> NDArray[np.float64]:
        """The share of each expert [layers, experts] in all choices in the layer."""
        return np.asarray(self.counts / self.counts.sum(axis=1, keepdims=True))

    @property
    def imbalance(self) -> NDArray[np.float64]:
        """The busiest expert's load over the mean load [layers]; 1 is balanced."""
        return np.asarray(self.counts.max(axis=1) / self.counts.mean(axis=1))

    @property
    def entropy_bits(self) -> NDArray[np.float64]:
        """The entropy of the shares [layers] in bits; log2 of the number of experts is balanced."""
        shares = self.shares
        logs = np.log2(shares, where=shares > 0, out=np.zeros_like(shares))
        return np.asarray(-(shares * logs).sum(axis=1))

    def hottest(self, m: int) -> NDArray[np.int64]:
        """Return the `m` most chosen experts [layers, m], the hottest first, equally hot ones by id."""
        assert 0 <= m <= self.counts.shape[1], m
        return np.argsort(-self.counts, axis=1, kind="stable")[:, :m]

    def hit_rate(self, hot: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the share of choices [layers] that fall on the `hot` experts [layers, m]. A table made from the same
        tokens flatters itself; take `hottest` of other tokens."""
        return np.asarray(np.take_along_axis(self.shares, hot, axis=1).sum(axis=1))


def load_statistics(routing: Routing, layers: Iterable[int], tokens: Tokens, *, num_experts: int) -> LoadStatistics:
    """Count where the given tokens go in the given layers. There must be at least one of each."""
    asked = tuple(layers)
    assert asked and len(tokens[0]), "statistics of nothing"
    counts = [np.bincount(routing.experts(*tokens, layer).ravel(), minlength=num_experts) for layer in asked]
    return LoadStatistics(asked, np.stack(counts).astype(np.int64))


def all_tokens(num_requests: int, num_positions: int) -> Tokens:
    """Return the first positions of the first requests, request by request."""
    requests, positions = np.divmod(np.arange(num_requests * num_positions, dtype=np.int64), num_positions)
    return requests, positions
