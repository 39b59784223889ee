"""What the README says works: its strategy runs and is verified, and its first two lines are what .ci/run takes."""

from __future__ import annotations

import re
import sys

import pytest

import strategies
from harness.config import ConfigError
from harness.plan.planning import make_plan
from harness.run.experiment import run_experiment
from tests.composing import composed
from tests.conftest import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    """The README's only block in a language."""
    (text,) = re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
    return str(text)


@pytest.fixture
def layerwise(tmp_path, monkeypatch) -> str:
    """The README's strategy, installed beside the others; what Hydra has to be told to find its YAML."""
    package = tmp_path / "strategies" / "layerwise"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(block("python"), encoding="utf-8")
    conf = tmp_path / "conf" / "strategy"
    conf.mkdir(parents=True)
    (conf / "layerwise.yaml").write_text(block("yaml"), encoding="utf-8")
    monkeypatch.setattr(strategies, "__path__", [*strategies.__path__, str(package.parent)])
    monkeypatch.delitem(sys.modules, "strategies.layerwise", raising=False)
    monkeypatch.delattr(strategies, "layerwise", raising=False)
    return f"hydra.searchpath=[file://{conf.parent}]"


@pytest.mark.parametrize("machine", ["emulated", "shuffled"])
def test_the_strategy_in_a_page_gives_the_reference_tokens(layerwise, machine, tmp_path):
    overrides = ["strategy=layerwise", "experiment=smoke", f"machine={machine}", f"results_dir={tmp_path / 'results'}"]
    values = composed(layerwise, *overrides, "wandb.mode=disabled", "progress=false")
    summary, _ = run_experiment(values)
    assert summary["strategy"] == "layerwise"
    assert summary["status"] == "ok"
    assert summary["num_finished"] == summary["verify"]["checked"] == values["dataset"]["num_requests"]
    assert summary["verify"]["mismatched"] == 0
    assert summary["num_passes"] > 2


@pytest.mark.parametrize("setting", ["packet_mb=0", "max_pass_tokens=0"])
def test_the_strategy_in_a_page_names_a_bad_value(layerwise, setting):
    values = composed(layerwise, "strategy=layerwise", "experiment=smoke", f"strategy.{setting}")
    with pytest.raises(ConfigError, match=f"^strategy.{setting.partition('=')[0]}: must be at least"):
        make_plan(values)


def test_the_table_that_is_the_same_on_every_computer():
    """The command's rates, of one seed, are among those in the table's rows."""
    (command,) = re.findall(r"^    python run.py -m (machine=simulated .*)$", README, flags=re.MULTILINE)
    settings = [word for word in command.split() if not word.startswith(("strategy=", "seed=", "results_dir="))]
    rows = re.findall(r"^     \d  (\w+) +simulated .* 3 +[\d.]+ \(([\d.]+)-([\d.]+)\)$", README, flags=re.MULTILINE)
    assert [name for name, _, _ in rows] == ["moelens", "moelightning", "flexgen"]
    for name, least, most in rows:
        summary = make_plan(composed(*settings, f"strategy={name}")).summary
        assert float(least) <= float(f"{summary['throughput_tok_s']:.3g}") <= float(most), name


def test_the_first_two_commands_start_from_nothing():
    section = re.search(r"^## Try it$(.*?)^#", README, flags=re.MULTILINE | re.DOTALL)
    assert section, 'README.md has no section "Try it"'
    lines = [line for line in section[1].splitlines() if line.startswith("    ")]
    assert len(lines) == 2, ".ci/run runs these two"
    assert all("python3 -m venv" in line and "pip install -c constraints.txt -e " in line for line in lines)
    assert lines[0].endswith("&& python run.py strategy=moelens dataset=mtbench")
    assert lines[1].endswith("&& pytest")
