"""Tell what ops cost on a simulated machine that stands for a calibrated one. Torch-free."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from math import inf

from harness.calibration.table import (
    AGAIN,
    AT_REST,
    BESIDE_GPU_AND_LINK,
    IN_CACHE,
    CalibrationTable,
    Company,
    weights_used,
)
from harness.machine.base import Lane, LaneKind, MachineError, Op, Work


@dataclass
class _Told:
    """Sums the seconds told for ops of one kind on one kind of lane."""

    all_s: float = 0.0
    estimated_s: float = 0.0


@dataclass
class CalibratedCosts:
    """Tells the simulated machine what ops cost: by the table, and on links also by their stated rates. Ops of a kind
    that was not measured take what their lane's measured ops take for such work; ops without any work are free.
    `is_busy` tells whether a kind of lane has something to run at the moment when an op starts, `strategy_left_s` for
    how long the strategy's thread works on then."""

    table: CalibrationTable
    link_bytes_s: Mapping[LaneKind, float]
    is_busy: Callable[[LaneKind], bool]
    strategy_left_s: Callable[[], float] = float
    _gpu_bytes: float = 0.0  # that ops of the gpu lane have read and written
    _num_asked: int = 0
    _came: dict[Hashable, int] = field(default_factory=dict)  # by key of weights, the op that brought them last
    # By weights that an op uses, the op that read them last, and where in these bytes that was.
    _last_read: dict[Hashable, tuple[int, float]] = field(default_factory=dict)
    _last_s: dict[LaneKind, float] = field(default_factory=dict)  # of the op that began last on a lane
    _told: dict[tuple[LaneKind, str], _Told] = field(default_factory=lambda: defaultdict(_Told))

    def seconds(self, lane: Lane, op: Op, work: Work) -> float | tuple[float, float]:
        """Return seconds of the whole op. Where ops are launched ahead, these are its own, with those of its launching;
        elsewhere, beside a strategy's thread that works, with those by which it begins later. Raises MachineError where
        its lane has no rate for any of its work."""
        kind = lane.kind
        company = frozenset(other for other in BESIDE_GPU_AND_LINK if other is not kind and self.is_busy(other))
        found = self._found(kind, op, work)
        if kind is LaneKind.GPU and self.table.ahead and (launched := self.table.launched_s(lane, op)) is not None:
            own_s = launched[0]
            launching_s = launched[1] + self._crowding_s(lane, op, company) + self._late_s(lane, op)
            self._last_s[kind] = max(own_s, launching_s)
            self._told[kind, op.kind].all_s += self._last_s[kind]
            return own_s, launching_s
        link_s = work.link_bytes / self.link_bytes_s[kind] if kind in self.link_bytes_s else 0.0
        measured = self.table.seconds(lane, op, company, found=found)
        if measured is not None and (more_s := self._crowding_s(lane, op, company)):
            alone_s = self.table.seconds(lane, op, found=found)
            measured = max(measured, more_s + (alone_s or 0.0))
        seconds = link_s + (self._estimated(lane, op, work, company) if measured is None else measured)
        self._last_s[kind] = seconds
        told = self._told[kind, op.kind]
        told.all_s += seconds
        told.estimated_s += seconds if measured is None else 0.0
        late_s = 0.0 if measured is None else self._late_s(lane, op)
        if kind is LaneKind.GPU and self.table.ahead:
            return seconds + late_s  # two numbers would be those of a launch
        return (seconds, late_s) if late_s else seconds

    @property
    def estimated_shares(self) -> dict[tuple[LaneKind, str], float]:
        """The share of the time told so far that is an estimate, by lane and kind of op. A kind without estimates is
        left out. The share lies above 0 and below 1 where a kind's ops differ in their cost key, and only some of them
        were measured."""
        return {which: told.estimated_s / told.all_s for which, told in self._told.items() if told.estimated_s > 0}

    def _estimated(self, lane: Lane, op: Op, work: Work, company: Company) -> float:
        """Return an estimate of an op's seconds beyond the link's own time. Raises MachineError where the lane has no
        rate for any of its work."""
        if work == Work():
            return 0.0
        seconds = self.table.estimated_seconds(lane, work, company)
        if seconds is None and not (lane.kind in self.link_bytes_s and work.link_bytes):
            raise MachineError(
                f"{op} on {lane}: the calibration has no measurement of '{op.cost_key}', and no op on that lane with "
                f"such work ({work}) from which to estimate it"
            )
        return seconds or 0.0

    def _crowding_s(self, lane: Lane, op: Op, company: Company) -> float:
        """Return the seconds that an op takes longer than alone beside short ops on the lane in whose company ops of
        this lane lose most."""
        other = LaneKind.CPU if lane.kind is LaneKind.GPU else LaneKind.GPU
        if other in self._last_s and self.is_busy(other):
            return self.table.crowded_s(lane, op, other, self._last_s[other], company)
        return 0.0

    def _late_s(self, lane: Lane, op: Op) -> float:
        """Return the seconds that the strategy's thread takes from an op, for no longer than it works on. They were
        measured beside a thread that never rests, where ops take longer; beside one that ends, they pass before."""
        left_s = self.strategy_left_s()
        return min(self.table.beside_strategy_s(lane, op), left_s) if left_s else 0.0

    def _found(self, kind: LaneKind, op: Op, work: Work) -> str:
        """Return where an op of the gpu lane finds its weights; it must be called for each op as the op starts.

        They have come over the link and nobody has read them since, or are read `AGAIN` so soon that the core's own
        cache may hold them, or `IN_CACHE`, so soon that the last one may, or lie `AT_REST`.
        """
        self._num_asked += 1
        if kind is LaneKind.H2D:
            self._came.update(dict.fromkeys(op.writes, self._num_asked))
        if kind is not LaneKind.GPU:
            return ""
        used, before = weights_used(op), self._gpu_bytes
        self._gpu_bytes += work.device_bytes
        last = [self._last_read.get(each, (0, -inf)) for each in used]
        self._last_read.update(dict.fromkeys(used, (self._num_asked, self._gpu_bytes)))
        if any(self._came.get(each[0], 0) > number for each, (number, _) in zip(used, last, strict=True)):
            return ""
        oldest = max((before - at for _, at in last), default=0.0)
        if oldest <= self.table.near_bytes:
            return AGAIN
        return IN_CACHE if oldest <= self.table.cache_bytes else AT_REST
