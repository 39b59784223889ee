"""Report the hit rates of caches of experts, over their size, with several requests at a time, and across domains."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from harness.memory.expert_slots import Replacement
from harness.memory.replacement import LeastFrequentlyUsed, LeastRecentlyUsed
from harness.study.caches import Steps, belady_hits, hits, hot_hits, steps_of
from harness.study.recorded import Domain, Text

SIZES = (1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 3 / 4)  # of all experts of all layers
ACROSS = 1 / 4  # the size with which domains are compared
LANES = (1, 4, 8)  # requests at a time
POLICIES: dict[str, Callable[[], Replacement]] = {"lru": LeastRecentlyUsed, "lfu": LeastFrequentlyUsed}


def places(text: Text, size: float) -> int:
    return max(1, round(size * text.num_layers * text.num_experts))


def by_size(domain: Domain, most_passes: int) -> list[dict[str, Any]]:
    """Return hit rates of the test requests, in caches warmed up with the domain's other requests."""
    found = []
    for lanes in LANES:
        if lanes > min(len(domain.train.starts), len(domain.test.starts)) - 1:
            continue
        # As many accesses, whatever the number of requests at a time
        warm_up, steps = (steps_of(text, lanes, max(1, most_passes // lanes)) for text in (domain.train, domain.test))
        for size in SIZES:
            rates = rates_of(steps, places(domain.test, size), warm_up, domain.train)
            found.append({"requests": lanes, "size": size, "passes": len(steps) // domain.test.num_layers, **rates})
    return found


def rates_of(steps: Steps, capacity: int, warm_up: Steps, train: Text) -> dict[str, float]:
    """Return the hit rate of each policy in a cache with `capacity` places, and what experts at random would give."""
    count = sum(map(len, steps))
    found = {name: hits(steps, capacity, policy(), warm_up) / count for name, policy in POLICIES.items()}
    found["hot_table"] = hot_hits(steps, capacity, train) / count
    found["belady"] = belady_hits(steps, capacity) / count
    return found


def across(domains: Mapping[str, Domain], most_passes: int) -> dict[str, Any]:
    """Return hit rates at one request at a time: [warmed up with, tested on], in caches of one size."""
    warm_ups = [steps_of(domain.train, 1, most_passes) for domain in domains.values()]
    tests = [steps_of(domain.test, 1, most_passes) for domain in domains.values()]
    trains = [domain.train for domain in domains.values()]
    capacity = places(trains[0], ACROSS)
    found: dict[str, Any] = {"domains": list(domains), "size": ACROSS}
    for name in ("hot_table", *POLICIES):
        found[name] = [
            [_rate(name, steps, capacity, warm_up, train) for steps in tests]
            for warm_up, train in zip(warm_ups, trains, strict=True)
        ]
    return found


def _rate(name: str, steps: Steps, capacity: int, warm_up: Steps, train: Text) -> float:
    is_table = name == "hot_table"
    found = hot_hits(steps, capacity, train) if is_table else hits(steps, capacity, POLICIES[name](), warm_up)
    return found / sum(map(len, steps))
