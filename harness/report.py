"""What a run knows so far, and how it is told: the summary, the trace and W&B, whether it ended well or not."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from harness.calibration.undisturbed import MAX_TAKEN_SHARE
from harness.engine.sequences import Sequence, State
from harness.engine.strategy import Strategy
from harness.hardware.ratios import ratios
from harness.interrupts import word
from harness.machine.base import Machine
from harness.machine.turn import Turn
from harness.memory.tiers import MemoryCapacityError
from harness.record.files import RecordError
from harness.record.passes import PassRecord
from harness.record.store import RunFolder
from harness.record.summary import RunFacts, build_summary
from harness.record.trace import write_trace
from harness.record.wandb_sink import WandbSink
from harness.settings import Settings
from harness.verify.records import VerifyReport
from harness.workload.request import Workload

MAX_PROMPT_CHARACTERS = 4000  # of a prompt in requests.jsonl
MAX_PROMPT_IDS = 1024
MAX_ABSENT_SHARE = 0.02  # of the gpu lane's running time: below it, what others use of the cores is not missed
NUM_TABLE_REQUESTS = 64  # which W&B shows as a table, without their token ids
_IDS = ("prompt_ids", "generated_ids")


@dataclass(eq=False)
class RunState:
    """What is known so far; a run that ends early reports from this."""

    turn: Turn | None = None  # while this run may not be disturbed
    started_s: float = field(default_factory=time.monotonic)
    setup_s: float = 0.0
    machine: Machine | None = None
    workload: Workload | None = None
    weights_source: str = "unknown"
    tokenizer: Any = None
    strategy: Strategy | None = None
    sequences: list[Sequence] = field(default_factory=list)
    passes: list[PassRecord] = field(default_factory=list)
    verify_mode: str = "off"
    num_to_verify: int = 0  # requests chosen before the run; those that are rejected cannot be checked
    verify: VerifyReport | None = None
    host_steal_share: float | None = None  # while generating; this and the next two
    others_core_share: float | None = None
    beside: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def what_is_wrong(state: RunState) -> str | None:
    """Why a run that came to its end is not a result."""
    rejected = [s for s in state.sequences if s.state is State.REJECTED]
    if len(rejected) == len(state.sequences):
        return f"every request was rejected; the first: {rejected[0].reject_reason}"
    report = state.verify
    if state.verify_mode != "off" and (report is None or not report.checked):
        return "verification had nothing to check: all of its requests were rejected; verify=all checks the others"
    return None if report is None or report.ok else f"verification failed: {report.first_mismatch}"


def disturbed(beside: list[str], others_core_share: float | None, absent_share: float | None) -> str | None:
    """Why a run's times are not this machine's own; None where nothing says so.

    `others_core_share` is what other processes and other guests of the hypervisor had of all cores, `absent_share` the
    part of the gpu lane's running time in which it had no core. Either alone proves nothing: others may use cores that
    nobody wanted, and on two cores a run's own lanes take the gpu lane's core for 3 to 17 % of that time.
    """
    reasons = [f"{name} ran beside it" for name in beside]
    had, missed = others_core_share or 0.0, absent_share or 0.0
    if had > MAX_TAKEN_SHARE and missed > MAX_ABSENT_SHARE:
        reasons.append(f"others had {had:.0%} of the cores, the gpu lane had none for {missed:.0%} of its time")
    return "; ".join(reasons) or None


def request_row(sequence: Sequence, state: RunState) -> dict[str, Any]:
    """What a request was and what became of it. Times are seconds since generation began, None on a machine without a
    clock. There is text where there is a tokenizer; of a long prompt its beginning, and no ids."""
    request, times_s = sequence.request, _since_start(sequence, state)
    text, ids = request.text, list(request.prompt_ids)
    return {
        "request_id": request.request_id,
        "state": sequence.state.value,
        "reject_reason": sequence.reject_reason,
        "prompt_tokens": sequence.prompt_len,
        "prompt_text": text if text is None or len(text) <= MAX_PROMPT_CHARACTERS else _beginning(text),
        "prompt_ids": ids if text is not None and len(ids) <= MAX_PROMPT_IDS else None,
        "generated_ids": sequence.generated,
        "generated_text": state.tokenizer.decode(sequence.generated, skip_special_tokens=True)
        if state.tokenizer is not None
        else None,
        "preemptions": sequence.num_preemptions,
        "finished_pass": sequence.finished_pass,
        "first_token_s": times_s[0] if times_s else None,
        "finished_s": times_s[-1] if times_s and sequence.state is State.FINISHED else None,
    }


def _since_start(sequence: Sequence, state: RunState) -> list[float]:
    if state.machine is None or state.machine.clock == "none" or not state.passes:
        return []
    return [time_s - state.passes[0].start_s for time_s in sequence.token_times_s]


def _beginning(text: str) -> str:
    return f"{text[:MAX_PROMPT_CHARACTERS]}... ({len(text):,} characters in all)"


def record_failure(
    error: BaseException, settings: Settings, state: RunState, folder: RunFolder, sink: WandbSink
) -> str:
    """Whatever ended the run, its cause and what was measured until then are recorded; the run's status."""
    if isinstance(error, KeyboardInterrupt):
        status, text = "interrupted", word(error)
    elif any(isinstance(e, MemoryError | MemoryCapacityError) for e in (error, error.__cause__)):
        status, text = "oom", f"{type(error).__name__}: {error}"
    else:
        status, text = "failed", f"{type(error).__name__}: {error}"
    with suppress(OSError, RuntimeError):  # the disk itself may be what failed; the original error matters more
        report_run(settings, state, folder, sink, status, text)
    return status


