"""Everything that is derived from what lanes did and from passes, once, for all machines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from harness.machine.base import HOST_KINDS, EstimatedShares, Lane, LaneKind
from harness.record.activity import Activity, KindActivity
from harness.record.passes import PassRecord
from harness.record.spans import Window, lane_order

SATURATED = (
    0.85  # busy share from which a lane is called saturated; a full lane never shows 100 %: hand-overs cost time
)
BELOW_CEILING = 0.80  # share of a link's ceiling below which its rate while busy is worth a word
WORTH_NAMING = 0.10  # share of a busy lane's time from which an op's kind is named

_IN_WORDS = {
    LaneKind.GPU: "GPU compute",
    LaneKind.CPU: "CPU compute",
    LaneKind.H2D: "transfer to the device",
    LaneKind.D2H: "transfer to the host",
    LaneKind.PIN: "staging into pinned memory",
}


@dataclass(frozen=True, kw_only=True)
class LinkRate:
    """The rate that a lane moved: over the whole window, and over the time it was busy."""

    window_gb_s: float
    busy_gb_s: float


@dataclass(frozen=True, kw_only=True)
class KindTotal:
    """The cost of one kind of op on one kind of lane, summed over ranks. `share` is busy time per lane and window."""

    lane: LaneKind
    kind: str
    busy_s: float
    share: float
    num_ops: int
    flops: float
    moved_bytes: float


def steady_window(passes: Sequence[PassRecord]) -> Window:
    """Return the window from the start of the second pass to the end of the last but one: filling and draining are left
    out. With fewer than four passes the window covers all of them; without any it is empty."""
    if not passes:
        return 0.0, 0.0
    if len(passes) < 4:
        return min(p.start_s for p in passes), max(p.end_s for p in passes)
    ordered = sorted(passes, key=lambda p: p.index)
    return ordered[1].start_s, ordered[-2].end_s


def link_rate(activity: Activity, lane: Lane) -> LinkRate:
    """Return the achieved decimal GB/s of a lane; 0 where it never ran."""
    gigabytes = activity.moved_bytes(lane) / 1e9
    return LinkRate(
        window_gb_s=_ratio(gigabytes, activity.length_s), busy_gb_s=_ratio(gigabytes, activity.busy_s(lane))
    )


def utilization(activity: Activity) -> dict[str, float]:
    """Return the busy share of the window by kind of lane, 0 to 1, the mean over lanes; all 0 over an empty window."""
    shares: dict[str, list[float]] = {kind.value: [] for kind in LaneKind}
    for lane in activity.all_lanes():
        shares[lane.kind.value].append(_ratio(activity.busy_s(lane), activity.length_s))
    return {kind: sum(values) / _num_lanes(activity, LaneKind(kind)) for kind, values in shares.items()}


def _num_lanes(activity: Activity, kind: LaneKind) -> int:
    """Count the lanes of a kind: one a rank, but of the host's only those that ran anything."""
    if kind in HOST_KINDS:
        return len([lane for lane in activity.lanes if lane.kind is kind]) or 1
    return len({lane.rank for lane in activity.lanes}) or 1


def overlap_ratio(activity: Activity) -> float:
    """Return the sum of all lanes' busy times over the window's length: 1 means that nothing overlaps."""
    return _ratio(sum(activity.busy_s(lane) for lane in activity.lanes), activity.length_s)


def idle_share(activity: Activity) -> float:
    """Return the share of the window in which no lane at all runs."""
    return max(0.0, 1.0 - _ratio(activity.any_lane_s, activity.length_s))


def stolen_core_share(activity: Activity) -> float | None:
    """Return the share of the gpu lanes' running time in which their thread had no core: another process or lane took
    it. It is only meaningful where the gpu lane is a host thread; None where no processor time was recorded."""
    lanes = [did for lane, did in activity.lanes.items() if lane.kind is LaneKind.GPU]
    ran_s, on_core_s = sum(did.ran_s for did in lanes), sum(did.cpu_s for did in lanes)
    if on_core_s <= 0.0 or ran_s <= 0.0:
        return None
    return min(1.0, max(0.0, 1.0 - on_core_s / ran_s))


