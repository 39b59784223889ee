"""One run from its settings to its records: load, plan, execute, verify, report."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.console import Console

from harness.config import ConfigError
from harness.engine import loop
from harness.engine.engine import Engine
from harness.engine.sequences import Sequence, State
from harness.engine.strategy import Strategy
from harness.hardware.ratios import ratios
from harness.hardware.steal import read_cpu_times
from harness.machine.base import Machine
from harness.machine.build import load_machine
from harness.memory.kv_cache import KVCache
from harness.memory.tiers import MemoryCapacityError
from harness.memory.weights import Resident, WeightStore
from harness.model.checkpoint import Checkpoint
from harness.model.linear import bf16_method
from harness.model.zoo import ensure
from harness.record.files import plain, read_json, write_json
from harness.record.meter import PassMeter
from harness.record.passes import PassRecord
from harness.record.provenance import code_version, environment
from harness.record.store import RunFolder, run_id
from harness.record.summary import RunFacts, build_summary
from harness.record.terminal import Progress
from harness.record.trace import write_trace
from harness.record.wandb_sink import WandbSink
from harness.settings import Settings, load_strategy, parse_settings
from harness.verify.collect import generated_sequence
from harness.verify.records import VerifyReport
from harness.workload.build import build_workload
from harness.workload.request import Workload


class RunFailed(RuntimeError):
    """The run ended without a valid result; its folder says why."""

    def __init__(self, message: str, folder: Path, status: str) -> None:
        super().__init__(message)
        self.folder = folder
        self.status = status


@dataclass(eq=False)
class _State:
    """What is known so far; a run that ends early reports from this."""

    started_s: float = field(default_factory=time.monotonic)
    setup_s: float = 0.0
    machine: Machine | None = None
    workload: Workload | None = None
    weights_source: str = "unknown"
    strategy: Strategy | None = None
    sequences: list[Sequence] = field(default_factory=list)
    passes: list[PassRecord] = field(default_factory=list)
    verify: VerifyReport | None = None
    host_steal_share: float | None = None  # while generating
    warnings: list[str] = field(default_factory=list)


def run_experiment(values: Mapping[str, Any]) -> tuple[dict[str, Any], Path]:
    """Run what the configuration `values` asks for; the summary and the run folder.

    Raises ConfigError for bad input, RunFailed for anything that ends the run, both after recording what there is.
    """
    settings = parse_settings(values)
    module, strategy_config = load_strategy(settings.strategy)
    load_machine(settings.machine)  # bad settings are told before anything is loaded
    config = {**values, "strategy": {"name": settings.strategy_name, **values["strategy"]}}
    name = run_id(config, code_version(), [settings.hardware.name, environment()["processor"]])
    meta = {"code_version": code_version(), "environment": environment(), "experiment": settings.experiment.name}
    state = _State()
    with RunFolder.create(settings.results_dir, name, config, meta) as folder:
        sink = WandbSink(settings.wandb, folder.path)
        sink.start(config, meta)
        try:
            console = Console(stderr=True, quiet=not settings.progress)
            with Progress(settings.dataset.num_requests, console) as progress:
                _execute(settings, module, strategy_config, state, folder, sink, progress)
        except BaseException as error:
            _record_failure(error, settings, state, folder, sink)
            raise
        finally:
            if state.machine is not None:
                state.machine.close()
        wrong = _what_is_wrong(settings, state)
        status = "failed" if wrong else "ok"
        summary = _report(settings, state, folder, sink, status, wrong)
    if wrong:
        raise RunFailed(wrong, folder.path, status)
    return summary, folder.path


def _what_is_wrong(settings: Settings, state: _State) -> str | None:
    """Why a run that came to its end is not a result."""
    rejected = [s for s in state.sequences if s.state is State.REJECTED]
    if len(rejected) == len(state.sequences):
        return f"every request was rejected; the first: {rejected[0].reject_reason}"
    report = state.verify
    if settings.verify != "off" and (report is None or not report.checked):
        return "verification had nothing to check: all of its requests were rejected; verify=all checks the others"
    return None if report is None or report.ok else f"verification failed: {report.first_mismatch}"


def _execute(
    settings: Settings,
    module: ModuleType,
    strategy_config: Any,
    state: _State,
    folder: RunFolder,
    sink: WandbSink,
    progress: Progress,
) -> None:
    progress.stage("checkpoint")
    settings.model.require_weights()
    checkpoint = Checkpoint(ensure(settings.model), settings.model.dtype)
    state.weights_source = _weights_source(settings, checkpoint)
    progress.stage("prompts")
    state.workload = _workload(settings, checkpoint)
    sources = {"data_source": state.workload.source, "weights_source": state.weights_source}
    write_json(folder.path / "meta.json", {**read_json(folder.path / "meta.json"), **sources})
    progress.stage("weights")
    state.machine = machine = load_machine(settings.machine)(settings.hardware)
    if checkpoint.spec.dtype == "bfloat16":
        bf16_method()  # decides by a measurement, which lanes at work would disturb
    engine = _engine(settings, machine, checkpoint, state)
    progress.stage("planning")
    state.strategy = strategy = module.build(strategy_config, engine)
    planned = {"label": machine.label, "plan": strategy.plan, "prediction": strategy.prediction}
    write_json(folder.path / "plan.json", plain(planned))
    machine.drain()
    machine.spans.clear()  # set-up and profiling are not part of what is measured
    if warning := sink.settle():
        state.warnings.append(warning)
    state.setup_s = time.monotonic() - state.started_s
    _generate(engine, strategy, state, folder, sink, progress)
    if settings.verify != "off":
        progress.stage("verification")
        state.verify = _verify(settings, checkpoint, state.sequences)


def _generate(
    engine: Engine, strategy: Strategy, state: _State, folder: RunFolder, sink: WandbSink, progress: Progress
) -> None:
    progress.stage("generation")
    meter = PassMeter(engine.machine.spans)
    finished = generated = 0

    unrecorded = list(state.sequences)

    def record(rows: list[dict[str, Any]]) -> None:
        for row in rows:
            labelled = {"label": engine.machine.label, **row}
            folder.append_pass(labelled)
            sink.log_pass(labelled)

    def record_requests(*, all_of_them: bool) -> None:
        nonlocal unrecorded
        for sequence in unrecorded:
            if all_of_them or sequence.state in (State.FINISHED, State.REJECTED):
                folder.append_request(_request_row(sequence))
        unrecorded = [s for s in unrecorded if s.state not in (State.FINISHED, State.REJECTED)]

    def on_pass(passed: PassRecord) -> None:
        nonlocal finished, generated
        state.passes.append(passed)
        record(meter.add(passed))
        if passed.num_finished:
            record_requests(all_of_them=False)
        finished += passed.num_finished
        generated += passed.generated_tokens
        progress.update(finished, generated / max(passed.end_s - state.passes[0].start_s, 1e-9))

    before = read_cpu_times()
    try:
        loop.run(engine, strategy, on_pass)
    finally:
        if before is not None and (after := read_cpu_times()) is not None:
            state.host_steal_share = after.stolen_share_since(before)
        record(meter.finish())  # the meter holds the last pass back
        record_requests(all_of_them=True)  # those that an early end left unfinished too


def _engine(settings: Settings, machine: Machine, checkpoint: Checkpoint, state: _State) -> Engine:
    spec = checkpoint.spec
    if settings.stop_at_eos and spec.eos_token_id is None:
        raise ConfigError("stop_at_eos", "this model's config.json names no end-of-sequence token; set it to false")
    _require_host_memory(machine, checkpoint, settings)
    store = WeightStore(machine, checkpoint)
    _require_two_layers(machine, store, settings)
    resident = Resident(machine, store)
    kv = KVCache(machine, spec, capacity_bytes=int(settings.kv_cache_gb * 1e9), block_size=settings.kv_block_tokens)
    if kv.allocator.num_blocks == 0:
        block_gb = settings.kv_block_tokens * spec.kv_bytes_per_token / 1e9
        raise ConfigError("kv_cache_gb", f"{settings.kv_cache_gb:g} holds no block; one takes {block_gb:.4g} GB")
    state.sequences = [Sequence(request) for request in state.workload.requests] if state.workload else []
    for sequence in _sampled(settings, state.sequences):
        sequence.records_routing = True
    return Engine(
        machine=machine,
        spec=spec,
        family=checkpoint.family,
        store=store,
        resident=resident,
        kv=kv,
        sequences=state.sequences,
        eos_token_id=spec.eos_token_id if settings.stop_at_eos else None,
    )


def _require_host_memory(machine: Machine, checkpoint: Checkpoint, settings: Settings) -> None:
    weights_gb = sum(part.nbytes for _, part in checkpoint.parts()) / 1e9
    held_gb = weights_gb + settings.kv_cache_gb
    if held_gb * 1e9 > machine.tiers["pinned"].capacity_bytes:
        raise ConfigError(
            "hardware.pinned_memory_gb",
            f"must hold the weights ({weights_gb:.4g} GB) and kv_cache_gb ({settings.kv_cache_gb:g}), "
            f"got {settings.hardware.pinned_memory_gb:g}",
        )


def _require_two_layers(machine: Machine, store: WeightStore, settings: Settings) -> None:
    needed_gb = (2 * store.layer_bytes + store.embedding.layout.nbytes + store.head.layout.nbytes) / 1e9
    if needed_gb > settings.hardware.device_memory_gb:
        raise ConfigError(
            "hardware.device_memory_gb",
            f"must hold two layers with embedding and head, {needed_gb:.4g} GB for this model, "
            f"got {settings.hardware.device_memory_gb:g}",
        )


def _workload(settings: Settings, checkpoint: Checkpoint) -> Workload:
    return build_workload(
        settings.dataset,
        checkpoint.tokenizer(),
        vocab_size=checkpoint.spec.vocab_size,
        max_positions=checkpoint.spec.max_positions,
        seed=settings.seed,
    )


def _sampled(settings: Settings, sequences: list[Sequence]) -> list[Sequence]:
    """The requests that verification will look at: all, or some evenly spread over the workload."""
    if settings.verify == "off":
        return []
    count = len(sequences) if settings.verify == "all" else min(settings.verify_requests, len(sequences))
    return [sequences[i * len(sequences) // count] for i in range(count)]


def _verify(settings: Settings, checkpoint: Checkpoint, sequences: list[Sequence]) -> VerifyReport:
    from harness.verify.oracle import verify

    finished = [s for s in _sampled(settings, sequences) if s.state is State.FINISHED]
    return verify(checkpoint, [generated_sequence(s) for s in finished], eos=settings.stop_at_eos)


def _request_row(sequence: Sequence) -> dict[str, Any]:
    return {
        "request_id": sequence.request.request_id,
        "state": sequence.state.value,
        "reject_reason": sequence.reject_reason,
        "prompt_tokens": sequence.prompt_len,
        "generated_ids": sequence.generated,
        "preemptions": sequence.num_preemptions,
        "finished_pass": sequence.finished_pass,
    }


def _weights_source(settings: Settings, checkpoint: Checkpoint) -> str:
    kind = "random weights" if settings.model.path is None else f"checkpoint {settings.model.path}"
    return f"{kind}, {checkpoint.spec.dtype}, fingerprint {checkpoint.fingerprint()}"


def _record_failure(
    error: BaseException, settings: Settings, state: _State, folder: RunFolder, sink: WandbSink
) -> None:
    """Whatever ended the run, its cause and what was measured until then are recorded before the error goes on."""
    if isinstance(error, KeyboardInterrupt):
        status, text = "interrupted", "interrupted"
    elif any(isinstance(e, MemoryError | MemoryCapacityError) for e in (error, error.__cause__)):
        status, text = "oom", f"{type(error).__name__}: {error}"
    else:
        status, text = "failed", f"{type(error).__name__}: {error}"
    with suppress(OSError, RuntimeError):  # the disk itself may be what failed; the original error matters more
        _report(settings, state, folder, sink, status, text)


def _report(
    settings: Settings, state: _State, folder: RunFolder, sink: WandbSink, status: str, error: str | None
) -> dict[str, Any]:
    """Write trace, summary and status, then hand the first two to W&B, which may take its time."""
    spans = list(state.machine.spans) if state.machine else []
    label = state.machine.label if state.machine else "none"
    trace_path = folder.path / "trace.json"
    write_trace(trace_path, spans, state.passes, label=label, meta={"run_id": folder.run_id})
    extra: dict[str, Any] = {"run_id": folder.run_id, "warnings": state.warnings}
    extra |= {"hardware_ratios": ratios(settings.hardware, spans), "host_steal_share": state.host_steal_share}
    if state.strategy and state.strategy.prediction:
        extra["prediction"] = asdict(state.strategy.prediction)
    summary = build_summary(_facts(settings, state, status, error), state.passes, spans, extra)
    summary["reject_reasons"] = Counter(s.reject_reason for s in state.sequences if s.reject_reason)
    folder.write_summary(summary)
    folder.finish(status, error)
    summary["wandb"] = sink.finish(summary, trace_path)
    folder.write_summary(summary)
    return summary


def _facts(settings: Settings, state: _State, status: str, error: str | None) -> RunFacts:
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
        num_requests=settings.dataset.num_requests,
        num_finished=states.count(State.FINISHED),
        num_rejected=states.count(State.REJECTED),
        prompt_tokens=state.workload.total_prompt_tokens if state.workload else 0,
        wall_s=time.monotonic() - state.started_s,
        setup_s=state.setup_s,
        predicted_throughput_tok_s=strategy.prediction.throughput_tok_s if strategy and strategy.prediction else None,
        gpu_tok_s=strategy.gpu_tok_s if strategy else None,
        ceilings_gb_s=settings.hardware.link_ceilings_gb_s,
        peak_bytes={name: tier.peak_bytes for name, tier in tiers.items()},
        capacity_bytes={name: tier.capacity_bytes for name, tier in tiers.items()},
        memory_holders={name: tier.holders() for name, tier in tiers.items()},
        verify={"mode": settings.verify, "checked": 0, "mismatched": 0}
        | ({**asdict(report), "method": report.mode, "mode": settings.verify} if report else {}),
        data_source=state.workload.source if state.workload else "unknown",
        weights_source=state.weights_source,
        plan=strategy.plan if strategy else {},
    )
