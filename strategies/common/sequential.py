"""Layer after layer with the whole pass as one micro-batch: the plainest pipeline."""

from __future__ import annotations

from harness.engine import parallel
from harness.engine.batch import PassPlan, assemble
from harness.engine.emitter import InFlight
from harness.engine.engine import Engine
from harness.engine.strategy import PassResult


class SequentialPipeline:
    """`prefetch=False`: each part is loaded when its turn comes, used, and dropped, and every op waits for the one
    before it. `prefetch=True`: layers are double-buffered, so weight transfer overlaps with computation, while
    attention on the CPU and work on the GPU still alternate. Several GPUs share the model if the engine has them.
    """

    def __init__(self, engine: Engine, *, max_tokens: int, packet_bytes: int, prefetch: bool) -> None:
        depth = 2 if prefetch else 1
        self._engine = engine
        self._prefetch = prefetch
        self._stream = parallel.weight_stream(engine, depth=depth, packet_bytes=packet_bytes)
        self._acts = parallel.activations(engine, max_tokens=max_tokens, name="activations")
        self._emit = parallel.emitter(engine, serial=not prefetch)
        self._next_index = 0

    def run(self, plan: PassPlan) -> PassResult:
        batch = assemble(0, plan.prefill, plan.decode, self._engine.kv.allocator)
        it = InFlight(batch, self._acts)
        if self._next_index == 0 and self._prefetch:
            for index in range(self._stream.depth):
                self._stream.request_layer(index)
        self._emit.embed(it)
        for layer in range(self._engine.spec.num_layers):
            self._layer(it, layer)
        sampled = self._engine.machine.wait(self._emit.head(it))
        return PassResult([batch], [sampled])

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
        for name in self._engine.store.part_names(layer):
            if name.startswith("expert."):
                emit.experts(it, layer, {int(name.split(".")[1]): self._take(index, name)})
                self._drop(index, name)
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
