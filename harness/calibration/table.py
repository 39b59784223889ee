"""Hold the table that a calibration writes: costs by kind of op, lanes together, and the strategy's own time.
Torch-free."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from statistics import fmean, median
from typing import Any

from harness.bench.estimates import LaneRates
from harness.bench.fitting import Interpolated, Plane, fit, relative_spread, typical_by_features
from harness.calibration.joined import TOGETHER, joint_planes, joint_seconds
from harness.machine.base import Lane, LaneKind, Op, Work
from harness.memory.placed import PlacedPart
from harness.record.files import atomic_file

Points = list[tuple[tuple[float, ...], float]]  # (features, seconds)
Works = Mapping[str, Mapping[tuple[float, ...], Work]]  # by cost key with its lane, and features
Company = frozenset[LaneKind]  # the other lanes, of gpu and h2d, that are busy while an op runs
ALONE: Company = frozenset()
BESIDE_LINK: Company = frozenset({LaneKind.H2D})
BESIDE_GPU: Company = frozenset({LaneKind.GPU})
BESIDE_GPU_AND_LINK: Company = BESIDE_GPU | BESIDE_LINK
VERSION = 15
# What ends the key of an op with weights, by where it finds them: just come over the link (nothing), in the core's own
# cache since the op before it has read them, in the last cache, or in memory, where they have been for long.
AGAIN, IN_CACHE, AT_REST = ", again", ", in cache", ", at rest"
_LIKE = {AGAIN: (IN_CACHE, AT_REST)}  # what stands for joined ops that were not measured so; otherwise `AT_REST` does
_BY_COMPANY, _IN_NO_COMPANY = ("samples", "crowded"), ("beside_strategy", "ahead", "launching")
LINKS = (LaneKind.H2D, LaneKind.D2H, LaneKind.PIN)  # lanes that a profile gives a rate in bytes


@dataclass(frozen=True, kw_only=True)
class HostTimes:
    """Holds the seconds that the strategy's thread takes, and those that lanes take between ops."""

    submit_s: float  # of one op, from its making to its place in the queue
    wake_s: float  # from the end of what is awaited until the strategy goes on
    pass_s: float  # of one pass: to schedule, lay out and retire it
    sequence_s: float  # more for each sequence in the pass
    handover_s: float  # from the end of what an op waits for until its lane, idle until then, begins: nothing else runs
    handover_beside_s: float  # the same while another lane runs something
    turns_s: Mapping[str, float]  # by kind of lane that computes: from the end of its op until it begins the next one

    @classmethod
    def mean(cls, hosts: Sequence[HostTimes]) -> HostTimes:
        """Return the means of times that were measured on one machine."""
        turns = {kind: fmean(host.turns_s[kind] for host in hosts) for kind in hosts[0].turns_s}
        rest = {
            each.name: fmean(getattr(host, each.name) for host in hosts)
            for each in fields(cls)
            if each.name != "turns_s"
        }
        return cls(**rest, turns_s=turns)


