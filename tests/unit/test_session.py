"""Check that set-up parses everything once, tells mistakes in order, and closes what it opened."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from harness import settings
from harness.config import ConfigError
from harness.machine import build, simulated
from harness.machine.auto import Config as Auto
from harness.plan.planning import make_plan
from harness.record.store import read_run
from harness.run.experiment import run_experiment
from harness.run.session import Session
from harness.settings import Settings, load_strategy
from tests.composing import composed

TINY = ("machine=simulated", "hardware=a40", "model=mixtral-tiny", "dataset.num_requests=2", "kv_cache_gb=0.002")


@pytest.fixture
def parsed(monkeypatch) -> Counter[type]:
    """Count how often each class of settings is parsed."""
    found: Counter[type] = Counter()

    for module in (settings, build):

        def counted(cls, *given, parse=module.parse):
            found[cls] += 1
            return parse(cls, *given)

        monkeypatch.setattr(module, "parse", counted)
    return found


def quiet_run(values):
    return run_experiment({**values, "progress": False, "verify": "off"})


@pytest.mark.parametrize("do", [quiet_run, make_plan])
def test_settings_strategy_and_machine_are_loaded_once(do, parsed, tmp_path):
    values = composed(*TINY, f"results_dir={tmp_path}", "wandb.mode=disabled")
    strategy = load_strategy(values["strategy"]).package.Config
    parsed.clear()
    do(values)
    assert parsed == {Settings: 1, simulated.Config: 1, strategy: 1}


def test_the_machine_of_this_computer_is_chosen_once(parsed):
    session = Session.of(composed())
    assert parsed[Auto] == parsed[Settings] == 1
    assert session.settings.machine["name"] == session.loaded_machine.values["name"] != "auto"


def test_the_first_mistake_in_the_order_of_the_steps_is_told():
    """Raise none of them after the model is loaded, which is not there."""
    values = composed("machine=simulated", "model=checkpoint", "model.path=not/there", "hardware=t4x2")
    values["strategy"]["no_such"] = 1
    values["machine"]["no_such"] = 1
    values["no_such"] = 1
    for group, field in ((values, "no_such"), (values["machine"], "machine.no_such"),
                         (values["strategy"], "strategy.no_such"), ({"no_such": 1}, "hardware.num_gpus")):  # fmt: skip
        with pytest.raises(ConfigError) as told:
            Session.of(values)
        assert told.value.field == field
        del group["no_such"]


def test_a_set_up_that_is_interrupted_is_recorded_and_its_machine_closed(monkeypatch, tmp_path):
    def interrupted(session):
        raise KeyboardInterrupt

    closed: list[str] = []
    monkeypatch.setattr(Session, "build_engine", interrupted)
    monkeypatch.setattr(simulated.SimulatedMachine, "close", lambda machine: closed.append(machine.name))
    with pytest.raises(KeyboardInterrupt) as told:
        quiet_run(composed(*TINY, f"results_dir={tmp_path}", "wandb.mode=disabled"))
    assert closed == ["simulated"]
    summary = read_run(Path(str(told.value))).summary
    assert (summary["status"], summary["label"], summary["plan"]) == ("interrupted", "simulated", {})
    assert summary["prompt_tokens"] > 0 and "synthetic" in summary["data_source"]
    assert summary["weights_source"].startswith("dimensions only")
