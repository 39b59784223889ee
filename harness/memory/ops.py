"""Ops of the memories themselves: filling the host store, moving weights, and (in tests) poisoning. Torch-free."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, ClassVar

from harness.machine.base import Context, Op, Work
from harness.memory.tiers import Buffer

if TYPE_CHECKING:
    from harness.memory.kv_cache import KVCache
    from harness.memory.weights import PartSource, PlacedPart
    from harness.model.layout import PartLayout

_POISON_BYTE = 0xFF


class ReadPart(Op):
    """Checkpoint file -> host store."""

    kind: ClassVar[str] = "read checkpoint"

    def __init__(self, source: PartSource, layer: int | None, layout: PartLayout, target: Buffer) -> None:
        self.source, self.layer, self.layout, self.target = source, layer, layout, target
        self.writes = (target,)

    def run(self, ctx: Context, packet: int) -> None:
        self.source.read_part(self.layer, self.layout, ctx.tensor(self.target, (self.layout.nbytes,), "uint8"))


class CopyWeights(Op):
    """One part of a layer, host -> device (or pageable -> pinned), in packets."""

    kind: ClassVar[str] = "weights"

    def __init__(self, source: PlacedPart, target: Buffer, *, layer: int | None, packet_bytes: int) -> None:
        self.source, self.target, self.layer = source, target, layer
        self.packet_bytes = packet_bytes
        self.packets = max(1, -(-source.layout.nbytes // packet_bytes))
        self.reads, self.writes = source.keys, (target,)

    def work(self) -> Work:
        nbytes = self.source.layout.nbytes
        return Work(device_bytes=nbytes, host_bytes=nbytes, link_bytes=nbytes)

    def cost_features(self) -> tuple[float, ...]:
        return (float(self.packets),)

    def run(self, ctx: Context, packet: int) -> None:
        start = packet * self.packet_bytes
        nbytes = min(self.packet_bytes, self.source.layout.nbytes - start)
        ctx.copy(self.target, self.source.buffer, start, nbytes)


class CopyPage(Op):
    """The first `nbytes` of a page of weights, pinned memory -> device, in packets. The buffers are the keys."""

    kind: ClassVar[str] = "weights"

    def __init__(self, source: Buffer, target: Buffer, *, nbytes: int, layer: int, packet_bytes: int) -> None:
        self.source, self.target, self.nbytes, self.layer = source, target, nbytes, layer
        self.packet_bytes = packet_bytes
        self.packets = max(1, -(-nbytes // packet_bytes))
        self.reads, self.writes = (source,), (target,)

    def work(self) -> Work:
        return Work(device_bytes=self.nbytes, host_bytes=self.nbytes, link_bytes=self.nbytes)

    def cost_features(self) -> tuple[float, ...]:
        return (float(self.packets),)

    def run(self, ctx: Context, packet: int) -> None:
        start = packet * self.packet_bytes
        ctx.copy(self.target, self.source, start, min(self.packet_bytes, self.nbytes - start))


class StagePage(CopyPage):
    """The same, pageable -> pinned memory: host memory is read and written."""

    kind: ClassVar[str] = "weights to pinned"

    def work(self) -> Work:
        return Work(host_bytes=2 * self.nbytes, link_bytes=self.nbytes)


class Poison(Op):
    """Fill a buffer with NaN (tests): whoever reads it before it is written again computes nonsense."""

    kind: ClassVar[str] = "poison"

    def __init__(self, buffer: Buffer, keys: tuple[Hashable, ...] = ()) -> None:
        self.buffer = buffer
        self.writes = keys or (buffer,)

    def run(self, ctx: Context, packet: int) -> None:
        ctx.tensor(self.buffer, (self.buffer.nbytes,), "uint8").fill_(_POISON_BYTE)


class PoisonBlocks(Op):
    """Fill released KV blocks of one layer with NaN (tests)."""

    kind: ClassVar[str] = "poison kv"

    def __init__(self, cache: KVCache, layer: int, partition: int, blocks: tuple[int, ...]) -> None:
        self.cache, self.layer, self.blocks = cache, layer, blocks
        self.writes = (cache.region(layer, partition),)

    def run(self, ctx: Context, packet: int) -> None:
        assert self.layer is not None
        for buffer in (self.cache.keys[self.layer], self.cache.values[self.layer]):
            ctx.tensor(buffer, self.cache.shape, self.cache.dtype)[list(self.blocks)] = float("nan")
