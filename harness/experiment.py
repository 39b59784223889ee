"""One run from its settings to its records: load, plan, execute, verify, report."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.console import Console

from harness.config import ConfigError
from harness.engine import loop
from harness.engine.engine import Engine
from harness.engine.sequences import Sequence, State
from harness.engine.strategy import Strategy
from harness.hardware.steal import read_cpu_times
from harness.interrupts import interrupts_kept
from harness.machine.base import MachineError
from harness.machine.build import chosen_machine, load_machine
from harness.memory.tiers import MemoryCapacityError
from harness.preparing import LoadedModel, build_engine, load_model, load_workload, with_host_memory
from harness.record.files import plain, read_json, write_json
from harness.record.meter import PassMeter
from harness.record.passes import PassRecord
from harness.record.provenance import checkout, code_version, environment
from harness.record.store import RunFolder, run_id
from harness.record.terminal import Progress
from harness.record.wandb_rows import PassRows
from harness.record.wandb_sink import WandbSink
from harness.report import RunState, record_failure, report_run, request_row, what_is_wrong
from harness.routing.recording import recording
from harness.settings import Settings, load_strategy, parse_settings, require_num_gpus
from harness.simulating import equip
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
    values = {**values, "machine": chosen_machine(parse_settings(values).machine)}
    settings = parse_settings(values)
    module, strategy_config = load_strategy(settings.strategy)
    require_num_gpus(settings, strategy_config)
    loaded = load_machine(settings.machine)  # bad settings are told before anything is loaded, and before waiting
    config = {**values, "strategy": {"name": settings.strategy_name, **values["strategy"]}}
    name = run_id(config, code_version(), [settings.hardware.name, environment()["processor"]])
    meta = {"code_version": code_version(), **checkout(), "environment": environment(), "hostname": platform.node()}
    meta |= {"experiment": settings.experiment.name, "sweep": sweep}
    turn = loaded.turn(f"strategy {settings.strategy_name}", exclusive=settings.exclusive)
    with turn as others, RunFolder.create(settings.results_dir, name, config, meta) as folder:
        state = RunState(turn=others)
        sink = WandbSink(settings.wandb, folder.path)
        sink.start(config, meta)
        try:
            console = Console(stderr=True, quiet=not settings.progress)
            with Progress(settings.dataset.num_requests, console) as progress:
                _execute(settings, module, strategy_config, state, folder, sink, progress)
        except BaseException as error:
            status = record_failure(error, settings, state, folder, sink)
            if isinstance(error, KeyboardInterrupt):
                raise type(error)(str(folder.path)) from None
            if isinstance(error, MachineError) and isinstance(error.__cause__, ConfigError):
                raise error.__cause__ from error  # told by an op, such as one that reads the checkpoint
            if isinstance(error, MachineError | MemoryCapacityError | MemoryError):
                raise RunFailed(f"{type(error).__name__}: {error}", folder.path, status) from error
            error.add_note(f"run folder: {folder.path}")
            raise
        finally:
            if state.machine is not None:
                state.machine.close()
        wrong = what_is_wrong(state)
        status = "failed" if wrong else "ok"
        summary = report_run(settings, state, folder, sink, status, wrong)
    if wrong:
        raise RunFailed(wrong, folder.path, status)
    return summary, folder.path


def _execute(
    settings: Settings,
    module: ModuleType,
    strategy_config: Any,
    state: RunState,
    folder: RunFolder,
    sink: WandbSink,
    progress: Progress,
) -> None:
    progress.stage("checkpoint")
    loaded = load_machine(settings.machine)
    model = load_model(settings, has_tensors=loaded.has_tensors)
    settings = with_host_memory(settings, model)
    state.weights_source, state.tokenizer = model.weights_source, model.tokenizer
    state.verify_mode = settings.verify if loaded.has_tensors else "off"  # without tensors there are no tokens
    if state.verify_mode != "off":
        _require_reference(model)
    progress.stage("prompts")
    state.workload = load_workload(settings, model)
    sources = {"data_source": state.workload.source, "weights_source": state.weights_source}
    write_json(folder.path / "meta.json", {**read_json(folder.path / "meta.json"), **sources})
    progress.stage("weights")
    state.machine = machine = loaded.build(settings.hardware, model.spec)
    if not loaded.has_tensors:
        equip(machine, settings, model.spec, log=progress.note)
    state.sequences = [Sequence(request) for request in state.workload.requests]
    sampled = _sampled(settings, state)
    state.num_to_verify = len(sampled)
    for sequence in state.sequences if settings.record_routing else sampled:
        sequence.records_routing = True
    engine = build_engine(settings, machine, model, state.sequences, strategy_config)
    progress.stage("planning")
    state.strategy = strategy = module.build(strategy_config, engine)
    planned = {"label": machine.label, "plan": strategy.plan, "prediction": strategy.prediction}
    write_json(folder.path / "plan.json", plain(planned))
    machine.drain()
    machine.spans.clear()  # set-up and profiling are not part of what is measured
    state.setup_s = time.monotonic() - state.started_s
    if warning := sink.settle():
        state.warnings.append(warning)
    source = f"{machine.label} run; {state.weights_source}; {state.workload.source}"
    with recording(settings.record_routing, folder.path, model.spec, source) as record_routing:
        _generate(engine, strategy, state, folder, sink, progress, record_routing)
    if state.verify_mode != "off":
        progress.stage("verification")
        state.verify = _verify(settings, model, state)


def _generate(
    engine: Engine,
    strategy: Strategy,
    state: RunState,
    folder: RunFolder,
    sink: WandbSink,
    progress: Progress,
    record_routing: Callable[[Sequence], None],
) -> None:
    label, clock = engine.machine.label, engine.machine.clock
    stage = "generation" if clock == "none" else f"generation, {label}"
    progress.stage(stage, rate=f"tok/s {label}" if clock == "virtual" else "tok/s")
    meter = PassMeter(engine.machine.spans)
    history = PassRows(strategy.prediction.throughput_tok_s if strategy.prediction else None, timed=clock != "none")
    finished = generated = 0

    unrecorded = list(state.sequences)

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
                record_routing(sequence)
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
        if before is not None and (after := read_cpu_times()) is not None:
            state.host_steal_share = after.stolen_share_since(before)
            state.others_core_share = after.taken_share_since(before)
        state.beside = state.turn.beside() if state.turn else []
        record(meter.finish())  # the meter holds the last pass back
        record_requests(all_of_them=True)  # those that an early end left unfinished too


def _sampled(settings: Settings, state: RunState) -> list[Sequence]:
    """The requests that verification will look at: all, or some evenly spread over the workload."""
    sequences = state.sequences
    if state.verify_mode == "off":
        return []
    count = len(sequences) if state.verify_mode == "all" else min(settings.verify_requests, len(sequences))
    return [sequences[i * len(sequences) // count] for i in range(count)]


def _require_reference(model: LoadedModel) -> None:
    """What verification would refuse at the end is refused before the run."""
    from harness.verify.reference import reference_config

    assert model.checkpoint is not None, "without tensors there is nothing to verify"
    reference_config(model.checkpoint)


def _verify(settings: Settings, model: LoadedModel, state: RunState) -> VerifyReport:
    from harness.verify.oracle import verify

    assert model.checkpoint is not None, "without tensors there is nothing to verify"
    finished = [s for s in _sampled(settings, state) if s.state is State.FINISHED]
    return verify(model.checkpoint, [generated_sequence(s) for s in finished], eos=settings.stop_at_eos)
