"""The commands beside run.py: mistakes in one line with exit code 2, help without work, plans that tell."""

from __future__ import annotations

import re
import subprocess
import sys
from fnmatch import fnmatch
from importlib import import_module

import pytest
from hydra._internal.utils import get_args_parser

import harness
import run
from harness.cli.overrides import composed_values
from harness.engine.strategy import weights_tier
from harness.hardware import calibrate
from harness.plan import __main__ as plan
from harness.plan.planning import draft_plan
from harness.record.terminal import print_summary
from harness.run.experiment import run_experiment
from harness.run.small_batch import small_batch
from harness.settings import load_strategy, parse_settings
from harness.validate import __main__ as validate
from tests.composing import names_in
from tests.conftest import ROOT
from tests.test_architecture import module_name, sources

SMALL = ("model=mixtral-8x7b", "hardware=a40", "dataset.num_requests=4", "dataset.max_new_tokens=2")


CHILDREN = (  # started by other modules only
    *("harness.hardware.awake", "harness.hardware.slowed", "harness.record.wandb_child"),
    *("benchmarks.peers.*", "benchmarks.gpu_stages.*_peer"),
)
COMMANDS = sorted(
    module_name(path)
    for path in sources("harness", "paper_figures", "benchmarks")
    if '__name__ == "__main__"' in path.read_text(encoding="utf-8")
    and not any(fnmatch(module_name(path), child) for child in CHILDREN)
)
HELP_WITHOUT_EXTRAS = """
import sys, tomllib
from importlib import import_module
from importlib.metadata import packages_distributions
from re import match
extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"].values()
extras = {match("[A-Za-z0-9-]+", wanted)[0] for extra in extras for wanted in extra}
sys.modules |= {name: None for name, brought_by in packages_distributions().items() if extras & set(brought_by)}
assert sys.modules["pytest"] is None
for module in sys.argv[1:]:
    try:
        import_module(module).main(["--help"])
    except SystemExit as done:
        assert done.code == 0, module
    else:
        raise AssertionError(module)
"""


