"""Model how lanes slow each other down while they run together: shared host memory, or what was measured.

A lane's `demand` is the host memory traffic, in bytes per second, that its op would cause at full speed. Neither way to
share may be fitted to the throughput that a paper reports. The arithmetic is in C++ with the event loop that asks for
it (`kernels/csrc/simulation/sharing.cpp`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, combinations
from typing import Protocol

from harness.hardware.profile import MemorySharing
from harness.machine.base import Lane, LaneKind
from kernels.simulation import NativeSharing, measured_together, shared_memory, speeds_under

Running = Sequence[tuple[Lane, float]]  # lanes that run now, each with its demand in bytes per second


class Contention(Protocol):
    """`native` is what the event loop asks."""

    @property
    def native(self) -> NativeSharing: ...

    @property
    def name(self) -> str:
        """The name of the rule, for summaries."""

    def speeds(self, running: Running) -> list[float]:
        """Return for each lane its speed relative to running alone, in (0, 1]."""


@dataclass(frozen=True)
class SharedMemory:
    """The host memory of `host_bytes_s` is shared by all lanes of all ranks.

    Max-min fairness never slows down a link that wants less than half of the bandwidth, however hard attention on the
    CPU presses. Proportional sharing is what a memory controller that serves requests in the order of their arrival
    gives to sources that do not wait for answers: then demands of 150 and 19.5 GB/s on 150 GB/s stretch a transfer of
    5 s to 5.65 s; MoE-Lens §8.2 saw 6 s, which decides for its host (`conf/hardware/a40.yaml`).
    """

    host_bytes_s: float
    sharing: MemorySharing = MemorySharing.MAX_MIN

    def __post_init__(self) -> None:
        if not self.host_bytes_s > 0:
            raise ValueError(f"host_bytes_s: must be > 0, got {self.host_bytes_s}")

    @property
    def name(self) -> str:
        return str(self.sharing)

    @cached_property
    def native(self) -> NativeSharing:
        return shared_memory(self.host_bytes_s, proportional=self.sharing is MemorySharing.PROPORTIONAL)

    def speeds(self, running: Running) -> list[float]:
        return speeds_under(self.native, [(lane.kind, lane.rank, demand) for lane, demand in running])


@dataclass(frozen=True)
class MeasuredTogether:
    """Speeds measured with the lanes of a set active together: `table[{gpu, h2d}][gpu]` is what is left of the gpu's.

    A set that was not measured takes the product of its measured pairs, which overstates contention where all of them
    share one resource; so the product never goes below an equal share among the lanes of the set, unless a pair alone
    does. What was not measured at all does not slow down, nor does one lane alone. Ranks do not interfere: a set is the
    lanes of one rank.
    """

    table: Mapping[frozenset[LaneKind], Mapping[LaneKind, float]]

    def __post_init__(self) -> None:
        for kinds, speeds in self.table.items():
            name = "+".join(sorted(kinds))
            if len(kinds) < 2 or set(speeds) != set(kinds):
                raise ValueError(f"{name}: needs two lanes or more, and a speed for each of them and no other")
            for kind, speed in speeds.items():
                if not 0 < speed <= 1:
                    raise ValueError(f"{name}.{kind}: must be in (0, 1], got {speed}")

    @classmethod
    def of_slowdowns(cls, slowdowns: Mapping[str, Mapping[str, float]]) -> MeasuredTogether:
        """Read `{"cpu+gpu": {"cpu": 1.3, "gpu": 1.1}}`: how many times longer ops take. A value below 1 is noise, and
        counts as 1."""
        table = {}
        for names, factors in slowdowns.items():
            kinds = frozenset(LaneKind(name) for name in names.split("+"))
            table[kinds] = {LaneKind(name): 1.0 / max(1.0, factor) for name, factor in factors.items()}
        return cls(table)

    @property
    def name(self) -> str:
        return "measured"

    @cached_property
    def native(self) -> NativeSharing:
        sets = chain.from_iterable(combinations(LaneKind, count) for count in range(1, len(LaneKind) + 1))
        return measured_together([{kind: self.speed(kind, frozenset(kinds)) for kind in kinds} for kinds in sets])

    def speeds(self, running: Running) -> list[float]:
        return speeds_under(self.native, [(lane.kind, lane.rank, demand) for lane, demand in running])

    def speed(self, kind: LaneKind, kinds: frozenset[LaneKind]) -> float:
        """Return the speed of one lane while those of `kinds`, itself among them, are active."""
        measured = self.table.get(kinds)
        if measured is not None:
            return measured[kind]
        pairs = [self.table.get(frozenset((kind, other)), {}).get(kind, 1.0) for other in sorted(kinds - {kind})]
        product = 1.0
        for pair in pairs:
            product *= pair
        return max(product, min(*pairs, 1.0 / len(kinds))) if pairs else 1.0