@dataclass(frozen=True, kw_only=True)
class CalibrationTable:
    """Holds all that was measured on a machine. `samples` are (features, seconds) by company, lane and cost key: what
    one op takes. Where an op is joined of several, their number is a feature, and the key says so. On the links the
    seconds are those beyond bytes / rate, so that the table serves other link rates too. In company short ops lose
    most, to threads that hand the interpreter to each other and to caches that streams sweep.
    `crowded` are such samples beside the one lane that costs most: the cpu lane for gpu ops and the gpu lane for all
    others, with one short op after another, of `short_s` seconds by that lane; by whether the link is busy too.
    `beside_strategy` are such samples beside a thread that submits op after op.
    `ahead` are samples of gpu ops that were launched before they could begin, and `launching` what it took the host to
    launch each; both are empty where no op is launched ahead.
    `near_bytes` is what a core's own cache holds, 0 where that is unknown, and `cache_bytes` what the last one does.
    `works` has, by the same key and features, the work of such an op: from it follow the rates at which a lane's ops of
    other kinds are estimated. `together` has, by the lanes active at the same time ("cpu+gpu+h2d"), how many times
    longer *long* ops of each lane take than alone. `memory` is GB/s of host memory as measured, for the reader."""

    meta: Mapping[str, Any]
    samples: Mapping[Company, Mapping[str, Points]]
    works: Works
    together: Mapping[str, Mapping[str, float]]
    memory: Mapping[str, list[float]]
    host: HostTimes
    crowded: Mapping[Company, Mapping[str, Points]] = field(default_factory=dict)
    short_s: Mapping[str, float] = field(default_factory=dict)
    beside_strategy: Mapping[str, Points] = field(default_factory=dict)
    ahead: Mapping[str, Points] = field(default_factory=dict)
    launching: Mapping[str, Points] = field(default_factory=dict)
    near_bytes: int = 0
    cache_bytes: int = 0
    version: int = VERSION

    @cached_property
    def functions(self) -> dict[Company, dict[str, Interpolated | Plane]]:
        return {
            company: {key: fit(points) for key, points in by_key.items()} for company, by_key in self.samples.items()
        }

    def seconds(self, lane: Lane, op: Op, company: Company = ALONE, *, found: str = "") -> float | None:
        """Return an op's seconds beyond the link's own time, in this company or in the nearest one that was measured.
        The result is None where the op was measured in none. `found` says where the op finds its weights: `AGAIN`,
        `IN_CACHE`, `AT_REST` or none of these. Some experts in one op were measured `IN_CACHE` and `AT_REST` alone."""
        for key in dict.fromkeys((table_key(lane, op, found=found), table_key(lane, op))):
            for candidate in _nearest(company):
                function = self.functions.get(candidate, {}).get(key)
                if function is not None:
                    joint = self.joint.get(candidate, {})
                    others = (table_key(lane, op, found=each) for each in _LIKE.get(found, (AT_REST,)))
                    return joint_seconds(op, function, next(filter(None, map(joint.get, (key, *others))), None))
        return None

    @cached_property
    def launched(self) -> dict[str, tuple[Interpolated | Plane, Interpolated | Plane]]:
        """The own seconds of ops that are launched ahead, and those of their launching, by key."""
        keys = [key for key in self.ahead if not key.endswith(TOGETHER)]
        return {key: (fit(self.ahead[key]), fit(self.launching[key])) for key in keys}

    @cached_property
    def launched_jointly(self) -> tuple[dict[str, Plane], dict[str, Plane]]:
        """Both for ops that are joined of several, by the key of one of these, in the form of `joint`."""
        return joint_planes(self.ahead), joint_planes(self.launching)

    def launched_s(self, lane: Lane, op: Op) -> tuple[float, float] | None:
        """Return an op's own seconds and those of its launching; None where it was not measured launched ahead."""
        key = table_key(lane, op)
        if key not in self.launched:
            return None
        (own, launching), joint = self.launched[key], [by_key.get(key) for by_key in self.launched_jointly]
        return joint_seconds(op, own, joint[0]), joint_seconds(op, launching, joint[1])

    @cached_property
    def joint(self) -> dict[Company, dict[str, Plane]]:
        """The seconds of ops that are joined of several, by company and by the key of one of these. They are over the
        number of these and over what all of them have together of each feature."""
        return {company: joint_planes(by_key) for company, by_key in self.samples.items()}

    @cached_property
    def crowding_s(self) -> dict[Company, dict[tuple[str, bool], float]]:
        """The seconds that ops take longer than alone, as `crowded` says, by company, in the form of `_longer`."""
        return {company: self._longer(by_key) for company, by_key in self.crowded.items()}

    @cached_property
    def strategy_s(self) -> dict[tuple[str, bool], float]:
        """The seconds that ops take longer than alone, as `beside_strategy` says, in the form of `_longer`."""
        return self._longer(self.beside_strategy)

    def _longer(self, by_key: Mapping[str, Points]) -> dict[tuple[str, bool], float]:
        """Return the seconds that an op takes longer than alone: the mean over all shapes, by key, and by whether there
        was anything to do. They go to hand-overs of the interpreter, of which a kind of op has so many, and one that
        finds nothing to do fewer. Ops that are joined of several count as one of these: few of them are measured, and
        what a fit to them is off by is more than what is sought."""
        more_s: dict[tuple[str, bool], list[float]] = defaultdict(list)
        for key, points in by_key.items():
            alone = self.functions[ALONE].get(key)
            if alone is not None and not key.endswith(TOGETHER):
                for at, seconds in typical_by_features(points).items():
                    more_s[key.removesuffix(AT_REST), any(at)].append(seconds - alone(at))
        return {which: max(fmean(all_s), 0.0) for which, all_s in more_s.items()}

    def crowded_s(self, lane: Lane, op: Op, beside: LaneKind, beside_s: float, company: Company = ALONE) -> float:
        """Return the seconds that an op takes longer than alone beside ops of the lane `beside`, of `beside_s` seconds
        each. Where these are longer than those beside which it was measured, the interpreter is asked for that much
        more seldom. The result is 0 for an op that was not measured so."""
        which = (table_key(lane, op), any(op.cost_features()))
        by_company = (self.crowding_s.get(each, {}).get(which) for each in (company & BESIDE_LINK, ALONE))
        more_s = next((seconds for seconds in by_company if seconds is not None), 0.0)
        return more_s * min(1.0, self.short_s.get(beside, 0.0) / max(beside_s, 1e-9))

    def beside_strategy_s(self, lane: Lane, op: Op) -> float:
        """Return the seconds that an op takes longer than alone while the strategy's thread submits others. The result
        is 0 for an op that was not measured so."""
        return self.strategy_s.get((table_key(lane, op), any(op.cost_features())), 0.0)

    @cached_property
    def rates(self) -> dict[Company, dict[LaneKind, LaneRates]]:
        """The seconds of each lane's ops by their work, in each company. Among ops that use the same weights, only the
        first counts."""
        return {company: _lane_rates(by_key, self.works) for company, by_key in self.samples.items()}

    def estimated_seconds(self, lane: Lane, work: Work, company: Company = ALONE) -> float | None:
        """Return what an op takes beyond the link's own time, at the rates of its lane's measured ops. The rates are
        those of the nearest company in which measured ops had such work; without one, the result is None."""
        for candidate in _nearest(company):
            rates = self.rates.get(candidate, {}).get(lane.kind)
            seconds = None if rates is None else rates.seconds(work)
            if seconds is not None:
                return seconds
        return None

    def worst_fit(self) -> dict[str, float]:
        """Return, by key, the largest relative error of the fitted functions at a measured point."""
        found: dict[str, float] = {}
        for company, by_key in self.samples.items():
            for key, points in by_key.items():
                function = self.functions[company][key]
                errors = [abs(function(f) - s) / s for f, s in typical_by_features(points).items() if s > 1e-5]
                found[key] = max([found.get(key, 0.0), *errors])
        return found

    def spread(self) -> dict[str, float]:
        """Return, by key, how far repeated measurements of an op alone lie apart."""
        return {key: relative_spread(points) for key, points in self.samples[ALONE].items()}

    def covered(self, kind: str) -> list[Company]:
        """Return the companies in which every op of that lane was measured, so that samples hold what these companies
        cost. Poison, which only tests have, is no such op, nor is one whose weights came before."""
        own = {key for key in self.samples[ALONE] if key.startswith(f"{kind}: ")} - {f"{kind}: poison"}
        keys = {key for key in own if not _ends_with(key, IN_CACHE, AT_REST)}
        return [company for company in self.samples if keys and keys <= self.samples[company].keys()]

    def slowdowns(self) -> dict[str, dict[str, float]]:
        """Return the factors of `together` beyond what the samples in company already hold. Each lane's factor is
        relative to that of its largest covered company."""
        found = {}
        for group, factors in self.together.items():
            own = dict(factors)
            for kind in factors:
                others = {LaneKind(name) for name in factors} - {LaneKind(kind)}
                held = max((c for c in self.covered(kind) if c <= others), key=len, default=ALONE)
                if held:
                    own[kind] = factors[kind] / self.together["+".join(sorted({kind, *held}))][kind]
            found[group] = own
        return found

    @classmethod
    def merged(cls, tables: Sequence[CalibrationTable]) -> CalibrationTable:
        """Merge tables that were measured at several times of day. All samples are kept, so that fits go through
        typical values over all of them; factors and host times are averaged."""
        first = tables[0]

        def all_of(name: str) -> dict[Company, dict[str, Points]]:
            merged: dict[Company, dict[str, Points]] = {}
            for table in tables:
                own = getattr(table, name)
                for company, by_key in (own if name in _BY_COMPANY else {ALONE: own}).items():
                    for key, points in by_key.items():
                        merged.setdefault(company, {}).setdefault(key, []).extend(points)
            return merged

        works: dict[str, dict[tuple[float, ...], Work]] = defaultdict(dict)
        for table in tables:
            for key, by_features in table.works.items():
                works[key].update(by_features)
        hosts = [table.host for table in tables]
        disturbed = [name for table in tables for name in table.meta.get("disturbed", [])]
        return cls(
            meta={**first.meta, "merged": len(tables), "disturbed": disturbed},
            samples=all_of("samples"),
            works=works,
            together={
                group: {lane: fmean(t.together[group][lane] for t in tables) for lane in factors}
                for group, factors in first.together.items()
            },
            memory={name: [value for t in tables for value in t.memory[name]] for name in first.memory},
            host=HostTimes.mean(hosts),
            crowded=all_of("crowded"),
            beside_strategy=all_of("beside_strategy").get(ALONE, {}),
            ahead=all_of("ahead").get(ALONE, {}),
            launching=all_of("launching").get(ALONE, {}),
            short_s={kind: fmean(t.short_s[kind] for t in tables) for kind in first.short_s},
            near_bytes=first.near_bytes,
            cache_bytes=int(median(table.cache_bytes for table in tables)),
        )

    def write(self, path: Path) -> None:
        """Write the table, whole or not at all. Raises RecordError with the cause."""
        content = {
            "version": self.version,
            "meta": self.meta,
            "host": asdict(self.host),
            "together": self.together,
            "memory_gb_s": self.memory,
            "near_bytes": self.near_bytes,
            "cache_bytes": self.cache_bytes,
            "crowded": _written(self.crowded),
            **{name: _written({ALONE: getattr(self, name)}) for name in _IN_NO_COMPANY},
            "short_s": self.short_s,
            "spread": self.spread(),
            "samples": _written(self.samples),
            "works": {key: list(by_features.items()) for key, by_features in self.works.items()},
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as file:
            file.write((json.dumps(content) + "\n").encode())

    @classmethod
    def read(cls, path: Path) -> CalibrationTable:
        """Read a table. Raises ValueError naming the file where it is no table, or one of another version."""
        try:
            values = json.loads(path.read_text())
            if (version := values["version"]) == VERSION:
                return cls._of(values)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path}: no calibration table; remove it and calibrate again") from error
        raise ValueError(f"{path}: version {version}, this code reads {VERSION}; calibrate again")

    @classmethod
    def _of(cls, values: Mapping[str, Any]) -> CalibrationTable:
        alone = {name: _read(values.get(name, {})).get(ALONE, {}) for name in _IN_NO_COMPANY}
        return cls(
            meta=values["meta"],
            samples=_read(values["samples"]),
            works={key: {tuple(f): Work(*work) for f, work in rows} for key, rows in values["works"].items()},
            together=values["together"],
            memory=values["memory_gb_s"],
            host=HostTimes(**values["host"]),
            crowded=_read(values["crowded"]),
            short_s=values["short_s"],
            beside_strategy=alone["beside_strategy"],
            ahead=alone["ahead"],
            launching=alone["launching"],
            near_bytes=values["near_bytes"],
            cache_bytes=values["cache_bytes"],
        )


