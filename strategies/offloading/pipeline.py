"""The pipeline of MoE-Lightning and of the other systems in its Figure 6: a schedule, and what it works with."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial

from harness.engine.activation_pool import ActivationPool, PooledActivations
from harness.engine.batch import MicroBatch, PassPlan, assemble
from harness.engine.emitter import Emitter
from harness.engine.engine import Engine
from harness.engine.gpus import resources as parallel
from harness.engine.in_flight import InFlight, PassTickets
from harness.engine.sequences import Sequence
from harness.engine.strategy import PassResult
from harness.memory.paged_weights import PagedWeights
from harness.memory.tiers import PINNED, Buffer, device_tier
from strategies.offloading.planning.micro_batch_memory import MicroBatchMemory
from strategies.offloading.steps import Schedule, Steps, zigzag


@dataclass(frozen=True, kw_only=True)
class _Stage:
    """A stage has some layers on one GPU, or on several that share each of these layers."""

    layers: range
    emit: Emitter
    prefill_weights: list[PagedWeights]  # one for each GPU, as in the next two fields
    weights: list[PagedWeights]  # of decode: the same, or without experts
    pools: list[ActivationPool]
    kv_staging: list[list[Buffer]]  # two places on each GPU, or none
    kv_relays: list[Buffer]  # two places in pinned memory, or none

    def weights_for(self, plan: PassPlan) -> list[PagedWeights]:
        """Return the weights for the phase of the pass.

        Where the phases have streams of their own, the other phase's prefetch is dropped.
        """
        wanted, other = (self.prefill_weights, self.weights)[:: 1 if plan.prefill else -1]
        if other is not wanted:
            _cancel(other)
        return wanted

    def layout(self, batches: Seq[MicroBatch], number: int) -> list[tuple[PooledActivations, ...]]:
        """Lay out buffers for the micro-batches of the pass with this number: for each, those of all GPUs."""
        tokens, blocks = zip(*((each.num_tokens, each.on_device.num_blocks) for each in batches), strict=True)
        return list(zip(*(pool.layout(tokens, number, blocks=blocks) for pool in self.pools), strict=True))


@dataclass(eq=False, frozen=True)
class _UnderWay:
    """The part of a pass that is left to submit, stage by stage."""

    stages: deque[Iterator[None]]


class MicroBatchPipeline:
    """Runs prefill by the schedule `prefill` and decode by `schedule`, on lanes that are plain FIFOs.

    The scheduler cuts its passes into micro-batches and keeps the two phases apart. Where the prompts of a micro-batch
    exceed the buffers, its prefill goes in several parts.

    Several GPUs share every layer if the engine has them. With `stages` each GPU has a stage of consecutive layers
    instead, and as many passes can be in flight as there are stages. The passes move on together: while one is in stage
    s, the one that began after it is in stage s - 1, and what they submit takes turns.

    With F_g = 0 (`gpu_ffn` false; one GPU) decode has a stream of weights without experts, in pages of its own; the
    stream of whole layers is for prefill. Where the phase changes, what the other phase has prefetched is dropped.
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
        prefill: Schedule = zigzag,
    ) -> None:
        self._engine, self._schedule, self._prefill, self._memory = engine, schedule, prefill, memory
        engines = engine.stages if stages else [engine]
        assert gpu_ffn or len(engine.ranks) == 1, "experts on the CPU are a matter of one GPU"
        assert not memory.kv_relay_bytes or len(engines) == len(engine.ranks), "turns are a matter of one GPU a stage"
        per_stage, pinned = engine.spec.num_layers // len(engines), engine.machine.tiers[PINNED]

        def stage(number: int, on: Engine) -> _Stage:
            layers = range(number * per_stage, (number + 1) * per_stage)
            pages = partial(parallel.paged_weights, on, num_pages=num_pages, packet_bytes=packet_bytes, layers=layers)
            whole = pages(resident_share=resident_share if gpu_ffn else 0.0)
            return _Stage(
                layers=layers,
                emit=Emitter(on, fifo=True),
                prefill_weights=whole,
                weights=whole if gpu_ffn else pages(resident_share=resident_share, experts=False),
                pools=[self._pool(each, keeps=number == 0 and each is on) for each in on.ranks],
                kv_staging=[
                    [_on_device(each, f"kv staging {i}", memory.kv_staging_bytes) for each in on.ranks]
                    for i in range(2 if memory.kv_staging_bytes else 0)
                ],
                kv_relays=[
                    pinned.reserve(f"kv relay {i}", memory.kv_relay_bytes)
                    for i in ((2 * number, 2 * number + 1) if memory.kv_relay_bytes else ())
                ],
            )

        self._stages = [stage(number, on) for number, on in enumerate(engines)]
        self._under_way: deque[_UnderWay] = deque()  # passes of which a part is not submitted yet
        self._num_passes = 0
        self._cpu_experts = not gpu_ffn

    @property
    def page_bytes(self) -> int:
        return self._stages[0].weights[0].page_bytes

    @property
    def resident_bytes(self) -> int:
        """The bytes of resident weights on all devices together."""
        return sum(weights.resident_bytes for stage in self._stages for weights in stage.weights)

    def run(self, plan: PassPlan) -> PassResult:
        assert plan.micro_batches is not None, "the scheduler cuts the pass into micro-batches"
        assert not (plan.prefill and plan.decode), "prefill and decode come in passes of their own"
        allocator = self._engine.kv.allocator
        if plan.prefill:
            batches = [assemble(i, group, (), allocator) for i, group in enumerate(self._cut(plan.micro_batches))]
        else:
            batches = [assemble(i, (), group, allocator) for i, group in enumerate(plan.micro_batches)]
        number, self._num_passes = self._num_passes, self._num_passes + 1
        acts = [stage.layout(batches, number) for stage in self._stages]
        kept = [first.kept_hidden for first, *_ in acts[0]]
        tickets = [PassTickets() for _ in batches]
        in_flight = [list(map(InFlight.shared, batches, each, tickets)) for each in acts]
        steps = [
            Steps(
                stage.emit,
                stage.weights_for(plan),
                list(zip(mine, kept, strict=True)),
                first_index=number * len(stage.layers),
                layers=stage.layers,
                kv_staging=stage.kv_staging,
                cpu_experts=self._cpu_experts and not plan.prefill,
                following=[it.acts for it in theirs],
                kv_relays=stage.kv_relays,
            )
            for stage, mine, theirs in zip(self._stages, in_flight, [*in_flight[1:], []], strict=True)
        ]
        for stage, mine in zip(self._stages, in_flight, strict=True):
            for it in mine:
                stage.emit.poison(it)
        schedule = self._prefill if plan.prefill else self._schedule
        begun = _UnderWay(deque(_through(each, schedule) for each in steps))
        self._under_way.append(begun)
        self._move_on()
        return PassResult(in_flight[-1], partial(self._complete, begun))

    def finish(self) -> None:
        for stage in self._stages:
            _cancel(stage.prefill_weights)
            _cancel(stage.weights)

    def _pool(self, on: Engine, *, keeps: bool) -> ActivationPool:
        blocks = on.kv.num_device_blocks
        return ActivationPool(on.machine, on.spec, self._memory.pool, rank=on.rank, keeps=keeps, device_blocks=blocks)

    def _complete(self, wanted: _UnderWay) -> None:
        while wanted.stages:
            self._move_on()

    def _move_on(self) -> None:
        """Move every pass through its next stage."""
        moving = [under_way.stages.popleft() for under_way in self._under_way]
        while moving:
            moving = [stage for stage in moving if next(stage, _END) is not _END]
        while self._under_way and not self._under_way[0].stages:
            self._under_way.popleft()

    def _cut(self, micro_batches: Iterable[Seq[Sequence]]) -> Iterator[list[Sequence]]:
        """Yield the prompts of each micro-batch in order, as many together as the buffers allow."""
        for micro_batch in micro_batches:
            part: list[Sequence] = []
            for sequence in micro_batch:
                if part and sum(s.num_tokens + s.padding for s in (*part, sequence)) > self._memory.pool.largest:
                    yield part
                    part = []
                part.append(sequence)
            yield part


def _cancel(weights: list[PagedWeights]) -> None:
    for each in weights:
        each.cancel_all()


def _on_device(on: Engine, name: str, nbytes: int) -> Buffer:
    return on.machine.tiers[device_tier(on.rank)].reserve(name, nbytes)


_END = object()


def _through(steps: Steps, schedule: Schedule) -> Iterator[None]:
    steps.begin()
    yield from schedule(steps)
    steps.end()
