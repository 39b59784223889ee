"""What a run knows so far, and how it is told: the summary, the trace and W&B, whether it ended well or not."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from harness.engine.sequences import Sequence, State
from harness.engine.strategy import Strategy
from harness.hardware.ratios import ratios
from harness.machine.base import Machine
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


@dataclass(eq=False)
class RunState:
    """What is known so far; a run that ends early reports from this."""

    started_s: float = field(default_factory=time.monotonic)
    setup_s: float = 0.0
    machine: Machine | None = None
    workload: Workload | None = None
    weights_source: str = "unknown"
    strategy: Strategy | None = None
    sequences: list[Sequence] = field(default_factory=list)
    passes: list[PassRecord] = field(default_factory=list)
    verify_mode: str = "off"
    num_to_verify: int = 0  # requests chosen before the run; those that are rejected cannot be checked
    verify: VerifyReport | None = None
    host_steal_share: float | None = None  # while generating
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


def request_row(sequence: Sequence) -> dict[str, Any]:
    return {
        "request_id": sequence.request.request_id,
        "state": sequence.state.value,
        "reject_reason": sequence.reject_reason,
        "prompt_tokens": sequence.prompt_len,
        "generated_ids": sequence.generated,
        "preemptions": sequence.num_preemptions,
        "finished_pass": sequence.finished_pass,
    }


def record_failure(
    error: BaseException, settings: Settings, state: RunState, folder: RunFolder, sink: WandbSink
) -> str:
    """Whatever ended the run, its cause and what was measured until then are recorded; the run's status."""
    if isinstance(error, KeyboardInterrupt):
        status, text = "interrupted", "interrupted"
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
    spans = list(state.machine.spans) if state.machine else []
    label = state.machine.label if state.machine else "none"
    extra: dict[str, Any] = {"run_id": folder.run_id, "warnings": state.warnings}
    extra["hardware_ratios"] = ratios(settings.hardware, spans, _ceilings_gb_s(settings, state).get("h2d"))
    extra["host_steal_share"] = state.host_steal_share
    if state.strategy and state.strategy.prediction:
        extra["prediction"] = asdict(state.strategy.prediction)
    summary = build_summary(_facts(settings, state, status, error), state.passes, spans, extra)
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
    summary["wandb"] = sink.finish(summary, trace_path)
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
    )


def _ceilings_gb_s(settings: Settings, state: RunState) -> Mapping[str, float]:
    """What the links can carry: as the machine measured, else as the profile says."""
    measured = state.machine.link_ceilings_gb_s if state.machine else None
    return settings.hardware.link_ceilings_gb_s if measured is None else measured
