"""Simulate one batch of a case: its prefill, and decode steps at the beginning, the middle and the end of generation.

Between these the contexts are made longer without simulating the steps; the steps between are interpolated: each
simulated step stands for some of them. Of equal passes of prefill, one behind another, the first ones are simulated,
and the last of these stands for the others. All facts of a phase (seconds, bytes, tokens an expert) are sums over these
passes, each as often as it stands for.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from harness.engine import loop
from harness.engine.batch import PassPlan
from harness.engine.sequences import State
from harness.engine.strategy import PassResult
from harness.machine.base import Span
from harness.machine.virtual.span_log import Totals, TotalsByKind
from harness.model.spec import ModelSpec
from harness.plan.planning import Plan
from harness.record.passes import PassRecord

LANES = ("gpu", "cpu", "h2d", "d2h", "pin")
MOVED = ("weights", "kv", "other")  # over the link to the device
STOPS = (0.0, 0.5, 1.0)  # shares of generation at which steps are simulated
STEPS_AT_A_STOP = 2
EQUAL_PREFILLS = 3  # of these the first one begins with nothing prefetched


class _Enough(Exception):
    """The signal that nothing behind this pass is asked for."""


class _Totals(Protocol):
    def totals(self) -> TotalsByKind: ...


@dataclass(frozen=True, kw_only=True)
class Pass:
    """A simulated pass has its record and what its lanes did. `step` numbers those of decode, from 0. It stands for
    `count` passes, itself included. `counted` has what the strategy counted in it."""

    record: PassRecord
    did: Mapping[tuple[str, str], Totals]  # by lane and kind of op
    step: int | None
    count: float = 1
    counted: Mapping[str, int] = field(default_factory=dict)

    @property
    def length_s(self) -> float:
        return self.record.end_s - self.record.start_s


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The sums over one batch of static batching: a prefill, then a decode step for every further token."""

    num_sequences: int
    prefill_tokens: int
    prefill_s: float
    decode_s: float
    num_steps: int
    steps_simulated: int
    prefill_busy: Mapping[str, float]
    decode_busy: Mapping[str, float]

    @property
    def throughput_tok_s(self) -> float:
        """Generated tokens over the time of prefill and decode, as MoE-Lightning section 5.1 counts."""
        return self.num_sequences * (self.num_steps + 1) / (self.prefill_s + self.decode_s)

    @property
    def step_s(self) -> float:
        return self.decode_s / self.num_steps


def first_batch(plan: Plan) -> Batch:
    """Simulate the first batch of a plan, all of whose requests generate the same number of tokens, and sum it up."""
    passes = batch_passes(plan)
    prefill, decode = [p for p in passes if p.step is None], [p for p in passes if p.step is not None]
    num_steps = plan.settings.dataset.max_new_tokens - 1
    assert not any(p.record.num_decode_tokens for p in prefill), "not a static batch"
    assert decode and decode[-1].step == num_steps - 1, f"decode ended before step {num_steps}, or there is none"
    return Batch(
        num_sequences=round(over_passes(prefill, lambda p: p.record.num_sequences)),
        prefill_tokens=round(over_passes(prefill, lambda p: p.record.num_prefill_tokens)),
        prefill_s=over_passes(prefill, lambda p: p.length_s),
        decode_s=over_passes(decode, lambda p: p.length_s),
        num_steps=num_steps,
        steps_simulated=len(decode),
        prefill_busy=busy(prefill),
        decode_busy=busy(decode),
    )


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
        loop.run(plan.engine, replace(plan.strategy, pipeline=watcher), watcher.on_pass)
    if whole:
        return watcher.passes
    return list(_for_all_steps(watcher.passes, plan.settings.dataset.max_new_tokens - 1))


class _Watcher:
    """A pipeline and recorder of passes that simulates some of them, and ends the simulation behind the last one."""

    def __init__(self, plan: Plan, machine: _Totals, *, whole: bool) -> None:
        self.passes: list[Pass] = []
        num_steps = plan.settings.dataset.max_new_tokens - 1
        self._plan, self._machine, self._whole = plan, machine, whole or not num_steps
        self._pipeline = plan.strategy.pipeline
        self._steps = _chosen_steps(num_steps)
        self._before: TotalsByKind = {}
        self._counted = self._counts()
        self._step = 0
        self._prompts: list[list[tuple[int, int]]] = []  # of the passes of prefill: lengths and padding
        self._stood_for = False  # whether the last pass was not simulated

    def run(self, plan: PassPlan) -> PassResult:
        self._prompts.append([(s.prompt_len, s.padding) for s in plan.prefill])
        last = self._prompts[-1 - EQUAL_PREFILLS :]
        equal = bool(plan.prefill) and len(last) > EQUAL_PREFILLS and all(each == last[0] for each in last)
        in_order = not plan.decode and self._plan.strategy.passes_in_flight == 1
        self._stood_for = equal and in_order and not self._whole
        if not self._stood_for:
            return self._pipeline.run(plan)
        for sequence in plan.prefill:
            sequence.accept(0, None)
        return PassResult([])

    def finish(self) -> None:
        self._pipeline.finish()

    def on_pass(self, record: PassRecord) -> None:
        now = self._machine.totals()
        did = {(str(lane), kind): _less(total, self._before.get((lane, kind))) for (lane, kind), total in now.items()}
        self._before = now
        before, self._counted = self._counted, self._counts()
        if self._stood_for:
            self.passes[-1] = replace(self.passes[-1], count=self.passes[-1].count + 1)
            return
        is_decode = bool(record.num_decode_tokens) and not record.num_prefill_tokens
        if not (self._whole or is_decode) and any(p.step is not None for p in self.passes):
            raise _Enough  # the next batch begins
        counted = {name: count - before.get(name, 0) for name, count in self._counted.items()}
        step = self._step if is_decode else None
        self.passes.append(Pass(record=record, did=did, step=step, counted=counted))
        if self._whole:
            self._step += is_decode
        if self._whole or not is_decode:
            return
        later = [step for step in self._steps if step > self._step]
        if not later:
            raise _Enough
        self._skip(later[0] - self._step - 1)
        self._step = later[0]

    def _counts(self) -> dict[str, int]:
        """Return what the strategy has counted until now, without its shares."""
        return {name: count for name, count in self._plan.strategy.counted().items() if isinstance(count, int)}

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


