"""The bench of ops: micro-batches of chosen shapes, one layer's ops over them, and the seconds that these take.

It measures alike on every machine that has a clock: ops are submitted as pipelines submit them, alone or beside other
lanes, and tickets say when they ran.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from statistics import median
from typing import Protocol

import numpy as np

from harness.bench.shapes import Shape
from harness.engine.activations import Activations
from harness.engine.batch import MicroBatch, assemble
from harness.engine.emitter import Emitter, InFlight
from harness.engine.engine import Engine
from harness.engine.sequences import Sequence
from harness.machine.base import Ticket, Work
from harness.memory.kv_cache import BlockAllocator, Blocks
from harness.memory.placed import PlacedPart

_LEAST_S = 1e-9  # a clock may stand still

Once = Callable[[], list[Ticket]]  # submits the ops that are timed


class LayerWeights(Protocol):
    """The layers on the device, by index: a stream or pages."""

    def part(self, index: int, name: str, /) -> PlacedPart: ...
    def experts(self, index: int) -> dict[int, PlacedPart]: ...


@dataclass(frozen=True, kw_only=True)
class Timed:
    """The seconds that some ops took together in each repetition, and the work of one repetition."""

    times_s: tuple[float, ...]
    work: Work

    @property
    def shortest_s(self) -> float:
        """The shortest of the times, for ops that run alone: disturbances only ever add time."""
        return max(min(self.times_s), _LEAST_S)

    @property
    def median_s(self) -> float:
        """The median of the times, for ops in company: disturbances belong to what is measured."""
        return max(median(self.times_s), _LEAST_S)


class OpBench:
    """Holds micro-batches in activation buffers `acts`, and submits ops with a layer's `weights` over them. All of
    these belong to the caller. `fifo` is as for an emitter."""

    def __init__(
        self, engine: Engine, weights: LayerWeights, acts: Iterable[Activations] = (), *, fifo: bool = False
    ) -> None:
        self.engine, self.weights, self.acts = engine, weights, list(acts)
        self.emit = Emitter(engine, fifo=fifo)
        self._rng = np.random.default_rng(0)

    def sequences(
        self, shape: Shape, blocks: Blocks | None = None, *, on_device: bool = False
    ) -> tuple[list[Sequence], list[Sequence], BlockAllocator]:
        """Make sequences that prefill and that decode, with blocks scattered over a cache that has `blocks`, whose
        content does not matter. Without `blocks` theirs are nobody's, for ops that touch no cache. The allocator
        counts these blocks alone, under numbers of the whole cache."""
        prefill, decode = shape.sequences(self.engine.spec.vocab_size, self._rng)
        lengths, size = (*shape.prompts, *shape.contexts), (blocks or self.engine.kv.allocator).block_size
        needed = sum(-(-length // size) for length in lengths)
        order = self._rng.permutation(needed if blocks is None else blocks.num_blocks)[:needed].tolist()
        allocator = BlockAllocator(needed, size, order=order, on_device=on_device)
        for sequence in (*prefill, *decode):
            allocator.grow(sequence, sequence.num_tokens)
        return prefill, decode, allocator

    def batch(
        self, shape: Shape, blocks: Blocks | None = None, *, index: int = 0, on_device: bool = False
    ) -> MicroBatch:
        """Lay a micro-batch of this shape out; see `sequences`."""
        return assemble(index, *self.sequences(shape, blocks, on_device=on_device))

    def place(self, batch: MicroBatch) -> InFlight:
        """Return the micro-batch in the activation buffers of its index."""
        return InFlight(batch, self.acts[batch.index])

    def layer(self, it: InFlight, layer: int, *, attends: bool = True, emit: Emitter | None = None) -> list[Ticket]:
        """Submit a layer's ops on the gpu lane, with the attention of prompts or without."""
        emit = emit or self.emit
        tickets = [
            emit.attention_in(it, layer, self.weights.part(layer, "attention_in")),
            emit.prefill_attention(it, layer) if attends else None,
            emit.attention_out(it, layer, self.weights.part(layer, "attention_out")),
            emit.experts(it, layer, self.weights.experts(layer)),
            emit.combine(it, layer),
        ]
        return [ticket for ticket in tickets if ticket is not None]

    def behind_attention(self, shape: Shape, layer: int) -> InFlight:
        """Submit prompts up to attention, by whose results the router chooses. Memory as it happens to be would send
        all tokens to the same experts."""
        it = self.place(self.batch(shape))
        self._attention_in(it, layer)
        self.emit.prefill_attention(it, layer)
        return it

    @contextmanager
    def cached(self, shape: Shape, layer: int) -> Iterator[InFlight]:
        """Give decoding sequences, which have blocks of the engine's cache meanwhile. Their keys and values are written
        first: memory that was never written is read too fast."""
        blocks = self.engine.kv.allocator
        _, decode = shape.sequences(self.engine.spec.vocab_size, self._rng)
        for sequence in decode:
            blocks.grow(sequence, sequence.num_tokens)
        for number, prompts in enumerate(self._written_together(decode, blocks.block_size)):
            it = self.place(assemble(0, prompts, [], blocks))
            if not number:  # whatever numbers these are, they serve all others too
                self._attention_in(it, layer)
                self.emit.offload_qkv(it, layer)
            self.emit.append_kv(it, layer)
        yield self.place(assemble(0, [], decode, blocks))
        for sequence in decode:
            self.engine.kv.release(sequence)

    def _written_together(self, decode: Iterable[Sequence], block_size: int) -> Iterator[list[Sequence]]:
        """Yield prompts that lie in the blocks of decoding sequences, as many together as the buffers have rows for. A
        long context is several of them."""
        most, found, num_tokens = self.acts[0].max_tokens, list[Sequence](), 0
        num_blocks = max(most // block_size, 1)
        for sequence in decode:
            ids = (*sequence.request.prompt_ids, *sequence.generated)
            for first in range(0, len(sequence.blocks), num_blocks):
                its = ids[first * block_size :][: num_blocks * block_size]
                if found and num_tokens + len(its) > most:
                    yield found
                    found, num_tokens = [], 0
                request, own = replace(sequence.request, prompt_ids=its), sequence.blocks[first : first + num_blocks]
                found.append(replace(sequence, request=request, generated=[], num_cached=0, blocks=own))
                num_tokens += len(its)
        yield found

    def _attention_in(self, it: InFlight, layer: int) -> None:
        self.emit.embed(it)
        self.emit.attention_in(it, layer, self.weights.part(layer, "attention_in"))

    def timed(
        self, once: Once, repeats: int, *, warm_ups: int = 1, rounds: int = 1,
        beside: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> Timed:  # fmt: skip
        """Time what `once` submits, `repeats` times in each round, after `warm_ups` that do not count. Each round is
        within `beside`, which keeps other lanes busy."""
        runs: list[list[Ticket]] = []
        for _ in range(rounds):
            with beside():
                runs += [self._waited(once()) for _ in range(warm_ups + repeats)][warm_ups:]
        works = [ticket.op.work() for ticket in runs[-1]]
        return Timed(
            times_s=tuple(busy_s(tickets) for tickets in runs),
            work=Work(*(sum(values) for values in zip(*works, strict=True))),
        )

    def _waited(self, tickets: list[Ticket]) -> list[Ticket]:
        for ticket in tickets:
            self.engine.machine.wait(ticket)
        self.engine.machine.now()
        return tickets


def busy_s(tickets: Iterable[Ticket]) -> float:
    """Sum the seconds of ops that have finished."""
    return sum((t.finished_s or 0.0) - (t.started_s or 0.0) for t in tickets)


def length_s(tickets: list[Ticket]) -> float:
    """Return the seconds from the start of the first to the end of the last of ops that have finished."""
    return max(t.finished_s or 0.0 for t in tickets) - min(t.started_s or 0.0 for t in tickets)
