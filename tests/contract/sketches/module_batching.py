"""Sketch module-based batching after MoE-Gen.

Attention runs in small micro-batches, tokens accumulate in host memory, then the experts run one after another, each
over all of its tokens, in micro-batches of their own.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch

from harness.engine.activations import Activations
from harness.engine.batch import PassPlan, assemble
from harness.engine.emitter import Emitter, InFlight
from harness.engine.engine import Engine
from harness.engine.ops.views import weights
from harness.engine.strategy import PassResult, Strategy
from harness.machine.base import CPU, D2H, GPU, H2D, Op, Work
from harness.memory.tiers import Buffer
from harness.memory.weights import WeightStream
from strategies.common.static_batches import StaticBatches


class Pool:
    """The host memory in which the tokens of all attention micro-batches of a layer accumulate."""

    def __init__(self, engine: Engine, max_tokens: int) -> None:
        spec, pinned = engine.spec, engine.machine.tiers["pinned"]
        self.shape = (max_tokens, spec.hidden_dim)
        self.normed = pinned.reserve("accumulated tokens", max_tokens * spec.hidden_dim * spec.dtype_bytes)
        self.sums = pinned.reserve("accumulated sums", max_tokens * spec.hidden_dim * 4)


class Accumulate(Op):
    """Normed tokens of one micro-batch to rows of the pool, and zeros for their sums."""

    kind: ClassVar[str] = "accumulate"

    def __init__(self, engine: Engine, it: InFlight, pool: Pool, rows: slice, layer: int) -> None:
        self.spec, self.it, self.pool, self.rows, self.layer = engine.spec, it, pool, rows, layer
        self.reads = (it.acts.normed,)
        self.writes = ((pool.normed, it.batch.index), (pool.sums, it.batch.index))

    def work(self) -> Work:
        nbytes = self.it.batch.num_tokens * self.spec.hidden_dim * self.spec.dtype_bytes
        return Work(device_bytes=nbytes, host_bytes=nbytes, link_bytes=nbytes)

    def run(self, ctx, packet):
        n = self.it.batch.num_tokens
        source = ctx.tensor(self.it.acts.normed, (n, self.spec.hidden_dim), self.spec.dtype)
        ctx.move(ctx.tensor(self.pool.normed, self.pool.shape, self.spec.dtype)[self.rows], source)
        ctx.tensor(self.pool.sums, self.pool.shape, "float32")[self.rows] = 0


class MoveRows(Op):
    """The move of a host tensor's rows to a device buffer, or back."""

    kind: ClassVar[str] = "move rows"

    def __init__(
        self, engine: Engine, host: Buffer, host_shape, rows, device: Buffer, dtype, *, to_device, keys
    ) -> None:
        self.host, self.host_shape, self.rows, self.device = host, host_shape, rows, device
        self.dtype, self.to_device = dtype, to_device
        self.reads, self.writes = (keys, (device,)) if to_device else ((device,), keys)
        self.row_bytes = host_shape[1] * (4 if dtype == "float32" else engine.spec.dtype_bytes)

    def work(self) -> Work:
        nbytes = len(self.rows) * self.row_bytes
        return Work(device_bytes=nbytes, host_bytes=nbytes, link_bytes=nbytes)

    def run(self, ctx, packet):
        host = ctx.tensor(self.host, self.host_shape, self.dtype)
        device = ctx.tensor(self.device, (len(self.rows), self.host_shape[1]), self.dtype)
        if self.to_device:
            ctx.move(device, host[self.rows])
        else:
            ctx.move(host[self.rows.start : self.rows.stop], device)


class RunExpert(Op):
    """One expert over gathered tokens."""

    kind: ClassVar[str] = "expert"

    def __init__(self, engine: Engine, part, count: int, tokens: Buffer, result: Buffer, layer: int) -> None:
        self.engine, self.part, self.count, self.layer = engine, part, count, layer
        self.tokens, self.result = tokens, result
        self.reads, self.writes = (tokens, *part.keys), (result,)

    def work(self) -> Work:
        spec = self.engine.spec
        moved = self.count * spec.hidden_dim * (spec.dtype_bytes + 4)
        return Work(flops=2 * self.count * spec.expert_params, device_bytes=self.part.layout.nbytes + moved)

    def run(self, ctx, packet):
        spec = self.engine.spec
        x = ctx.tensor(self.tokens, (self.count, spec.hidden_dim), spec.dtype)
        y = self.engine.family.expert(spec, weights(ctx, self.part), x)
        ctx.tensor(self.result, (self.count, spec.hidden_dim), "float32").copy_(y)


class AddWeighted(Op):
    """An op that computes sums[rows] += probability * staged results, on the host."""

    kind: ClassVar[str] = "add weighted"

    def __init__(self, pool: Pool, staged: Buffer, rows, probs, keys, layer: int) -> None:
        self.pool, self.staged, self.rows, self.probs, self.layer = pool, staged, rows, probs, layer
        self.reads, self.writes = (staged,), keys

    def work(self) -> Work:
        return Work(host_bytes=3 * 4 * len(self.rows) * self.pool.shape[1])

    def run(self, ctx, packet):
        staged = ctx.tensor(self.staged, (len(self.rows), self.pool.shape[1]), "float32")
        sums = ctx.tensor(self.pool.sums, self.pool.shape, "float32")
        sums.index_add_(0, torch.as_tensor(self.rows), staged * torch.as_tensor(self.probs)[:, None])


