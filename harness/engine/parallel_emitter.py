"""The steps of an emitter on several GPUs: each with a micro-batch of its own, or all with one and the same."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar, cast

from harness.engine.activations import Activations
from harness.engine.emitter import Emitter, InFlight
from harness.engine.engine import Engine
from harness.engine.ops import collective
from harness.engine.sharded import Sharded, shard_of
from harness.machine.base import GPU, Op, Ticket
from harness.memory.tiers import Buffer, gpu_of
from harness.memory.weights import WeightStream

T = TypeVar("T")


class EachGpuEmitter:
    """The steps of `Emitter` on all GPUs, rank after rank, each with its own micro-batch (data parallelism): one in
    flight has a `Sharded` batch, with None for a GPU that has nothing to do.

    With `serial` a step follows the one before it on all GPUs; within a step they work side by side. Tickets that are
    returned are the first GPU's, in lists those of all.
    """

    def __init__(self, engine: Engine, *, serial: bool = False, fifo: bool = False) -> None:
        self._engine = engine
        self._ranks = [Emitter(each, serial=serial, fifo=fifo) for each in engine.ranks]

    def load(self, stream: WeightStream, index: int, part_name: str) -> Ticket:
        streams = cast(Sharded[WeightStream], stream).shards
        return self._each(lambda rank, emit: emit.load(streams[rank], index, part_name))[0]

    def embed(self, it: InFlight) -> list[Ticket]:
        return self._all_of(Emitter.embed, it)

    def upload_tokens(self, it: InFlight) -> Ticket:
        return self._step(Emitter.upload_tokens, it)

    def look_up(self, it: InFlight) -> Ticket:
        return self._step(Emitter.look_up, it)

    def attention_in(self, it: InFlight, layer: int, part: Any) -> Ticket:
        return self._step(Emitter.attention_in, it, layer, part)

    def prefill_attention(self, it: InFlight, layer: int) -> Ticket | None:
        return self._step(Emitter.prefill_attention, it, layer)

    def offload_qkv(self, it: InFlight, layer: int, *, queries: bool = True) -> Ticket | None:
        return self._step(partial(Emitter.offload_qkv, queries=queries), it, layer)

    def offload_hidden(self, it: InFlight, layer: int, to: Any) -> Ticket:
        return self._step(Emitter.offload_hidden, it, layer, to)

    def send_hidden(self, it: InFlight, layer: int, to: Any) -> Ticket:
        return self._step(Emitter.send_hidden, it, layer, to)

    def load_hidden(self, it: InFlight, layer: int, source: Any) -> Ticket:
        return self._step(Emitter.load_hidden, it, layer, source)

    def append_kv(self, it: InFlight, layer: int) -> list[Ticket]:
        return self._all_of(Emitter.append_kv, it, layer)

    def decode_attention(self, it: InFlight, layer: int) -> list[Ticket]:
        return self._all_of(Emitter.decode_attention, it, layer)

    def attend_in_place(self, it: InFlight, layer: int) -> Ticket | None:
        return self._step(Emitter.attend_in_place, it, layer)

    def attend_on_host(self, it: InFlight, layer: int) -> Ticket | None:
        return self._step(Emitter.attend_on_host, it, layer)

    def load_attention(self, it: InFlight, layer: int) -> Ticket | None:
        return self._step(Emitter.load_attention, it, layer)

    def load_kv(self, it: InFlight, layer: int, rows: range, to: Any) -> Ticket:
        return self._step(Emitter.load_kv, it, layer, rows, to)

    def attend_on_device(self, it: InFlight, layer: int, rows: range, staged: Any) -> Ticket:
        return self._step(Emitter.attend_on_device, it, layer, rows, staged)

    def decode_attention_on_device(self, it: InFlight, layer: int, staging: Any) -> list[Ticket]:
        return self._all_of(Emitter.decode_attention_on_device, it, layer, staging)

    def attention_out(self, it: InFlight, layer: int, part: Any) -> Ticket:
        return self._step(Emitter.attention_out, it, layer, part)

    def fetch_routing(self, it: InFlight, layer: int) -> Ticket:
        return self._step(Emitter.fetch_routing, it, layer)

    def route(self, it: InFlight, layer: int) -> Ticket:
        return self._step(Emitter.route, it, layer)

    def experts(self, it: InFlight, layer: int, parts: Any, *, routed: Any = None) -> Ticket | None:
        return self._step(partial(Emitter.experts, routed=routed), it, layer, parts)

    def experts_on_host(self, it: InFlight, layer: int) -> list[Ticket]:
        return self._all_of(Emitter.experts_on_host, it, layer)

    def load_expert_sums(self, it: InFlight, layer: int) -> Ticket:
        return self._step(Emitter.load_expert_sums, it, layer)

    def combine(self, it: InFlight, layer: int, extra: Any = ()) -> Ticket:
        return self._step(partial(Emitter.combine, extra=extra), it, layer)

    def head(self, it: InFlight) -> Ticket:
        return self._step(Emitter.head, it)

    def poison(self, buffers: Iterable[Buffer]) -> list[Ticket]:
        by_rank: dict[int, list[Buffer]] = defaultdict(list)
        for buffer in buffers:
            by_rank[gpu_of(buffer.tier)].append(buffer)
        tickets = self._each(lambda rank, emit: emit.poison(by_rank[rank]))
        return [ticket for each in tickets for ticket in each]

    # -- how a step reaches the GPUs ------------------------------------------------------------------------------

    def _step(self, method: Callable[..., Any], it: InFlight, *arguments: Any) -> Any:
        return self._on_each(method, it, *arguments)[0]

    def _all_of(self, method: Callable[..., Any], it: InFlight, *arguments: Any) -> list[Ticket]:
        return [ticket for tickets in self._on_each(method, it, *arguments) if tickets for ticket in tickets]

    def _on_each(self, method: Callable[..., Any], it: InFlight, *arguments: Any) -> list[Any]:
        """A step of the ordinary emitter on every GPU that has a micro-batch."""

        def run(rank: int, emit: Emitter) -> Any:
            mine = self._on(it, rank)
            if mine.batch is None:
                return None
            return method(emit, mine, *(shard_of(argument, rank) for argument in arguments))

        return self._each(run)

    def _each(self, run: Callable[[int, Emitter], Any]) -> list[Any]:
        before, results = self._ranks[0].tail, []
        after: dict[Ticket, None] = {}  # an ordered set
        for rank, emit in enumerate(self._ranks):
            emit.tail = before
            results.append(run(rank, emit))
            after |= dict.fromkeys(emit.tail)
        self._follow(tuple(after))
        return results

    def _follow(self, tail: tuple[Ticket, ...]) -> None:
        for emit in self._ranks:
            emit.tail = tail

    @staticmethod
    def _on(it: InFlight, rank: int) -> InFlight:
        """What a GPU has of a micro-batch, in its buffers."""
        return InFlight(shard_of(it.batch, rank), shard_of(it.acts, rank), shard_of(it.tickets, rank))


class ParallelEmitter(EachGpuEmitter):
    """All GPUs with one micro-batch, each with its share of every layer (tensor parallelism), and with sums over GPUs
    where a layer needs them. All have the same hidden states."""

    def offload_hidden(self, it: InFlight, layer: int, to: Any) -> Ticket:
        return self._first(lambda emit: emit.offload_hidden(self._on(it, 0), layer, to))

    def attention_out(self, it: InFlight, layer: int, part: Any) -> Ticket:
        def op_of(kind: Any) -> Callable[[Engine, InFlight, int], Op]:
            return lambda on, mine, rank: kind(on.family, on.spec, it.batch, mine.acts, shard_of(part, rank), layer)

        self._ops(it, op_of(collective.OutputProjection))
        self._all_reduce(it, layer, "normed")
        ticket = self._ops(it, op_of(collective.AfterAttention))
        if it.batch.records_routing and not self._engine.spec.is_dense(layer):
            it.tickets.routing[layer] = self.fetch_routing(it, layer)
        return ticket

    def fetch_routing(self, it: InFlight, layer: int) -> Ticket:
        return self._first(lambda emit: emit.fetch_routing(self._on(it, 0), layer))

    def route(self, it: InFlight, layer: int) -> Ticket:
        return self._first(lambda emit: emit.route(self._on(it, 0), layer))

    def combine(self, it: InFlight, layer: int, extra: Any = ()) -> Ticket:
        assert not extra, "only the GPUs' own sums are added"
        return self._all_reduce(it, layer, "hidden")

    def head(self, it: InFlight) -> Ticket:
        return self._first(lambda emit: emit.head(self._on(it, 0)))

    def _ops(self, it: InFlight, make: Callable[[Engine, InFlight, int], Op]) -> Ticket:
        """One op on the gpu lane of every GPU; the first one's ticket."""
        engines = self._engine.ranks
        tickets = self._each(lambda rank, emit: emit.submit(GPU, make(engines[rank], self._on(it, rank), rank)))
        return cast(Ticket, tickets[0])

    def _all_reduce(self, it: InFlight, layer: int, to: Any) -> Ticket:
        """All members in one call, so that they are in the same order on all lanes."""
        partials = cast(Sharded[Activations], it.acts).shards

        def member(on: Engine, mine: InFlight, rank: int) -> Op:
            return collective.AllReduce(on.spec, it.batch, mine.acts, layer, partials=partials, to=to)

        return self._ops(it, member)

    def _first(self, run: Callable[[Emitter], T]) -> T:
        """On the first GPU alone."""
        result = run(self._ranks[0])
        self._follow(self._ranks[0].tail)
        return result
