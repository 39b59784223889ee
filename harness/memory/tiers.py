"""Memory tiers with a capacity in bytes; every allocation is accounted for by name. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from decimal import ROUND_CEILING, Context, Decimal


class MemoryCapacityError(RuntimeError):
    """A reservation does not fit its tier; the message shows who holds what."""


class Buffer:
    """A buffer is a named range of a tier's memory. The buffer itself is the key by which ops declare reads and writes.

    Sub-buffers share their root's memory, and keys that name overlapping ones conflict. A buffer that is not `backed`
    is accounted for and has no memory of its own: it is room for what is allocated elsewhere.
    """

    __slots__ = ("__weakref__", "backed", "name", "nbytes", "offset_bytes", "root", "tier")

    def __init__(
        self,
        tier: str,
        name: str,
        nbytes: int,
        root: Buffer | None = None,
        offset_bytes: int = 0,
        *,
        backed: bool = True,
    ) -> None:
        self.backed = backed
        self.tier = tier
        self.name = name
        self.nbytes = nbytes
        self.root = root or self
        self.offset_bytes = offset_bytes  # within the root

    def sub(self, name: str, offset_bytes: int, nbytes: int) -> Buffer:
        assert offset_bytes >= 0 and offset_bytes + nbytes <= self.nbytes, f"{name} lies outside {self.name}"
        start_bytes = self.offset_bytes + offset_bytes
        return Buffer(self.tier, f"{self.name}/{name}", nbytes, self.root, start_bytes, backed=self.backed)

    def __repr__(self) -> str:
        return f"Buffer({self.tier}:{self.name}, {self.nbytes} B)"


PINNED, PAGEABLE = "pinned", "host"  # host memory that the links can read, and host memory that they cannot
DEVICE = "device"  # the memory of GPU 0; that of GPU r is `device_tier(r)`
RAM = "ram"  # the memory modules that the tiers in `HOST_TIERS` share, where their size is known
HOST_TIERS = (PINNED, PAGEABLE)


def device_tier(rank: int) -> str:
    """Return the name of the memory of GPU `rank`."""
    return f"{DEVICE}{rank}" if rank else DEVICE


def make_tiers(
    capacities_bytes: Mapping[str, int],
    back: Callable[[Buffer], None] | None = None,
    unback: Callable[[Buffer], None] | None = None,
) -> dict[str, Tier]:
    """Make the tiers, by name. With a capacity for "ram", pinned and host memory together stay within it."""
    ram = Tier(RAM, capacities_bytes[RAM]) if RAM in capacities_bytes else None
    tiers = {
        name: Tier(name, size, back, unback, within=ram if name in HOST_TIERS else None)
        for name, size in capacities_bytes.items()
        if name != RAM
    }
    return tiers if ram is None else {**tiers, RAM: ram}


class Tier:
    """A tier is one kind of memory (device, pinned, host) of one rank. All that it holds is held by the tier that it
    lies `within`, too."""

    def __init__(
        self,
        name: str,
        capacity_bytes: int,
        back: Callable[[Buffer], None] | None = None,
        unback: Callable[[Buffer], None] | None = None,
        *,
        within: Tier | None = None,
    ) -> None:
        self.name = name
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.peak_bytes = 0
        self._held: dict[Buffer, int] = {}
        self._back = back
        self._unback = unback
        self._within = within
        self.checks: list[Callable[[], None]] = []  # what else must hold of this memory: see `Places`

    @property
    def free_bytes(self) -> int:
        """The bytes that can still be reserved in this tier and in the tier that it lies within."""
        return self.limit._own_free_bytes

    @property
    def limit(self) -> Tier:
        """The tier that has less left: this one, or the one that it lies within."""
        within = self._within
        return self if within is None or self._own_free_bytes <= within.free_bytes else within

    @property
    def _own_free_bytes(self) -> int:
        return self.capacity_bytes - self.used_bytes

    def reserve(self, name: str, nbytes: int, *, backed: bool = True) -> Buffer:
        """Take `nbytes` under `name` for the life of the plan. Raises MemoryCapacityError with the holders."""
        assert nbytes >= 0, f"negative reservation {name}"
        self._require_room(name, nbytes)
        buffer = Buffer(self.name, name, nbytes, backed=backed)
        if self._back is not None:
            self._back(buffer)
        for tier in (self, self._within):
            if tier is not None:
                tier._hold(buffer, nbytes)
        return buffer

    def _require_room(self, name: str, nbytes: int) -> None:
        for tier in (self, self._within):
            if tier is not None and nbytes > tier._own_free_bytes:
                raise MemoryCapacityError(
                    f"{tier.name} memory: '{name}' needs {_human(nbytes)}, {_human(tier._own_free_bytes)} of "
                    f"{_human(tier.capacity_bytes)} are free. Held: {told_bytes(tier.holders()) or 'nothing'}"
                )

    def _hold(self, buffer: Buffer, nbytes: int) -> None:
        self._held[buffer] = nbytes
        self.used_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    def release(self, buffer: Buffer) -> None:
        """Give a reserved root buffer back; the caller has made sure that no op uses it any more."""
        self._drop(buffer)
        if self._within is not None:
            self._within._drop(buffer)
        if self._unback is not None:
            self._unback(buffer)

    def _drop(self, buffer: Buffer) -> None:
        self.used_bytes -= self._held.pop(buffer)

    def holders(self) -> dict[str, int]:
        """Return the bytes held under each name, largest first."""
        totals: dict[str, int] = {}
        for buffer, nbytes in self._held.items():
            totals[buffer.name] = totals.get(buffer.name, 0) + nbytes
        return dict(sorted(totals.items(), key=lambda item: -item[1]))

    def check_integrity(self) -> None:
        assert self.used_bytes == sum(self._held.values()), f"{self.name}: accounting is off"
        assert 0 <= self.used_bytes <= self.capacity_bytes, f"{self.name}: over capacity"
        for check in self.checks:
            check()


def told_bytes(sizes: Mapping[str, float]) -> str:
    """Return a text that names all that take any bytes, the largest first."""
    ranked = sorted(sizes.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {_human(nbytes)}" for name, nbytes in ranked if nbytes)


def enough(nbytes: float, unit_bytes: int = 10**9) -> str:
    """Return a number of `unit_bytes` in four digits that is enough for so many bytes, as a setting too."""
    digits = Decimal(math.ceil(nbytes)) / unit_bytes
    while True:
        told = f"{Context(prec=4, rounding=ROUND_CEILING).plus(digits):f}"
        if int(float(told) * unit_bytes) >= nbytes:
            return told.rstrip("0").rstrip(".") if "." in told else told
        digits = Decimal(told) + Decimal(1) / unit_bytes  # the setting lost its last byte as a float


def _human(nbytes: float) -> str:
    for unit in ("B", "KB", "MB"):
        if abs(nbytes) < 1000:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.4g} GB"