def kind_totals(activity: Activity) -> list[KindTotal]:
    """Tell where the time goes: every kind of op on every kind of lane, the largest busy time first."""
    sums: dict[tuple[LaneKind, str], KindActivity] = {}
    for lane, did in activity.lanes.items():
        for kind, mine in did.kinds.items():
            so_far = sums.get((lane.kind, kind))
            sums[lane.kind, kind] = mine if so_far is None else so_far + mine
    totals = [
        KindTotal(
            lane=lane_kind,
            kind=kind,
            share=_ratio(did.busy_s, _num_lanes(activity, lane_kind) * activity.length_s),
            **asdict(did),
        )
        for (lane_kind, kind), did in sums.items()
    ]
    return sorted(totals, key=lambda total: (-total.busy_s, lane_order(Lane(total.lane)), total.kind))


def estimated(totals: Sequence[KindTotal], shares: EstimatedShares) -> dict[str, Any]:
    """Return the `share` of all lanes' busy time whose costs are estimates, and its parts by lane and kind of op, the
    largest first."""
    all_s = sum(total.busy_s for total in totals)
    found = {f"{t.lane} {t.kind}": _ratio(shares.get((t.lane, t.kind), 0.0) * t.busy_s, all_s) for t in totals}
    by_kind = {name: share for name, share in found.items() if share > 0}
    return {"share": sum(by_kind.values()), "by_kind": dict(sorted(by_kind.items(), key=lambda kind: -kind[1]))}


def bottleneck(activity: Activity, ceilings_gb_s: Mapping[str, float] | None = None) -> str:
    """Say in words what holds this run back, from the numbers alone. `ceilings_gb_s` is by kind of lane, where
    known."""
    ceilings = ceilings_gb_s or {}
    shares = {lane: _ratio(activity.busy_s(lane), activity.length_s) for lane in activity.lanes}
    ranked = sorted(shares, key=lambda lane: (-shares[lane], lane_order(lane)))
    if not ranked or shares[ranked[0]] == 0.0:
        return "nothing ran in the steady window"
    full = [lane for lane in ranked if shares[lane] >= SATURATED]
    if not full:
        waits = ", ".join(f"{lane} {shares[lane]:.0%}" for lane in ranked[1:] if shares[lane] > 0)
        return (
            f"no lane is saturated: busiest is {_describe(activity, ranked[0], shares[ranked[0]], ceilings)}"
            f"{f', then {waits}' if waits else ''}; nothing at all runs {idle_share(activity):.0%} of the time"
        )
    others = "".join(f"; {lane} lane also {shares[lane]:.0%} busy" for lane in full[1:])
    return _describe(activity, full[0], shares[full[0]], ceilings) + others


def _describe(activity: Activity, lane: Lane, share: float, ceilings: Mapping[str, float]) -> str:
    facts = [f"{lane} lane {share:.0%} busy"]
    rate, ceiling = link_rate(activity, lane), ceilings.get(lane.kind.value)
    if ceiling:
        facts.append(f"{rate.window_gb_s:.2f} of {ceiling:.2f} GB/s")
        if rate.busy_gb_s < BELOW_CEILING * ceiling:
            facts.append(f"only {rate.busy_gb_s:.2f} GB/s while busy")
    elif lane.kind in (LaneKind.H2D, LaneKind.D2H, LaneKind.PIN):
        facts.append(f"{rate.window_gb_s:.2f} GB/s")
    top = kind_totals(replace(activity, lanes={lane: activity.lanes[lane]}))[:2]
    told = [f"{total.kind} {total.share:.0%}" for total in top if total.share >= WORTH_NAMING * share]
    facts.append(f"most of it {' and '.join(told)}")
    return f"{_IN_WORDS[lane.kind]} ({', '.join(facts)})"


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0.0 else 0.0