def table_key(lane: Lane, op: Op, *, found: str = "") -> str:
    """Return the key by which the table knows an op. An op that uses weights has a key for each place in which it may
    have found them (`AGAIN`, `IN_CACHE`, `AT_REST`)."""
    return f"{lane.kind}: {op.cost_key}{found if weight_keys(op) else ''}"


def weight_keys(op: Op) -> tuple[Hashable, ...]:
    """Return the keys of the weights that a compute op reads; other ops have none."""
    keys: tuple[Hashable, ...] = getattr(op, "weight_keys", ())
    return keys


def weights_used(op: Op) -> list[tuple[Hashable, str, str]]:
    """Return the weights that a compute op reads, by key, name of their part and kind of op. A page is a key of several
    parts, and some kinds of op read but one of a part's tensors."""
    keys, parts = weight_keys(op), getattr(op, "parts", None) or ()
    if isinstance(part := getattr(op, "part", None), PlacedPart) and not parts:
        parts = (part,)
    if keys and parts:
        return [(key, part.layout.name, op.kind) for part in parts for key in part.keys]
    return [(key, "", op.kind) for key in keys]


def _lane_rates(by_key: Mapping[str, Points], works: Works) -> dict[LaneKind, LaneRates]:
    measured: dict[LaneKind, list[tuple[Work, float]]] = defaultdict(list)
    for key, points in by_key.items():
        if not _ends_with(key, AGAIN, IN_CACHE, AT_REST):
            measured[LaneKind(key.split(":")[0])] += [(works[key][features], seconds) for features, seconds in points]
    return {kind: LaneRates.of(found) for kind, found in measured.items()}


