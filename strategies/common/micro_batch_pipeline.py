"""The pipeline of MoE-Lightning and of the systems beside it in its Figure 6: a schedule, and what it works with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq

from harness.engine import parallel
from harness.engine.batch import PassPlan, assemble
from harness.engine.engine import Engine
from harness.engine.sequences import Sequence
from harness.engine.strategy import PassResult
from harness.memory.tiers import Buffer
from strategies.common.micro_batch_memory import MicroBatchMemory
from strategies.common.steps import Schedule, Steps, zigzag


class MicroBatchPipeline:
    """Prefill in zigzag order, decode by `schedule`; the scheduler cuts its passes into micro-batches and keeps the two
    phases apart. Where the prompts of one exceed the buffers, its prefill goes in several. Lanes are plain FIFOs.
    Several GPUs share every layer if the engine has them.
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
    ) -> None:
        self._engine, self._schedule, self._memory = engine, schedule, memory
        self._emit = parallel.emitter(engine, fifo=True)
        self.weights = parallel.paged_weights(
            engine, num_pages=num_pages, packet_bytes=packet_bytes, resident_share=resident_share
        )
        self._pool = parallel.activation_pool(engine, memory.pool)
        self._kv_staging: list[Buffer] = [
            parallel.device_buffer(engine, f"kv staging {i}", memory.kv_staging_bytes)
            for i in range(2 if memory.kv_staging_bytes else 0)
        ]
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
            self.weights,
            list(zip(batches, acts, strict=True)),
            first_index=self._first_index,
            num_layers=self._engine.spec.num_layers,
            kv_staging=self._kv_staging,
        )
        self._emit.poison(dict.fromkeys(buffer for each in acts for buffer in each.all_buffers()))
        steps.begin()
        (zigzag if plan.prefill else self._schedule)(steps)
        self._first_index += steps.num_layers
        return PassResult(batches, [self._engine.machine.wait(ticket) for ticket in steps.sampled])

    def finish(self) -> None:
        self.weights.cancel_all()

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
