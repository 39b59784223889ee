"""Replay recorded routing against caches of experts, and compute what the best of all caches would have had.

A *step* is the experts that the tokens of one pass choose in one layer; the keys are (layer, expert). Steps follow one
another pass by pass and layer by layer, as a decode pass makes them. A hit is an expert that lies in the cache when its
step begins: nothing is prefetched.

LRU and LFU run as on `ExpertSlots`: of a step's experts those that are there go first, each missing one takes a place,
and whatever is in the cache may give it up. The table of hot experts never changes; what misses passes through memory
of its own. So does what misses in Belady's optimum where it is not worth a place (it may bypass the cache). That
optimum knows the future, and no policy with the same number of places has more hits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush, nsmallest
from math import inf
from typing import TypeAlias

import numpy as np

from harness.memory.expert_slots import Key, Replacement
from harness.memory.replacement import NextUses
from harness.study.loads import loads_of
from harness.study.recorded import Text

Steps: TypeAlias = Sequence[tuple[Key, ...]]  # the distinct keys of each step, ascending


def steps_of(text: Text, num_lanes: int, most_passes: int) -> list[tuple[Key, ...]]:
    """Return the steps of decoding `num_lanes` requests at a time, one token each in a pass.

    Requests are dealt to lanes in turn, and a lane runs its requests one after another. It ends when the first lane has
    run out, so that all passes have the same number of tokens.
    """
    lanes = [np.concatenate(_rows(text, range(lane, len(text.starts) - 1, num_lanes))) for lane in range(num_lanes)]
    num_passes = min(most_passes, *(len(lane) for lane in lanes))
    found = []
    for number in range(num_passes):
        experts = text.experts[[lane[number] for lane in lanes]]  # [lanes, layers, k]
        for layer in range(text.num_layers):
            found.append(tuple((layer, int(expert)) for expert in np.unique(experts[:, layer])))
    return found


def _rows(text: Text, requests: Iterable[int]) -> list[np.ndarray]:
    return [np.empty(0, dtype=np.int64), *(np.arange(text.starts[at], text.starts[at + 1]) for at in requests)]


def hits(steps: Steps, capacity: int, policy: Replacement, warm_up: Steps = ()) -> int:
    """Count the hits of a policy with `capacity` places. The cache begins with what `warm_up` left in it."""
    there: dict[Key, None] = {}
    found = 0
    for number, step in enumerate((*warm_up, *steps)):
        missing = [key for key in step if key not in there]
        if number >= len(warm_up):
            found += len(step) - len(missing)
        for key in step:
            if key in there:
                policy.used(key)
        for key in missing:
            if len(there) == capacity:
                del there[policy.victim(there.keys(), key)]
            there[key] = None
            policy.used(key)
    return found


def hot_hits(steps: Steps, capacity: int, train: Text) -> int:
    """Count the hits of a table with the experts that were chosen most in `train`, of all layers together."""
    counts = loads_of(train).counts
    hottest = np.argsort(-counts.ravel(), kind="stable")[:capacity]
    table = {(int(key) // train.num_experts, int(key) % train.num_experts) for key in hottest}
    return sum(key in table for step in steps for key in step)


def belady_hits(steps: Steps, capacity: int, *, cold: bool = False) -> int:
    """Count the hits of the optimum, which keeps after each step what is used again first.

    It begins with the experts that are used first, as if it had been warmed up with foresight, or empty where `cold`.
    """
    future = NextUses(steps)
    there = set() if cold else set(nsmallest(capacity, future.keys(), key=lambda key: (future.next_use(key), key)))
    latest = [(-future.next_use(key), key) for key in there]  # a heap: used again latest first; also past uses
    heapify(latest)
    found = 0
    for step in steps:
        for key in step:
            found += key in there
            future.pass_by(key)
            if future.next_use(key) < inf:
                there.add(key)
                heappush(latest, (-future.next_use(key), key))
            else:
                there.discard(key)
        while len(there) > capacity:
            there.remove(heappop(latest)[1])  # past uses lie behind the next one of all that is there
    return found
