"""Measure what the strategy's own thread takes: to make and submit ops, to wake up, to schedule and lay out passes."""

from __future__ import annotations

import time

import numpy as np

from harness.bench.fitting import typical
from harness.bench.shapes import Shape
from harness.calibration.op_costs import BetweenOps, Recording
from harness.calibration.probes import LayerProbes
from harness.calibration.table import HostTimes
from harness.calibration.undisturbed import Undisturbed
from harness.engine.batch import assemble
from harness.engine.engine import Engine
from harness.engine.sequences import accept
from harness.machine.base import LaneKind


def measure_host(
    engine: Engine, probes: LayerProbes, undisturbed: Undisturbed, *, repeats: int, max_tokens: int, max_context: int,
    between: BetweenOps,
) -> HostTimes:  # fmt: skip
    """Measure the times of the strategy's own thread. Ops are submitted while the lanes work, as they are in a run.
    What lanes take `between` ops was seen while these were measured."""
    pairs = [
        undisturbed("submissions", lambda: _submit_and_wake(engine, probes, max_tokens)) for _ in range(4 * repeats)
    ]
    room = max_context // (60 + engine.kv.allocator.block_size)
    counts = sorted({min(count, room) for count in (1, 16, 64, 160)})
    points = [(n, _pass_s(probes, n)) for n in counts for _ in range(repeats)]
    slope, fixed = np.polyfit([n for n, _ in points], [s for _, s in points], 1) if len(counts) > 1 else (0.0, 0.0)
    return HostTimes(
        submit_s=float(np.median([submit_s for submit_s, _ in pairs])),
        wake_s=float(np.median([wake_s for _, wake_s in pairs])),
        pass_s=float(max(fixed, 0.0)),
        sequence_s=float(max(slope, 0.0)),
        handover_s=max(typical(between.handovers_s), 0.0),
        handover_beside_s=max(typical(between.handovers_beside_s), 0.0),
        turns_s={kind: max(typical(between.turns_s[kind]), 0.0) for kind in (LaneKind.GPU, LaneKind.CPU)},
    )


def _submit_and_wake(engine: Engine, probes: LayerProbes, max_tokens: int) -> tuple[float, float]:
    """Return the seconds of one submission, and those from the last op's end until the thread that waits for it goes
    on."""
    machine = engine.machine
    its = probes.pair(Shape(prompts=(min(100, max_tokens),)))
    emit = Recording(engine)
    start_s = time.monotonic()
    for it in its:
        emit.embed(it)
    probes.overlapped(emit, its, probes.layer, 2, experts_apart=True)
    last = emit.head(its[0])
    layers = range(probes.layer, probes.layer + 4)  # the two layers and the two behind them
    num_transfers = sum(len(probes.stream.part_names(index)) for index in layers)
    submit_s = (time.monotonic() - start_s) / (len(emit.tickets) + num_transfers)
    machine.wait(last)
    back_s = machine.now()
    assert last.finished_s is not None
    wake_s = max(back_s - last.finished_s, 0.0)
    probes.stream.cancel_all()
    machine.drain()
    return submit_s, wake_s


def _pass_s(probes: LayerProbes, num_sequences: int) -> float:
    """Return the seconds to lay out a pass and to hand tokens to its sequences. The latter count twice, since a
    scheduler's own walk over the sequences costs about as much."""
    shape = Shape(contexts=(60,) * num_sequences)
    _, sequences, allocator = probes.ops.sequences(shape, probes.engine.kv.allocator)
    start_s = time.perf_counter()
    assemble(0, (), sequences, allocator)
    laid_out_s = time.perf_counter()
    accept(sequences, [1] * num_sequences, None)
    return laid_out_s - start_s + 2 * (time.perf_counter() - laid_out_s)
