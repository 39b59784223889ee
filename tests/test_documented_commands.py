"""Every `python ...` that a page shows is run, in a small form; what takes minutes or a GPU is parsed and composed.

A command is found wherever it stands, in a block or in a sentence, so a new one is run without being listed anywhere.
"""

from __future__ import annotations

import json
import re
import runpy
import shlex
import shutil
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from harness.cli.arguments import CommandParser
from harness.cli.overrides import composed_values
from harness.llapor.settings import parse_llapor
from harness.model.zoo import ensure
from harness.settings import load_strategy, parse_settings
from harness.training.settings import parse_training
from paper_figures import reports
from tests.composing import composed
from tests.conftest import ROOT, tiny_config
from tests.test_docs import PAGES

COMMAND = re.compile(r"\bpython (?=run\.py|-m |\S+\.py)[^\n`#;&|]*")

STAND_INS = {  # what a page leaves open -> what lies in the `workplace`, or a name that there is
    "/models/Mixtral-8x7B-Instruct-v0.1": "checkpoint",
    "model.path=FOLDER": "model.path=checkpoint",
    "kv_cache_gb=10 hardware.device": "kv_cache_gb=0.1 hardware.device",  # all of it is touched
    "RUN_FOLDER ...": "results/runs/recorded results/runs/recorded",
    "results/runs/<run>": "results/runs/recorded",
    "results/compare": "results",
    "routing.path=results/reference/": f"routing.path={ROOT}/results/reference/",
    "FILE.csv OUT.jsonl": "choices.csv OUT.jsonl",
    "paper_figures.moelightning NAME": "paper_figures.moelightning table4",
    "paper_figures.moegen NAME": "paper_figures.moegen claims",
    "paper_figures.prescope NAME": "paper_figures.prescope gap",
}
NOT_RUN = {  # the command begins so -> why it is only parsed
    "python -m pytest": "it runs these tests",
    "python run.py strategy=layerwise": "tests/test_readme.py runs that strategy",
    "python run.py machine=cuda": "it needs a GPU",
    "python run.py machine=simulated hardware=local": "it needs a calibration of this computer",
    "python run.py dataset=gsm8k dataset.use_hub=true": "it needs the network",
    "python -m harness.hardware.calibrate": "it measures for some two minutes",
    "python -m harness.training": "it trains for minutes",
    "python -m harness.llapor": "it trains for minutes",
    "python run.py machine=simulated hardware=a40 routing.hit_rates_path": "it needs what that training measured",
    "python -m harness.validate": "it runs for an hour",
    "python -m harness.study --out results/reference/routing": "it needs recorded runs of a trained model",
    "python -m harness.study --out FOLDER": "it needs recorded runs of a trained model",
    "python -m harness.study.excerpt --out results/reference/routing/mixtral.jsonl.gz": "it needs the same runs",
    "python run.py model=checkpoint model.path=models/mixtral-trained": "it needs a model that was trained for minutes",
    "python -m paper_figures": "it simulates for a quarter of an hour",
    "python -m paper_figures.moelens.simulate": "it simulates for minutes",
    "python -m paper_figures.moelens.speed_up": "it simulates for minutes",
    "python -m paper_figures.moelens.workloads": "it simulates for minutes",
    "python -m paper_figures.moelens table1": "it simulates for minutes",
    "python -m paper_figures.moegen": "it simulates for minutes",
    "python -m paper_figures.prescope.prediction": "it writes the committed page again",
    "python -m paper_figures.prescope.emulated": "it needs what a sweep recorded",
    "python -m paper_figures.moegen.part": "it simulates for minutes",
    "python -m paper_figures.routing --out results/reference/routing": "the same runs, without --out",
    "python -m paper_figures.latency": "it simulates for minutes",
    "python -m paper_figures.latency.part": "it simulates for minutes",
    "python -m paper_figures.prescope": "it simulates for minutes",
    "python run.py strategy=expert_cache strategy.policy=belady": "it needs what another run recorded",
    "python -m paper_figures.moegen.differences": "tests/unit/figures/test_moegen.py runs it",
    **{
        f"python -m paper_figures.moelightning {name}": "it simulates for minutes"
        for name in ("table4", "systems", "hrm_accuracy", "fig6", "fig10", "several_gpus")
    },
    "python benchmarks/": "it measures for minutes",
    "python setup.py": "it builds what these tests have loaded, with what only a build has installed",
}
SMALL = ("dataset.num_requests=3", "dataset.max_new_tokens=3", "verify=off", "wandb.mode=disabled", "progress=false")
NEEDS_MATPLOTLIB = ("timelines", "moelens", "moelightning", "routing")  # of paper_figures, where they draw


