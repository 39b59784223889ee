"""Sketch the event-driven placement of single experts after PreScope.

After each gate the active experts are spread over what is resident, what a prefetch brought, what is loaded on demand,
and the CPU; the next layer's experts are prefetched on a guess and withdrawn when the gate says otherwise.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from harness.engine.activations import Activations
from harness.engine.batch import PassPlan, assemble
from harness.engine.emitter import Emitter, InFlight
from harness.engine.engine import Engine
from harness.engine.ops.views import weights
from harness.engine.strategy import PassResult, Strategy
from harness.machine.base import CPU, D2H, H2D, Op, Ticket, Work
from harness.memory.ops import CopyWeights
from harness.memory.tiers import Buffer
from harness.memory.weights import PlacedPart, WeightStream
from strategies.common.static_batches import StaticBatches


class OffloadNormed(Op):
    """The transfer of gating input and routing to the host, for experts that run there."""

    kind: ClassVar[str] = "offload normed"

    def __init__(self, engine: Engine, it: InFlight, normed: Buffer, sums: Buffer, layer: int) -> None:
        self.spec, self.it, self.normed, self.sums, self.layer = engine.spec, it, normed, sums, layer
        self.reads, self.writes = (it.acts.normed,), (normed, sums)

    def work(self) -> Work:
        nbytes = self.it.batch.num_tokens * self.spec.hidden_dim * self.spec.dtype_bytes
        return Work(device_bytes=nbytes, host_bytes=nbytes, link_bytes=nbytes)

    def run(self, ctx, packet):
        shape = (self.it.batch.num_tokens, self.spec.hidden_dim)
        ctx.move(
            ctx.tensor(self.normed, shape, self.spec.dtype), ctx.tensor(self.it.acts.normed, shape, self.spec.dtype)
        )
        ctx.tensor(self.sums, shape, "float32").zero_()


class ExpertOnHost(Op):
    """One expert on the cpu lane, with the weights where they lie in host memory."""

    kind: ClassVar[str] = "expert on host"

    def __init__(self, engine, it, part, rows, probs, normed: Buffer, sums: Buffer, layer: int) -> None:
        self.engine, self.it, self.part, self.rows, self.probs = engine, it, part, rows, probs
        self.normed, self.sums, self.layer = normed, sums, layer
        self.reads, self.writes = (normed, *part.keys), (sums,)

    def work(self) -> Work:
        """Count one expert's weights, which are read, and its tokens' rows, which are read and added to."""
        spec, n = self.engine.spec, len(self.rows)
        row_bytes = spec.hidden_dim * (spec.dtype_bytes + 8)
        return Work(flops=2 * n * spec.expert_params, host_bytes=self.part.layout.nbytes + n * row_bytes)

    def run(self, ctx, packet):
        import torch

        spec, shape = self.engine.spec, (self.it.batch.num_tokens, self.engine.spec.hidden_dim)
        x = ctx.tensor(self.normed, shape, spec.dtype)[self.rows]
        y = self.engine.family.expert(spec, weights(ctx, self.part), x).float()
        sums = ctx.tensor(self.sums, shape, "float32")
        sums.index_add_(0, torch.as_tensor(self.rows), y * torch.as_tensor(self.probs)[:, None])


class LoadSums(Op):
    """The transfer of the sums of the host's experts to the device."""

    kind: ClassVar[str] = "load sums"

    def __init__(self, engine: Engine, it: InFlight, sums: Buffer, target: Buffer, layer: int) -> None:
        self.spec, self.it, self.sums, self.target, self.layer = engine.spec, it, sums, target, layer
        self.reads, self.writes = (sums,), (target,)

    def work(self) -> Work:
        nbytes = self.it.batch.num_tokens * self.spec.hidden_dim * 4
        return Work(device_bytes=nbytes, host_bytes=nbytes, link_bytes=nbytes)

    def run(self, ctx, packet):
        shape = (self.it.batch.num_tokens, self.spec.hidden_dim)
        ctx.move(ctx.tensor(self.target, shape, "float32"), ctx.tensor(self.sums, shape, "float32"))


