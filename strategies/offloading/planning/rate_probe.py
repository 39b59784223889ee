"""Measure the rates of an HRM on the machine that the policy is for; FLOPs and bytes are calculated (MoE-Lightning
§4.2).

Every machine is probed alike: with ops of one layer, each lane alone, in buffers that are given back. The cost of an op
is the time that the smallest op of its kind takes beyond its rates while weights are on their way: on a machine of
threads an op waits for others that run at the same time, and short ops most of all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from harness.bench.op_bench import Once, OpBench, Timed
from harness.bench.shapes import Shape
from harness.engine.activations import Activations
from harness.engine.emitter import InFlight
from harness.engine.engine import Engine
from harness.engine.gpus import resources as parallel
from harness.engine.limits import SLACK_BYTES, tokens_that_fit
from harness.engine.ops.data import OffloadQkv, UploadTokens
from harness.machine.base import CPU, D2H, H2D, Ticket
from harness.memory.paged_weights import PagedWeights
from strategies.offloading.planning.cost import OpSeconds, Rates, SizedFlops
from strategies.offloading.planning.hrm import Level

_MANY_TOKENS = 1024  # these saturate the GPU's arithmetic, where its memory holds them
_FEW_TOKENS_AN_EXPERT = 2  # with so few, reading the weights takes longer than arithmetic
_SOME_TOKENS = 128  # these saturate a CPU, which needs fewer tokens and takes longer
_CONTEXT_TOKENS = 64  # of each sequence, for attention on the CPU
_REPEATS = 3  # disturbances only ever add time: the shortest counts
_REPEATS_IN_COMPANY = 5  # in each round; here disturbances are part of the time: the median counts
_ROUNDS_IN_COMPANY = 3
_ROUNDS_OF_ONE = 5
_LEAST_SHARE = 0.1  # of an op's time that is left without its fixed cost, which was measured with other ops
_LAYERS_BUFFERED = 2
_OPS_OF_MATRICES = 4  # those that `OpBench.layer` times without attention
_LEAST_S = 1e-9  # a clock may stand still


class RateProbe:
    """Measures the rates with ops of one layer.

    The links of several GPUs are all probed together, as they will be used; for the other rates the first GPU stands
    for all. Without `cpu_ffn`, where no experts will run on the CPU, their rate is not measured, and attention's stands
    in its place. With `extended` the probe also measures what the extensions of Eq. 12-14 need; the GPU's rates are
    then those without the fixed cost of its ops.
    """

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
        self._layer = engine.spec.moe_layers[-1]
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
        """The bytes of layers in pinned memory, on their way to each GPU."""
        store, num_gpus = self._engine.store, len(self._engine.ranks)
        return num_gpus * _LAYERS_BUFFERED * store.layer_bytes + SLACK_BYTES if store.is_pageable else 0

    def measure(self) -> Rates:
        """Return what the machine reaches. All memory is given back."""
        engine = self._engine
        with self._bench() as (bench, weights, acts):
            pin_bytes_s, h2d_bytes_s = self._weights(weights)
            gpu = self._gpu(bench)
            cpu = self._cpu(bench)
            cpu_ffn = self._cpu_experts(bench) if self._cpu_ffn else cpu
            offloaded = bench.timed(self._offloads(bench, self._max_tokens), _REPEATS)
            rates = Rates(
                gpu=gpu,
                cpu_attention=cpu,
                cpu_ffn=cpu_ffn,
                h2d_bytes_s=h2d_bytes_s,
                d2h_bytes_s=offloaded.work.link_bytes / offloaded.shortest_s,
                pin_bytes_s=pin_bytes_s if engine.store.is_pageable else None,
                peer_bytes_s=self._sums(bench, acts) if self._adds_up else None,
            )
            return self._with_ops(rates, bench, weights) if self._extended else rates

    def at_sizes(self, rates: Rates, *, decode_tokens: int, prompts: Shape) -> Rates:
        """Return the rates with the FLOP/s that the GPU reaches at the sizes of a policy, beside a busy link.

        These are a micro-batch of so many decoding sequences, and a part of a prefill with these prompts. Whatever is
        larger than the probe's buffers is as fast as what fits them. All memory is given back.
        """
        fitting = Shape.of_prompts(
            min(prompts.num_tokens, self._max_tokens), min(max(prompts.prompts), self._max_tokens)
        )
        rows = min(decode_tokens, self._max_tokens)
        with self._bench() as (bench, weights, _):
            self._load(weights, self._layer)

            def flops_s(once: Once, num_ops: int) -> float:
                # Once beside each transfer of a layer: long ops would outlast it.
                timed = self._in_company(bench, weights, once, repeats=1, rounds=_ROUNDS_OF_ONE, warm_ups=0)
                alone_s = timed.median_s - num_ops * rates.op_s.gpu
                return timed.work.flops / max(alone_s, _LEAST_SHARE * timed.median_s)

            sized = SizedFlops(
                decode=flops_s(self._matrices(bench, rows), _OPS_OF_MATRICES),
                prefill=flops_s(self._matrices(bench, fitting.num_tokens), _OPS_OF_MATRICES),
                prefill_attention=flops_s(self._prompt_attention(bench, fitting), 1),
            )
        return replace(rates, sized=sized)

    @contextmanager
    def _bench(self) -> Iterator[tuple[OpBench, list[PagedWeights], list[Activations]]]:
        """Give a bench in buffers of its own."""
        engine = self._engine
        weights = parallel.paged_weights(engine, num_pages=4, packet_bytes=self._packet_bytes)
        acts = parallel.activations(engine, max_tokens=self._max_tokens, name="rate probe", host_experts=self._cpu_ffn)
        try:
            yield OpBench(engine, weights[0], acts[:1], fifo=True), weights, acts
        finally:
            for pages, buffers in zip(weights, acts, strict=True):
                pages.close()
                buffers.close()

    def _load(self, weights: list[PagedWeights], layer: int) -> None:
        for pages in weights:
            pages.load(layer, pages.num_pages_of(layer) - 1)

    def _in_company(
        self, bench: OpBench, weights: list[PagedWeights], once: Once, *, repeats: int, rounds: int, warm_ups: int = 1
    ) -> Timed:
        """Time ops while the next layer's weights are on their way: all those of a round within one transfer, if they
        are short enough."""

        @contextmanager
        def busy_link() -> Iterator[None]:
            self._load(weights, self._layer + 1)
            yield
            self._engine.machine.drain()
            for pages in weights:
                pages.release(self._layer + 1)

        return bench.timed(once, repeats, rounds=rounds, warm_ups=warm_ups, beside=busy_link)

    def _weights(self, weights: list[PagedWeights]) -> tuple[float, float]:
        """Return the bytes/s of each GPU's staging copies and of each link, over a whole layer; the layer stays on the
        device."""
        last = weights[0].num_pages_of(self._layer) - 1
        machine, nbytes = self._engine.machine, weights[0].slot_bytes

        def timed(run: Callable[[PagedWeights], object]) -> float:
            machine.drain()
            start_s = machine.now()
            for pages in weights:
                run(pages)
            machine.drain()
            return max(machine.now() - start_s, _LEAST_S)

        staging_s, link_s = [], []
        for repeat in range(_REPEATS):
            staging_s.append(timed(lambda pages: pages.stage(self._layer, last)))
            link_s.append(timed(lambda pages: pages.load(self._layer, last)))
            if repeat < _REPEATS - 1:
                for pages in weights:
                    pages.release(self._layer)
        return nbytes / min(staging_s), nbytes / min(link_s)

    def _gpu(self, bench: OpBench) -> Level:
        """Measure FLOP/s with many tokens, and bytes/s with so few that reading the weights is what takes time."""
        many, few = (bench.timed(self._matrices(bench, n), _REPEATS) for n in (self._max_tokens, self._few_tokens))
        bytes_s = few.work.device_bytes / few.shortest_s
        return Level(name="gpu", flops_s=many.work.flops / many.shortest_s, bytes_s=bytes_s)

    def _with_ops(self, rates: Rates, bench: OpBench, weights: list[PagedWeights]) -> Rates:
        """Return the rates with the fixed cost of ops, and with host memory's own rate.

        On the GPU few tokens differ from a single one by the additional bytes that they read, which gives both cost and
        rate; next to the time of many tokens the cost is small.
        """

        def in_company(once: Once) -> Timed:
            return self._in_company(bench, weights, once, repeats=_REPEATS_IN_COMPANY, rounds=_ROUNDS_IN_COMPANY)

        few = in_company(self._matrices(bench, self._few_tokens))
        one = in_company(self._matrices(bench, 1))
        gpu, more_bytes = rates.gpu, few.work.device_bytes - one.work.device_bytes
        if few.median_s > one.median_s and more_bytes > 0:
            gpu = replace(gpu, bytes_s=more_bytes / (few.median_s - one.median_s))
        fixed_s = max(one.median_s - one.work.device_bytes / gpu.bytes_s, 0.0)
        with bench.cached(Shape(contexts=(1,)), self._layer) as it:
            attended = in_company(self._attention(bench, it))
        offloaded = in_company(self._offloads(bench, 1))
        uploaded = bench.timed(self._uploads(bench, 1), _REPEATS)
        op_s = OpSeconds(
            gpu=fixed_s / _OPS_OF_MATRICES,
            cpu=max(attended.median_s - attended.work.host_bytes / rates.cpu_attention.bytes_s, 0.0),
            h2d=max(uploaded.shortest_s - uploaded.work.link_bytes / rates.h2d_bytes_s, 0.0),
            d2h=max(offloaded.median_s - offloaded.work.link_bytes / rates.d2h_bytes_s, 0.0),
        )
        return replace(rates, gpu=gpu, op_s=op_s, host_bytes_s=self._engine.machine.host_bytes_s)

    @property
    def _few_tokens(self) -> int:
        spec = self._engine.spec
        return min(self._max_tokens, _FEW_TOKENS_AN_EXPERT * max(1, spec.num_experts // spec.experts_per_token))

    def _cpu_experts(self, bench: OpBench) -> Level:
        """Measure FLOP/s and bytes/s of a layer's experts on the CPU, with some tokens and with few."""
        some, few = (
            bench.timed(self._experts_on_host(bench, n), _REPEATS)
            for n in (min(_SOME_TOKENS, self._max_tokens), self._few_tokens)
        )
        bytes_s = few.work.host_bytes / few.shortest_s
        return Level(name="cpu", flops_s=some.work.flops / some.shortest_s, bytes_s=bytes_s)

    def _experts_on_host(self, bench: OpBench, num_tokens: int) -> Once:
        it, layer = bench.behind_attention(Shape(prompts=(num_tokens,)), self._layer), self._layer
        bench.emit.attention_out(it, layer, bench.weights.part(layer, "attention_out"))
        return lambda: [ticket for ticket in bench.emit.experts_on_host(it, layer) if ticket.lane == CPU]

    def _matrices(self, bench: OpBench, num_tokens: int) -> Once:
        """Prepare a layer's projections, router and experts."""
        it = bench.behind_attention(Shape(prompts=(num_tokens,)), self._layer)
        return lambda: bench.layer(it, self._layer, attends=False)

    def _cpu(self, bench: OpBench) -> Level:
        """Measure attention over as many sequences as the probe's buffers and the free blocks allow."""
        blocks = self._engine.kv.allocator
        context = max(1, min(_CONTEXT_TOKENS, self._max_tokens, blocks.num_free * blocks.block_size))
        count = max(1, min(self._max_tokens // context, blocks.num_free // blocks.blocks_for(context)))
        with bench.cached(Shape(contexts=(context,) * count), self._layer) as it:
            timed = bench.timed(self._attention(bench, it), _REPEATS)
        seconds, work = timed.shortest_s, timed.work
        return Level(name="cpu", flops_s=work.flops / seconds, bytes_s=work.host_bytes / seconds)

    def _attention(self, bench: OpBench, it: InFlight) -> Once:
        def once() -> list[Ticket]:
            ticket = bench.emit.attend_on_host(it, self._layer)
            assert ticket is not None, "its cache lies in host memory"
            return [ticket]

        return once

    def _prompt_attention(self, bench: OpBench, shape: Shape) -> Once:
        it = bench.behind_attention(shape, self._layer)

        def once() -> list[Ticket]:
            ticket = bench.emit.prefill_attention(it, self._layer)
            assert ticket is not None, "there are prompts"
            return [ticket]

        return once

    def _offloads(self, bench: OpBench, num_tokens: int) -> Once:
        """Prepare the copy of keys and values to the host."""
        spec, batch, acts = self._engine.spec, bench.batch(Shape(prompts=(num_tokens,))), bench.acts[0]
        return lambda: [bench.emit.submit(D2H, OffloadQkv(spec, batch, acts, self._layer, queries=False))]

    def _uploads(self, bench: OpBench, num_tokens: int) -> Once:
        spec, batch, acts = self._engine.spec, bench.batch(Shape(prompts=(num_tokens,))), bench.acts[0]
        return lambda: [bench.emit.submit(H2D, UploadTokens(spec, batch, acts))]

    def _sums(self, bench: OpBench, acts: list[Activations]) -> float:
        """Return the bytes/s that each GPU sends while partial sums are added up over all of them."""
        it = InFlight.shared(bench.batch(Shape(prompts=(self._max_tokens,))), acts)
        timed = bench.timed(lambda: [bench.emit.combine(it, self._layer)], _REPEATS)
        return timed.work.link_bytes / timed.shortest_s
