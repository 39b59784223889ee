"""VSLPipe lets two halves of a batch take turns on the GPU and the CPU (MoE-Lens §6.4, Figures 8 and 9).

A layer is GA (norm, QKV, prefill attention), C (KV append and decode attention on the CPU) and GB (O projection,
router, experts). While the GPU computes GB and the next layer's GA for one half, the CPU attends for the other.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from harness.engine.activations import Activations
from harness.engine.batch import PassPlan, assemble
from harness.engine.emitter import Emitter, InFlight
from harness.engine.engine import Engine
from harness.engine.replay import Replay
from harness.engine.sequences import Sequence, num_tokens
from harness.engine.strategy import PassResult
from harness.memory.weights import WeightStream
from strategies.moelens.config import Config

_LAYERS_BUFFERED = 2


class VSLPipe:
    """The pipeline of MoE-Lens, whose weight buffer holds two layers.

    The transfer unit of stage i is {O, router, experts} of a layer with {norm, QKV} of the next, contiguous in host
    memory. The place of each part is handed on as soon as the part's last reader has been submitted, so the link never
    drains, not even between passes.
    """

    def __init__(self, engine: Engine, config: Config, *, max_tokens: int) -> None:
        machine, spec = engine.machine, engine.spec
        self._engine = engine
        self._num_layers = spec.num_layers
        self._emit = Emitter(engine)
        self._on_gpu = config.attention == "gpu"
        self._stream = WeightStream(
            machine,
            engine.store,
            depth=_LAYERS_BUFFERED,
            packet_bytes=int(config.packet_mb * 1e6),
            resident=engine.resident,
            experts_together=True,
        )
        self._acts = [
            Activations(machine, spec, max_tokens=max_tokens, name=name, device_blocks=engine.kv.num_device_blocks)
            for name in ("alpha", "beta")
        ]
        self._staging = (
            [machine.tiers["device"].reserve(f"kv staging {i}", int(config.gpu_kv_staging_mb * 1e6)) for i in (0, 1)]
            if self._on_gpu
            else []
        )
        self._first_index = 0  # stream index of the layer 0 of the pass that is emitted next
        # Loads for the GPU's attention depend on how long the contexts are, and buffers on where a pass begins.
        are_alike = not self._on_gpu and self._num_layers % _LAYERS_BUFFERED == 0
        self._replay = Replay(machine, self._stream.under_way, applies=are_alike)

    def run(self, plan: PassPlan) -> PassResult:
        halves = [
            InFlight(assemble(i, prefill, decode, self._engine.kv.allocator), self._acts[i])
            for i, (prefill, decode) in enumerate(split(plan))
        ]
        if self._first_index == 0:
            self._request_first_layers()
        self._replay.run(halves, lambda: self._submit_pass(halves))
        return PassResult(halves)

    def finish(self) -> None:
        self._stream.cancel_all()

    def _submit_pass(self, halves: list[InFlight]) -> None:
        """Submit the ops of one pass, line by line as in Figure 9."""
        alpha, beta = halves[0], halves[1:]  # beta is empty where a single sequence runs
        last = self._num_layers - 1
        for it in (alpha, *beta):
            self._emit.embed(it)
        # Prologue: GA_0(alpha), then GA_0(beta) during C_0(alpha).
        self._ga(0, [alpha])
        self._c(0, [alpha])
        self._ga(0, beta)
        self._pass_on(0, "attention_in")
        for i in range(last):
            # Stage i, phase 1: the GPU has alpha, the CPU has beta.
            self._c(i, beta)
            self._gb(i, [alpha])
            self._ga(i + 1, [alpha])
            # Phase 2: the GPU has beta, the CPU has alpha of the next layer.
            self._c(i + 1, [alpha])
            self._gb(i, beta)
            self._ga(i + 1, beta)
            self._pass_on(i, "attention_out")
            self._pass_on(i + 1, "attention_in")
        # Epilogue: GB of the last layer with the head.
        self._c(last, beta)
        self._gb(last, [alpha])
        self._emit.head(alpha)
        self._gb(last, beta)
        self._pass_on(last, "attention_out")
        for it in beta:
            self._emit.head(it)
        self._first_index += self._num_layers

    def _ga(self, layer: int, half: Seq[InFlight]) -> None:
        for it in half:
            self._emit.attention_in(it, layer, self._stream.part(self._first_index + layer, "attention_in"))
            self._emit.offload_qkv(it, layer)
            self._emit.prefill_attention(it, layer)

    def _c(self, layer: int, half: Seq[InFlight]) -> None:
        for it in half:
            self._emit.append_kv(it, layer)
            if not self._on_gpu:
                self._emit.decode_attention(it, layer)

    def _gb(self, layer: int, half: Seq[InFlight]) -> None:
        index = self._first_index + layer
        for it in half:
            if self._on_gpu and it.batch.decode:
                self._emit.decode_attention_on_device(it, layer, self._staging)
            self._emit.attention_out(it, layer, self._stream.part(index, "attention_out"))
            self._emit.experts(it, layer, self._stream.experts(index))
            self._emit.combine(it, layer)

    def _pass_on(self, layer: int, first_part: str) -> None:
        """Give the place of a part to the layer after the next, and for `attention_out` the place of the experts after
        it too."""
        index = self._first_index + layer
        names = self._stream.part_names(index)
        behind = names[names.index(first_part) :] if first_part == "attention_out" else (first_part,)
        for name in behind:
            self._stream.advance(index, name)

    def _request_first_layers(self) -> None:
        for index in range(_LAYERS_BUFFERED):
            self._stream.request_layer(index)


def split(plan: PassPlan) -> list[tuple[list[Sequence], list[Sequence]]]:
    """Split a pass into halves alpha and beta, with prefill tokens, decode tokens and decode contexts each balanced.

    Returns one half where there is one sequence; an empty half is never returned.
    """
    halves: list[tuple[list[Sequence], list[Sequence]]] = [([], []), ([], [])]
    longest_first = np.argsort(-num_tokens(plan.decode), kind="stable")
    dealt = (np.arange(len(plan.decode)) + 1) // 2 % 2  # 0 1 1 0 0 1 1 0 ...: counts within one, contexts balanced
    for number, (_, decode) in enumerate(halves):
        decode += [plan.decode[at] for at in longest_first[dealt == number].tolist()]
    loads = [0, 0] if len(halves[0][1]) <= len(halves[1][1]) else [1, 0]
    for sequence in sorted(plan.prefill, key=lambda s: -s.num_tokens):
        lighter = loads.index(min(loads))
        halves[lighter][0].append(sequence)
        loads[lighter] += sequence.num_tokens
    return [half for half in halves if half[0] or half[1]]
