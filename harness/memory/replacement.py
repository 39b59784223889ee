"""Choose which expert gives its slot up, by past use, by gate scores, or by foresight: policies for `ExpertSlots`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from heapq import heapify, heappop, heappush
from math import inf

import numpy as np

from harness.memory.expert_slots import Key, Replacement


class LeastRecentlyUsed:
    """Evicts the expert that was used longest ago."""

    def __init__(self) -> None:
        self._order: dict[Key, None] = {}  # oldest first

    def used(self, key: Key) -> None:
        self._order.pop(key, None)
        self._order[key] = None

    def victim(self, candidates: Collection[Key], wanted: Key) -> Key:
        allowed = _as_set(candidates)
        chosen = next(key for key in self._order if key in allowed)
        del self._order[chosen]
        return chosen

    def lost(self, key: Key) -> None:
        self._order.pop(key, None)


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

    def victim(self, candidates: Collection[Key], wanted: Key) -> Key:
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

    def lost(self, key: Key) -> None:
        """Do nothing: its count stays."""


class AdaptiveReplacement:
    """Evicts by ARC (Megiddo and Modha, FAST 2003, Fig. 4).

    It shares `num_places` between experts that were used once lately and experts that were used more often, by which of
    both it has lately evicted too early. An expert that is gone without having been chosen leaves no trace.
    """

    def __init__(self, num_places: int) -> None:
        assert num_places >= 1, "a cache has places"
        self._num_places = num_places
        self._aim = 0.0  # p: places for experts that were used once
        # Oldest first. T1 and T2 are there, B1 and B2 were evicted from them.
        self._once: dict[Key, None] = {}
        self._often: dict[Key, None] = {}
        self._once_gone: dict[Key, None] = {}
        self._often_gone: dict[Key, None] = {}
        self._returning: Key | None = None  # was in B1 or B2, and its place has been made

    def used(self, key: Key) -> None:
        if key in self._once or key in self._often:
            self._once.pop(key, None)
            self._often.pop(key, None)
            self._often[key] = None
        elif self._returning == key or self._returns(key):
            self._often[key] = None
        else:
            self._forget()
            self._once[key] = None
        self._returning = None

    def victim(self, candidates: Collection[Key], wanted: Key) -> Key:
        allowed = _as_set(candidates)
        from_often = wanted in self._often_gone
        self._returning = wanted if self._returns(wanted) else None
        if self._returning is None and len(self._once) >= self._num_places and not self._once_gone:
            chosen = _oldest(self._once, allowed)  # nothing that is there was used twice: no trace of it is kept
            if chosen is not None:
                del self._once[chosen]
                return chosen
        enough = len(self._once) > self._aim or (from_often and len(self._once) == self._aim)
        order = [(self._once, self._once_gone), (self._often, self._often_gone)]
        for there, gone in order if self._once and enough else reversed(order):
            if (chosen := _oldest(there, allowed)) is not None:
                del there[chosen]
                gone[chosen] = None
                return chosen
        return next(iter(candidates))  # never used

    def _returns(self, key: Key) -> bool:
        """Move the aim where an expert comes back that was evicted, and tell whether it was."""
        once_gone, often_gone = len(self._once_gone), len(self._often_gone)
        if key in self._once_gone:
            self._aim = min(self._num_places, self._aim + max(1.0, often_gone / once_gone))
            del self._once_gone[key]
        elif key in self._often_gone:
            self._aim = max(0.0, self._aim - max(1.0, once_gone / often_gone))
            del self._often_gone[key]
        else:
            return False
        return True

    def _forget(self) -> None:
        """Keep no more traces of evicted experts than ARC's directory has room for one that is new."""
        if len(self._once) + len(self._once_gone) >= self._num_places and self._once_gone:
            del self._once_gone[next(iter(self._once_gone))]
        lists = (self._once, self._often, self._once_gone, self._often_gone)
        if sum(map(len, lists)) >= 2 * self._num_places and self._often_gone:
            del self._often_gone[next(iter(self._often_gone))]

    def lost(self, key: Key) -> None:
        self._once.pop(key, None)
        self._often.pop(key, None)


