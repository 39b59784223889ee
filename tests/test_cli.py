"""`python run.py` as a user meets it: exit codes, and what is printed where."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from harness.record.store import list_runs
from harness.record.terminal import number
from tests.composing import GROUPS, names_in
from tests.conftest import ROOT
from tests.test_documented_commands import run_script

MISTAKES = [
    ("dataset.num_requets=8", "dataset.num_requets", "did you mean 'num_requests'?"),
    ("strategy=moelnes", "strategy", "moelens"),
    ("machine=cloud", "machine", "emulated"),
    ("hardware=null", "hardware", "conf/hardware"),
    ("hardware=[laptop,a40]", "hardware", "-m hardware=laptop,a40"),
    ("kv_cache_gb=inf", "kv_cache_gb", "finite"),
    ("strategy.packet_mbb=2", "strategy.packet_mbb", "did you mean 'packet_mb'?"),
    ("dataset.num_requests=many", "dataset.num_requests", "valid integer"),
    ("dataset.num_requests=0", "dataset.num_requests", "1 or more"),
    ("hardware.device_memory_gb=0.0001", "hardware.device_memory_gb", "2 layers of weights"),
    ("kv_cache_gb=0.0000001", "kv_cache_gb", "one takes"),
]


def run(tmp_path: Path, *arguments: str, sweep: bool = False, **more: str) -> subprocess.CompletedProcess[str]:
    """In another working directory, where the configuration and the packages must be found all the same; `more` are
    variables of the environment."""
    command = [sys.executable, str(ROOT / "run.py"), *(["-m"] if sweep else [])]
    command += [f"results_dir={tmp_path}/results", "wandb.mode=disabled"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **more}
    return subprocess.run(
        [*command, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
    )


@pytest.mark.parametrize(("mistake", "field", "valid"), MISTAKES, ids=[m for m, _, _ in MISTAKES])
def test_a_mistake_is_one_line_and_exit_code_2(tmp_path, mistake, field, valid, monkeypatch, capfd):
    assert here(tmp_path, monkeypatch, mistake) == 2
    told = capfd.readouterr()
    (line,) = told.err.splitlines()
    assert line.startswith(f"error: {field}: ")
    assert valid in line
    assert not told.out


def test_a_mistake_is_all_that_a_process_tells(tmp_path):
    mistake, field, valid = MISTAKES[0]
    done = run(tmp_path, "experiment=smoke", "progress=false", mistake)
    assert done.returncode == 2 and not done.stdout
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: {field}: ") and valid in line


def test_a_run_prints_its_table_and_nothing_else(tmp_path):
    """No package that it imports warns of anything."""
    done = run(tmp_path, "experiment=smoke", "progress=false")
    assert (done.returncode, done.stderr) == (0, "")
    assert "warning" not in done.stdout.lower()
    assert "[emulated]" in done.stdout
    assert "0 mismatched" in done.stdout
    (folder,) = (tmp_path / "results" / "runs").iterdir()
    assert str(folder / "trace.json") in done.stdout


DONE_BEFORE = """
import json, runpy, sys, types
from pathlib import Path

folder = Path(sys.argv.pop())
done = types.ModuleType("harness.run.experiment")
done.run_experiment = lambda *given: (json.loads((folder / "summary.json").read_text()), folder)
sys.modules[done.__name__] = done
sys.argv[0] = "run.py"
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_table_that_cannot_be_printed_costs_no_run(tmp_path, monkeypatch, capfd):
    """The process only shows what ran here before."""
    assert here(tmp_path, monkeypatch, "verify=off") == 0
    (folder,) = (tmp_path / "results" / "runs").iterdir()
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", DONE_BEFORE, str(folder)], cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True
        )
    (line,) = done.stderr.splitlines()
    assert done.returncode == 0 and line.startswith("warning: the summary could not be printed (No space left")
    assert line.endswith(str(folder))


def here(tmp_path: Path, patch: pytest.MonkeyPatch, *arguments: str, sweep: bool = False) -> object:
    """Exit code of run.py in this process, where nothing has to be imported."""
    patch.chdir(tmp_path)
    base = ["experiment=smoke", "progress=false", f"results_dir={tmp_path}/results", "wandb.mode=disabled"]
    return run_script(patch, ["run.py", *(["-m"] if sweep else []), *base, *arguments])