def commands(text: str) -> list[str]:
    """What the text shows, joined where a line goes on in the next."""
    return [" ".join(found.split()) for found in COMMAND.findall(text.replace("\\\n", " "))]


SHOWN = list(dict.fromkeys(command for page in PAGES for command in commands(page.read_text(encoding="utf-8"))))


def small(command: str) -> tuple[str, str | None]:
    """The command with nothing left open, and why it is only parsed."""
    for shown, stand_in in STAND_INS.items():
        command = command.replace(shown, stand_in)
    prefix = next((prefix for prefix in NOT_RUN if re.match(rf"{re.escape(prefix)}(?![.\w])", command)), None)
    if command.startswith("python benchmarks/"):
        prefix = "python benchmarks/"
    return command, prefix and NOT_RUN[prefix]


def arguments_of(command: str) -> list[str]:
    words = shlex.split(command)[1:]
    assert not [word for word in words if "<" in word or "..." in word], f"{command}: STAND_INS says nothing of it"
    return words


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    """A folder with all that the pages take for granted."""
    folder = tmp_path_factory.mktemp("workplace")
    (folder / "question.jsonl").write_text(json.dumps({"question_id": 1, "turns": ["Why?", "Why not?"]}) + "\n")
    (folder / "prompts.jsonl").write_text(json.dumps({"instruction": "Count to three."}) + "\n")
    choices = [f"{layer},{expert}" for layer in range(2) for expert in range(6)]
    (folder / "choices.csv").write_text("\n".join(["layer,expert", *choices]))
    shutil.copytree(ensure(tiny_config()), folder / "checkpoint")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert run_script(patch, ["run.py", "record_routing=true", "model=mixtral-tiny", *SMALL]) == 0
    (run,) = (folder / "results" / "runs").iterdir()
    run.rename(run.parent / "recorded")
    return folder


def run_script(patch: pytest.MonkeyPatch, words: list[str]) -> object:
    """Exit code of a script of the repository, in this process."""
    patch.setattr(sys, "argv", [str(ROOT / words[0]), *words[1:]])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(sys.argv[0], run_name="__main__")
    return ended.value.code or 0


def run_module(words: list[str]) -> object:
    """Exit code of `python -m`, in this process."""
    spec = find_spec(words[0])
    assert spec is not None, f"there is no module {words[0]}"
    name = f"{words[0]}.__main__" if spec.submodule_search_locations else words[0]
    return import_module(name).main(words[1:])


def shortened(words: list[str]) -> list[str]:
    """Cut the first list that is swept over to its first and last value, and others to their first one. What is left
    out only makes a configuration."""
    if words[:2] != ["run.py", "-m"]:
        return words
    lists = {name: values.split(",") for name, _, values in (word.partition("=") for word in words[2:])}
    swept = next((name for name, values in lists.items() if len(values) > 1), None)
    kept = {name: values[:1] + values[-1:] * (name == swept) for name, values in lists.items()}
    first = {name: values[0] for name, values in lists.items()}
    for name, values in lists.items():
        for value in values:
            if value not in kept[name]:
                chosen = {**first, name: value}
                load_strategy(parse_settings(composed(*(f"{key}={chosen[key]}" for key in chosen))).strategy)
    return [*words[:2], *(f"{name}={','.join(values)}" for name, values in kept.items())]


