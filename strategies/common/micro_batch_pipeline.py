"""The pipeline of MoE-Lightning and of the systems beside it in its Figure 6: a schedule, and what it works with."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import partial

from harness.engine import parallel
from harness.engine.activation_pool import ActivationPool
from harness.engine.batch import PassPlan, assemble
from harness.engine.emitter import Emitter
from harness.engine.engine import Engine
from harness.engine.in_flight import InFlight
from harness.engine.sequences import Sequence
from harness.engine.strategy import PassResult
from harness.memory.paged_weights import PagedWeights
from harness.memory.tiers import Buffer
from strategies.common.micro_batch_memory import MicroBatchMemory
from strategies.common.steps import Schedule, Steps, zigzag


@dataclass(frozen=True, kw_only=True)
class _Stage:
    """Some layers, and the GPUs that have them: one, or several that share each of these layers."""

    layers: range
    emit: Emitter
    prefill_weights: PagedWeights
    weights: PagedWeights  # of decode: the same, or without experts
    pool: ActivationPool
    kv_staging: Seq[Buffer]

    def weights_for(self, plan: PassPlan) -> PagedWeights:
        """Where the phases have streams of their own, the other one's prefetch is dropped."""
        wanted, other = (self.prefill_weights, self.weights)[:: 1 if plan.prefill else -1]
        if other is not wanted:
            other.cancel_all()
        return wanted


@dataclass(eq=False, frozen=True)
class _UnderWay:
    """What is left to submit of a pass, stage by stage."""

    stages: deque[Iterator[None]]


class MicroBatchPipeline:
    """Prefill in zigzag order, decode by `schedule`; the scheduler cuts its passes into micro-batches and keeps the two
    phases apart. Where the prompts of one exceed the buffers, its prefill goes in several. Lanes are plain FIFOs.

    Several GPUs share every layer if the engine has them, or with `stages` the layers: each has a stage of consecutive
    ones, and as many passes can be in flight as there are stages. They move on together: while one pass is in stage s,
    the one that began after it is in stage s - 1, and what they submit takes turns.

    With F_g = 0 (`gpu_ffn` false; one GPU) decode has a stream of weights without experts, in pages of its own, beside
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
        stages: bool = False,
    ) -> None:
        self._engine, self._schedule, self._memory = engine, schedule, memory
        engines = engine.stages if stages else [engine]
        assert gpu_ffn or len(engine.ranks) == 1, "experts on the CPU are a matter of one GPU"
        per_stage = engine.spec.num_layers // len(engines)

        def stage(number: int, on: Engine) -> _Stage:
            layers = range(number * per_stage, (number + 1) * per_stage)
            pages = partial(parallel.paged_weights, on, num_pages=num_pages, packet_bytes=packet_bytes, layers=layers)
            whole = pages(resident_share=resident_share if gpu_ffn else 0.0)
            return _Stage(
                layers=layers,
                emit=parallel.emitter(on, fifo=True),
                prefill_weights=whole,
                weights=whole if gpu_ffn else pages(resident_share=resident_share, experts=False),
                pool=parallel.activation_pool(on, memory.pool, keeps=number == 0),
                kv_staging=[
                    parallel.device_buffer(on, f"kv staging {i}", memory.kv_staging_bytes)
                    for i in range(2 if memory.kv_staging_bytes else 0)
                ],
            )

        self._stages = [stage(number, on) for number, on in enumerate(engines)]
        self._under_way: deque[_UnderWay] = deque()  # not all of which has been submitted
        self._num_passes = 0
        self._cpu_experts = not gpu_ffn

    @property
    def page_bytes(self) -> int:
        return self._stages[0].weights.page_bytes

    @property
    def resident_bytes(self) -> int:
        """On all devices together."""
        return sum(stage.weights.resident_bytes for stage in self._stages)

    def run(self, plan: PassPlan) -> PassResult:
        assert plan.micro_batches is not None, "the scheduler cuts the pass into micro-batches"
        assert not (plan.prefill and plan.decode), "prefill and decode come in passes of their own"
        allocator = self._engine.kv.allocator
        if plan.prefill:
            batches = [assemble(i, group, (), allocator) for i, group in enumerate(self._cut(plan.micro_batches))]
        else:
            batches = [assemble(i, (), group, allocator) for i, group in enumerate(plan.micro_batches)]
        number, self._num_passes = self._num_passes, self._num_passes + 1
        tokens, blocks = zip(*((batch.num_tokens, len(batch.on_device.flat_blocks)) for batch in batches), strict=True)
        acts = [stage.pool.layout(tokens, number, blocks=blocks) for stage in self._stages]
        in_flight = [InFlight(batch, each) for batch, each in zip(batches, acts[0], strict=True)]
        kept = [each.kept_hidden for each in acts[0]]
        steps = [
            Steps(
                stage.emit,
                stage.weights_for(plan),
                [(replace(it, acts=each), at) for it, each, at in zip(in_flight, mine, kept, strict=True)],
                first_index=number * len(stage.layers),
                layers=stage.layers,
                kv_staging=stage.kv_staging,
                cpu_experts=self._cpu_experts and not plan.prefill,
                following=theirs,
            )
            for stage, mine, theirs in zip(self._stages, acts, [*acts[1:], []], strict=True)
        ]
        for stage, mine in zip(self._stages, acts, strict=True):
            stage.emit.poison(dict.fromkeys(buffer for each in mine for buffer in each.all_buffers()))
        schedule = zigzag if plan.prefill else self._schedule
        begun = _UnderWay(deque(_through(each, schedule) for each in steps))
        self._under_way.append(begun)
        self._move_on()
        return PassResult(in_flight, partial(self._complete, begun))

    def finish(self) -> None:
        for stage in self._stages:
            stage.prefill_weights.cancel_all()
            stage.weights.cancel_all()

    def _complete(self, wanted: _UnderWay) -> None:
        while wanted.stages:
            self._move_on()

    def _move_on(self) -> None:
        """Every pass through its next stage."""
        moving = [under_way.stages.popleft() for under_way in self._under_way]
        while moving:
            moving = [stage for stage in moving if next(stage, _END) is not _END]
        while self._under_way and not self._under_way[0].stages:
            self._under_way.popleft()

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


_END = object()


def _through(steps: Steps, schedule: Schedule) -> Iterator[None]:
    steps.begin()
    yield from schedule(steps)
    steps.end()
