"""Tell what ops cost on a simulated machine that stands for a calibrated one. Torch-free."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field

from harness.calibration.table import BESIDE_GPU_AND_LINK, LINKS, CalibrationTable, Company, weight_keys
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
    `is_busy` tells whether a kind of lane has something to run at the moment when an op starts."""

    table: CalibrationTable
    link_bytes_s: Mapping[LaneKind, float]
    is_busy: Callable[[LaneKind], bool]
    _unread: set[Hashable] = field(default_factory=set)  # written over the link, and used by no op since
    _told: dict[tuple[LaneKind, str], _Told] = field(default_factory=lambda: defaultdict(_Told))

    def seconds(self, lane: Lane, op: Op, work: Work) -> float:
        """Return seconds of the whole op. Raises MachineError where its lane has no rate for any of its work."""
        kind = lane.kind
        company = frozenset(other for other in BESIDE_GPU_AND_LINK if other is not kind and self.is_busy(other))
        link_s = work.link_bytes / self.link_bytes_s[kind] if kind in LINKS else 0.0
        measured = self.table.seconds(lane, op, company, again=self._is_again(kind, op))
        seconds = link_s + (self._estimated(lane, op, work, company) if measured is None else measured)
        told = self._told[kind, op.kind]
        told.all_s += seconds
        told.estimated_s += seconds if measured is None else 0.0
        return seconds

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
        if seconds is None and not (lane.kind in LINKS and work.link_bytes):
            raise MachineError(
                f"{op} on {lane}: the calibration has no measurement of '{op.cost_key}', and no op on that lane with "
                f"such work ({work}) from which to estimate it"
            )
        return seconds or 0.0

    def _is_again(self, kind: LaneKind, op: Op) -> bool:
        """Return whether another op has read this op's weights since they arrived. It must be called for each op as the
        op starts."""
        if kind is LaneKind.H2D:
            self._unread.update(op.writes)
            return False
        keys = weight_keys(op)
        again = self._unread.isdisjoint(keys)
        self._unread.difference_update(keys)
        return again
