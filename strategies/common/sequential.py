"""Layer after layer with the whole pass as one micro-batch: the plainest pipeline."""

from __future__ import annotations

from typing import cast

from harness.engine import parallel
from harness.engine.batch import MicroBatch, PassPlan, assemble
from harness.engine.engine import Engine
from harness.engine.in_flight import InFlight, PassTickets
from harness.engine.sharded import Sharded, shard_of
from harness.engine.strategy import PassResult


class SequentialPipeline:
    """`prefetch=False`: each part is loaded when its turn comes, used, and dropped, and every op waits for the one
    before it. `prefetch=True`: layers are double-buffered, so weight transfer overlaps with computation, while
    attention on the CPU and work on the GPU still alternate.

    Several GPUs share every layer if the engine has them. With `own_sequences` they share its transfer only: each has
    the whole pass of the sequences whose KV cache it holds, of at most `max_tokens`.
    """

    def __init__(
        self, engine: Engine, *, max_tokens: int, packet_bytes: int, prefetch: bool, own_sequences: bool = False
    ) -> None:
        depth = 2 if prefetch else 1
        self._engine = engine
        self._prefetch = prefetch
        self._is_split = own_sequences and len(engine.ranks) > 1
        stream_of = parallel.gathered_stream if self._is_split else parallel.weight_stream
        self._stream = stream_of(engine, depth=depth, packet_bytes=packet_bytes)
        self._acts = parallel.activations(engine, max_tokens=max_tokens, name="activations")
        emitter_of = parallel.each_gpu_emitter if self._is_split else parallel.emitter
        self._emit = emitter_of(engine, serial=not prefetch)
        self._next_index = 0

    def run(self, plan: PassPlan) -> PassResult:
        in_flight = self._in_flight(plan)
        it = self._together(in_flight)
        if self._next_index == 0 and self._prefetch:
            for index in range(self._stream.depth):
                self._stream.request_layer(index)
        self._emit.embed(it)
        for layer in range(self._engine.spec.num_layers):
            self._layer(it, layer)
        self._emit.head(it)
        return PassResult(list(in_flight.values()))

    def _in_flight(self, plan: PassPlan) -> dict[int, InFlight]:
        """One micro-batch, or by rank one for each GPU that has sequences in this pass."""
        blocks = self._engine.kv.allocator
        if not self._is_split:
            return {0: InFlight(assemble(0, plan.prefill, plan.decode, blocks), self._acts)}
        found = {}
        for rank in range(len(self._engine.ranks)):
            prefill, decode = ([s for s in phase if s.kv_rank == rank] for phase in (plan.prefill, plan.decode))
            if prefill or decode:
                found[rank] = InFlight(assemble(rank, prefill, decode, blocks), shard_of(self._acts, rank))
        return found

    def _together(self, in_flight: dict[int, InFlight]) -> InFlight:
        """Return what the emitter takes for all GPUs."""
        if not self._is_split:
            return in_flight[0]
        each = [in_flight.get(rank) for rank in range(len(self._engine.ranks))]
        return InFlight(
            cast(MicroBatch, Sharded(it and it.batch for it in each)),
            self._acts,
            cast(PassTickets, Sharded(it and it.tickets for it in each)),
        )

    def finish(self) -> None:
        self._stream.cancel_all()

    def _layer(self, it: InFlight, layer: int) -> None:
        emit, index = self._emit, self._next_index
        emit.attention_in(it, layer, self._take(index, "attention_in"))
        self._drop(index, "attention_in")
        emit.prefill_attention(it, layer)
        emit.offload_qkv(it, layer)
        emit.append_kv(it, layer)
        emit.decode_attention(it, layer)
        emit.attention_out(it, layer, self._take(index, "attention_out"))
        self._drop(index, "attention_out")
        for number, part in self._engine.store.experts(layer).items():
            emit.experts(it, layer, {number: self._take(index, part.layout.name)})
            self._drop(index, part.layout.name)
        emit.combine(it, layer)
        self._next_index += 1

    def _take(self, index: int, name: str):  # type: ignore[no-untyped-def]
        if not self._prefetch:
            self._emit.load(self._stream, index, name)
        return self._stream.part(index, name)

    def _drop(self, index: int, name: str) -> None:
        if self._prefetch:
            self._stream.advance(index, name)
        else:
            self._stream.release(index, name)