class LowestRecentScore:
    """Evicts the expert to which its gate has lately given least ("minus recent score", HybriMoE, Section IV-D).

    Of several such the one goes that was used longest ago. `weight` is the paper's alpha: a new score counts so much,
    the old one the rest.
    """

    def __init__(self, weight: float) -> None:
        assert 0 < weight <= 1, weight
        self._weight = weight
        self._scores: dict[int, np.ndarray] = {}  # by layer, float64 [experts]
        self._uses: dict[Key, int] = {}  # of experts that are there, the number of the last use among all
        self._queue: list[tuple[float, int, Key]] = []  # a heap with the score and last use of each, and outdated ones
        self._num_uses = 0

    def scored(self, layer: int, scores: np.ndarray) -> None:
        """Note what the gate of a layer gave its experts in a pass [experts], 0 to those that do not count."""
        before = self._scores.get(layer, np.zeros(len(scores)))
        self._scores[layer] = self._weight * scores + (1 - self._weight) * before
        for key in ((layer, expert) for expert in range(len(scores))):
            if key in self._uses:
                heappush(self._queue, self._entry(key))

    def used(self, key: Key) -> None:
        self._num_uses += 1
        self._uses[key] = self._num_uses
        heappush(self._queue, self._entry(key))
        if len(self._queue) > 4 * len(self._uses) + 64:  # most are outdated
            self._queue = [self._entry(other) for other in self._uses]
            heapify(self._queue)

    def victim(self, candidates: Collection[Key], wanted: Key) -> Key:
        allowed, kept = _as_set(candidates), []
        while True:
            entry = heappop(self._queue)
            key = entry[-1]
            if key not in self._uses or entry != self._entry(key):
                continue  # evicted, used or scored since
            if key in allowed:
                break
            kept.append(entry)
        for other in kept:
            heappush(self._queue, other)
        del self._uses[key]
        return key

    def lost(self, key: Key) -> None:
        self._uses.pop(key, None)

    def _entry(self, key: Key) -> tuple[float, int, Key]:
        layer, expert = key
        score = float(self._scores[layer][expert]) if layer in self._scores else 0.0
        return score, self._uses[key], key


class NextUses:
    """Knows the steps of a run beforehand, and in which of them an expert is used next.

    A step is the experts that the tokens of one pass choose in one layer.
    """

    def __init__(self, steps: Iterable[tuple[Key, ...]]) -> None:
        self.steps = list(steps)
        self._uses: dict[Key, list[int]] = {}
        for number in range(len(self.steps) - 1, -1, -1):
            for key in self.steps[number]:
                self._uses.setdefault(key, []).append(number)  # the next one last

    def next_use(self, key: Key) -> float:
        """Return the number of the step, infinite where there is none."""
        uses = self._uses.get(key)
        return uses[-1] if uses else inf

    def pass_by(self, key: Key) -> None:
        """Note that the expert's next use is over."""
        self._uses[key].pop()

    def keys(self) -> Collection[Key]:
        """Return all experts that are ever used."""
        return self._uses.keys()


class FarthestNextUse:
    """Evicts the expert that is used again last (Belady, 1966): an oracle, which knows the whole run beforehand.

    It is told of each use once, in the order of the steps.
    """

    def __init__(self, steps: Iterable[tuple[Key, ...]]) -> None:
        self._future = NextUses(steps)

    def used(self, key: Key) -> None:
        self._future.pass_by(key)

    def victim(self, candidates: Collection[Key], wanted: Key) -> Key:
        return max(candidates, key=lambda key: (self._future.next_use(key), key))

    def lost(self, key: Key) -> None:
        """Do nothing: what comes stays the same."""


class ByLayer:
    """Gives each layer so many places, in which a policy of its own chooses (`sizes`: layer -> places).

    While a layer has more experts there than its places, because they came when others had none to bring, it gives one
    up for whatever layer wants a place.
    """

    def __init__(self, sizes: Mapping[int, int], make: Callable[[int], Replacement]) -> None:
        self._sizes = dict(sizes)
        self._policies = {layer: make(size) for layer, size in sizes.items()}
        self._there: dict[int, set[Key]] = {layer: set() for layer in sizes}

    def used(self, key: Key) -> None:
        self._there[key[0]].add(key)
        self._policies[key[0]].used(key)

    def victim(self, candidates: Collection[Key], wanted: Key) -> Key:
        allowed = _as_set(candidates)
        surplus = {layer: len(there) - self._sizes[layer] for layer, there in self._there.items()}
        layers = sorted(surplus, key=lambda layer: (-surplus[layer], layer))
        layer = next(layer for layer in layers if not allowed.isdisjoint(self._there[layer]))
        if surplus[layer] <= 0 and not allowed.isdisjoint(self._there[wanted[0]]):
            layer = wanted[0]
        chosen = self._policies[layer].victim(_OfLayer(allowed, layer), wanted)
        self._there[layer].remove(chosen)
        return chosen

    def lost(self, key: Key) -> None:
        self._there[key[0]].discard(key)
        self._policies[key[0]].lost(key)


class _OfLayer(Set[Key]):
    """Looks at the candidates of one layer only as far as it is asked."""

    def __init__(self, candidates: Set[Key], layer: int) -> None:
        self._candidates, self._layer = candidates, layer

    def __contains__(self, key: object) -> bool:
        return isinstance(key, tuple) and key[0] == self._layer and key in self._candidates

    def __iter__(self) -> Iterator[Key]:
        return (key for key in self._candidates if key[0] == self._layer)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _oldest(there: Mapping[Key, None], allowed: Set[Key]) -> Key | None:
    return next((key for key in there if key in allowed), None)


def _as_set(candidates: Collection[Key]) -> Set[Key]:
    return candidates if isinstance(candidates, Set) else set(candidates)