def _for_all_steps(passes: Sequence[Pass], num_steps: int) -> Iterator[Pass]:
    """Yield the passes, those of decode with the number of steps that each stands for. A step that was not simulated
    lies on the line between two that were, so that each of these stands for a part of it; the first step of all stands
    for itself alone."""
    simulated = [p.step for p in passes if p.step is not None]
    steps = np.arange(1, num_steps)
    for p in passes:
        if p.step and len(simulated) > 1:
            own = [float(step == p.step) for step in simulated[1:]]
            yield replace(p, count=float(np.interp(steps, simulated[1:], own).sum()))
        else:
            yield p


def over_passes(passes: Iterable[Pass], value: Callable[[Pass], float]) -> float:
    """Return the sum of a value over passes, each as often as it stands for."""
    return sum(p.count * value(p) for p in passes)


def counts(passes: Sequence[Pass]) -> dict[str, float]:
    """Return what the strategy counted over passes, each as often as it stands for."""
    names = passes[0].counted if passes else ()
    return {name: over_passes(passes, lambda p, name=name: p.counted[name]) for name in names}


def busy(passes: Sequence[Pass]) -> dict[str, float]:
    """Return the busy share of each lane over passes; 0 over none."""
    length_s = over_passes(passes, lambda p: p.length_s)
    return {lane: over_passes(passes, lambda p, lane=lane: _busy_s(p, lane)) / length_s if passes else 0.0
            for lane in LANES}  # fmt: skip


def phase_facts(plan: Plan, passes: Sequence[Pass]) -> dict[str, Any] | None:
    """Sum up the passes of one phase; None of none. Bytes over the link are those of a pass."""
    if not passes:
        return None
    spec, num_passes = plan.engine.spec, round(sum(p.count for p in passes))
    length_s = over_passes(passes, lambda p: p.length_s)
    flop_s = plan.settings.hardware.gemm_flop_s(spec.dtype, peak=False)
    experts = expert_facts(spec, passes)
    achieved_flop_s = experts.pop("gpu_flop_s")
    return {
        "passes": num_passes,
        "pass_s": length_s / num_passes,
        "sequences": max(p.record.num_sequences for p in passes),
        "busy": busy(passes),
        "link_gb": {what: over_passes(passes, lambda p, what=what: link_gb(p, what)) / num_passes for what in MOVED},
        "expert_flops_used": achieved_flop_s and achieved_flop_s / flop_s,
        **experts,
    }


def expert_facts(spec: ModelSpec, passes: Sequence[Pass]) -> dict[str, float | None]:
    """Sum up the routed experts of passes; None where none ran.

    That is the tokens an expert runs over, the share of them on the CPU, and the gpu lane's FLOP/s while they run.
    """
    experts = {lane: _sum((p.count, p.did.get((lane, "experts"))) for p in passes) for lane in ("gpu", "cpu")}
    runs = sum(_runs(spec, total, lane) for lane, total in experts.items())
    tokens = {lane: total.flops / (2 * spec.expert_params) for lane, total in experts.items()}
    gpu = experts["gpu"]
    return {
        "tokens_an_expert_run": sum(tokens.values()) / runs if runs else None,
        "experts_on_cpu": tokens["cpu"] / sum(tokens.values()) if runs else None,
        "gpu_flop_s": gpu.flops / gpu.busy_s if gpu.busy_s else None,
    }


def recorded_passes(passes: Sequence[PassRecord], spans: Iterable[Span]) -> list[Pass]:
    """Return a run's passes with what its lanes began in each; what runs ahead counts to the pass in which it began."""
    did: list[dict[tuple[str, str], Totals]] = [{} for _ in passes]
    starts = [each.start_s for each in passes]
    for span in spans:
        of_pass = did[max(0, bisect_right(starts, span.start_s) - 1)]
        key = str(span.lane), span.kind
        part = Totals(1, span.end_s - span.start_s, *span.work)
        of_pass[key] = Totals(*(a + b for a, b in zip(of_pass.get(key, Totals()), part, strict=True)))
    return [
        Pass(record=record, did=sums, step=None if record.num_prefill_tokens else at)
        for at, (record, sums) in enumerate(zip(passes, did, strict=True))
    ]


def _sum(totals: Iterable[tuple[float, Totals | None]]) -> Totals:
    found = Totals()
    for count, total in totals:
        if total is not None:
            found = Totals(*(a + count * b for a, b in zip(found, total, strict=True)))
    return found


def _runs(spec: ModelSpec, total: Totals, lane: str) -> float:
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
