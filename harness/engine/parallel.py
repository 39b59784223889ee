"""Emitter, weight streams and activations over all GPUs that share a model, for pipelines written as for one.

A pipeline takes these three from here instead of making them, hands on what they give it (parts, activations) without
looking inside, and so runs on one GPU or on several. On one GPU they are the ordinary ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Generic, TypeVar, cast

from harness.engine.activations import Activations
from harness.engine.emitter import Emitter, InFlight
from harness.engine.engine import Engine
from harness.engine.ops import collective
from harness.machine.base import GPU, Op, Ticket
from harness.memory.weights import WeightStream

T = TypeVar("T")


class Sharded(Generic[T]):
    """One of a kind for each GPU, by rank."""

    def __init__(self, shards: Iterable[T]) -> None:
        self.shards = tuple(shards)


def shard_of(value: Any, rank: int) -> Any:
    """What a GPU gets of an argument: its own of what is sharded, also within a mapping; of others the argument."""
    if isinstance(value, Sharded):
        return value.shards[rank]
    if isinstance(value, dict):
        return {key: shard_of(item, rank) for key, item in value.items()}
    return value


def emitter(engine: Engine, *, serial: bool = False) -> Emitter:
    """For all GPUs of the engine."""
    if len(engine.ranks) == 1:
        return Emitter(engine, serial=serial)
    return cast(Emitter, ParallelEmitter(engine, serial=serial))  # a test holds that it has the same methods


def weight_stream(engine: Engine, *, depth: int, packet_bytes: int, name: str = "weight buffer") -> WeightStream:
    """For all GPUs of the engine, each over its own link."""
    streams = [
        WeightStream(each.machine, each.store, depth=depth, packet_bytes=packet_bytes, name=name, rank=each.rank)
        for each in engine.ranks
    ]
    return streams[0] if len(streams) == 1 else cast(WeightStream, ParallelStream(streams))


def activations(engine: Engine, *, max_tokens: int, name: str) -> Activations:
    """For all GPUs of the engine. Without host buffers where no part of the KV cache lies in host memory."""
    host = engine.kv.host is not None
    each_acts = [
        Activations(
            each.machine,
            each.spec,
            max_tokens=max_tokens,
            name=name,
            host=host,
            rank=each.rank,
            device_blocks=each.kv.num_device_blocks,
        )
        for each in engine.ranks
    ]
    return each_acts[0] if len(each_acts) == 1 else cast(Activations, Sharded(each_acts))


class ParallelStream:
    """The weight streams of all GPUs in step: see `WeightStream` for each method."""

    def __init__(self, streams: Iterable[WeightStream]) -> None:
        self.streams = tuple(streams)
        self.depth = self.streams[0].depth
        self.packet_bytes = self.streams[0].packet_bytes

    def layer(self, index: int) -> int:
        return self.streams[0].layer(index)

    def part_names(self, index: int) -> tuple[str, ...]:
        return self.streams[0].part_names(index)

    def request_layer(self, index: int) -> list[Ticket]:
        return [ticket for stream in self.streams for ticket in stream.request_layer(index)]

    def part(self, index: int, part_name: str) -> Sharded[Any]:
        return Sharded(stream.part(index, part_name) for stream in self.streams)

    def experts(self, index: int) -> Sharded[Any]:
        return Sharded(stream.experts(index) for stream in self.streams)

    def release(self, index: int, part_name: str) -> None:
        for stream in self.streams:
            stream.release(index, part_name)

    def advance(self, index: int, part_name: str) -> None:
        for stream in self.streams:
            stream.advance(index, part_name)

    def cancel_all(self) -> None:
        for stream in self.streams:
            stream.cancel_all()

    def close(self) -> None:
        for stream in self.streams:
            stream.close()


class ParallelEmitter:
    """The steps of `Emitter` on all GPUs, rank after rank, with sums over GPUs where a layer needs them.

    With `serial` a step follows the one before it on all GPUs; within a step they work side by side. Tickets that are
    returned are the first GPU's.
    """

    def __init__(self, engine: Engine, *, serial: bool = False) -> None:
        self._engine = engine
        self._ranks = [Emitter(each, serial=serial) for each in engine.ranks]

    def load(self, stream: WeightStream, index: int, part_name: str) -> None:
        streams = cast(ParallelStream, stream).streams
        self._each(lambda rank, emit: emit.load(streams[rank], index, part_name))

    def embed(self, it: InFlight) -> None:
        self._step(Emitter.embed, it)

    def upload_tokens(self, it: InFlight) -> None:
        self._step(Emitter.upload_tokens, it)

    def look_up(self, it: InFlight) -> None:
        self._step(Emitter.look_up, it)

    def attention_in(self, it: InFlight, layer: int, part: Any) -> Ticket:
        return self._step(Emitter.attention_in, it, layer, part)

    def prefill_attention(self, it: InFlight, layer: int) -> Ticket | None:
        return self._step(Emitter.prefill_attention, it, layer)

    def offload_qkv(self, it: InFlight, layer: int, *, queries: bool = True) -> None:
        self._step(partial(Emitter.offload_qkv, queries=queries), it, layer)

    def offload_hidden(self, it: InFlight, layer: int, to: Any) -> None:
        self._step(Emitter.offload_hidden, it, layer, to)

    def load_hidden(self, it: InFlight, layer: int, source: Any) -> None:
        self._step(Emitter.load_hidden, it, layer, source)

    def append_kv(self, it: InFlight, layer: int) -> None:
        self._step(Emitter.append_kv, it, layer)

    def decode_attention(self, it: InFlight, layer: int) -> None:
        self._step(Emitter.decode_attention, it, layer)

    def attend_in_place(self, it: InFlight, layer: int) -> None:
        self._step(Emitter.attend_in_place, it, layer)

    def attend_on_host(self, it: InFlight, layer: int) -> None:
        self._step(Emitter.attend_on_host, it, layer)

    def load_attention(self, it: InFlight, layer: int) -> None:
        self._step(Emitter.load_attention, it, layer)

    def load_kv(self, it: InFlight, layer: int, rows: range, to: Any) -> None:
        self._step(Emitter.load_kv, it, layer, rows, to)

    def attend_on_device(self, it: InFlight, layer: int, rows: range, staged: Any) -> None:
        self._step(Emitter.attend_on_device, it, layer, rows, staged)

    def decode_attention_on_device(self, it: InFlight, layer: int, staging: Any) -> None:
        self._step(Emitter.decode_attention_on_device, it, layer, staging)

    def attention_out(self, it: InFlight, layer: int, part: Any) -> Ticket:
        def op_of(kind: Any) -> Callable[[Engine, InFlight, int], Op]:
            return lambda on, mine, rank: kind(on.family, on.spec, it.batch, mine.acts, shard_of(part, rank), layer)

        self._ops(it, op_of(collective.OutputProjection))
        self._all_reduce(it, layer, "normed")
        ticket = self._ops(it, op_of(collective.AfterAttention))
        if it.batch.records_routing and not self._engine.spec.is_dense(layer):
            it.batch.routing_tickets[layer] = self.fetch_routing(it, layer)
        return ticket

    def fetch_routing(self, it: InFlight, layer: int) -> Ticket:
        return self._first(lambda emit: emit.fetch_routing(self._on(it, 0), layer))

    def experts(self, it: InFlight, layer: int, parts: Any) -> Ticket | None:
        return self._step(Emitter.experts, it, layer, parts)

    def combine(self, it: InFlight, layer: int, extra: Any = ()) -> Ticket:
        assert not extra, "only the GPUs' own sums are added"
        return self._all_reduce(it, layer, "hidden")

    def head(self, it: InFlight) -> Ticket:
        return self._first(lambda emit: emit.head(self._on(it, 0)))

    def poison(self, buffers: Any) -> None:
        self._each(lambda rank, emit: emit.poison(shard_of(buffers, rank)))

    # -- how a step reaches the GPUs ------------------------------------------------------------------------------

    def _step(self, method: Callable[..., Any], it: InFlight, *arguments: Any) -> Any:
        """A step of the ordinary emitter on every GPU."""

        def run(rank: int, emit: Emitter) -> Any:
            return method(emit, self._on(it, rank), *(shard_of(argument, rank) for argument in arguments))

        return self._each(run)

    def _ops(self, it: InFlight, make: Callable[[Engine, InFlight, int], Op]) -> Ticket:
        """One op on the gpu lane of every GPU."""
        engines = self._engine.ranks
        return self._each(lambda rank, emit: emit.submit(GPU, make(engines[rank], self._on(it, rank), rank)))

    def _all_reduce(self, it: InFlight, layer: int, to: Any) -> Ticket:
        """All members in one call, so that they are in the same order on all lanes."""
        partials = cast(Sharded[Activations], it.acts).shards

        def member(on: Engine, mine: InFlight, rank: int) -> Op:
            return collective.AllReduce(on.spec, it.batch, mine.acts, layer, partials=partials, to=to)

        return self._ops(it, member)

    def _each(self, run: Callable[[int, Emitter], Any]) -> Any:
        before, results = self._ranks[0].tail, []
        after: dict[Ticket, None] = {}  # an ordered set
        for rank, emit in enumerate(self._ranks):
            emit.tail = before
            results.append(run(rank, emit))
            after |= dict.fromkeys(emit.tail)
        self._follow(tuple(after))
        return results[0]

    def _first(self, run: Callable[[Emitter], Ticket]) -> Ticket:
        """On the first GPU alone."""
        ticket = run(self._ranks[0])
        self._follow(self._ranks[0].tail)
        return ticket

    def _follow(self, tail: tuple[Ticket, ...]) -> None:
        for emit in self._ranks:
            emit.tail = tail

    @staticmethod
    def _on(it: InFlight, rank: int) -> InFlight:
        """The micro-batch in the buffers of one GPU."""
        return InFlight(it.batch, shard_of(it.acts, rank))