def report_run(
    settings: Settings, state: RunState, folder: RunFolder, sink: WandbSink, status: str, error: str | None
) -> dict[str, Any]:
    """Write summary, trace and status, then hand the first two to W&B, which may take its time. The summary comes first
    since a disk may have room for it alone."""
    spans = state.machine.spans if state.machine else []
    label = state.machine.label if state.machine else "none"
    unseen = [state.turn.warning] if state.turn and state.turn.warning else []
    extra: dict[str, Any] = {"run_id": folder.run_id, "warnings": [*state.warnings, *unseen]}
    extra["hardware_ratios"] = ratios(settings.hardware, spans, _ceilings_gb_s(settings, state).get("h2d"))
    extra |= {"host_steal_share": state.host_steal_share, "others_core_share": state.others_core_share}
    if state.strategy and state.strategy.prediction:
        extra["prediction"] = asdict(state.strategy.prediction)
    summary = build_summary(_facts(settings, state, status, error), state.passes, spans, extra)
    summary["disturbed"] = disturbed(state.beside, state.others_core_share, summary["stolen_core_share"])
    summary["reject_reasons"] = Counter(s.reject_reason for s in state.sequences if s.reject_reason)
    folder.write_summary(summary)
    trace_path = folder.path / "trace.json"
    try:
        write_trace(trace_path, spans, state.passes, label=label, meta={"run_id": folder.run_id})
    except RecordError as failure:
        if status == "ok":
            folder.write_summary(summary | {"status": "failed", "error": f"RecordError: {failure}"})
        raise
    folder.finish(status, error)
    shown = [request_row(sequence, state) for sequence in state.sequences[:NUM_TABLE_REQUESTS]]
    summary["wandb"] = sink.finish(summary, trace_path, [{k: v for k, v in r.items() if k not in _IDS} for r in shown])
    folder.write_summary(summary)
    return summary


def _facts(settings: Settings, state: RunState, status: str, error: str | None) -> RunFacts:
    tiers = state.machine.tiers if state.machine else {}
    strategy, report = state.strategy, state.verify
    states = [s.state for s in state.sequences]
    return RunFacts(
        status=status,
        error=error,
        label=state.machine.label if state.machine else "none",
        strategy=settings.strategy_name,
        model=settings.model.name,
        dataset=settings.dataset.name,
        machine=settings.machine["name"],
        hardware=settings.hardware.name,
        clock=state.machine.clock if state.machine else "host",
        machine_facts=state.machine.facts if state.machine else {},
        estimated_shares=state.machine.estimated_shares if state.machine else None,
        num_requests=settings.dataset.num_requests,
        num_finished=states.count(State.FINISHED),
        num_rejected=states.count(State.REJECTED),
        prompt_tokens=state.workload.total_prompt_tokens if state.workload else 0,
        wall_s=time.monotonic() - state.started_s,
        setup_s=state.setup_s,
        predicted_throughput_tok_s=strategy.prediction.throughput_tok_s if strategy and strategy.prediction else None,
        gpu_tok_s=strategy.gpu_tok_s if strategy else None,
        ceilings_gb_s=_ceilings_gb_s(settings, state),
        peak_bytes={name: tier.peak_bytes for name, tier in tiers.items()},
        capacity_bytes={name: tier.capacity_bytes for name, tier in tiers.items()},
        memory_holders={name: tier.holders() for name, tier in tiers.items()},
        verify={"mode": state.verify_mode, "asked": state.num_to_verify, "checked": 0, "mismatched": 0}
        | ({**asdict(report), "method": report.mode, "mode": state.verify_mode} if report else {}),
        data_source=state.workload.source if state.workload else "unknown",
        weights_source=state.weights_source,
        plan=strategy.plan if strategy else {},
        token_times_s=[s.token_times_s for s in state.sequences if s.state is State.FINISHED],
    )


def _ceilings_gb_s(settings: Settings, state: RunState) -> Mapping[str, float]:
    """What the links can carry: as the machine measured, else as the profile says."""
    measured = state.machine.link_ceilings_gb_s if state.machine else None
    return settings.hardware.link_ceilings_gb_s if measured is None else measured
