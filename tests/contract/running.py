"""Runs a strategy or a bare pipeline on a machine, without records, and hands its tokens to the oracle."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from harness.engine import loop
from harness.engine.assembly import assemble_engine, rank_sources
from harness.engine.engine import Engine
from harness.engine.sequences import Records, Sequence, State
from harness.engine.strategy import Strategy, parallelism, weights_tier
from harness.machine.base import LaneKind, Machine
from harness.machine.emulated import EmulatedMachine
from harness.machine.shuffled import ShuffledMachine
from harness.machine.threads.context import LaneRate
from harness.memory.tiers import device_tier
from harness.model.checkpoint import Checkpoint
from harness.record.passes import PassRecord
from harness.settings import load_strategy
from harness.verify.collect import generated_sequence
from harness.verify.oracle import verify
from harness.verify.records import VerifyReport
from harness.workload.request import Request

CAPACITIES_BYTES = {"device": 24_000_000, "pinned": 400_000_000, "host": 100_000_000}


def capacities_bytes(num_gpus: int) -> dict[str, int]:
    return CAPACITIES_BYTES | {device_tier(rank): CAPACITIES_BYTES["device"] for rank in range(num_gpus)}


def shuffled(seed: int, *, num_gpus: int = 1) -> ShuffledMachine:
    return ShuffledMachine(capacities_bytes=capacities_bytes(num_gpus), seed=seed)


def emulated(h2d_gb_s: float = 0.2, *, num_gpus: int = 1) -> EmulatedMachine:
    rates = {LaneKind.H2D: LaneRate(bytes_s=h2d_gb_s * 1e9), LaneKind.CPU: LaneRate(flops_s=4e9, bytes_s=4e9)}
    return EmulatedMachine(capacities_bytes=capacities_bytes(num_gpus), rates=rates, poison=True)


def requests(
    count: int, *, vocab_size: int, longest: int = 60, max_new_tokens: int = 6, seed: int = 0
) -> list[Request]:
    rng = random.Random(seed)
    return [
        Request(
            request_id=i,
            prompt_ids=tuple(rng.randrange(3, vocab_size) for _ in range(rng.randint(1, longest))),
            max_new_tokens=rng.randint(1, max_new_tokens),
            text=None,
        )
        for i in range(count)
    ]


def engine_on(
    machine: Machine, checkpoint: Checkpoint, work: list[Request], *, kv_blocks: int, block_size: int = 4,
    num_gpus: int = 1, values: dict[str, Any] | None = None,
) -> Engine:  # fmt: skip
    """Build an engine; with the `values` of a strategy its weights lie where that strategy wants them."""
    config = values and load_strategy(values).config
    shared = parallelism(config)
    specs = [source.spec for source in rank_sources(checkpoint, num_gpus, shared)]
    keeping = specs if shared == "tensor" else specs[:1]  # GPUs whose heads the host's cache has
    return assemble_engine(
        machine,
        checkpoint,
        num_gpus=num_gpus,
        kv_bytes=kv_blocks * block_size * sum(spec.kv_bytes_per_token for spec in keeping),
        block_size=block_size,
        weights_tier=weights_tier(config),
        parallelism=shared,
        sequences=[Sequence(request, records=Records()) for request in work],
        eos_token_id=None,
    )


def strategy_of(engine: Engine, values: dict[str, Any]) -> Strategy:
    """Build the strategy from `values` as in conf/strategy/*.yaml."""
    return load_strategy(values).build(engine)


def run_to_end(engine: Engine, build: Callable[[Engine], Strategy]) -> list[PassRecord]:
    """Run all passes, with integrity checked after each; conservation is checked here for every test."""
    passes: list[PassRecord] = []
    try:
        strategy = build(engine)
        engine.machine.drain()
        engine.machine.spans.clear()
        loop.run(engine, strategy, passes.append, check=True)
    finally:
        engine.machine.close()
    for sequence in engine.sequences:
        assert sequence.state in (State.FINISHED, State.REJECTED), f"request {sequence.request.request_id} was lost"
        assert (sequence.state is State.REJECTED) == (sequence.reject_reason is not None)
        assert not sequence.blocks
    assert engine.kv.allocator.num_used == 0
    return passes


def check_tokens(checkpoint: Checkpoint, sequences: list[Sequence]) -> VerifyReport:
    """Return the oracle's verdict on every finished sequence."""
    finished = [s for s in sequences if s.state is State.FINISHED]
    for sequence in finished:
        request = sequence.request
        assert len(sequence.generated) == min(request.ends_after or request.max_new_tokens, request.max_new_tokens)
        for segment in generated_sequence(sequence).segments:  # float32 verification reads it only after a divergence
            possible = (segment.routing >= 0) & (segment.routing < checkpoint.spec.num_experts)
            assert possible.all(), f"request {sequence.request.request_id}: impossible routing was recorded"
    return verify(checkpoint, [generated_sequence(s) for s in finished], eos=False)
