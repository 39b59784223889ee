"""Input that once ended in a traceback, ran without end or wrote outside its folder: one line and exit code 2, at once.

Settings are composed and parsed as run.py does, files are opened as a run does; no run is started.
"""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

import run
from harness.calibration.local import table_path
from harness.cli.overrides import composed_values, explained
from harness.config import ConfigError
from harness.model import zoo
from harness.model.config import ModelConfig
from harness.model.planned import planned_model
from harness.routing.build import build_routing
from harness.settings import load_strategy, parse_settings
from harness.workload.build import build_workload
from tests.composing import composed

TINY = composed("model=mixtral-tiny")["model"]["recipe"]
DEEP = "[" * 100_000
DIGITS = '{"prompt": ' + "9" * 5000 + "}"


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        (["kv_cache_gb=1e-12"], "kv_cache_gb"),
        (["kv_cache_gb=1e300"], "kv_cache_gb"),
        (["hardware.device_memory_gb=1e300"], "hardware.device_memory_gb"),
        (["hardware.ram_gb=1e300"], "hardware.ram_gb"),
        (["model.recipe.seed=-1"], "model.recipe.seed"),
        (["model.recipe.num_layers=1000000000"], "model.recipe.num_layers"),
        (["model=mixtral-8x7b", "model.spec.num_experts=100000000"], "model.spec.num_layers"),
        (["dataset.num_requests=99999999999999999999999"], "dataset.num_requests"),
        (["dataset.num_requests=100000000"], "dataset.num_requests"),
        (["seed=1e300"], "seed"),
        (["results_dir='..\udcff'"], "results_dir"),
        (["wandb.tags=['a','\udcff']"], "wandb.tags.1"),
        (["model.name=''"], "model.name"),
        (["hardware.name=''"], "hardware.name"),
        (["dataset.name=' '"], "dataset.name"),
        (["experiment.name=''"], "experiment.name"),
    ],
    ids=ascii,
)
def test_settings_out_of_bounds_name_their_field(overrides, field):
    with pytest.raises(ConfigError) as raised:
        parse_settings(composed_values(overrides))
    assert raised.value.field == field
    assert len(str(raised.value).splitlines()) == 1 and str(raised.value).isprintable()


@pytest.mark.parametrize(
    ("strategy", "setting"),
    [
        *((name, "packet_mb=1e304") for name in ("moegen_h", "vllm_offload", "llamacpp_split", "prescope")),
        *((name, "packet_mb=1e9") for name in ("moelens", "flexgen")),
        ("vllm_offload", "cpu_offload_gb=1e300"),
        ("llamacpp_split", f"context_tokens={10**22}"),
        ("moegen_g", f"policy.batch_size={10**400}"),
    ],
)
def test_sizes_of_a_strategy_out_of_bounds_name_their_field(strategy, setting):
    values = composed_values([f"strategy={strategy}", f"strategy.{setting}"])
    with pytest.raises(ConfigError) as raised:
        load_strategy(values["strategy"])
    assert raised.value.field == f"strategy.{setting.split('=')[0]}"


