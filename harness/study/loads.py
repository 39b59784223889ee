"""Measure how popular experts are, and how far their popularity drifts from one kind of text to another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.routing.statistics import LoadStatistics
from harness.study.recorded import Domain, Text

Floats = NDArray[np.float64]


def loads_of(text: Text) -> LoadStatistics:
    """Count how many tokens chose each expert. Layers count from the first with a router."""
    counts = [
        np.bincount(text.experts[:, layer].ravel(), minlength=text.num_experts) for layer in range(text.num_layers)
    ]
    return LoadStatistics(tuple(range(text.num_layers)), np.stack(counts).astype(np.int64))


def popularity(text: Text) -> dict[str, Any]:
    """Describe the loads of each layer: sorted shares, entropy, the busiest over the mean, and what the hottest quarter
    of the experts get."""
    loads = loads_of(text)
    hot = max(1, text.num_experts // 4)
    return {
        "sorted_shares": np.sort(loads.shares, axis=1)[:, ::-1],  # [layers, ranks]
        "entropy_bits": loads.entropy_bits,
        "most_entropy_bits": float(np.log2(text.num_experts)),
        "busiest_over_mean": loads.imbalance,
        "hot_quarter_share": loads.hit_rate(loads.hottest(hot)),
        "unused_experts": (loads.counts == 0).sum(axis=1),
    }


def drift(domains: Mapping[str, Domain]) -> dict[str, Any]:
    """Compare the loads of one domain's first half with those of another's second half, for all pairs: [domain,
    domain], means over layers. The diagonal is what chance and the choice of requests do within a domain."""
    firsts = [loads_of(domain.train) for domain in domains.values()]
    seconds = [loads_of(domain.test) for domain in domains.values()]
    hot = max(1, firsts[0].counts.shape[1] // 4)

    def all_pairs(compare: Any) -> list[list[float]]:
        return [[float(np.mean(compare(one, other))) for other in seconds] for one in firsts]

    return {
        "domains": list(domains),
        "total_variation": all_pairs(lambda one, other: total_variation(one.shares, other.shares)),
        "jensen_shannon_bits": all_pairs(lambda one, other: jensen_shannon_bits(one.shares, other.shares)),
        "hot_experts": hot,
        "hot_overlap": all_pairs(lambda one, other: overlap(one.hottest(hot), other.hottest(hot))),
        "hot_overlap_by_chance": hot / firsts[0].counts.shape[1],
    }


def total_variation(one: Floats, other: Floats) -> Floats:
    """Return the share of the load [layers] that would have to move to make two distributions equal."""
    return np.asarray(np.abs(one - other).sum(axis=-1) / 2)


def jensen_shannon_bits(one: Floats, other: Floats) -> Floats:
    """Return the Jensen-Shannon divergence [layers] of two distributions, between 0 and 1 bit."""
    middle = (one + other) / 2
    return np.asarray((_relative_bits(one, middle) + _relative_bits(other, middle)) / 2)


def _relative_bits(one: Floats, other: Floats) -> Floats:
    logs = np.log2(np.divide(one, other, where=one > 0, out=np.ones_like(one)))
    return np.asarray((one * logs).sum(axis=-1))


def overlap(one: NDArray[np.int64], other: NDArray[np.int64]) -> Floats:
    """Return which share of one set of experts is in the other one: [layers, m] each -> [layers]."""
    return np.asarray((one[:, :, None] == other[:, None, :]).any(axis=2).mean(axis=1))
