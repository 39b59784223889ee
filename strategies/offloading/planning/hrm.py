"""The Hierarchical Roofline Model (MoE-Lightning section 3) for any number of memory levels. Pure arithmetic.

Symbols: P^i peak FLOP/s of the processor at level i, B^i bytes/s at which it reads its own memory, B^{j,i} bytes/s from
the memory of level j to that of level i, I^i FLOPs of a task for each byte of level i's memory that it touches.
Levels go by name; rates may be peaks or achieved ones, as long as they are all of one kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True, kw_only=True)
class Level:
    """A level is a memory with its processor. A store without a processor (a disk) has flops_s = 0."""

    name: str
    flops_s: float  # P^i
    bytes_s: float  # B^i


@dataclass(frozen=True, kw_only=True)
class Bound:
    """The FLOP/s that a task reaches, and the roof it meets: "compute", "memory", or the level that its data come
    from."""

    flops_s: float
    roof: str


@dataclass(frozen=True, kw_only=True)
class Hierarchy:
    """A hierarchy has levels and the links between them, `(from, to) -> bytes/s`.

    A pair without a link of its own is served through other levels: copies of a large transfer follow each other hop by
    hop, so the narrowest hop is its rate.
    """

    levels: tuple[Level, ...]
    links_bytes_s: Mapping[tuple[str, str], float]

    def __post_init__(self) -> None:
        assert len(self._by_name) == len(self.levels), "levels share a name"
        for pair, rate in self.links_bytes_s.items():
            assert set(pair) <= self._by_name.keys() and len(set(pair)) == 2, f"no link between levels: {pair}"
            assert rate > 0, f"link {pair} needs a rate"

    @cached_property
    def _by_name(self) -> dict[str, Level]:
        return {level.name: level for level in self.levels}

    @cached_property
    def _rates(self) -> dict[tuple[str, str], float]:
        """The widest way between each pair: Floyd and Warshall's algorithm with (max, min) for (min, +)."""
        rates = dict(self.links_bytes_s)
        names = list(self._by_name)
        for via in names:
            for source in names:
                for target in names:
                    if source != target:
                        through = min(rates.get((source, via), 0.0), rates.get((via, target), 0.0))
                        if through > rates.get((source, target), 0.0):
                            rates[source, target] = through
        return rates

    def link_bytes_s(self, source: str, target: str) -> float:
        """Return B^{source,target}; 0 where nothing leads there."""
        return self._rates.get((source, target), 0.0)

    def local(self, level: str, intensity: float) -> float:
        """Return the FLOP/s at `level` on data that lie there."""
        here = self._by_name[level]
        return min(here.flops_s, here.bytes_s * intensity)  # Eq. 8

    def attainable(self, level: str, intensities: Mapping[str, float]) -> Bound:
        """Return what a task reaches when computed at `level`.

        `intensities` has its FLOPs per byte for every level whose memory it touches. The data of all other levels are
        brought to `level` at the same time, as the links are apart. The intensity of `level` itself may be missing
        where the task touches nothing there.
        """
        here = self._by_name[level]
        roofs = [Bound(flops_s=here.flops_s, roof="compute")]  # Eq. 4
        for name, intensity in intensities.items():
            if name == level:
                roofs.append(Bound(flops_s=here.bytes_s * intensity, roof="memory"))  # Eq. 5
            else:
                roofs.append(Bound(flops_s=self.link_bytes_s(name, level) * intensity, roof=name))  # Eq. 6
        return min(roofs, key=lambda roof: roof.flops_s)  # Eq. 7

    def threshold_to_move(self, source: str, target: str, intensity: float) -> float:
        """Return the I^source below which computing at `source` is at least as fast as the link alone allows.

        `intensity` is that of the task at `source`. Eq. 9 has it on both sides: where it moves, `first_turning_point`
        solves it.
        """
        return self.local(source, intensity) / self.link_bytes_s(source, target)  # Eq. 9

    def first_turning_point(self, source: str, target: str) -> float:
        """Return P_1: the least I^source from which the link allows more than the processor at `source` reaches.

        Where the link is as fast as the source's own memory or faster, moving costs nothing, and P_1 is 0.
        """
        link_bytes_s, there = self.link_bytes_s(source, target), self._by_name[source]
        return 0.0 if link_bytes_s >= there.bytes_s else there.flops_s / link_bytes_s  # Eq. 9 solved for I^j

    def second_turning_point(self, source: str, target: str, intensity: float) -> float:
        """Return P_2: the I^source below which the link is the limit, for a task of `intensity` at `target`."""
        return self.local(target, intensity) / self.link_bytes_s(source, target)  # Eq. 10

    def balance_point(self, source: str, target: str, intensity: float) -> float | None:
        """Return the I^source at which the link and the target's memory are limits alike.

        Returns None where the target is bound by compute, so that no such point is worth having.
        """
        here = self._by_name[target]
        if here.bytes_s * intensity >= here.flops_s:
            return None
        return here.bytes_s * intensity / self.link_bytes_s(source, target)  # Eq. 11

    def best_level(self, home: str, intensities: Mapping[str, float]) -> str:
        """Return the level where a task whose data lie at `home` runs fastest; `home` where it is a tie.

        `intensities` has the task's FLOPs per byte at each level; that of a level stands for whatever the task touches
        there when run there.
        """

        def reached(level: str) -> float:
            touched = {name: intensities[name] for name in {level, home}}
            return self.attainable(level, touched).flops_s

        return max(self._by_name, key=lambda level: (reached(level), level == home))
