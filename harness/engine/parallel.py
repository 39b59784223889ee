"""Emitter, weights, activations and buffers over all GPUs that share a model, for pipelines written as for one.

A pipeline takes these from here instead of making them, hands on what they give it (parts, activations) without looking
inside, and so runs on one GPU or on several. On one GPU they are the ordinary ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Any, cast

from harness.engine.activation_pool import ActivationPool, PooledActivations, PoolSizes
from harness.engine.activations import Activations
from harness.engine.emitter import Emitter
from harness.engine.engine import Engine
from harness.engine.parallel_emitter import EachGpuEmitter, ParallelEmitter
from harness.engine.sharded import Sharded, ShardedActivations
from harness.machine.base import Lane, LaneKind, Machine, Ticket
from harness.memory.ops import AllGather
from harness.memory.paged_weights import PagedWeights
from harness.memory.tiers import Buffer, device_tier
from harness.memory.weights import WeightStream


def emitter(engine: Engine, *, serial: bool = False, fifo: bool = False) -> Emitter:
    """For all GPUs of the engine."""
    if len(engine.ranks) == 1:
        return Emitter(engine, serial=serial, fifo=fifo)
    return cast(Emitter, ParallelEmitter(engine, serial=serial, fifo=fifo))  # a test holds that it has the same methods


def each_gpu_emitter(engine: Engine, *, serial: bool = False) -> Emitter:
    """For all GPUs of the engine, each with a micro-batch of its own."""
    if len(engine.ranks) == 1:
        return Emitter(engine, serial=serial)
    return cast(Emitter, EachGpuEmitter(engine, serial=serial))


def weight_stream(engine: Engine, *, depth: int, packet_bytes: int, name: str = "weight buffer") -> WeightStream:
    """For all GPUs of the engine, each over its own link."""
    streams = [
        WeightStream(each.machine, each.store, depth=depth, packet_bytes=packet_bytes, name=name, rank=each.rank)
        for each in engine.ranks
    ]
    return streams[0] if len(streams) == 1 else cast(WeightStream, ParallelStream(streams))


def gathered_stream(engine: Engine, *, depth: int, packet_bytes: int, name: str = "weight buffer") -> WeightStream:
    """Whole layers on all GPUs of the engine: each brings its share over its own link, and has the rest from the
    others."""
    num_gpus = len(engine.ranks)
    streams = [
        WeightStream(
            each.machine,
            each.store,
            depth=depth,
            packet_bytes=packet_bytes,
            name=name,
            rank=each.rank,
            num_shares=num_gpus,
        )
        for each in engine.ranks
    ]
    return streams[0] if num_gpus == 1 else cast(WeightStream, GatheredStream(engine.machine, streams))


def paged_weights(
    engine: Engine,
    *,
    num_pages: int,
    packet_bytes: int,
    resident_share: float = 0.0,
    layers: range | None = None,
    experts: bool = True,
) -> PagedWeights:
    """For all GPUs of the engine, each over its own link; they take turns at the host's staging copies."""
    pages = [
        PagedWeights(
            each.machine,
            each.store,
            num_pages=num_pages,
            packet_bytes=packet_bytes,
            resident_share=resident_share,
            rank=each.rank,
            layers=layers,
            experts=experts,
            prefix="" if experts else "dense ",
        )
        for each in engine.ranks
    ]
    return pages[0] if len(pages) == 1 else cast(PagedWeights, ParallelPages(pages))


def activations(engine: Engine, *, max_tokens: int, name: str, host_experts: bool = False) -> Activations:
    """For all GPUs of the engine. Without host buffers where no part of the KV cache lies in host memory."""
    host = engine.kv.host is not None
    each_acts = [
        Activations(
            each.machine,
            each.spec,
            max_tokens=max_tokens,
            name=name,
            host=host,
            host_experts=host_experts,
            rank=each.rank,
            device_blocks=each.kv.num_device_blocks,
        )
        for each in engine.ranks
    ]
    return each_acts[0] if len(each_acts) == 1 else cast(Activations, Sharded(each_acts))


def activation_pool(engine: Engine, sizes: PoolSizes, *, keeps: bool = True) -> ActivationPool:
    """For all GPUs of the engine, of which the first keeps hidden states in pinned memory, if any does."""
    pools = [
        ActivationPool(
            each.machine,
            each.spec,
            sizes,
            rank=each.rank,
            keeps=keeps and each is engine,
            device_blocks=each.kv.num_device_blocks,
        )
        for each in engine.ranks
    ]
    return pools[0] if len(pools) == 1 else cast(ActivationPool, ParallelPool(pools))