class ExpertPlacement:
    """The strategy has two buffers for experts on demand, two for prefetched ones, and expert 0 of each layer
    resident."""

    def __init__(self, engine: Engine, *, max_tokens: int, cpu_below: int) -> None:
        machine, spec = engine.machine, engine.spec
        device, pinned = machine.tiers["device"], machine.tiers["pinned"]
        self._engine, self._emit, self._cpu_below = engine, Emitter(engine), cpu_below
        self._stream = WeightStream(machine, engine.store, depth=1, packet_bytes=4096, experts=False)
        self._acts = Activations(machine, spec, max_tokens=max_tokens, name="batch")
        size = engine.store.experts(0)[0].layout.nbytes
        self._on_demand = [device.reserve(f"on demand {i}", size) for i in range(2)]
        self._free = [device.reserve(f"prefetch {i}", size) for i in range(2)]
        self._resident = [device.reserve(f"resident {i}", size) for i in range(spec.num_layers)]
        for layer, buffer in enumerate(self._resident):
            self._copy(layer, 0, buffer)
        self._prefetched: dict[tuple[int, int], tuple[Buffer, Ticket]] = {}
        self._host_normed = pinned.reserve("host normed", max_tokens * spec.hidden_dim * spec.dtype_bytes)
        self._host_sums = pinned.reserve("host sums", max_tokens * spec.hidden_dim * 4)
        self._device_sums = device.reserve("device sums", max_tokens * spec.hidden_dim * 4)
        self._index = 0
        self.counts = {"resident": 0, "prefetched": 0, "on demand": 0, "cpu": 0, "cancelled": 0}

    def run(self, plan: PassPlan) -> PassResult:
        it = InFlight(assemble(0, plan.prefill, plan.decode, self._engine.kv.allocator), self._acts)
        self._emit.embed(it)
        for layer in range(self._engine.spec.num_layers):
            self._layer(it, layer)
            self._index += 1
        self._emit.head(it)
        return PassResult([it])

    def finish(self) -> None:
        self._withdraw(list(self._prefetched))
        self._stream.cancel_all()

    def _layer(self, it: InFlight, layer: int) -> None:
        machine, emit, stream, i = self._engine.machine, self._emit, self._stream, self._index
        for name in ("attention_in", "attention_out"):
            stream.request(i, name, urgent=True)  # ahead of prefetches that were only guessed
        emit.attention_in(it, layer, stream.part(i, "attention_in"))
        emit.prefill_attention(it, layer)
        emit.offload_qkv(it, layer)
        emit.append_kv(it, layer)
        emit.decode_attention(it, layer)
        emit.attention_out(it, layer, stream.part(i, "attention_out"))
        for name in ("attention_in", "attention_out"):
            stream.release(i, name)
        machine.submit(D2H, OffloadNormed(self._engine, it, self._host_normed, self._host_sums, layer))
        ids, probs = machine.wait(emit.route(it, layer))
        self._place(it, layer, ids, probs)
        sums = LoadSums(self._engine, it, self._host_sums, self._device_sums, layer)
        machine.submit(H2D, sums, urgent=True)  # ahead of the prefetches for the next layer
        emit.combine(it, layer, extra=(self._device_sums,))

    def _place(self, it: InFlight, layer: int, ids: np.ndarray, probs: np.ndarray) -> None:
        machine = self._engine.machine
        self._routed = np.bincount(ids.ravel(), minlength=self._engine.spec.num_experts)
        active = [e for e in np.argsort(self._routed).tolist() if self._routed[e]]
        self._withdraw([key for key in self._prefetched if key[0] != layer or key[1] not in active])
        pending: list[Ticket] = []
        spare = list(self._on_demand)
        owners: dict[Ticket, Buffer] = {}
        for expert in active:
            tokens, slots = np.nonzero(ids == expert)
            if expert == 0:
                self._count("resident")
                self._expert(it, layer, expert, self._resident[layer])
            elif (layer, expert) in self._prefetched:
                self._count("prefetched")
                buffer, _ = self._prefetched.pop((layer, expert))
                self._expert(it, layer, expert, buffer)
                self._free.append(buffer)  # the next copy into it waits for this expert by itself
            elif len(tokens) < self._cpu_below:
                self._count("cpu")
                part = self._engine.store.experts(layer)[expert]
                probabilities = probs[tokens, slots]
                machine.submit(
                    CPU,
                    ExpertOnHost(
                        self._engine, it, part, tokens, probabilities, self._host_normed, self._host_sums, layer
                    ),
                )
            else:
                if not spare:  # react to whichever on-demand expert finishes first
                    first = machine.wait_any(pending)[0]
                    pending.remove(first)
                    spare.append(owners.pop(first))
                self._count("on demand")
                buffer = spare.pop()
                self._copy(layer, expert, buffer)
                ticket = self._expert(it, layer, expert, buffer)
                owners[ticket] = buffer
                pending.append(ticket)
        following = (layer + 1) % self._engine.spec.num_layers
        for expert in active[-2:]:  # the guess: what is hot here is hot there
            if self._free and expert and (following, expert) not in self._prefetched:
                buffer = self._free.pop()
                self._prefetched[following, expert] = (buffer, self._copy(following, expert, buffer))

    def _withdraw(self, keys) -> None:
        for key in keys:
            buffer, ticket = self._prefetched.pop(key)
            if self._engine.machine.cancel(ticket):
                self._count("cancelled")
            self._free.append(buffer)

    def _copy(self, layer: int, expert: int, buffer: Buffer) -> Ticket:
        source = self._engine.store.experts(layer)[expert]
        return self._engine.machine.submit(H2D, CopyWeights(source, buffer, layer=layer, packet_bytes=4096))

    def _expert(self, it: InFlight, layer: int, expert: int, buffer: Buffer) -> Ticket:
        layout = self._engine.store.experts(layer)[expert].layout
        return self._emit.experts(it, layer, {expert: PlacedPart(layout, buffer, (buffer,))}, routed=self._routed)

    def _count(self, what: str) -> None:
        self.counts[what] += 1


def build(engine: Engine, cpu_below: int = 4) -> Strategy:
    scheduler = StaticBatches(engine.sequences, engine.kv.allocator, max_pass_tokens=512)
    return Strategy(scheduler=scheduler, pipeline=ExpertPlacement(engine, max_tokens=512, cpu_below=cpu_below))