class ModuleBatching:
    """The strategy takes `attention_batch` sequences through attention together, and `expert_batch` tokens through an
    expert."""

    def __init__(self, engine: Engine, *, attention_batch: int, expert_batch: int, max_tokens: int) -> None:
        machine, spec = engine.machine, engine.spec
        self._engine, self._emit = engine, Emitter(engine)
        self._attention_batch, self._expert_batch = attention_batch, expert_batch
        self._stream = WeightStream(machine, engine.store, depth=1, packet_bytes=4096)
        self._pool = Pool(engine, max_tokens)
        self._acts = [Activations(machine, spec, max_tokens=max_tokens, name=f"mb {i}") for i in range(attention_batch)]
        size = expert_batch * spec.hidden_dim
        self._tokens = machine.tiers["device"].reserve("expert tokens", size * spec.dtype_bytes)
        self._result = machine.tiers["device"].reserve("expert result", size * 4)
        self._staged = machine.tiers["pinned"].reserve("staged result", size * 4)
        self._index = 0

    def run(self, plan: PassPlan) -> PassResult:
        size = -(-len(plan.sequences) // self._attention_batch)
        groups = [plan.sequences[i : i + size] for i in range(0, len(plan.sequences), size)]
        pipeline, start = [], 0
        for i, group in enumerate(groups):
            prefill = [s for s in group if s in plan.prefill]
            decode = [s for s in group if s not in plan.prefill]
            it = InFlight(assemble(i, prefill, decode, self._engine.kv.allocator), self._acts[i])
            pipeline.append((it, slice(start, start + it.batch.num_tokens)))
            start += it.batch.num_tokens
            self._emit.embed(it)
        for layer in range(self._engine.spec.num_layers):
            self._layer(pipeline, layer)
            self._index += 1
        for it, _ in pipeline:
            self._emit.head(it)
        return PassResult([it for it, _ in pipeline])

    def finish(self) -> None:
        self._stream.cancel_all()

    def _layer(self, pipeline, layer: int) -> None:
        machine, emit, stream, i = self._engine.machine, self._emit, self._stream, self._index
        routing = []
        for name in ("attention_in", "attention_out"):
            emit.load(stream, i, name)
        for it, rows in pipeline:
            emit.attention_in(it, layer, stream.part(i, "attention_in"))
            emit.prefill_attention(it, layer)
            emit.offload_qkv(it, layer)
            emit.append_kv(it, layer)
            emit.decode_attention(it, layer)
            emit.attention_out(it, layer, stream.part(i, "attention_out"))
            machine.submit(D2H, Accumulate(self._engine, it, self._pool, rows, layer))
            routing.append(emit.route(it, layer))
        for name in ("attention_in", "attention_out"):
            stream.release(i, name)
        ids, weight = (np.concatenate(values) for values in zip(*map(machine.wait, routing), strict=True))
        for expert in range(self._engine.spec.num_experts):
            self._expert(pipeline, layer, expert, ids, weight)
        for it, rows in pipeline:
            shape, keys = self._pool.shape, ((self._pool.sums, it.batch.index),)
            back = MoveRows(
                self._engine, self._pool.sums, shape, range(rows.start, rows.stop), it.acts.moe_out, "float32",
                to_device=True, keys=keys,
            )  # fmt: skip
            machine.submit(H2D, back)
            emit.combine(it, layer)

    def _expert(self, pipeline, layer: int, expert: int, ids, weight) -> None:
        machine, spec = self._engine.machine, self._engine.spec
        tokens, slots = np.nonzero(ids == expert)
        if not len(tokens):
            return
        name = self._engine.store.experts(layer)[expert].layout.name
        self._emit.load(self._stream, self._index, name)
        part = self._stream.part(self._index, name)
        in_keys = tuple((self._pool.normed, it.batch.index) for it, _ in pipeline)
        sum_keys = tuple((self._pool.sums, it.batch.index) for it, _ in pipeline)
        for start in range(0, len(tokens), self._expert_batch):
            rows = tokens[start : start + self._expert_batch].tolist()
            probs = weight[rows, slots[start : start + self._expert_batch]]
            shape = self._pool.shape
            machine.submit(
                H2D,
                MoveRows(
                    self._engine, self._pool.normed, shape, rows, self._tokens, spec.dtype, to_device=True, keys=in_keys
                ),
            )
            machine.submit(GPU, RunExpert(self._engine, part, len(rows), self._tokens, self._result, layer))
            staged_shape = (self._expert_batch, spec.hidden_dim)
            down = MoveRows(
                self._engine, self._staged, staged_shape, range(len(rows)), self._result, "float32",
                to_device=False, keys=(self._staged,),
            )  # fmt: skip
            machine.submit(D2H, down)
            machine.submit(CPU, AddWeighted(self._pool, self._staged, rows, probs, sum_keys, layer))
        self._stream.release(self._index, name)


def build(engine: Engine) -> Strategy:
    max_tokens = 512
    scheduler = StaticBatches(engine.sequences, engine.kv.allocator, max_pass_tokens=max_tokens)
    pipeline = ModuleBatching(engine, attention_batch=3, expert_batch=16, max_tokens=max_tokens)
    return Strategy(scheduler=scheduler, pipeline=pipeline)
