"""Hold what a run knows so far, and tell it: in the summary, the trace and W&B, whether it ended well or not."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, MutableSequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from harness.calibration.undisturbed import MAX_TAKEN_SHARE
from harness.engine.sequences import Sequence, State
from harness.hardware.ratios import ratios
from harness.interrupts import word
from harness.machine.base import Span
from harness.machine.turn import Turn
from harness.memory.tiers import MemoryCapacityError
from harness.record.files import RecordError
from harness.record.measured import Fold
from harness.record.passes import PassRecord
from harness.record.store import RunFolder
from harness.record.summary import RunFacts, build_summary, measure
from harness.record.trace import excerpt, write_trace
from harness.record.wandb_sink import WandbSink
from harness.run.session import Session
from harness.verify.records import VerifyReport

MAX_PROMPT_CHARACTERS = 4000  # of a prompt in requests.jsonl
MAX_PROMPT_IDS = 1024
MAX_ABSENT_SHARE = 0.02  # of the gpu lane's running time: below it, what others use of the cores is not missed
NUM_TABLE_REQUESTS = 64  # which W&B shows as a table, without their token ids
_IDS = ("prompt_ids", "generated_ids")


@dataclass(frozen=True, kw_only=True)
class Others:
    """Says what others had of this computer while a run generated.

    `beside` names the runs that ran at the same time. The shares are of all cores' time, None where nobody knows them.
    """

    host_steal_share: float | None = None
    others_core_share: float | None = None
    beside: tuple[str, ...] = ()


@dataclass(eq=False)
class RunState:
    """Holds a run's set-up as far as it came, and what followed; a run that ends early is reported from this."""

    session: Session
    turn: Turn | None = None  # while this run may not be disturbed
    started_s: float = field(default_factory=time.monotonic)
    setup_s: float = 0.0
    passes: list[PassRecord] = field(default_factory=list)
    others: Others = Others()
    stopped: str | None = None  # why generation ended before its requests did, though nothing went wrong
    verify: VerifyReport | None = None
    warnings: list[str] = field(default_factory=list)
    small_batch: list[str] = field(default_factory=list)  # what keeps it small, where nobody has asked for that
    fold: Fold | None = None  # of spans that are not kept

    @property
    def verify_mode(self) -> str:
        """The setting `verify`, but "off" before there is a model and on machines without tensors."""
        session = self.session
        return session.settings.verify if session.model is not None and session.has_tensors else "off"

    @property
    def to_verify(self) -> list[Sequence]:
        """The requests that verification looks at: all, or some evenly spread over the workload. Those that are
        rejected cannot be checked."""
        sequences, mode = self.session.sequences, self.verify_mode
        asked = {"off": 0, "sample": self.session.settings.verify_requests}.get(mode, len(sequences))
        count = min(asked, len(sequences))
        return [sequences[i * len(sequences) // count] for i in range(count)]

    @property
    def generation_start_s(self) -> float | None:
        """The first pass's start on the machine's clock; None before it, and on a machine without a clock."""
        machine = self.session.machine
        return self.passes[0].start_s if self.passes and machine is not None and machine.clock != "none" else None


def what_is_wrong(state: RunState) -> str | None:
    """Say why a run that came to its end is not a result."""
    sequences = state.session.sequences
    rejected = [s for s in sequences if s.state is State.REJECTED]
    if len(rejected) == len(sequences):
        return f"every request was rejected; the first: {rejected[0].reject_reason}"
    report = state.verify
    if state.verify_mode != "off" and (report is None or not report.checked):
        return "verification had nothing to check: all of its requests were rejected; verify=all checks the others"
    return None if report is None or report.ok else f"verification failed: {report.first_mismatch}"


def disturbed(beside: Iterable[str], others_core_share: float | None, absent_share: float | None) -> str | None:
    """Say why a run's times are not this machine's own; None where nothing says so.

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
    """Tell what a request was and what became of it. Times are seconds since generation began, None on a machine
    without a clock. There is text where there is a tokenizer; of a long prompt its beginning, and no ids."""
    request, start_s = sequence.request, state.generation_start_s
    text, ids = request.text, list(request.prompt_ids)
    times_s = [time_s - start_s for time_s in sequence.token_times_s] if start_s is not None else []
    tokenizer = state.session.model.tokenizer if state.session.model else None
    return {
        "request_id": request.request_id,
        "state": sequence.state.value,
        "reject_reason": sequence.reject_reason,
        "prompt_tokens": sequence.prompt_len,
        "prompt_text": text if text is None or len(text) <= MAX_PROMPT_CHARACTERS else _beginning(text),
        "prompt_ids": ids if text is not None and len(ids) <= MAX_PROMPT_IDS else None,
        "generated_ids": sequence.generated,
        "generated_text": tokenizer.decode(sequence.generated, skip_special_tokens=True)
        if tokenizer is not None
        else None,
        "preemptions": sequence.num_preemptions,
        "finished_pass": sequence.finished_pass,
        "first_token_s": times_s[0] if times_s else None,
        "finished_s": times_s[-1] if times_s and sequence.state is State.FINISHED else None,
    }


def _beginning(text: str) -> str:
    return f"{text[:MAX_PROMPT_CHARACTERS]}... ({len(text):,} characters in all)"


def record_failure(error: BaseException, state: RunState, folder: RunFolder, sink: WandbSink) -> str:
    """Record what ended the run, its cause and what was measured until then, and return the run's status."""
    if isinstance(error, KeyboardInterrupt):
        status, text = "interrupted", word(error)
    elif any(isinstance(e, MemoryError | MemoryCapacityError) for e in (error, error.__cause__)):
        status, text = "oom", f"{type(error).__name__}: {error}"
    else:
        status, text = "failed", f"{type(error).__name__}: {error}"
    with suppress(OSError, RuntimeError):  # the disk itself may be what failed; the original error matters more
        report_run(state, folder, sink, status, text)
    return status


def report_run(state: RunState, folder: RunFolder, sink: WandbSink, status: str, error: str | None) -> dict[str, Any]:
    """Write summary, trace and status, then hand the first two to W&B, which may take its time. The summary comes first
    since a disk may have room for it alone."""
    summary = _summary(state, folder, status, error)
    folder.write_summary(summary)
    trace_path = None
    if state.fold is None:
        trace_path = folder.path / "trace.json"
        try:
            summary["trace_excerpt"] = _write_trace(state, trace_path, folder.run_id)
        except RecordError as failure:
            if status == "ok":
                folder.write_summary(summary | {"status": "failed", "error": f"RecordError: {failure}"})
            raise
    folder.finish(status, error)
    shown = [request_row(sequence, state) for sequence in state.session.sequences[:NUM_TABLE_REQUESTS]]
    summary["wandb"] = sink.finish(summary, trace_path, [{k: v for k, v in r.items() if k not in _IDS} for r in shown])
    folder.write_summary(summary)
    return summary


def _write_trace(state: RunState, path: Path, run_id: str) -> str | None:
    """Write the trace and return, of a run too long for it, which part it shows."""
    machine, spans = state.session.machine, _spans(state.session)
    only = excerpt(spans, state.passes, state.session.settings.trace_slices)
    label = machine.label if machine else "none"
    write_trace(path, spans, state.passes, label=label, meta={"run_id": run_id}, only=only)
    return only.told if only else None


def write_first_summary(state: RunState, folder: RunFolder, error: str) -> None:
    """Write what was measured, in a summary that counts as failed by `error` unless `report_run` writes another one."""
    folder.write_summary(_summary(state, folder, "failed", error))


def _spans(session: Session) -> MutableSequence[Span]:
    return session.machine.spans if session.machine else []


def _summary(state: RunState, folder: RunFolder, status: str, error: str | None) -> dict[str, Any]:
    session, others = state.session, state.others
    facts = _facts(state, status, error)
    measured = state.fold.measured() if state.fold else measure(facts.clock, state.passes, _spans(session))
    unseen = [state.turn.warning] if state.turn and state.turn.warning else []
    extra: dict[str, Any] = {"run_id": folder.run_id, "warnings": [*state.warnings, *unseen]}
    extra["hardware_ratios"] = ratios(
        session.settings.hardware, measured.gpu_flops, measured.gpu_s, _ceilings_gb_s(session).get("h2d")
    )
    extra |= {"host_steal_share": others.host_steal_share, "others_core_share": others.others_core_share}
    if session.strategy and session.strategy.prediction:
        extra["prediction"] = asdict(session.strategy.prediction)
    extra["counted"] = session.strategy.counted() if session.strategy else {}
    extra |= {"stopped": state.stopped, "small_batch": state.small_batch}
    summary = build_summary(facts, state.passes, measured, extra)
    if state.stopped:
        summary["prediction_accuracy"] = None  # predicted is the whole run
    summary["disturbed"] = disturbed(others.beside, others.others_core_share, summary["stolen_core_share"])
    summary["reject_reasons"] = Counter(s.reject_reason for s in session.sequences if s.reject_reason)
    return summary


def _facts(state: RunState, status: str, error: str | None) -> RunFacts:
    session, report = state.session, state.verify
    settings, machine, strategy = session.settings, session.machine, session.strategy
    tiers = machine.tiers if machine else {}
    states = [s.state for s in session.sequences]
    return RunFacts(
        status=status,
        error=error,
        label=machine.label if machine else "none",
        strategy=settings.strategy_name,
        model=settings.model.name,
        dataset=settings.dataset.name,
        machine=settings.machine["name"],
        hardware=settings.hardware.name,
        clock=machine.clock if machine else "host",
        machine_facts=machine.facts if machine else {},
        estimated_shares=machine.estimated_shares if machine else None,
        num_requests=settings.dataset.num_requests,
        num_finished=states.count(State.FINISHED),
        num_rejected=states.count(State.REJECTED),
        prompt_tokens=session.workload.total_prompt_tokens if session.workload else 0,
        wall_s=time.monotonic() - state.started_s,
        setup_s=state.setup_s,
        predicted_throughput_tok_s=strategy.prediction.throughput_tok_s if strategy and strategy.prediction else None,
        gpu_tok_s=strategy.gpu_tok_s if strategy else None,
        ceilings_gb_s=_ceilings_gb_s(session),
        peak_bytes={name: tier.peak_bytes for name, tier in tiers.items()},
        capacity_bytes={name: tier.capacity_bytes for name, tier in tiers.items()},
        memory_holders={name: tier.holders() for name, tier in tiers.items()},
        verify={"mode": state.verify_mode, "asked": len(state.to_verify), "checked": 0, "mismatched": 0}
        | ({**asdict(report), "method": report.mode, "mode": state.verify_mode} if report else {}),
        data_source=session.workload.source if session.workload else "unknown",
        weights_source=session.model.weights_source if session.model else "unknown",
        plan=strategy.plan if strategy else {},
        token_times_s=[s.token_times_s for s in session.sequences if s.state is State.FINISHED],
    )


def _ceilings_gb_s(session: Session) -> Mapping[str, float]:
    """Return what the links can carry: as the machine measured, else as the profile says."""
    measured = session.machine.link_ceilings_gb_s if session.machine else None
    return session.settings.hardware.link_ceilings_gb_s if measured is None else measured