def size_of(words: list[str]) -> list[str]:
    """What makes a command small; later words come before earlier ones."""
    (model,) = [word for word in words if word.startswith("model=")] or [""]
    is_one = model and "," not in model and "routing=trace" not in words  # a recorded trace has all layers
    layers = ["model.spec.num_layers=6"] if is_one and {"machine=simulated", "model=deepseek-r1"} & {*words} else []
    searches = any(word.startswith("strategy=moegen") for word in words)  # test_families.py searches
    search = ["strategy.search=false"] if searches else []
    match words[:2]:
        case ["run.py", *_]:
            recipe = ["model.recipe.num_layers=2", "model.recipe.expert_dim=64"] if "-mini" in model else []
            return [*SMALL, *search, *recipe, *layers, *(() if model else ("model=mixtral-tiny",))]
        case ["-m", "harness.plan"]:
            return ["dataset.num_requests=20", *search, *layers, "--max-simulated-ops", "1"]
        case ["-m", str(module)] if module.startswith("paper_figures") and not module.endswith("table2"):
            return ["--out", "picture.png" if module.endswith("timelines") else "figures"]
    return []


def marked(command: str) -> object:
    words = command.split()
    draws = words[2].rpartition(".")[2] in NEEDS_MATPLOTLIB and small(command)[1] is None if len(words) > 2 else False
    return pytest.param(command, marks=[pytest.mark.needs("matplotlib", extra="figures")] if draws else [])


@pytest.mark.parametrize("command", [marked(command) for command in SHOWN if small(command)[1] is None], ids=str)
def test_it_runs(command, workplace, monkeypatch, capsys):
    monkeypatch.chdir(workplace)
    words = shortened(arguments_of(small(command)[0]))
    words += size_of(words)
    assert (run_module(words[1:]) if words[0] == "-m" else run_script(monkeypatch, words)) == 0, capsys.readouterr().err
    assert capsys.readouterr().out


@pytest.mark.parametrize("command", [command for command in SHOWN if small(command)[1] is not None])
def test_it_is_valid(command, workplace, monkeypatch):
    """The script or module exists and takes these arguments; overrides make a configuration."""
    monkeypatch.chdir(workplace)
    words = arguments_of(small(command)[0])
    if words[0] == "run.py":
        if "strategy=layerwise" not in words:
            load_strategy(parse_settings(composed(*words[1:])).strategy)
    elif words[0] == "-m" and words[1] != "pytest":
        monkeypatch.setattr(reports, "run", lambda *report, again: None)  # names of reports are checked before
        if words[1] not in ("paper_figures.moelens", "paper_figures.moelightning", "paper_figures.moegen"):
            monkeypatch.setattr(CommandParser, "run", parsed)
        assert run_module(words[1:]) == 0
    elif words[0].startswith("benchmarks/"):
        monkeypatch.setattr(CommandParser, "run", parsed)
        assert run_script(monkeypatch, words) == 0
    elif words[0] == "setup.py":
        assert (ROOT / words[0]).exists()
    else:
        assert words[1:] == [] or words[1] == "pytest"


def parsed(parser: CommandParser, *given: object) -> int:
    """Instead of what a command does."""
    arguments = next((each for each in given if isinstance(each, list)), sys.argv[1:])
    namespace, unknown = parser.parse_known_args(arguments)
    assert not unknown, f"{parser.prog} knows no {' '.join(unknown)}"
    if overrides := getattr(namespace, "overrides", None):
        if parser.prog.endswith("harness.training"):
            parse_training(composed_values(overrides, root="train"))
        elif parser.prog.endswith("harness.llapor"):
            parse_llapor(composed_values(overrides, root="llapor"))
        else:
            parse_settings(composed(*overrides))
    return 0


def test_no_command_escapes():
    """The pattern finds one wherever it stands; each reason and each stand-in is of use."""
    text = "`python run.py a=1` x\n    python -m m.n b \\\n        c  # why\n    E=1 timeout 9 python d/e.py --f && g"
    assert commands(text) == ["python run.py a=1", "python -m m.n b c", "python d/e.py --f"]
    assert not [stand_in for stand_in in STAND_INS if not any(stand_in in command for command in SHOWN)]
    whole = [small(command)[0] for command in SHOWN]
    assert not [prefix for prefix in NOT_RUN if not any(command.startswith(prefix) for command in whole)]
