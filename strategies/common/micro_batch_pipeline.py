"""The pipeline of MoE-Lightning and of the systems beside it in its Figure 6: a schedule, and what it works with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from functools import partial

from harness.engine.activation_pool import ActivationPool
from harness.engine.batch import PassPlan, assemble
from harness.engine.emitter import Emitter
from harness.engine.engine import Engine
from harness.engine.sequences import Sequence
from harness.engine.strategy import PassResult
from harness.memory.paged_weights import PagedWeights
from harness.memory.tiers import Buffer
from strategies.common.micro_batch_memory import MicroBatchMemory
from strategies.common.steps import Schedule, Steps, zigzag


class MicroBatchPipeline:
    """Prefill in zigzag order, decode by `schedule`; the scheduler cuts its passes into micro-batches and keeps the two
    phases apart. Where the prompts of one exceed the buffers, its prefill goes in several. Lanes are plain FIFOs.

    `weights` are those of decode: with F_g = 0 (`gpu_ffn` false) a stream without experts, in pages of its own, beside
    that of whole layers for prefill; where the phase changes, what the other one has prefetched is dropped.
    """

    def __init__(
        self,
        engine: Engine,
        schedule: Schedule,
        memory: MicroBatchMemory,
        *,
        num_pages: int,
        resident_share: float,
        packet_bytes: int,
        gpu_ffn: bool = True,
    ) -> None:
        machine = engine.machine
        self._engine, self._schedule, self._memory = engine, schedule, memory
        self._emit = Emitter(engine, fifo=True)
        self._cpu_experts = not gpu_ffn
        whole = partial(PagedWeights, machine, engine.store, num_pages=num_pages, packet_bytes=packet_bytes)
        if gpu_ffn:
            self.weights = self._prefill_weights = whole(resident_share=resident_share)
        else:
            self._prefill_weights = whole()
            self.weights = whole(resident_share=resident_share, experts=False, prefix="dense ")
        self._pool = ActivationPool(machine, engine.spec, memory.pool)
        self._kv_staging: list[Buffer] = [
            machine.tiers["device"].reserve(f"kv staging {i}", memory.kv_staging_bytes)
            for i in range(2 if memory.kv_staging_bytes else 0)
        ]
        self._streaming = self._prefill_weights
        self._first_index = 0  # of the current pass's layer 0 in the stream of weights

    def run(self, plan: PassPlan) -> PassResult:
        assert plan.micro_batches is not None, "the scheduler cuts the pass into micro-batches"
        assert not (plan.prefill and plan.decode), "prefill and decode come in passes of their own"
        allocator = self._engine.kv.allocator
        if plan.prefill:
            batches = [assemble(i, group, (), allocator) for i, group in enumerate(self._cut(plan.micro_batches))]
        else:
            batches = [assemble(i, (), group, allocator) for i, group in enumerate(plan.micro_batches)]
        acts = self._pool.layout([batch.num_tokens for batch in batches])
        steps = Steps(
            self._emit,
            self._weights_for(plan),
            list(zip(batches, acts, strict=True)),
            first_index=self._first_index,
            num_layers=self._engine.spec.num_layers,
            kv_staging=self._kv_staging,
            cpu_experts=self._cpu_experts and not plan.prefill,
        )
        self._emit.poison(dict.fromkeys(buffer for each in acts for buffer in each.all_buffers()))
        steps.begin()
        (zigzag if plan.prefill else self._schedule)(steps)
        steps.end()
        self._first_index += steps.num_layers
        return PassResult(batches, [self._engine.machine.wait(ticket) for ticket in steps.sampled])

    def finish(self) -> None:
        self._streaming.cancel_all()

    def _weights_for(self, plan: PassPlan) -> PagedWeights:
        wanted = self._prefill_weights if plan.prefill else self.weights
        if wanted is not self._streaming:
            self._streaming.cancel_all()
            self._streaming = wanted
        return wanted

    def _cut(self, micro_batches: Iterable[Seq[Sequence]]) -> Iterator[list[Sequence]]:
        """Prompts together as long as the buffers allow, in order."""
        for micro_batch in micro_batches:
            part: list[Sequence] = []
            for sequence in micro_batch:
                if part and sum(s.num_tokens + s.padding for s in (*part, sequence)) > self._memory.pool.largest:
                    yield part
                    part = []
                part.append(sequence)
            yield part
