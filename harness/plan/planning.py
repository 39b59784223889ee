"""A plan: what memory holds, which policy the strategy chose, what is predicted, and what the simulator says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from harness.calibration.local import Log, calibrate
from harness.config import ConfigError
from harness.engine import loop
from harness.engine.engine import Engine
from harness.engine.garbage import collecting_rarely
from harness.engine.sequences import State
from harness.engine.strategy import Strategy
from harness.machine.base import Machine
from harness.memory.tiers import MemoryCapacityError
from harness.record.measured import Fold
from harness.record.meter import PassMeter
from harness.record.passes import PassRecord
from harness.record.steady import EnoughPasses, require_more
from harness.record.summary import RunFacts, build_summary
from harness.run.session import Session
from harness.run.thinking import let_think
from harness.settings import Settings

# What errors name that mean too little memory, once the settings themselves have been found valid.
_SIZES = ("hardware.device_memory_gb", "hardware.pinned_memory_gb", "hardware.host_memory_gb", "hardware.ram_gb")


class DoesNotFit(RuntimeError):
    """Memory does not suffice. `needed` is what the harness asks for at the least, by tier and name, `there_is` the
    capacities; the message is the error of who asked for too much."""

    def __init__(self, message: str, needed: Mapping[str, Mapping[str, int]], there_is: Mapping[str, int]) -> None:
        super().__init__(message)
        self.needed = needed
        self.there_is = there_is

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what makes the error again in another process."""
        return DoesNotFit, (str(self), self.needed, self.there_is)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """`summary` is that of a simulated run, None until there was one; `stopped` says how far one went that did not
    go to its end. `before_run` is to be called before the plan is simulated."""

    settings: Settings
    engine: Engine
    strategy: Strategy
    data_source: str
    summary: dict[str, Any] | None = None
    stopped: str | None = None
    before_run: Callable[[], None] = lambda: None

    @property
    def machine(self) -> Machine:
        return self.engine.machine


def make_plan(values: Mapping[str, Any], *, simulate: bool = True, log: Log = print) -> Plan:
    """Plan what the configuration `values` asks for, and simulate it to its end. Raises what `draft_plan` raises."""
    plan = draft_plan(values, log=log)
    return simulated(plan) if simulate else plan


@collecting_rarely()
def draft_plan(values: Mapping[str, Any], *, log: Log = print) -> Plan:
    """Plan everything but the simulation, on the simulated machine. Raises ConfigError, and DoesNotFit where memory
    does not suffice."""
    session = Session.of(values)
    if session.has_tensors:
        raise ConfigError("machine", f"must be simulated to plan, got {session.settings.machine['name']}")
    session.load_model()
    workload = session.load_workload()
    try:
        session.build_machine(partial(calibrate, log=log))
        session.queue_requests()
        engine, strategy = session.build_engine(), session.build_strategy()
    except MemoryCapacityError as error:
        raise _does_not_fit(error, session) from error
    except ConfigError as error:
        if error.field not in _SIZES:
            raise
        raise _does_not_fit(error, session) from error
    return Plan(
        settings=session.settings, engine=engine, strategy=strategy, data_source=workload.source,
        before_run=partial(let_think, session),
    )  # fmt: skip


def _does_not_fit(error: Exception, session: Session) -> DoesNotFit:
    return DoesNotFit(str(error), session.least_bytes(), session.settings.hardware.capacities_bytes)


class _Stop(Exception):
    """Enough was simulated."""


def simulated(
    plan: Plan, *, max_ops: int | None = None, on_progress: Callable[[int, float], None] = lambda done, rate: None
) -> Plan:
    """Return the plan with the summary of a simulated run, or of its passes up to the one that reaches `max_ops` ops.
    After each pass `on_progress` is told the finished requests and the tokens a second until now. A plan is simulated
    once."""
    engine, strategy, settings = plan.engine, plan.strategy, plan.settings
    assert plan.summary is None, "a plan is simulated once"
    plan.before_run()
    spans = engine.machine.spans
    engine.machine.drain()
    spans.clear()
    passes: list[PassRecord] = []
    fold = Fold()
    meter = PassMeter(spans, clears=settings.keep_spans == "totals", fold=fold)
    num_finished = num_generated = 0

    def on_pass(record: PassRecord) -> None:
        nonlocal num_finished, num_generated
        passes.append(record)
        meter.add(record)
        num_finished += record.num_finished
        num_generated += record.generated_tokens
        on_progress(num_finished, num_generated / max(record.end_s - passes[0].start_s, 1e-9))
        if max_ops is not None and meter.num_spans >= max_ops:
            raise _Stop
        require_more(passes, settings.stop_after_decode_passes)

    stopped = None
    try:
        loop.run(engine, strategy, on_pass)
    except EnoughPasses as enough:
        stopped = f"stopped {enough}"
    except _Stop:
        if any(s.state not in (State.FINISHED, State.REJECTED) for s in engine.sequences):
            done = f"{len(passes)} passes, {num_finished} of {len(engine.sequences)} requests finished"
            stopped = f"stopped after {meter.num_spans:,} ops: {done}"
    meter.finish()
    facts = RunFacts(
        status="ok",
        label=engine.machine.label,
        strategy=settings.strategy_name,
        model=settings.model.name,
        dataset=settings.dataset.name,
        machine=engine.machine.name,
        clock=engine.machine.clock,
        machine_facts=engine.machine.facts,
        estimated_shares=engine.machine.estimated_shares,
        hardware=settings.hardware.name,
        gpu_tok_s=strategy.gpu_tok_s,
        ceilings_gb_s=settings.hardware.link_ceilings_gb_s,
        token_times_s=[s.token_times_s for s in engine.sequences if s.state is State.FINISHED],
    )
    summary = build_summary(facts, passes, fold.measured(), {"counted": strategy.counted()})
    return replace(plan, summary=summary, stopped=stopped)
