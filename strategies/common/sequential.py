"""Run layer after layer, with the whole pass as one micro-batch: the plainest pipeline."""

from __future__ import annotations

from harness.engine.batch import PassPlan, assemble
from harness.engine.emitter import Emitter, InFlight
from harness.engine.engine import Engine
from harness.engine.gpus import resources as parallel
from harness.engine.replay import Replay
from harness.engine.strategy import PassResult
from harness.memory.placed import PlacedPart
from harness.memory.weights import WeightStream


class SequentialPipeline:
    """Takes each pass through the model layer by layer, with or without prefetch of weights.

    With `prefetch=False` each part is loaded when its turn comes, used, and dropped, so the device holds one part at a
    time, and every op waits for the one before it. With `prefetch=True` layers are double-buffered, so weight transfer
    overlaps with computation, while attention on the CPU and work on the GPU still alternate.

    Several GPUs share every layer if the engine has them. With `own_sequences` they share its transfer only: each runs
    the whole pass of the sequences whose KV cache it holds, of at most `max_tokens`.
    """

    def __init__(
        self, engine: Engine, *, max_tokens: int, packet_bytes: int, prefetch: bool, own_sequences: bool = False
    ) -> None:
        depth, num_gpus = 2 if prefetch else 1, len(engine.ranks)
        self._engine = engine
        self._prefetch = prefetch
        self._is_split = own_sequences and num_gpus > 1
        num_shares = num_gpus if self._is_split else 1
        self._streams = [
            WeightStream(
                each.machine,
                each.store,
                depth=depth,
                packet_bytes=packet_bytes,
                rank=each.rank,
                num_shares=num_shares,
                one_part=not prefetch,
                resident=each.resident,
            )
            for each in engine.ranks
        ]
        self._acts = parallel.activations(engine, max_tokens=max_tokens, name="activations")
        self._emit = Emitter(engine, serial=not prefetch)
        are_alike = num_gpus == 1 and engine.spec.num_layers % depth == 0  # passes of one shape
        self._replay = Replay(engine.machine, self._streams[0].under_way, applies=are_alike)
        self._next_index = 0

    def run(self, plan: PassPlan) -> PassResult:
        in_flight = self._in_flight(plan)
        it = InFlight.together(in_flight) if self._is_split else in_flight[0]
        if self._next_index == 0 and self._prefetch:
            for index in range(self._streams[0].depth):
                for stream in self._streams:
                    stream.request_layer(index)
        self._replay.run(in_flight, lambda: self._submit_pass(it))
        return PassResult(in_flight)

    def _submit_pass(self, it: InFlight) -> None:
        self._emit.embed(it)
        for layer in range(self._engine.spec.num_layers):
            self._layer(it, layer)
        self._emit.head(it)

    def _in_flight(self, plan: PassPlan) -> list[InFlight]:
        """Return one micro-batch, or one for each GPU that has sequences in this pass."""
        blocks = self._engine.kv.allocator
        if not self._is_split:
            return [InFlight.shared(assemble(0, plan.prefill, plan.decode, blocks), self._acts)]
        found = []
        for gpu, acts in enumerate(self._acts):
            prefill, decode = ([s for s in phase if s.kv_rank == gpu] for phase in (plan.prefill, plan.decode))
            if prefill or decode:
                found.append(InFlight(assemble(gpu, prefill, decode, blocks), acts, gpu=gpu))
        return found

    def finish(self) -> None:
        for stream in self._streams:
            stream.cancel_all()

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
            parts = self._take(index, part.layout.name)
            emit.experts(it, layer, [{number: each} for each in parts])
            self._drop(index, part.layout.name)
        emit.combine(it, layer)
        self._next_index += 1

    def _take(self, index: int, name: str) -> list[PlacedPart]:
        if not self._prefetch:
            self._emit.load(self._streams, index, name)
        parts = [stream.part(index, name) for stream in self._streams]
        if self._is_split and not self._streams[0].is_resident(index, name):
            self._emit.gather(parts, index % self._engine.spec.num_layers)
        return parts

    def _drop(self, index: int, name: str) -> None:
        for stream in self._streams:
            if self._prefetch:
                stream.advance(index, name)
            else:
                stream.release(index, name)
