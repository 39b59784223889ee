"""What the README says works: its strategy runs and is verified, its commands are valid, its links lead somewhere."""

from __future__ import annotations

import re
import shlex
import sys
from itertools import product
from pathlib import Path

import pytest

import strategies
from harness.experiment import run_experiment
from harness.settings import load_strategy, parse_settings
from tests.composing import composed
from tests.conftest import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = [line.split("#")[0].strip() for line in README.splitlines() if line.startswith("    python run.py ")]


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


def jobs(command: str) -> list[list[str]]:
    """The overrides of each job; a sweep has one for every combination."""
    words = shlex.split(command)[2:]
    if "-m" not in words:
        return [words]
    choices = [[f"{word.split('=')[0]}={v}" for v in word.split("=")[1].split(",")] for word in words if word != "-m"]
    return [list(job) for job in product(*choices)]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_are_valid(command):
    for overrides in jobs(command):
        settings = parse_settings(composed(*overrides))  # Hydra refuses a key or a choice that does not exist
        load_strategy(settings.strategy)


def test_it_is_complete():
    assert "@@" not in README, "a placeholder was left"


def test_there_are_commands():
    assert len(COMMANDS) >= 8


def test_the_first_two_commands_start_from_nothing():
    lines = [line for line in README.splitlines() if line.startswith("    python3 -m venv")]
    assert len(lines) == 2
    assert all("pip install -c constraints.txt -e " in line for line in lines)
    assert lines[0].endswith("&& python run.py strategy=moelens dataset=mtbench")
    assert lines[1].endswith("&& pytest")


@pytest.mark.parametrize("target", re.findall(r"\]\(([^)#]+)", README))
def test_links_lead_somewhere(target):
    assert target.startswith("https://") or (ROOT / target).exists()


def test_files_named_in_it_exist():
    named = re.findall(r"`((?:conf|harness|strategies|tests|docs|results)/[\w./-]+\w)`", README)
    assert named
    for name in named:
        assert "layerwise" in name or Path(ROOT / name).exists(), name
