"""Memory tiers with a capacity in bytes; every allocation is accounted for by name. Torch-free."""

from __future__ import annotations

from collections.abc import Callable


class MemoryCapacityError(RuntimeError):
    """A reservation does not fit its tier; the message shows who holds what."""


class Buffer:
    """A named range of a tier's memory. Identity is the key by which ops declare reads and writes.

    Sub-buffers share their root's memory; ops must name disjoint leaves, never a parent and its child.
    """

    __slots__ = ("__weakref__", "name", "nbytes", "offset_bytes", "root", "tier")

    def __init__(self, tier: str, name: str, nbytes: int, root: Buffer | None = None, offset_bytes: int = 0) -> None:
        self.tier = tier
        self.name = name
        self.nbytes = nbytes
        self.root = root or self
        self.offset_bytes = offset_bytes  # within the root

    def sub(self, name: str, offset_bytes: int, nbytes: int) -> Buffer:
        assert offset_bytes >= 0 and offset_bytes + nbytes <= self.nbytes, f"{name} lies outside {self.name}"
        return Buffer(self.tier, f"{self.name}/{name}", nbytes, self.root, self.offset_bytes + offset_bytes)

    def __repr__(self) -> str:
        return f"Buffer({self.tier}:{self.name}, {self.nbytes} B)"


class Tier:
    """One kind of memory (device, pinned, host) of one rank."""

    def __init__(
        self,
        name: str,
        capacity_bytes: int,
        back: Callable[[Buffer], None] | None = None,
        unback: Callable[[Buffer], None] | None = None,
    ) -> None:
        self.name = name
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.peak_bytes = 0
        self._held: dict[Buffer, int] = {}
        self._back = back
        self._unback = unback

    @property
    def free_bytes(self) -> int:
        return self.capacity_bytes - self.used_bytes

    def reserve(self, name: str, nbytes: int) -> Buffer:
        """Take `nbytes` under `name` for the life of the plan. Raises MemoryCapacityError with the holders."""
        assert nbytes >= 0, f"negative reservation {name}"
        if nbytes > self.free_bytes:
            raise MemoryCapacityError(
                f"{self.name} memory: '{name}' needs {_human(nbytes)}, {_human(self.free_bytes)} of "
                f"{_human(self.capacity_bytes)} are free. Held: {self._holders()}"
            )
        buffer = Buffer(self.name, name, nbytes)
        if self._back is not None:
            self._back(buffer)
        self._held[buffer] = nbytes
        self.used_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return buffer

    def release(self, buffer: Buffer) -> None:
        """Give a reserved root buffer back; the caller has made sure that no op uses it any more."""
        self.used_bytes -= self._held.pop(buffer)
        if self._unback is not None:
            self._unback(buffer)

    def holders(self) -> dict[str, int]:
        """Bytes by name, largest first."""
        totals: dict[str, int] = {}
        for buffer, nbytes in self._held.items():
            totals[buffer.name] = totals.get(buffer.name, 0) + nbytes
        return dict(sorted(totals.items(), key=lambda item: -item[1]))

    def check_integrity(self) -> None:
        assert self.used_bytes == sum(self._held.values()), f"{self.name}: accounting is off"
        assert 0 <= self.used_bytes <= self.capacity_bytes, f"{self.name}: over capacity"

    def _holders(self) -> str:
        return ", ".join(f"{name} {_human(nbytes)}" for name, nbytes in self.holders().items()) or "nothing"


def _human(nbytes: float) -> str:
    for unit in ("B", "KB", "MB"):
        if abs(nbytes) < 1000:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.4g} GB"
