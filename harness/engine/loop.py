"""The engine's loop schedules a pass, emits it and retires it, until every request has ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from harness.engine.batch import PassPlan
from harness.engine.engine import Engine
from harness.engine.garbage import collecting_rarely
from harness.engine.in_flight import InFlight
from harness.engine.ops.data import RecordedLayer
from harness.engine.ops.warm_up import ViewWeights
from harness.engine.sequences import Life, Sequence, State, accept
from harness.engine.strategy import PassResult, Strategy
from harness.machine.base import Lane, LaneKind
from harness.record.passes import PassRecord
from kernels import fields


def look_at_weights(engine: Engine) -> None:
    """Make the views of weights that stay on devices, where the machine warms up: set-up, before anything counts."""
    if engine.machine.warms_up:
        for each in engine.ranks:
            op = ViewWeights(each.family, each.spec, each.resident.parts)
            engine.machine.wait(engine.machine.submit(Lane(LaneKind.GPU, each.rank), op))


def run(engine: Engine, strategy: Strategy, on_pass: Callable[[PassRecord], None], *, check: bool = False) -> None:
    """Run the workload to its end. `check` verifies the integrity of memory and blocks after every pass (tests).

    Passes end in the order in which they began. A scheduler is asked for the next pass while fewer are under way than
    the strategy allows. If it first needs one of them to end, it is asked again after that.
    """
    index, under_way = 0, deque[_UnderWay]()
    with collecting_rarely():
        while True:
            started = None
            if len(under_way) < strategy.passes_in_flight:
                started = _start(engine, strategy, index)
            if started is not None:
                under_way.append(started)
                index += 1
            elif under_way:
                on_pass(_finish(engine, strategy, under_way.popleft()))
                if check:
                    _check_integrity(engine)
            else:
                break
        strategy.pipeline.finish()
        engine.machine.drain()
    _check_conservation(engine)


@dataclass(frozen=True, kw_only=True)
class _UnderWay:
    """A pass that has begun, with the number of blocks that were in use then."""

    index: int
    start_s: float
    plan: PassPlan
    result: PassResult
    kv_blocks_used: int


def _start(engine: Engine, strategy: Strategy, index: int) -> _UnderWay | None:
    start_s = engine.machine.now()
    plan = strategy.scheduler.next_pass()
    if plan is None:
        return None
    for sequence in plan.prefill:
        sequence.lives.append(Life(first_generated=len(sequence.generated)))
    engine.machine.spend_host_time(len(plan.sequences))
    engine.machine.in_pass = True
    result = strategy.pipeline.run(plan)
    engine.machine.in_pass = False
    used = engine.kv.allocator.num_used
    return _UnderWay(index=index, start_s=start_s, plan=plan, result=result, kv_blocks_used=used)


def _finish(engine: Engine, strategy: Strategy, it: _UnderWay) -> PassRecord:
    it.result.complete()
    ended = _retire(engine, it.result, it.index)
    strategy.scheduler.retire(it.plan, ended)
    return _record(engine, strategy, it, num_finished=len(ended))


def _retire(engine: Engine, result: PassResult, index: int) -> list[Sequence]:
    """Hand sampled tokens to their sequences; free the blocks of ended sequences, after their last op."""
    ended = []
    for it in result.in_flight:
        assert it.tickets.sampled is not None, f"no head was submitted for micro-batch {it.batch.index}"
        sampled = engine.machine.wait(it.tickets.sampled)
        for ticket in it.tickets.kv:
            if not ticket.done:  # hardly any, behind the tokens
                engine.machine.wait(ticket)
        _collect_routing(engine, it)
        now_s = engine.machine.now()
        sequences = it.batch.sequences
        fields.append(sequences, "token_times_s", [now_s] * len(sequences))
        for sequence in accept(sequences, sampled.tolist(), engine.eos_token_id):
            sequence.state = State.FINISHED
            sequence.finished_pass = index
            engine.kv.release(sequence)
            ended.append(sequence)
    return ended


def _collect_routing(engine: Engine, it: InFlight) -> None:
    if not it.batch.records_routing:
        return
    layers = [engine.machine.wait(ticket) for _, ticket in sorted(it.tickets.routing.items())]
    routing = np.stack([each.expert_ids for each in layers], axis=1).astype(np.int16)  # [tokens, layers, k]
    weights = np.stack([each.weights for each in layers], axis=1) if it.batch.records_weights else None
    inputs = _inputs(layers) if it.batch.sampled_runs else None
    for sequence, rows in it.batch.rows_of():
        if sequence.records is None:
            continue
        life = sequence.lives[-1]
        life.routing.append(routing[rows])
        if weights is not None and sequence.records.weights:
            life.weights.append(weights[rows])
        if inputs is not None and sequence.records.sample is not None:
            first, end = np.searchsorted(it.batch.sampled_rows, (rows.start, rows.stop))
            life.inputs.append(inputs[first:end].copy())  # a view would keep the whole pass's


def _inputs(layers: list[RecordedLayer]) -> np.ndarray:
    """Return what the routers got of the sampled rows, uint8 [sampled rows, layers, bytes]."""
    return np.stack([np.concatenate(each.inputs) for each in layers], axis=1)


def _record(engine: Engine, strategy: Strategy, it: _UnderWay, *, num_finished: int) -> PassRecord:
    plan, result = it.plan, it.result
    return PassRecord(
        index=it.index,
        start_s=it.start_s,
        end_s=engine.machine.now(),
        num_prefill_tokens=sum(b.num_prefill_tokens - b.num_padding_tokens for b in result.micro_batches),
        num_padding_tokens=sum(b.num_padding_tokens for b in result.micro_batches),
        num_decode_tokens=sum(len(b.decode) for b in result.micro_batches),
        num_sequences=len(plan.sequences),
        kv_blocks_used=it.kv_blocks_used,
        kv_blocks_total=engine.kv.allocator.num_blocks,
        num_preemptions=plan.num_preemptions,
        num_waiting=strategy.scheduler.num_waiting,
        num_finished=num_finished,
        mode=plan.mode,
        generated_tokens=len(plan.sequences),
    )


def _check_conservation(engine: Engine) -> None:
    """Assert that every request has ended: a scheduler that loses one would report a shorter run as a faster one."""
    open_ = [s.request.request_id for s in engine.sequences if s.state not in (State.FINISHED, State.REJECTED)]
    assert not open_, f"the scheduler stopped with {len(open_)} requests unfinished, the first is {open_[0]}"


def _check_integrity(engine: Engine) -> None:
    engine.kv.allocator.check_integrity(engine.sequences)
    for tier in engine.machine.tiers.values():
        tier.check_integrity()
