"""Take one run from its settings to its records: load, plan, execute, verify, report."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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
from harness.record.measured import Fold
from harness.record.meter import PassMeter
from harness.record.passes import PassRecord
from harness.record.provenance import checkout, code_version, environment
from harness.record.steady import EnoughPasses, require_more
from harness.record.store import RunFolder, run_id
from harness.record.terminal import Progress
from harness.record.wandb_rows import PassRows
from harness.record.wandb_sink import WandbSink
from harness.routing.recording import hidden_sample, recording
from harness.routing.token_sample import TokenSample
from harness.run.report import (
    Others,
    RunState,
    record_failure,
    report_run,
    request_row,
    what_is_wrong,
    write_first_summary,
)
from harness.run.session import Session
from harness.run.small_batch import small_batch
from harness.run.thinking import let_think
from harness.verify.collect import generated_sequence


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
    config = {**values, "machine": machine.values, "strategy": {**values["strategy"], "name": settings.strategy_name}}
    name = run_id(config, code_version(), [settings.hardware.name, environment()["processor"]])
    meta = {"code_version": code_version(), **checkout(), "environment": environment(), "hostname": platform.node()}
    meta |= {"experiment": settings.experiment.name, "sweep": sweep}
    turn = machine.turn(f"strategy {settings.strategy_name}", exclusive=settings.exclusive)
    with turn as others, RunFolder.create(settings.results_dir, name, config, meta) as folder:
        state = RunState(session, others)
        sink = WandbSink(settings.wandb, folder.path)
        sink.start(config, meta)
        console = Console(stderr=True, quiet=not settings.progress)
        with Progress(settings.dataset.num_requests, console) as progress:
            with session, _failures_recorded(state, folder, sink):
                _execute(state, folder, sink, progress)
            with _failures_recorded(state, folder, sink):  # the machine has given its memory back
                _verify(state, folder, progress)
        wrong = what_is_wrong(state)
        status = "failed" if wrong else "ok"
        summary = report_run(state, folder, sink, status, wrong)
    if wrong:
        raise RunFailed(wrong, folder.path, status)
    return summary, folder.path


def _execute(state: RunState, folder: RunFolder, sink: WandbSink, progress: Progress) -> None:
    """Set the session up and generate, each stage told to `progress`."""
    session = state.session
    progress.stage("checkpoint")
    model = session.load_model()
    if state.verify_mode != "off":
        _require_reference(model)
    progress.stage("prompts")
    workload = session.load_workload()
    _add_to_meta(folder, {"data_source": workload.source, "weights_source": model.weights_source})
    progress.stage("weights")
    machine = session.build_machine(partial(calibrate, log=progress.note))
    _add_to_meta(folder, {"machine": machine.facts})  # for a run that ends early
    session.queue_requests()
    source = f"{machine.label} run; {model.weights_source}; {workload.source}"
    sample = _ask_for_records(state, source)
    engine = session.build_engine()
    progress.stage("planning")
    strategy = session.build_strategy()
    state.small_batch = small_batch(session.settings, engine)
    planned = {"label": machine.label, "plan": strategy.plan, "prediction": strategy.prediction}
    write_json(folder.path / "plan.json", plain(planned))
    let_think(session)
    loop.look_at_weights(engine)
    _add_to_meta(folder, {"machine": machine.facts})
    machine.drain()
    machine.spans.clear()  # set-up and profiling are not part of what is measured
    state.setup_s = time.monotonic() - state.started_s
    if warning := sink.settle():
        state.warnings.append(warning)
    routing = session.settings.record_routing
    with recording(folder.path, model.spec, source, routing=routing, sample=sample) as record_sequence:
        _generate(engine, strategy, state, folder, sink, progress, record_sequence)


@contextmanager
def _failures_recorded(state: RunState, folder: RunFolder, sink: WandbSink) -> Iterator[None]:
    """Record what ends the run within the block, and let it through as `run_experiment` promises."""
    try:
        yield
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


def _add_to_meta(folder: RunFolder, facts: Mapping[str, Any]) -> None:
    path = folder.path / "meta.json"
    write_json(path, {**read_json(path), **facts})


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
    if state.session.settings.keep_spans == "totals":
        state.fold = Fold()
    meter = PassMeter(engine.machine.spans, clears=state.fold is not None, fold=state.fold)
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
        require_more(state.passes, state.session.settings.stop_after_decode_passes)

    before = read_cpu_times()
    try:
        loop.run(engine, strategy, on_pass)
    except EnoughPasses as enough:
        state.stopped = str(enough)
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
    from harness.machine.device.pinned import free_bytes_by_limit
    from harness.verify.reference import is_loaded, reference_config

    assert model.checkpoint is not None, "without tensors there is nothing to verify"
    reference_config(model.checkpoint)
    free_bytes = min(free_bytes_by_limit().values(), default=None)
    needed_bytes = 0 if is_loaded(model.checkpoint) else 4 * model.spec.model_bytes // model.spec.dtype_bytes
    if free_bytes is not None and needed_bytes > free_bytes:
        reference = f"a float32 reference of this model takes {needed_bytes / 1e9:.4g} GB of host memory"
        raise ConfigError("verify", f"must be off: {reference}, of which {free_bytes / 1e9:.4g} are free")


def _verify(state: RunState, folder: RunFolder, progress: Progress) -> None:
    """Compare the tokens with the reference's, if that is asked for. What was measured is on disk before that: the
    reference takes much memory, and who takes too much is killed."""
    if state.verify_mode == "off":
        return
    from harness.verify.oracle import verify

    progress.stage("verification")
    session = state.session
    assert session.model is not None and session.model.checkpoint is not None, "there is nothing to verify"
    write_first_summary(state, folder, "ended while its tokens were verified")
    finished = [generated_sequence(s) for s in state.to_verify if s.state is State.FINISHED]
    state.verify = verify(session.model.checkpoint, finished, eos=session.settings.stop_at_eos)
