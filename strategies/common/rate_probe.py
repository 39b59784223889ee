"""The rates of an HRM, measured on the machine that the policy is for, while FLOPs and bytes are calculated
(MoE-Lightning §4.2). Every machine is probed alike: with ops of one layer, each lane alone, in buffers that are given
back. The cost of an op is what the smallest of its kind takes beyond its rates while weights are on their way: on a
machine of threads an op waits for others in company, and short ones most of all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from statistics import median

from harness.engine import parallel
from harness.engine.activations import Activations
from harness.engine.batch import MicroBatch, assemble
from harness.engine.emitter import Emitter, InFlight
from harness.engine.engine import Engine
from harness.engine.limits import SLACK_BYTES, tokens_that_fit
from harness.engine.ops.data import OffloadQkv, UploadTokens
from harness.engine.sequences import Sequence, State
from harness.engine.sharded import shard_of
from harness.machine.base import D2H, H2D, Ticket, Work
from harness.memory.kv_cache import BlockAllocator
from harness.memory.paged_weights import PagedWeights
from harness.workload.request import Request
from strategies.common.hrm import Level
from strategies.common.policy_cost import OpSeconds, Rates

_MANY_TOKENS = 1024  # that saturate the GPU's arithmetic, where its memory holds them
_FEW_TOKENS_AN_EXPERT = 2  # so few that reading the weights takes longer
_SOME_TOKENS = 128  # the same for a CPU, which has less to saturate and takes longer
_CONTEXT_TOKENS = 64  # of a sequence, for attention on the CPU
_REPEATS = 3  # disturbances only ever add time: the shortest counts
_REPEATS_IN_COMPANY = 5  # in each round; disturbances belong to what is measured: the median counts
_ROUNDS_IN_COMPANY = 3
_LAYERS_BUFFERED = 2
_OPS_OF_MATRICES = 4  # those that `_matrices` times
_LEAST_S = 1e-9  # a clock may stand still

Once = Callable[[], list[Ticket]]  # submits the ops that are timed


class RateProbe:
    """`measure` takes a few passes of one layer. Of several GPUs all links are probed together, as they will be used;
    for the rest the first stands for all. Without `cpu_ffn`, where no experts will run on the CPU, their rate is not
    measured; attention's stands in its place. `extended`: what the extensions of Eq. 12-14 need, too; the GPU's rates
    are then those without the fixed cost of its ops."""

    def __init__(
        self,
        engine: Engine,
        *,
        packet_bytes: int,
        shares_layers: bool = True,
        cpu_ffn: bool = True,
        extended: bool = False,
    ) -> None:
        self._engine, self._packet_bytes = engine, packet_bytes
        self._cpu_ffn, self._extended = cpu_ffn, extended
        self._adds_up = shares_layers and len(engine.ranks) > 1
        self._emit = Emitter(engine, fifo=True)
        self._layer = engine.spec.num_layers - 1  # leading layers may be dense
        fitting = tokens_that_fit(
            engine,
            num_layers_buffered=_LAYERS_BUFFERED,
            num_micro_batches=1,
            pinned_reserved_bytes=self._staging_bytes,
            host_experts=cpu_ffn,
        )
        self._max_tokens = max(1, min(_MANY_TOKENS, fitting))

    @property
    def _staging_bytes(self) -> int:
        """Of layers in pinned memory, on their way to each GPU."""
        store, num_gpus = self._engine.store, len(self._engine.ranks)
        return num_gpus * _LAYERS_BUFFERED * store.layer_bytes + SLACK_BYTES if store.is_pageable else 0

    def measure(self) -> Rates:
        engine = self._engine
        all_weights = parallel.paged_weights(engine, num_pages=4, packet_bytes=self._packet_bytes)
        all_acts = parallel.activations(
            engine, max_tokens=self._max_tokens, name="rate probe", host_experts=self._cpu_ffn
        )
        weights, acts = shard_of(all_weights, 0), shard_of(all_acts, 0)
        try:
            pin_bytes_s, h2d_bytes_s = self._weights(all_weights)
            gpu = self._gpu(weights, acts)
            cpu = self._cpu(weights, acts)
            cpu_ffn = self._cpu_experts(weights, acts) if self._cpu_ffn else cpu
            d2h_bytes_s = self._offload(acts)
            rates = Rates(
                gpu=gpu,
                cpu_attention=cpu,
                cpu_ffn=cpu_ffn,
                h2d_bytes_s=h2d_bytes_s,
                d2h_bytes_s=d2h_bytes_s,
                pin_bytes_s=pin_bytes_s if engine.store.is_pageable else None,
                peer_bytes_s=self._sums(all_acts) if self._adds_up else None,
            )
            if self._extended:
                rates = self._with_ops(rates, all_weights, all_acts)
        finally:
            all_weights.close()
            for rank in range(len(engine.ranks)):
                shard_of(all_acts, rank).close()
        return rates

    def _weights(self, weights: PagedWeights) -> tuple[float, float]:
        """Bytes/s of the staging copies and of each link, over a whole layer; the layer stays on the device."""
        last = weights.num_pages_of(self._layer) - 1
        machine, nbytes = self._engine.machine, weights.slot_bytes

        def timed(run: Callable[[], None]) -> float:
            machine.drain()
            start_s = machine.now()
            run()
            machine.drain()
            return max(machine.now() - start_s, _LEAST_S)

        staging_s, link_s = [], []
        for repeat in range(_REPEATS):
            staging_s.append(timed(lambda: weights.stage(self._layer, last)))
            link_s.append(timed(lambda: weights.load(self._layer, last)))
            if repeat < _REPEATS - 1:
                weights.release(self._layer)
        return len(self._engine.ranks) * nbytes / min(staging_s), nbytes / min(link_s)

    def _gpu(self, weights: PagedWeights, acts: Activations) -> Level:
        """FLOP/s with many tokens, bytes/s with so few that reading the weights is what takes time."""
        many_s, many = self._shortest(self._matrices(weights, acts, self._max_tokens))
        few_s, little = self._shortest(self._matrices(weights, acts, self._few_tokens))
        return Level(name="gpu", flops_s=many.flops / many_s, bytes_s=little.device_bytes / few_s)

    def _with_ops(self, rates: Rates, all_weights: PagedWeights, all_acts: Activations) -> Rates:
        """With the fixed cost of ops, and host memory's own rate. On the GPU few tokens differ from a single one by the
        bytes that they read more, which gives both cost and rate; beside many tokens it is small."""
        weights, acts = shard_of(all_weights, 0), shard_of(all_acts, 0)

        def beside_link(once: Once) -> tuple[float, Work]:
            return self._in_company(once, all_weights)

        few_s, little = beside_link(self._matrices(weights, acts, self._few_tokens))
        one_s, least = beside_link(self._matrices(weights, acts, 1))
        gpu = rates.gpu
        if few_s > one_s and little.device_bytes > least.device_bytes:
            gpu = replace(gpu, bytes_s=(little.device_bytes - least.device_bytes) / (few_s - one_s))
        fixed_s = max(one_s - least.device_bytes / gpu.bytes_s, 0.0)
        with self._attention(weights, acts, 1, 1) as once:
            attend_s, attended = beside_link(once)
        offload_s, offloaded = beside_link(self._offloads(acts, 1))
        upload_s, uploaded = self._shortest(self._uploads(acts))
        op_s = OpSeconds(
            gpu=fixed_s / _OPS_OF_MATRICES,
            cpu=max(attend_s - attended.host_bytes / rates.cpu_attention.bytes_s, 0.0),
            h2d=max(upload_s - uploaded.link_bytes / rates.h2d_bytes_s, 0.0),
            d2h=max(offload_s - offloaded.link_bytes / rates.d2h_bytes_s, 0.0),
        )
        return replace(rates, gpu=gpu, op_s=op_s, host_bytes_s=self._engine.machine.host_bytes_s)

    @property
    def _few_tokens(self) -> int:
        spec = self._engine.spec
        return min(self._max_tokens, _FEW_TOKENS_AN_EXPERT * max(1, spec.num_experts // spec.experts_per_token))

    def _cpu_experts(self, weights: PagedWeights, acts: Activations) -> Level:
        """FLOP/s and bytes/s of a layer's experts on the CPU, with some tokens and with few."""
        (some_s, some), (few_s, little) = (
            self._experts_on_host(weights, acts, n) for n in (min(_SOME_TOKENS, self._max_tokens), self._few_tokens)
        )
        return Level(name="cpu", flops_s=some.flops / some_s, bytes_s=little.host_bytes / few_s)

    def _experts_on_host(self, weights: PagedWeights, acts: Activations, num_tokens: int) -> tuple[float, Work]:
        it, layer = self._behind_attention(weights, acts, num_tokens), self._layer
        self._emit.attention_out(it, layer, weights.part(layer, "attention_out"))
        return self._shortest(lambda: self._emit.experts_on_host(it, layer))

    def _matrices(self, weights: PagedWeights, acts: Activations, num_tokens: int) -> Once:
        """A layer's projections, router and experts."""
        part, layer = weights.part, self._layer
        it = self._behind_attention(weights, acts, num_tokens)

        def once() -> list[Ticket]:
            done = [
                self._emit.attention_in(it, layer, part(layer, "attention_in")),
                self._emit.attention_out(it, layer, part(layer, "attention_out")),
                self._emit.experts(it, layer, weights.experts(layer)),
                self._emit.combine(it, layer),
            ]
            return [ticket for ticket in done if ticket is not None]

        return once

    def _behind_attention(self, weights: PagedWeights, acts: Activations, num_tokens: int) -> InFlight:
        """A prompt up to attention, by whose results the router chooses: memory as it happens to be would send all
        tokens to the same experts."""
        it = InFlight(self._prompt(num_tokens), acts)
        self._emit.embed(it)
        self._emit.attention_in(it, self._layer, weights.part(self._layer, "attention_in"))
        self._emit.prefill_attention(it, self._layer)
        return it

    def _cpu(self, weights: PagedWeights, acts: Activations) -> Level:
        """Attention over as many sequences as the probe's buffers and the free blocks allow."""
        blocks = self._engine.kv.allocator
        context = max(1, min(_CONTEXT_TOKENS, self._max_tokens, blocks.num_free * blocks.block_size))
        count = max(1, min(self._max_tokens // context, blocks.num_free // blocks.blocks_for(context)))
        with self._attention(weights, acts, count, context) as once:
            seconds, work = self._shortest(once)
        return Level(name="cpu", flops_s=work.flops / seconds, bytes_s=work.host_bytes / seconds)

    @contextmanager
    def _attention(self, weights: PagedWeights, acts: Activations, count: int, context: int) -> Iterator[Once]:
        """Of `count` sequences, which have blocks meanwhile; their keys and values are written first, since memory that
        was never written is read too fast."""
        blocks, layer = self._engine.kv.allocator, self._layer
        cached = [self._sequence(number, context) for number in range(count)]
        for sequence in cached:
            blocks.grow(sequence, context)
        written = InFlight(assemble(0, cached, [], blocks), acts)
        self._emit.embed(written)
        self._emit.attention_in(written, layer, weights.part(layer, "attention_in"))
        self._emit.offload_qkv(written, layer)
        self._emit.append_kv(written, layer)
        for sequence in cached:
            sequence.num_cached = context - 1
        it = InFlight(assemble(0, [], cached, blocks), acts)

        def once() -> list[Ticket]:
            ticket = self._emit.attend_on_host(it, layer)
            assert ticket is not None, "its cache lies in host memory"
            return [ticket]

        yield once
        for sequence in cached:
            self._engine.kv.release(sequence)

    def _offload(self, acts: Activations) -> float:
        """Bytes/s of keys and values on their way to the host."""
        seconds, work = self._shortest(self._offloads(acts, self._max_tokens))
        return work.link_bytes / seconds

    def _offloads(self, acts: Activations, num_tokens: int) -> Once:
        spec, batch = self._engine.spec, self._prompt(num_tokens)
        return lambda: [self._emit.submit(D2H, OffloadQkv(spec, batch, acts, self._layer, queries=False))]

    def _uploads(self, acts: Activations) -> Once:
        spec, batch = self._engine.spec, self._prompt(1)
        return lambda: [self._emit.submit(H2D, UploadTokens(spec, batch, acts))]

    def _sums(self, acts: Activations) -> float:
        """Bytes/s that each GPU sends while partial sums are added up over all of them."""
        emit, it = parallel.emitter(self._engine, fifo=True), InFlight(self._prompt(self._max_tokens), acts)
        seconds, work = self._shortest(lambda: [emit.combine(it, self._layer)])
        return work.link_bytes / seconds

    def _shortest(self, once: Once) -> tuple[float, Work]:
        """Of some repetitions: seconds of the ops together, and their work."""
        times, work = self._timed(once, _REPEATS)
        return max(min(times), _LEAST_S), work

    def _in_company(self, once: Once, weights: PagedWeights) -> tuple[float, Work]:
        """The median, while the links bring a layer."""
        index, times = self._layer + 1, []
        for _ in range(_ROUNDS_IN_COMPANY):
            weights.load(index, weights.num_pages_of(index) - 1)
            found, work = self._timed(once, _REPEATS_IN_COMPANY)
            times += found
            self._engine.machine.drain()
            weights.release(index)
        return max(median(times), _LEAST_S), work

    def _timed(self, once: Once, repeats: int) -> tuple[list[float], Work]:
        times = []
        for _ in range(repeats + 1):  # the first one warms up
            tickets = once()
            for ticket in tickets:
                self._engine.machine.wait(ticket)
            self._engine.machine.now()
            times.append(sum((t.finished_s or 0.0) - (t.started_s or 0.0) for t in tickets))
        works = [ticket.op.work() for ticket in tickets]
        return times[1:], Work(*(sum(values) for values in zip(*works, strict=True)))

    def _prompt(self, num_tokens: int) -> MicroBatch:
        """Prompts of random length would say no more than one of all tokens; its blocks are nobody's."""
        sequence = self._sequence(0, num_tokens)
        allocator = BlockAllocator(num_tokens, 1)
        allocator.grow(sequence, num_tokens)
        return assemble(0, [sequence], [], allocator)

    def _sequence(self, number: int, num_tokens: int) -> Sequence:
        vocab = self._engine.spec.vocab_size
        ids = tuple((number * 7919 + 31 * position) % vocab for position in range(num_tokens))
        request = Request(request_id=-1 - number, prompt_ids=ids, max_new_tokens=2, text=None)
        return Sequence(request, state=State.PREFILL)
