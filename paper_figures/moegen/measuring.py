"""Simulate one batch of a case: its prefill, and decode steps at the beginning, the middle and the end of generation.

Between these the contexts are made longer without simulating the steps; the steps between are interpolated. All facts
of a phase (seconds, bytes, tokens an expert) are sums over what was simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from harness.engine import loop
from harness.engine.sequences import State
from harness.machine.virtual.span_log import Totals, TotalsByKind
from harness.plan.planning import Plan
from harness.record.passes import PassRecord

LANES = ("gpu", "cpu", "h2d", "d2h", "pin")
MOVED = ("weights", "kv", "other")  # over the link to the device
STOPS = (0.0, 0.5, 1.0)  # shares of generation at which steps are simulated
STEPS_AT_A_STOP = 2


class _Enough(Exception):
    """The signal that nothing behind this pass is asked for."""


class _Totals(Protocol):
    def totals(self) -> TotalsByKind: ...


@dataclass(frozen=True, kw_only=True)
class Pass:
    """A simulated pass: its record, what its lanes did, and, of decode, the number of its step from 0."""

    record: PassRecord
    did: Mapping[tuple[str, str], Totals]  # by lane and kind of op
    step: int | None

    @property
    def length_s(self) -> float:
        return self.record.end_s - self.record.start_s


def batch_passes(plan: Plan, *, whole: bool = False) -> list[Pass]:
    """Simulate the first batch of a plan whose scheduler keeps prefill and decode apart, or all its passes if `whole`.

    A pass with tokens of both kinds counts as prefill. Contexts can be made longer between two passes, as such a
    scheduler has room for the full length of all sequences that it runs.
    """
    machine = plan.machine
    assert hasattr(machine, "totals"), "only the simulated machine sums up what it did"
    watcher = _Watcher(plan, machine, whole=whole)
    machine.drain()
    machine.spans.clear()
    with suppress(_Enough):
        loop.run(plan.engine, plan.strategy, watcher.on_pass)
    return watcher.passes


class _Watcher:
    """A recorder of passes that skips steps between the stops, and ends the simulation behind the last one."""

    def __init__(self, plan: Plan, machine: _Totals, *, whole: bool) -> None:
        self.passes: list[Pass] = []
        num_steps = plan.settings.dataset.max_new_tokens - 1
        self._plan, self._machine, self._whole = plan, machine, whole or not num_steps
        self._steps = _chosen_steps(num_steps)
        self._before: TotalsByKind = {}
        self._step = 0

    def on_pass(self, record: PassRecord) -> None:
        now = self._machine.totals()
        did = {(str(lane), kind): _less(total, self._before.get((lane, kind))) for (lane, kind), total in now.items()}
        self._before = now
        is_decode = bool(record.num_decode_tokens) and not record.num_prefill_tokens
        if not (self._whole or is_decode) and any(p.step is not None for p in self.passes):
            raise _Enough  # the next batch begins
        self.passes.append(Pass(record=record, did=did, step=self._step if is_decode else None))
        if self._whole:
            self._step += is_decode
        if self._whole or not is_decode:
            return
        later = [step for step in self._steps if step > self._step]
        if not later:
            raise _Enough
        self._skip(later[0] - self._step - 1)
        self._step = later[0]

    def _skip(self, num_steps: int) -> None:
        """Make the contexts of all running sequences longer by so many tokens, or to their last but one."""
        allocator = self._plan.engine.kv.allocator
        for sequence in self._plan.engine.sequences:
            if num_steps and sequence.state is State.DECODING:
                left = sequence.request.max_new_tokens - len(sequence.generated) - 1
                sequence.generated.extend([0] * min(num_steps, left))
                sequence.num_cached += min(num_steps, left)
                if allocator.missing_blocks(sequence, sequence.num_tokens):
                    allocator.grow(sequence, sequence.num_tokens)


def _chosen_steps(num_steps: int) -> list[int]:
    """Return the steps that are simulated, ascending: the first one, and some at each stop. The first one, which
    follows a prefill, stands for itself alone."""
    last = num_steps - STEPS_AT_A_STOP
    found = {0} | {1 + round(stop * max(0, last - 1)) + i for stop in STOPS for i in range(STEPS_AT_A_STOP)}
    return sorted(step for step in found if step < num_steps)


def _less(total: Totals, before: Totals | None) -> Totals:
    return total if before is None else Totals(*(a - b for a, b in zip(total, before, strict=True)))


def over_all_steps(passes: Sequence[Pass], num_steps: int, value: Callable[[Pass], float]) -> float:
    """Return the sum of a value over all decode steps. Steps that were not simulated lie on lines between those that
    were; the first one stands for itself alone."""
    decode = [p for p in passes if p.step is not None]
    if not decode:
        return 0.0
    first, later = decode[0], decode[1:] or decode
    steps = np.arange(1, num_steps)
    found = np.interp(steps, [p.step for p in later if p.step is not None], [value(p) for p in later])
    return float(value(first) + found.sum())


def phase_facts(plan: Plan, passes: Sequence[Pass]) -> dict[str, Any] | None:
    """Sum up the passes of one phase; None of none. Bytes over the link are those of a pass."""
    if not passes:
        return None
    spec, length_s = plan.engine.spec, sum(p.length_s for p in passes)
    experts = {lane: _sum(p.did.get((lane, "experts")) for p in passes) for lane in ("gpu", "cpu")}
    flop_s = plan.settings.hardware.gemm_flop_s(spec.dtype, peak=False)
    runs = sum(_runs(spec, total, lane) for lane, total in experts.items())
    tokens = {lane: total.flops / (2 * spec.expert_params) for lane, total in experts.items()}
    gpu_s = experts["gpu"].busy_s
    return {
        "passes": len(passes),
        "pass_s": length_s / len(passes),
        "sequences": max(p.record.num_sequences for p in passes),
        "busy": {lane: sum(_busy_s(p, lane) for p in passes) / length_s for lane in LANES},
        "link_gb": {what: sum(link_gb(p, what) for p in passes) / len(passes) for what in MOVED},
        "tokens_an_expert_run": sum(tokens.values()) / runs if runs else None,
        "expert_flops_used": experts["gpu"].flops / (gpu_s * flop_s) if gpu_s else None,
        "experts_on_cpu": tokens["cpu"] / sum(tokens.values()) if runs else None,
    }


def _sum(totals: Any) -> Totals:
    found = Totals()
    for total in totals:
        if total is not None:
            found = Totals(*(a + b for a, b in zip(found, total, strict=True)))
    return found


def _runs(spec: Any, total: Totals, lane: str) -> float:
    """Return how many times an expert ran over some tokens: so often its weights were read by the lane.

    An op may run all experts of a layer, so ops do not tell. What it moves beside weights is known by its tokens.
    """
    tokens = total.flops / (2 * spec.expert_params)
    moved = tokens * (2 * spec.hidden_dim + 3 * spec.expert_dim) * spec.dtype_bytes
    read = (total.device_bytes if lane == "gpu" else total.host_bytes) - moved
    return read / spec.components["expert"].nbytes


def _busy_s(it: Pass, lane: str) -> float:
    return sum(total.busy_s for (name, _), total in it.did.items() if name == lane)


def link_gb(it: Pass, what: str) -> float:
    """Return the GB that came over the link in a pass: "weights", keys and values ("kv"), or all "other"."""
    named = {"weights": "weights", "load kv": "kv"}
    moved = (
        total.link_bytes for (lane, kind), total in it.did.items() if lane == "h2d" and named.get(kind, "other") == what
    )
    return sum(moved) / 1e9