def _ends_with(key: str, *found: str) -> bool:
    """Tell whether a key says that weights were found so."""
    return key.removesuffix(TOGETHER).endswith(found)


def _nearest(company: Company) -> Iterator[Company]:
    """Yield the company itself, then those with fewer lanes. A busy gpu matters more than a busy link."""
    yield company
    if len(company) > 1:
        yield from (BESIDE_GPU & company, BESIDE_LINK & company)
    if company:
        yield ALONE


def _company_name(company: Company) -> str:
    return "+".join(sorted(company)) or "alone"


def _company(name: str) -> Company:
    return ALONE if name == "alone" else frozenset(LaneKind(kind) for kind in name.split("+"))


def _written(samples: Mapping[Company, Mapping[str, Points]]) -> dict[str, Any]:
    return {
        _company_name(company): {key: _grouped(points) for key, points in by_key.items()}
        for company, by_key in samples.items()
    }


def _read(values: Mapping[str, Mapping[str, Any]]) -> dict[Company, dict[str, Points]]:
    return {
        _company(name): {
            key: [(tuple(features), s) for features, all_s in rows for s in all_s] for key, rows in by_key.items()
        }
        for name, by_key in values.items()
    }


def _grouped(points: Sequence[tuple[tuple[float, ...], float]]) -> list[tuple[tuple[float, ...], list[float]]]:
    """Group points by features, with seconds to a tenth of a microsecond. Tables are kept beside reports, which should
    stay small."""
    rows: dict[tuple[float, ...], list[float]] = {}
    for features, seconds in points:
        rows.setdefault(features, []).append(round(seconds, 7))
    return list(rows.items())
