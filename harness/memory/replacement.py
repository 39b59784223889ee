"""Choose which expert gives its slot up, by how recently or how often it was used: policies for `ExpertSlots`."""

from __future__ import annotations

from collections.abc import Collection, Set
from heapq import heapify, heappop, heappush

from harness.memory.expert_slots import Key


class LeastRecentlyUsed:
    """Evicts the expert that was used longest ago."""

    def __init__(self) -> None:
        self._order: dict[Key, None] = {}  # oldest first; also experts that were evicted for other reasons

    def used(self, key: Key) -> None:
        self._order.pop(key, None)
        self._order[key] = None

    def victim(self, candidates: Collection[Key]) -> Key:
        allowed = _as_set(candidates)
        chosen = next(key for key in self._order if key in allowed)
        del self._order[chosen]
        return chosen


class LeastFrequentlyUsed:
    """Evicts the expert that was used least often since the start, and of several such the one used longest ago.

    Counts outlive evictions: an expert that comes back is as popular as it was. They never age, so a policy that was
    used on other text keeps to what was popular there.
    """

    def __init__(self) -> None:
        self._uses: dict[Key, tuple[int, int]] = {}  # (how often, number of the last use among all)
        self._queue: list[tuple[int, int, Key]] = []  # a heap with each expert's last use, and outdated ones
        self._num_uses = 0

    def used(self, key: Key) -> None:
        self._num_uses += 1
        uses = self._uses[key] = (self._uses.get(key, (0, 0))[0] + 1, self._num_uses)
        heappush(self._queue, (*uses, key))
        if len(self._queue) > 4 * len(self._uses) + 64:  # most are outdated
            self._queue = [(*of_key, other) for other, of_key in self._uses.items()]
            heapify(self._queue)

    def victim(self, candidates: Collection[Key]) -> Key:
        allowed, kept = _as_set(candidates), []
        while True:
            entry = heappop(self._queue)
            count, last, key = entry
            if self._uses[key] != (count, last):
                continue  # used again since
            if key in allowed:
                break
            kept.append(entry)
        for other in kept:
            heappush(self._queue, other)
        return key


def _as_set(candidates: Collection[Key]) -> Set[Key]:
    return candidates if isinstance(candidates, Set) else set(candidates)
