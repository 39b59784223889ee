"""Define the ops of the memories themselves: filling the host store, moving weights, and (in tests) poisoning.
Torch-free."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from harness.machine.base import CPU, Context, Lane, Op, Work
from harness.memory.tiers import HOST_TIERS, Buffer
from harness.model.layout import ALIGNMENT_BYTES

if TYPE_CHECKING:
    from harness.memory.placed import PartSource, PlacedPart
    from harness.model.layout import PartLayout

_POISON_BYTE = 0xFF


class ReadPart(Op):
    """Reads one part from the checkpoint's file into the host store."""

    kind: ClassVar[str] = "read checkpoint"

    def __init__(self, source: PartSource, layer: int | None, layout: PartLayout, target: Buffer) -> None:
        self.source, self.layer, self.layout, self.target = source, layer, layout, target
        self.writes = (target,)

    def work(self) -> Work:
        """Return no work: this is set-up, which no cost model times."""
        return Work()

    def run(self, ctx: Context, packet: int) -> None:
        self.source.read_part(self.layer, self.layout, ctx.tensor(self.target, (self.layout.nbytes,), "uint8"))


class CopyWeights(Op):
    """Brings one part of a layer from the host to the device (or from pageable to pinned memory), in packets.

    A part of several equal `pieces`, such as a layer's experts, crosses as that many parts would.
    """

    kind: ClassVar[str] = "weights"
    has_fixed_work: ClassVar[bool] = True

    def __init__(
        self, source: PlacedPart, target: Buffer, *, layer: int | None, packet_bytes: int, pieces: int = 1
    ) -> None:
        self.source, self.target, self.layer = source, target, layer
        self.packet_bytes, self.pieces = packet_bytes, pieces
        self.piece_bytes = source.layout.nbytes // pieces
        self.packets = pieces * max(1, -(-self.piece_bytes // packet_bytes))
        self.reads, self.writes = source.keys, (target,)

    def work(self) -> Work:
        return self._work

    @cached_property
    def _work(self) -> Work:
        nbytes = self.source.layout.nbytes
        return Work(device_bytes=nbytes, host_bytes=nbytes, link_bytes=nbytes)

    def cost_features(self) -> tuple[float, ...]:
        return (float(self.packets // self.pieces),)

    def run(self, ctx: Context, packet: int) -> None:
        piece, packet = divmod(packet, self.packets // self.pieces)
        start = packet * self.packet_bytes
        nbytes = min(self.packet_bytes, self.piece_bytes - start)
        ctx.copy(self.target, self.source.buffer, piece * self.piece_bytes + start, nbytes)


class CopyShare(CopyWeights):
    """Brings one GPU's share of a part, which several GPUs fetch together, to its place in the whole."""

    def __init__(
        self, source: PlacedPart, target: Buffer, *, share: range, layer: int | None, packet_bytes: int
    ) -> None:
        super().__init__(source, target, layer=layer, packet_bytes=packet_bytes)
        self.share = share
        self.packets = max(1, -(-len(share) // packet_bytes))
        self.writes = (target, fetched(target))

    def work(self) -> Work:
        return Work(device_bytes=len(self.share), host_bytes=len(self.share), link_bytes=len(self.share))

    def run(self, ctx: Context, packet: int) -> None:
        start = self.share.start + packet * self.packet_bytes
        ctx.copy(self.target, self.source.buffer, start, min(self.packet_bytes, self.share.stop - start))


class AllGather(Op):
    """Makes a part whole in the buffer of GPU `rank`, as one member of a collective. Each of the `buffers` holds its
    own GPU's share of the part. Members are tied by their keys: each reads what every GPU fetched, and writes what none
    of the others reads."""

    kind: ClassVar[str] = "all-gather"

    def __init__(self, buffers: Sequence[Buffer], rank: int, *, nbytes: int, layer: int) -> None:
        self.buffers, self.rank, self.nbytes, self.layer = tuple(buffers), rank, nbytes, layer
        self.reads, self.writes = tuple(map(fetched, self.buffers)), (self.buffers[rank],)

    @property
    def _received(self) -> list[tuple[int, range]]:
        shares = [(rank, share_of(self.nbytes, rank, len(self.buffers))) for rank in range(len(self.buffers))]
        return [(rank, share) for rank, share in shares if rank != self.rank]

    def work(self) -> Work:
        """Return the work of a ring: every GPU receives the shares of all others, and sends as much."""
        received_bytes = sum(len(share) for _, share in self._received)
        return Work(device_bytes=2 * received_bytes, link_bytes=received_bytes)

    def cost_features(self) -> tuple[float, ...]:
        return (float(self.nbytes), float(len(self.buffers)))

    def run(self, ctx: Context, packet: int) -> None:
        target = ctx.tensor(self.buffers[self.rank], (self.nbytes,), "uint8")
        for rank, share in self._received:
            source = ctx.tensor(self.buffers[rank], (self.nbytes,), "uint8")
            target[share.start : share.stop].copy_(source[share.start : share.stop])


def share_of(nbytes: int, rank: int, num_ranks: int) -> range:
    """Return the bytes that GPU `rank` fetches for all. Shares are equal and whole cache lines; the last ones may be
    smaller."""
    size = -(-nbytes // (num_ranks * ALIGNMENT_BYTES)) * ALIGNMENT_BYTES
    return range(min(rank * size, nbytes), min((rank + 1) * size, nbytes))


def fetched(buffer: Buffer) -> Hashable:
    """Return the key of a GPU's own share of the part that is to be whole in `buffer`."""
    return (buffer, "fetched")


class CopyPage(Op):
    """Brings the first `nbytes` of a page of weights from pinned memory to the device, in packets. The buffers are the
    keys."""

    kind: ClassVar[str] = "weights"
    has_fixed_work: ClassVar[bool] = True

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
    """Brings the first `nbytes` of a page of weights from pageable to pinned memory: host memory is read and
    written."""

    kind: ClassVar[str] = "weights to pinned"

    def work(self) -> Work:
        return Work(host_bytes=2 * self.nbytes, link_bytes=self.nbytes)


class Poison(Op):
    """Fills a buffer with NaN (in tests): an op that reads it before it is written again computes nonsense."""

    kind: ClassVar[str] = "poison"

    def __init__(self, buffer: Buffer, keys: tuple[Hashable, ...] = ()) -> None:
        self.buffer = buffer
        self.writes = keys or (buffer,)

    def work(self) -> Work:
        """Return no work: poison serves tests, on machines that time nothing."""
        return Work()

    def run(self, ctx: Context, packet: int) -> None:
        ctx.tensor(self.buffer, (self.buffer.nbytes,), "uint8").fill_(_POISON_BYTE)


def poison_lane(buffer: Buffer, gpu: Lane) -> Lane:
    """Return the lane that poisons a buffer: the host's own for host memory, which a GPU's stream does not write."""
    return CPU if buffer.tier in HOST_TIERS else gpu
