"""Measures a machine: every kind of op alone and in company, lanes together, host memory, and the strategy's thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from harness.bench.fitting import typical
from harness.calibration.ahead import LaunchedAhead
from harness.calibration.host_times import measure_host
from harness.calibration.memory import measure_caches, measure_memory
from harness.calibration.op_costs import OpCosts
from harness.calibration.probes import ContextRoom, LayerProbes
from harness.calibration.table import CalibrationTable
from harness.calibration.together import Together
from harness.calibration.undisturbed import MAX_ATTEMPTS, MAX_TAKEN_SHARE, Undisturbed
from harness.config import ConfigError
from harness.engine.engine import Engine
from harness.engine.limits import tokens_that_fit
from harness.machine.base import LaneKind

_MAX_TOKENS = 2048  # of a probed micro-batch


def measure_all(
    engine: Engine, *, link_bytes_s: dict[LaneKind, float], packet_bytes: int, ram_bytes: int, meta: dict[str, Any],
    repeats: int = 2, log: Callable[[str], None] = lambda text: None,
) -> CalibrationTable:  # fmt: skip
    """Measure the engine's machine and return its table. `log` is told what is being measured, and what stayed
    disturbed."""
    room, fitting = _room(engine)
    max_tokens, kv = min(fitting, _MAX_TOKENS), engine.kv.allocator
    max_context = kv.num_blocks * kv.block_size
    undisturbed = Undisturbed(log)
    log("host memory")
    memory, caches = measure_memory(undisturbed, ram_bytes, repeats), measure_caches(undisturbed, ram_bytes)
    probes = LayerProbes(engine, room=room, max_tokens=max_tokens, packet_bytes=packet_bytes)
    ops = OpCosts(
        engine, probes, link_bytes_s=link_bytes_s, undisturbed=undisturbed, max_tokens=max_tokens,
        max_context=max_context,
    )  # fmt: skip
    ahead = LaunchedAhead(engine, probes, undisturbed)
    lanes = Together(engine, probes, undisturbed, max_context)
    try:
        ops.measure(repeats, log)
        ahead.measure(ops.shapes(), log)
        together = lanes.measure(repeats, log)
        log("the strategy's own thread")
        host = measure_host(
            engine, probes, undisturbed, repeats=repeats, max_tokens=max_tokens, max_context=max_context,
            between=ops.between,
        )  # fmt: skip
    finally:
        probes.close()
    made = {"repeats": repeats, "rejected": undisturbed.num_rejected, "disturbed": undisturbed.disturbed}
    limits = {"taken_limit": MAX_TAKEN_SHARE, "attempts": MAX_ATTEMPTS}
    return CalibrationTable(
        meta={**meta, **made, **limits},
        samples=ops.samples,
        works=ops.works,
        together=together,
        memory=memory,
        host=host,
        crowded=ops.crowded,
        beside_strategy=ops.beside_strategy,
        ahead=ahead.own,
        launching=ahead.launching,
        short_s={kind: typical(all_s) for kind, all_s in ops.short_s.items()},
        near_bytes=caches[2],
        cache_bytes=caches[3],
    )


def _room(engine: Engine) -> tuple[ContextRoom, int]:
    """Return the device memory for contexts, and the tokens of a micro-batch that fit beside it. It is the least where
    otherwise nothing fits. Raises ConfigError where nothing does then."""

    def fitting(room: ContextRoom) -> int:
        return tokens_that_fit(
            engine,
            num_layers_buffered=2,
            num_micro_batches=2,
            reserved_bytes={"buffers of the probes": room.reserved_bytes},
            pinned_reserved_bytes=LayerProbes.pinned_bytes(engine, _MAX_TOKENS),
            host_experts=True,
            num_predicted=engine.spec.experts_per_token,
        )

    room = ContextRoom.of(engine)
    try:
        return room, fitting(room)
    except ConfigError:
        return ContextRoom(), fitting(ContextRoom())
