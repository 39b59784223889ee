"""Tell what ops cost by what was measured: interpolation between the points of a profile (MoE-Gen, Appendix B).

Between measured points an op's time is a straight line where it depends on one number, such as its rows. Where it
depends on several, rows and what they attend to, it is a plane through all points, corrected at each of them: machines
need not take twice as long for twice the context. On a link it is a fixed time and one for each byte. Ops of a
kind that was not measured take what their lane's measured ops take for such work.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median

from harness.bench.estimates import LaneRates
from harness.bench.fitting import Sample, fit, fit_by_length, fit_plane, typical_by_features
from harness.engine.ops.experts import Expert
from harness.machine.base import Lane, LaneKind, Op, Work

_LINKS = (LaneKind.H2D, LaneKind.D2H)

Key = tuple[str, ...]
Function = Callable[[Sequence[float]], float]


def _key(lane: Lane, op: Op) -> Key:
    """Return what tells apart ops whose times are functions of their own."""
    if lane.kind in _LINKS:
        return (lane.kind, op.kind)
    rows = "chosen rows" if isinstance(op, Expert) and op.tokens is not None else "first rows"
    return (lane.kind, op.kind, op.cost_key, rows, *(str(int(feature > 0)) for feature in op.cost_features()))


def _features(lane: Lane, op: Op) -> tuple[float, ...]:
    """Return the numbers that an op's time depends on; those that are 0 are part of its key."""
    if lane.kind in _LINKS:
        return (float(op.work().link_bytes),)
    return tuple(feature for feature in op.cost_features() if feature > 0)


def _all_that_counts(lane: Lane, op: Op) -> tuple[Hashable, ...]:
    """Return all that the time of a measured op depends on; cheaper than `_key` and `_features`, which follow from
    it."""
    if lane.kind in _LINKS:
        return (lane.kind, op.kind, op.work().link_bytes)
    chosen = type(op) is Expert and op.tokens is not None
    return (lane.kind, op.kind, op.cost_key, chosen, op.cost_features())


@dataclass(eq=False)
class ModuleCosts:
    """The costs are measured features and seconds of single ops, by key, and by lane their work. `estimated` names the
    kinds of op that were asked for and had not been measured."""

    samples: dict[Key, list[Sample]] = field(default_factory=lambda: defaultdict(list))
    works: dict[LaneKind, list[tuple[Work, float]]] = field(default_factory=lambda: defaultdict(list))
    estimated: set[str] = field(default_factory=set)

    def add(self, lane: Lane, op: Op, seconds: float) -> None:
        """Take note of an op that took `seconds`; all of them come before the first question."""
        self.samples[_key(lane, op)].append((_features(lane, op), seconds))
        self.works[lane.kind].append((op.work(), seconds))

    def seconds(self, lane: Lane, op: Op) -> float:
        """Return what an op takes. Ops without any work are free."""
        alike = _all_that_counts(lane, op)
        if (seconds := self._known.get(alike)) is not None:
            return seconds
        function = self._functions.get(_key(lane, op))
        if function is None:
            return self._estimated(lane, op)
        seconds = self._known[alike] = max(function(_features(lane, op)), 0.0)
        return seconds

    def _estimated(self, lane: Lane, op: Op) -> float:
        """Return what an op takes that was not measured, by its work."""
        work = op.work()
        if work == Work():
            return 0.0
        self.estimated.add(f"{lane.kind} {op.kind}")
        rates = self._rates.get(lane.kind)
        return (rates.seconds(work) if rates is not None else None) or 0.0

    @cached_property
    def _known(self) -> dict[tuple[Hashable, ...], float]:
        """The seconds of measured ops that were asked for before: a pass has thousands that cost the same."""
        return {}

    @cached_property
    def _functions(self) -> dict[Key, Function]:
        return {key: _fitted(key, samples) for key, samples in self.samples.items()}

    @cached_property
    def _rates(self) -> dict[LaneKind, LaneRates]:
        return {lane: LaneRates.of(measured) for lane, measured in self.works.items()}


def _fitted(key: Key, samples: list[Sample]) -> Function:
    if not samples[0][0]:
        fixed_s = median(seconds for _, seconds in samples)
        return lambda features: fixed_s
    if key[0] in _LINKS:
        return fit_plane(typical_by_features(samples))
    return fit(samples) if len(samples[0][0]) == 1 else fit_by_length(typical_by_features(samples))