@pytest.mark.parametrize("name", ["../../../escape", "/absolute/name", "..", "n" * 300, "a/b c"])
def test_no_name_leads_out_of_the_cache(name, tmp_path, monkeypatch):
    monkeypatch.setenv("MOE_HARNESS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(zoo, "_make", lambda recipe, folder: (folder / "config.json").write_text(config_json()))
    monkeypatch.setattr(zoo, "config_entries", lambda recipe: {})
    settings = parse_settings({**composed(), "model": {"name": name, "recipe": TINY}})
    folder = zoo.ensure(settings.model)
    assert folder.is_dir() and folder.parent == tmp_path / "cache" / "models"
    path = table_path(settings, planned_model(settings.model).spec)
    assert path.parent == tmp_path / "cache" / "calibration" and len(path.name) < 100


def config_json(**entries: Any) -> str:
    whole = planned_entries()
    return json.dumps({**whole, **entries})


def planned_entries() -> dict[str, Any]:
    from harness.model import families
    from harness.model.recipe import RandomRecipe

    return families.layout("mixtral").config_from_recipe(RandomRecipe(**TINY))


@pytest.mark.parametrize(
    "text",
    [
        DEEP,
        DIGITS,
        config_json(num_hidden_layers=1_000_000_000),
        config_json(num_local_experts=10_000_000),
    ],
    ids=["deep", "digits", "layers", "experts"],
)
def test_a_config_json_that_no_model_has_is_refused(text, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match="^model.path: "):
        planned_model(ModelConfig(name="m", path=str(tmp_path)))


@pytest.mark.parametrize("choice", [True, False])
def test_a_model_without_latents_expands_none(choice, tmp_path):
    (tmp_path / "config.json").write_text(config_json())
    with pytest.raises(ConfigError, match=r"^model.expand_prefill: must be null"):
        planned_model(ModelConfig(name="m", path=str(tmp_path), expand_prefill=choice))


def device(path: Path, target: str) -> Path:
    """Where reading would never end: a pipe that nobody writes to, or a link to a device."""
    os.mkfifo(path) if target == "pipe" else path.symlink_to(target)
    return path


@pytest.mark.parametrize("target", ["pipe", "/dev/zero", "/dev/full"])
def test_pipes_and_devices_are_no_input_files(target, tmp_path):
    device(tmp_path / "config.json", target)
    with pytest.raises(ConfigError, match=r"^model.path: .*config.json: no regular file"):
        planned_model(ModelConfig(name="m", path=str(tmp_path)))
    with pytest.raises(ConfigError, match=r"^dataset.path: .* is no regular file"):
        prompts(device(tmp_path / "d.jsonl", target))
    with pytest.raises(ConfigError, match=r"^routing.path: .* no regular file"):
        routing(device(tmp_path / "r.jsonl", target))


def prompts(path: Path) -> None:
    dataset = parse_settings(composed(f"dataset.path={path}")).dataset
    build_workload(dataset, FakeTokenizer(), vocab_size=300, max_positions=1000, seed=0)


def routing(path: Path) -> None:
    settings = parse_settings(composed("routing=trace", f"routing.path={path}", "model=mixtral-8x7b"))
    build_routing(settings.routing, planned_model(settings.model).spec, seed=0)


class FakeTokenizer:
    bos_token_id = None

    def __call__(self, texts, **options):
        return {"input_ids": [list(text.encode()) for text in texts]}


@pytest.mark.parametrize("name", ["d.jsonl", "d.json"])
@pytest.mark.parametrize(
    "text", [DEEP, DIGITS, '{"turns": ["\\ud800"]}', '{"turns": ["half \\udc00 of one"]}'], ids=range(4)
)
def test_a_dataset_that_python_cannot_hold_is_named_with_its_place(name, text, tmp_path):
    (tmp_path / name).write_text(text if name == "d.jsonl" or text == DEEP else f"[{text}]")
    with pytest.raises(ConfigError, match=r"^dataset.path: d.json") as raised:
        prompts(tmp_path / name)
    assert str(raised.value).isprintable()


def test_a_routing_trace_that_is_nested_without_end_is_named_with_its_line(tmp_path):
    (tmp_path / "r.jsonl").write_text(DEEP + "\n")
    with pytest.raises(ConfigError, match=r"^routing.path: .*r.jsonl, line 1"):
        routing(tmp_path / "r.jsonl")


@pytest.mark.parametrize(
    "error",
    [OSError(errno.EMFILE, "Too many open files", "x.json"), RuntimeError("can't start new thread")],
    ids=["files", "threads"],
)
def test_what_the_system_has_no_more_of_is_told_in_a_line(error, monkeypatch, capsys):
    def starved() -> None:
        raise error

    monkeypatch.setattr(run, "run", starved)
    monkeypatch.setattr("sys.argv", ["run.py"])
    assert run.main() == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"error: the system has no more: {error}"


def test_a_folder_of_hydras_own_that_cannot_be_made_names_its_setting(monkeypatch, capsys):
    def hydra() -> None:
        Path("/proc/nope").mkdir()

    monkeypatch.setattr(run, "run", hydra)
    monkeypatch.setattr("sys.argv", ["run.py", "strategy=moelens", "hydra.run.dir=/proc/nope"])
    assert run.main() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: hydra.run.dir: cannot write to '/proc/nope'")
    assert explained(OSError(2, "No such file", "/elsewhere"), ["hydra.run.dir=/proc/nope"]) is None
