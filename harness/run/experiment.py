"""One run from its settings to its records: load, plan, execute, verify, report."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from harness.calibration.local import calibrate
from harness.config import ConfigError
from harness.engine import loop
from harness.engine.engine import Engine
from harness.engine.sequences import Records, Sequence, State
from harness.engine.strategy import Strategy
from harness.hardware.steal import CpuTimes, read_cpu_times
from harness.interrupts import interrupts_kept
from harness.machine.base import MachineError
from harness.machine.turn import Turn
from harness.memory.tiers import MemoryCapacityError
from harness.model.loading import LoadedModel
from harness.record.files import plain, read_json, write_json
from harness.record.meter import PassMeter
from harness.record.passes import PassRecord
from harness.record.provenance import checkout, code_version, environment
from harness.record.store import RunFolder, run_id
from harness.record.terminal import Progress
from harness.record.wandb_rows import PassRows
from harness.record.wandb_sink import WandbSink
from harness.routing.recording import hidden_sample, recording
from harness.routing.token_sample import TokenSample
from harness.run.report import Others, RunState, record_failure, report_run, request_row, what_is_wrong
from harness.run.session import Session
from harness.verify.collect import generated_sequence
from harness.verify.records import VerifyReport


class RunFailed(RuntimeError):
    """The run ended without a valid result; its folder says why."""

    def __init__(self, message: str, folder: Path, status: str) -> None:
        super().__init__(message)
        self.folder = folder
        self.status = status


@interrupts_kept()
def run_experiment(values: Mapping[str, Any], sweep: str | None = None) -> tuple[dict[str, Any], Path]:
    """Run what the configuration `values` asks for; the summary and the run folder. `sweep` names the sweep that has
    the run as a job.

    Raises ConfigError for bad input, RunFailed for anything that ends the run, both after recording what there is.
    """
    session = Session.of(values)  # bad settings are told before anything is loaded, and before waiting
    settings, machine = session.settings, session.loaded_machine
    config = {**values, "machine": machine.values, "strategy": {"name": settings.strategy_name, **values["strategy"]}}
    name = run_id(config, code_version(), [settings.hardware.name, environment()["processor"]])
    meta = {"code_version": code_version(), **checkout(), "environment": environment(), "hostname": platform.node()}
    meta |= {"experiment": settings.experiment.name, "sweep": sweep}
    turn = machine.turn(f"strategy {settings.strategy_name}", exclusive=settings.exclusive)
    with turn as others, RunFolder.create(settings.results_dir, name, config, meta) as folder:
        state = RunState(session, others)
        sink = WandbSink(settings.wandb, folder.path)
        sink.start(config, meta)
        with session:
            try:
                console = Console(stderr=True, quiet=not settings.progress)
                with Progress(settings.dataset.num_requests, console) as progress:
                    _execute(state, folder, sink, progress)
            except BaseException as error:
                status = record_failure(error, state, folder, sink)
                if isinstance(error, KeyboardInterrupt):
                    raise type(error)(str(folder.path)) from None
                if isinstance(error, MachineError) and isinstance(error.__cause__, ConfigError):
                    raise error.__cause__ from error  # told by an op, such as one that reads the checkpoint
                if isinstance(error, MachineError | MemoryCapacityError | MemoryError):
                    raise RunFailed(f"{type(error).__name__}: {error}", folder.path, status) from error
                error.add_note(f"run folder: {folder.path}")
                raise
        wrong = what_is_wrong(state)
        status = "failed" if wrong else "ok"
        summary = report_run(state, folder, sink, status, wrong)
    if wrong:
        raise RunFailed(wrong, folder.path, status)
    return summary, folder.path


def _execute(state: RunState, folder: RunFolder, sink: WandbSink, progress: Progress) -> None:
    """Set the session up, generate and verify, each stage told to `progress`."""
    session = state.session
    progress.stage("checkpoint")
    model = session.load_model()
    if state.verify_mode != "off":
        _require_reference(model)
    progress.stage("prompts")
    workload = session.load_workload()
    sources = {"data_source": workload.source, "weights_source": model.weights_source}
    write_json(folder.path / "meta.json", {**read_json(folder.path / "meta.json"), **sources})
    progress.stage("weights")
    machine = session.build_machine(partial(calibrate, log=progress.note))
    session.queue_requests()
    source = f"{machine.label} run; {model.weights_source}; {workload.source}"
    sample = _ask_for_records(state, source)
    engine = session.build_engine()
    progress.stage("planning")
    strategy = session.build_strategy()
    planned = {"label": machine.label, "plan": strategy.plan, "prediction": strategy.prediction}
    write_json(folder.path / "plan.json", plain(planned))
    machine.drain()
    machine.spans.clear()  # set-up and profiling are not part of what is measured
    state.setup_s = time.monotonic() - state.started_s
    if warning := sink.settle():
        state.warnings.append(warning)
    routing = session.settings.record_routing
    with recording(folder.path, model.spec, source, routing=routing, sample=sample) as record_sequence:
        _generate(engine, strategy, state, folder, sink, progress, record_sequence)
    if state.verify_mode != "off":
        progress.stage("verification")
        state.verify = _verify(model, state)


def _ask_for_records(state: RunState, source: str) -> TokenSample | None:
    """Tell the sequences what of their routing is wanted, be it for records or for verification. Returns the tokens
    whose hidden states are recorded, if any are."""
    session, settings, sample = state.session, state.session.settings, None
    assert session.model is not None, "what can be recorded depends on the model"
    if settings.record_hidden:
        limit_mb, spec = settings.record_hidden_mb, session.model.spec
        sample = hidden_sample(spec, source, session.sequences, limit_mb=limit_mb, seed=settings.seed)
    records = Records(weights=settings.record_routing == "weights", sample=sample)
    for sequence in session.sequences if settings.record_routing or sample else state.to_verify:
        sequence.records = records
    return sample


def _generate(
    engine: Engine,
    strategy: Strategy,
    state: RunState,
    folder: RunFolder,
    sink: WandbSink,
    progress: Progress,
    record_sequence: Callable[[Sequence], None],
) -> None:
    label, clock = engine.machine.label, engine.machine.clock
    stage = "generation" if clock == "none" else f"generation, {label}"
    progress.stage(stage, rate=f"tok/s {label}" if clock == "virtual" else "tok/s")
    meter = PassMeter(engine.machine.spans)
    history = PassRows(strategy.prediction.throughput_tok_s if strategy.prediction else None, timed=clock != "none")
    finished = generated = 0

    unrecorded = list(engine.sequences)

    def record(rows: list[dict[str, Any]]) -> None:
        for row in rows:
            labelled = {"label": engine.machine.label, **row}
            folder.append_pass(labelled)
            sink.log_pass(history.row(labelled))

    def record_requests(*, all_of_them: bool) -> None:
        nonlocal unrecorded
        for sequence in unrecorded:
            if all_of_them or sequence.state in (State.FINISHED, State.REJECTED):
                folder.append_request(request_row(sequence, state))
                record_sequence(sequence)
        unrecorded = [s for s in unrecorded if s.state not in (State.FINISHED, State.REJECTED)]

    def on_pass(passed: PassRecord) -> None:
        nonlocal finished, generated
        state.passes.append(passed)
        record(meter.add(passed))
        if passed.num_finished:
            record_requests(all_of_them=False)
        finished += passed.num_finished
        generated += passed.generated_tokens
        rate = generated / max(passed.end_s - state.passes[0].start_s, 1e-9)
        progress.update(finished, None if clock == "none" else rate)

    before = read_cpu_times()
    try:
        loop.run(engine, strategy, on_pass)
    finally:
        state.others = _others_since(before, state.turn)
        record(meter.finish())  # the meter holds the last pass back
        record_requests(all_of_them=True)  # those that an early end left unfinished too


def _others_since(before: CpuTimes | None, turn: Turn | None) -> Others:
    """Return what others had of this computer since `before`."""
    after = read_cpu_times()
    beside = tuple(turn.beside()) if turn else ()
    if before is None or after is None:
        return Others(beside=beside)
    return Others(
        host_steal_share=after.stolen_share_since(before),
        others_core_share=after.taken_share_since(before),
        beside=beside,
    )


def _require_reference(model: LoadedModel) -> None:
    """Refuse before the run what verification would refuse at its end."""
    from harness.verify.reference import reference_config

    assert model.checkpoint is not None, "without tensors there is nothing to verify"
    reference_config(model.checkpoint)


def _verify(model: LoadedModel, state: RunState) -> VerifyReport:
    from harness.verify.oracle import verify

    assert model.checkpoint is not None, "without tensors there is nothing to verify"
    finished = [s for s in state.to_verify if s.state is State.FINISHED]
    return verify(model.checkpoint, [generated_sequence(s) for s in finished], eos=state.session.settings.stop_at_eos)