@pytest.mark.parametrize("module", COMMANDS)
def test_every_command_speaks_one_dialect(module, capsys):
    """Its help names it and its options; an option that it does not have is one line that names those that it has."""
    command = import_module(module).main
    with pytest.raises(SystemExit) as done:
        command(["--help"])
    text = capsys.readouterr().out
    assert done.value.code == 0
    names = f"{module.replace('.', '/')}.py", f"-m {module.removesuffix('.__main__')}"
    assert text.startswith(tuple(f"usage: python {name} " for name in names)) and "Exit codes: " in text
    assert command(["--nonsense", "x"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: --nonsense: unknown; ") and "--help" in line
    with pytest.raises(SystemExit) as done:
        command(["--version"])
    assert done.value.code == 0 and capsys.readouterr().out == f"moe-offload-harness {harness.__version__}\n"


def test_every_help_needs_the_base_install_only():
    command = [sys.executable, "-c", HELP_WITHOUT_EXTRAS, *COMMANDS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("word", "hint"),
    [("--bogus", ""), ("--vers", "did you mean --version? "), ("--multi", "did you mean --multirun? ")],
)
def test_run_tells_of_an_unknown_option_in_one_line(word, hint, tmp_path, monkeypatch, capsys):
    """Hydra would print its usage, or take the word for what it abbreviates."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["run.py", "experiment=smoke", word])
    assert run.main() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {word}: unknown; {hint}valid are --cfg, ")


def test_run_knows_every_option_of_hydra():
    names = {name for action in get_args_parser()._actions for name in action.option_strings if name.startswith("--")}
    assert names == set(run.OPTIONS)


@pytest.mark.parametrize(
    ("command", "mistake", "field"),
    [
        (plan.main, "kv_cache_bg=1", "kv_cache_bg"),
        (plan.main, "--max-simulated-ops=none", "--max-simulated-ops"),
        (plan.main, "hardware=a41", "hardware"),
        (plan.main, "strategy.packet_mb=1e-9", "strategy.packet_mb"),
        (plan.main, "hardware.calibrated=true", "hardware.calibrated"),
        (plan.main, "--max-simulated-ops=0", "--max-simulated-ops"),
        (plan.main, "kv_cache_gb=0.000001", "kv_cache_gb"),
        (plan.main, "model.path=no/folder", "model.path"),
        (plan.main, "hardware=t4x2", "hardware.num_gpus"),
        (plan.main, "hardware=laptop", "hardware.host_gb_s"),
        (plan.main, "dataset=[mtbench,gsm8k]", "dataset"),
        (plan.main, "dataset.path=a=b", "dataset.path"),
        (plan.main, "strategy=3", "strategy"),
        (plan.main, "nonsense", "'nonsense'"),
        (plan.main, "=3", "'=3'"),
        (calibrate.main, "hardware.h2d_gb_s=-1", "hardware.h2d_gb_s"),
        (calibrate.main, "--out=/dev/null/table.json", "--out"),
        (validate.main, "--repeats=0", "--repeats"),
        (validate.main, "--limit=0", "--limit"),
        (validate.main, "--only=no such setting", "--only"),
        (validate.main, "--limt=1", "--limt"),
        (validate.main, "--resume=1", "--resume"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(command, mistake, field, capsys):
    base = SMALL if command is plan.main else ()
    assert command([*(word for word in base if word.split("=")[0] != mistake.split("=")[0]), mistake]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {field}: ")


def test_a_plan_shows_memory_policy_and_both_throughputs(capsys):
    assert plan.main([*SMALL, "kv_cache_gb=2"]) == 0
    text = capsys.readouterr().out
    for expected in ("weight buffer 0", "kv cache", "n_real", "predicted", "simulated", "bottleneck"):
        assert expected in text
    assert plan.main([*SMALL, "kv_cache_gb=2", "--no-simulation"]) == 0
    assert "bottleneck" not in capsys.readouterr().out


@pytest.mark.parametrize("overrides", [["hardware=a40"], ["hardware=a5000", "dataset=gsm8k"], ["experiment=balanced"]])
def test_a_plan_is_of_the_requests_that_a_run_with_the_same_overrides_has(overrides):
    """A simulated run and a plan are asked for in the same words, and a user holds their rates side by side."""
    assert plan.planned_values(overrides) == composed_values(["machine=simulated", *overrides])


def test_a_run_says_as_a_plan_does_when_a_laptops_defaults_keep_the_batch_small(tmp_path, capsys):
    asked = ["model=mixtral-8x7b", "hardware=a40", "dataset.max_new_tokens=2", "dataset.num_requests=8"]
    assert plan.main([*asked, "--no-simulation"]) == 0
    planned = " ".join(capsys.readouterr().out.split())
    quiet = ["wandb.mode=disabled", "progress=false", f"results_dir={tmp_path}"]
    summary, folder = run_experiment(composed_values(["machine=simulated", *asked, *quiet]))
    (line,) = summary["small_batch"]
    assert line.startswith("WARNING: kv_cache_gb=0.04 is little beside ") and line in planned
    print_summary(summary, folder)
    assert line in " ".join(capsys.readouterr().out.split())
    values = composed_values(["machine=simulated", *asked, *quiet, "kv_cache_gb=70", "dataset.num_requests=2000"])
    assert small_batch(draft_plan(values).settings, draft_plan(values).engine) == []


def test_a_plan_says_when_a_laptops_defaults_make_its_answer_meaningless(capsys):
    base = ["model=mixtral-8x7b", "hardware=a40", "--no-simulation"]

    def told(*overrides):
        assert plan.main([*base, *overrides]) == 0
        return " ".join(capsys.readouterr().out.split())

    assert "WARNING: kv_cache_gb=0.04 is little beside 656 GB that are free" in told("dataset.num_requests=80")
    few = told("dataset.num_requests=80", "kv_cache_gb=70")
    assert "WARNING: only 80 requests, of which the KV cache holds 3," in few and "; the paper has 25,000 " in few
    assert "WARNING" not in told("kv_cache_gb=70", "dataset.num_requests=2000")


@pytest.mark.parametrize("strategy", ["vllm_offload", "llamacpp_split", "deepspeed_zero"])
def test_a_plan_asks_for_no_more_host_memory_where_the_kv_cache_is_on_the_device(strategy, capsys):
    asked = ["model=mixtral-8x7b", "hardware=a40", "dataset.num_requests=2000", f"strategy={strategy}"]
    assert plan.main([*asked, "--no-simulation"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert re.search(r"the KV cache in device memory holds [\d,]+ tokens, about [\d,]+ of these requests at once", told)
    assert "kv_cache_gb=" not in told and "WARNING" not in told


def test_a_plan_in_which_nothing_runs_says_why(capsys):
    assert plan.main([*SMALL, "kv_cache_gb=0.003"]) == 1
    assert "every request is rejected; the first: needs" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("strategy", names_in("strategy"))
@pytest.mark.parametrize(
    ("tier", "size_gb", "needs"),
    [
        ("host", 50, ("50 GB", "weights", "93.4 GB", "kv cache", "2 GB")),
        ("device", 0.6, ("600 MB", "embedding and head", "524 MB")),
    ],
)
def test_a_plan_that_does_not_fit_shows_every_tier_by_name(strategy, tier, size_gb, needs, capsys):
    """Mixtral-8x7B in bfloat16: 46.7 billion parameters, 1.45 billion a layer, 0.176 billion an expert."""
    if tier == "device":
        one_part = ("the largest part of a layer", "352 MB")
        module_batching = ("1 experts", "352 MB", "1 layers of weights", "84 MB")
        others = {
            "ondemand": one_part,
            "vllm_offload": one_part,
            "llamacpp_split": ("all layers without experts", "2.69 GB", "copies of 3 experts", "1.06 GB"),
            "moegen_g": module_batching,
            "moegen_h": module_batching,
            **dict.fromkeys(
                ("prescope", "expert_cache", "fiddler", "fate", "hybrimoe", "klotski"),
                ("all layers without experts", "2.69 GB"),
            ),
        }
        needs = (*needs, *others.get(strategy, ("2 layers of weights", "5.81 GB")))
    else:
        values = composed_values(["machine=simulated", *SMALL, f"strategy={strategy}"])
        tier = weights_tier(load_strategy(parse_settings(values).strategy).config)
    size = f"hardware.{tier}_memory_gb={size_gb}"
    assert plan.main([*SMALL, f"strategy={strategy}", "kv_cache_gb=2", size]) == 1
    out, err = capsys.readouterr()
    assert "does not fit: " in err and "hardware." in err
    for expected in (*needs, "device", "pinned", "host"):
        assert expected in out
    assert out.count("TOO SMALL") == 1


def test_a_long_simulation_stops_and_says_so(capsys):
    arguments = [*SMALL[:2], "dataset.num_requests=20", "dataset.max_new_tokens=8", "kv_cache_gb=0.3"]
    assert plan.main(["--max-simulated-ops", "3000", *arguments]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "INCOMPLETE stopped after" in out and "of 20 requests finished" in out
    assert "accuracy" not in out, "a part of the run proves no prediction"
    assert "prediction it is for a whole run, and is not compared with this part of one" in out
    assert plan.main(arguments) == 0
    assert "INCOMPLETE" not in capsys.readouterr().out


def test_the_tables_come_before_the_simulation(monkeypatch, capsys):
    """Memory and policy are there at once, however long the rest takes."""

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(plan, "simulated", interrupted)
    with pytest.raises(KeyboardInterrupt):
        plan.main([*SMALL, "kv_cache_gb=2"])
    out = capsys.readouterr().out
    assert "weight buffer 0" in out and "n_real" in out and "kv_cache_gb=2 holds" in out


def test_strategies_that_use_one_gpu_say_so_and_others_use_all(capsys):
    two = ["model=mixtral-8x7b", "hardware=t4x2", "hardware.ram_gb=200", "kv_cache_gb=2", *SMALL[2:]]
    assert plan.main(two) == 2
    told = "hardware.num_gpus: must be 1 for strategy moelens, which uses one GPU, got 2"
    assert told in capsys.readouterr().err
    assert plan.main([*two, "hardware.num_gpus=1"]) == 0
    assert "device1" not in capsys.readouterr().out
    assert plan.main([*two, "strategy=ondemand"]) == 0
    assert "device1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["hardware=t4x2", "hardware.num_gpus=3"], "hardware.num_gpus: must divide the model's num_kv_heads 8"),
        (["hardware=t4", "hardware.num_gpus=2"], "hardware.p2p_gb_s: profile 't4' states none"),
        (["hardware=local", "hardware.num_gpus=2"], "hardware.num_gpus: must be 1 on a calibrated profile"),
    ],
)
def test_what_several_gpus_need_is_told(overrides, told, capsys):
    assert plan.main(["model=mixtral-8x7b", "strategy=ondemand", *overrides, *SMALL[2:]]) == 2
    assert told in capsys.readouterr().err