def device_buffer(engine: Engine, name: str, nbytes: int) -> Buffer:
    """Of so many bytes on each GPU of the engine."""
    buffers = [each.machine.tiers[device_tier(each.rank)].reserve(name, nbytes) for each in engine.ranks]
    return buffers[0] if len(buffers) == 1 else cast(Buffer, Sharded(buffers))


class ParallelStream(Sharded[WeightStream]):
    """The weight streams of all GPUs in step: see `WeightStream` for each method."""

    def __init__(self, shards: Iterable[WeightStream]) -> None:
        super().__init__(shards)
        self.depth = self.shards[0].depth
        self.packet_bytes = self.shards[0].packet_bytes

    def layer(self, index: int) -> int:
        return self.shards[0].layer(index)

    def part_names(self, index: int) -> tuple[str, ...]:
        return self.shards[0].part_names(index)

    def request_layer(self, index: int) -> list[Ticket]:
        return [ticket for stream in self.shards for ticket in stream.request_layer(index)]

    def part(self, index: int, part_name: str) -> Sharded[Any]:
        return Sharded(stream.part(index, part_name) for stream in self.shards)

    def experts(self, index: int) -> Sharded[Any]:
        return Sharded(stream.experts(index) for stream in self.shards)

    def release(self, index: int, part_name: str) -> None:
        for stream in self.shards:
            stream.release(index, part_name)

    def advance(self, index: int, part_name: str) -> None:
        for stream in self.shards:
            stream.advance(index, part_name)

    def cancel_all(self) -> None:
        for stream in self.shards:
            stream.cancel_all()

    def close(self) -> None:
        for stream in self.shards:
            stream.close()


class GatheredStream(ParallelStream):
    """Streams that bring a share each: `part` makes it whole on all GPUs, when it is first asked for. The gpu lanes do
    that, so it waits for the slowest link and lets nothing be computed meanwhile."""

    def __init__(self, machine: Machine, shards: Iterable[WeightStream]) -> None:
        super().__init__(shards)
        self._machine = machine
        self._gathered: set[tuple[int, str]] = set()

    def part(self, index: int, part_name: str) -> Sharded[Any]:
        parts = super().part(index, part_name)
        if (index, part_name) not in self._gathered:
            self._gathered.add((index, part_name))
            buffers, nbytes = [part.buffer for part in parts.shards], parts.shards[0].layout.nbytes
            for rank in range(len(buffers)):
                op = AllGather(buffers, rank, nbytes=nbytes, layer=self.layer(index))
                self._machine.submit(Lane(LaneKind.GPU, rank), op)
        return parts

    def release(self, index: int, part_name: str) -> None:
        self._gathered.discard((index, part_name))
        super().release(index, part_name)

    def advance(self, index: int, part_name: str) -> None:
        self._gathered.discard((index, part_name))
        super().advance(index, part_name)

    def cancel_all(self) -> None:
        self._gathered.clear()
        super().cancel_all()


class ParallelPages(Sharded[PagedWeights]):
    """The paged weights of all GPUs in step: see `PagedWeights` for each method."""

    def __init__(self, shards: Iterable[PagedWeights]) -> None:
        super().__init__(shards)
        self.num_pages = self.shards[0].num_pages
        self.page_bytes, self.slot_bytes = self.shards[0].page_bytes, self.shards[0].slot_bytes
        self.resident_bytes = sum(pages.resident_bytes for pages in self.shards)

    def num_pages_of(self, index: int) -> int:
        return self.shards[0].num_pages_of(index)

    def stage(self, index: int, page: int) -> None:
        for pages in self.shards:
            pages.stage(index, page)

    def load(self, index: int, page: int) -> None:
        for pages in self.shards:
            pages.load(index, page)

    def part(self, index: int, name: str) -> Sharded[Any]:
        return Sharded(pages.part(index, name) for pages in self.shards)

    def experts(self, index: int) -> Sharded[Any]:
        return Sharded(pages.experts(index) for pages in self.shards)

    def release(self, index: int) -> None:
        for pages in self.shards:
            pages.release(index)

    def cancel_all(self) -> None:
        for pages in self.shards:
            pages.cancel_all()

    def close(self) -> None:
        for pages in self.shards:
            pages.close()


class ParallelPool(Sharded[ActivationPool]):
    """The activation pools of all GPUs, cut alike: see `ActivationPool`."""

    def layout(self, sizes: Seq[int], number: int = 0, *, blocks: Seq[int] | None = None) -> list[PooledActivations]:
        by_rank = [pool.layout(sizes, number, blocks=blocks) for pool in self.shards]
        return [cast(PooledActivations, ShardedActivations(each)) for each in zip(*by_rank, strict=True)]