def test_repeats_are_single_runs_with_seeds_of_their_own_and_end_in_their_median(tmp_path, monkeypatch, capfd):
    assert here(tmp_path, monkeypatch, "verify=off", "repeats=3", "seed=5") == 0
    runs, told = list_runs(tmp_path / "results"), capfd.readouterr().out
    assert [each.config["seed"] for each in runs] == [5, 6, 7] and {each.config["repeats"] for each in runs} == {1}
    assert len({each.run_id for each in runs}) == 3
    tok_s = sorted(each.summary["throughput_tok_s"] for each in runs)
    least, middle, most = map(number, tok_s)
    assert f" {middle} ({least}-{most}) " in told
    assert told.count("[emulated]") == 3


def test_a_sweep_goes_on_after_a_failed_job_and_tells(tmp_path, monkeypatch, capfd):
    assert here(tmp_path, monkeypatch, "dataset.num_requests=0,2", sweep=True) == 2
    told = capfd.readouterr()
    assert told.err.startswith("error: dataset.num_requests: must be 1 or more")
    assert "Traceback" not in told.err
    assert "2 of 2 finished" in told.out


def test_a_sweep_over_strategies_takes_options_that_the_default_one_lacks(tmp_path, monkeypatch, capfd):
    """Values with quotes, commas and brackets stay what they are."""
    swept = ["strategy=fiddler,hybrimoe", "strategy.batch_size=3", "dataset.name='a, b'"]
    assert here(tmp_path, monkeypatch, "verify=off", *swept, sweep=True) == 0, capfd.readouterr().err
    runs = list_runs(tmp_path / "results")
    assert {each.config["strategy"]["name"] for each in runs} == {"fiddler", "hybrimoe"}
    assert [each.config["strategy"]["batch_size"] for each in runs] == [3, 3]
    assert {each.config["dataset"]["name"] for each in runs} == {"a, b"}


def test_a_sweep_over_strategies_refuses_an_option_that_one_of_them_lacks(tmp_path, monkeypatch, capfd):
    assert here(tmp_path, monkeypatch, "strategy=fiddler,moelens", "strategy.batch_size=3", sweep=True) == 2
    assert "error: strategy.batch_size: unknown key" in capfd.readouterr().err


def test_help_is_the_projects_own(tmp_path):
    done = run(tmp_path, "strategy=flexgen", "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: python run.py ")
    for told in (
        "Exit codes: 0 ",
        "python run.py experiment=smoke",
        "\nstrategy: deepspeed_zero, ",
        "package: strategies.fl",
    ):
        assert told in done.stdout
    groups = done.stdout.partition("GROUP/NAME.yaml ==\n\n")[2].partition("\n\n==")[0]
    assert groups.splitlines() == [f"{group}: {', '.join(names_in(group))}" for group in sorted(GROUPS)]
    assert "powered by" not in done.stdout.lower() and "$" not in done.stdout.replace("${", "")


def test_the_version_is_the_projects_own(tmp_path):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert run(tmp_path, "--version").stdout == f"{project['name']} {project['version']}\n"


LAUNCHER = """
from hydra.core.config_store import ConfigStore
from hydra.plugins.launcher import Launcher

class Absent(Launcher):
    def setup(self, **context):
        pass

    def launch(self, job_overrides, initial_job_idx):
        raise RuntimeError("there is no cluster here")

ConfigStore.instance().store(
    group="hydra/launcher", name="absent", node={"_target_": f"{__name__}.Absent"}, provider="absent_launcher"
)
"""


def test_a_launcher_whose_system_is_not_there_is_one_line(tmp_path):
    """As submitit's is on a computer without Slurm."""
    plugin = tmp_path / "path" / "hydra_plugins" / "absent_launcher"
    plugin.mkdir(parents=True)
    (plugin / "__init__.py").write_text(LAUNCHER)
    path = os.pathsep.join((str(tmp_path / "path"), str(ROOT)))
    done = run(tmp_path, "hydra/launcher=absent", "seed=0,1", sweep=True, PYTHONPATH=path)
    (line,) = done.stderr.splitlines()
    assert (done.returncode, line) == (1, "error: absent_launcher: there is no cluster here")
