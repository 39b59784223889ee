"""The engine's loop: schedule a pass, emit it, retire it, until every request has ended."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from harness.engine.batch import MicroBatch, PassPlan
from harness.engine.engine import Engine
from harness.engine.sequences import Life, Sequence, State
from harness.engine.strategy import PassResult, Strategy
from harness.record.passes import PassRecord


def run(engine: Engine, strategy: Strategy, on_pass: Callable[[PassRecord], None], *, check: bool = False) -> None:
    """Run the workload to its end. `check` verifies the integrity of memory and blocks after every pass (tests)."""
    index = 0
    while True:
        start_s = engine.machine.now()
        plan = strategy.scheduler.next_pass()
        if plan is None:
            break
        for sequence in plan.prefill:
            sequence.lives.append(Life(first_generated=len(sequence.generated)))
        engine.machine.spend_host_time(len(plan.sequences))
        result = strategy.pipeline.run(plan)
        used = engine.kv.allocator.num_used
        ended = _retire(engine, result, index)
        strategy.scheduler.retire(plan, ended)
        on_pass(_record(engine, strategy, plan, result, index, start_s, used, len(ended)))
        if check:
            _check_integrity(engine)
        index += 1
    strategy.pipeline.finish()
    engine.machine.drain()
    _check_conservation(engine)


def _retire(engine: Engine, result: PassResult, index: int) -> list[Sequence]:
    """Hand sampled tokens to their sequences; free the blocks of those that ended, after their last op."""
    ended = []
    for batch, sampled in zip(result.micro_batches, result.sampled, strict=True):
        for ticket in batch.kv_tickets:
            engine.machine.wait(ticket)
        _collect_routing(engine, batch)
        for sequence, token in zip(batch.sequences, sampled.tolist(), strict=True):
            if sequence.accept(token, engine.eos_token_id):
                sequence.state = State.FINISHED
                sequence.finished_pass = index
                engine.kv.release(sequence)
                ended.append(sequence)
    return ended


def _collect_routing(engine: Engine, batch: MicroBatch) -> None:
    if not batch.records_routing:
        return
    layers = [engine.machine.wait(batch.routing_tickets[layer]) for layer in sorted(batch.routing_tickets)]
    routing = np.stack(layers, axis=1).astype(np.int16)  # [tokens, layers with a router, experts_per_token]
    for sequence, rows in batch.rows_of():
        if sequence.records_routing:
            sequence.lives[-1].routing.append(routing[rows])


def _record(
    engine: Engine,
    strategy: Strategy,
    plan: PassPlan,
    result: PassResult,
    index: int,
    start_s: float,
    kv_blocks_used: int,
    num_finished: int,
) -> PassRecord:
    return PassRecord(
        index=index,
        start_s=start_s,
        end_s=engine.machine.now(),
        num_prefill_tokens=sum(b.num_prefill_tokens - b.num_padding_tokens for b in result.micro_batches),
        num_padding_tokens=sum(b.num_padding_tokens for b in result.micro_batches),
        num_decode_tokens=sum(len(b.decode) for b in result.micro_batches),
        num_sequences=len(plan.sequences),
        kv_blocks_used=kv_blocks_used,
        kv_blocks_total=engine.kv.allocator.num_blocks,
        num_preemptions=plan.num_preemptions,
        num_waiting=strategy.scheduler.num_waiting,
        num_finished=num_finished,
        mode=plan.mode,
        generated_tokens=len(plan.sequences),
    )


def _check_conservation(engine: Engine) -> None:
    """A scheduler that loses a request would otherwise report a shorter run as a faster one."""
    open_ = [s.request.request_id for s in engine.sequences if s.state not in (State.FINISHED, State.REJECTED)]
    assert not open_, f"the scheduler stopped with {len(open_)} requests unfinished, the first is {open_[0]}"


def _check_integrity(engine: Engine) -> None:
    engine.kv.allocator.check_integrity(engine.sequences)
    for tier in engine.machine.tiers.values():
        tier.check_integrity()
