"""What the README says works: its strategy runs and is verified, and its first two lines are what .ci/run takes."""

from __future__ import annotations

import re
import sys

import pytest

import strategies
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


def test_the_first_two_commands_start_from_nothing():
    section = re.search(r"^## Try it$(.*?)^#", README, flags=re.MULTILINE | re.DOTALL)
    assert section, 'README.md has no section "Try it"'
    lines = [line for line in section[1].splitlines() if line.startswith("    ")]
    assert len(lines) == 2, ".ci/run runs these two"
    assert all("python3 -m venv" in line and "pip install -c constraints.txt -e " in line for line in lines)
    assert lines[0].endswith("&& python run.py strategy=moelens dataset=mtbench")
    assert lines[1].endswith("&& pytest")
