"""Every YAML composes and becomes settings; whatever a user can get wrong there is answered with the field's name."""

from __future__ import annotations

import copy
import importlib
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from harness.config import ConfigError
from harness.machine.build import load_machine
from harness.machine.cuda import device_found
from harness.model.planned import planned_model
from harness.settings import Settings, load_strategy, parse_settings
from paper_figures import composing
from tests.composing import CONF, GROUPS, composed, names_in

CHOICES = [(group, name) for group in GROUPS for name in names_in(group)]
SPEC = planned_model(parse_settings(composed("model=mixtral-8x7b")).model).spec
# What a choice cannot do without on the command line.
NEEDED = {
    ("model", "checkpoint"): ["model.path=some/folder"],
    ("dataset", "file"): ["dataset.path=prompts.jsonl"],
}


def check(values: dict[str, Any]) -> Settings:
    """Parse all that a run parses before it does any work."""
    settings = parse_settings(values)
    load_strategy(settings.strategy)
    loaded = load_machine(settings.machine)
    runs_here = loaded.values["name"] != "cuda" or device_found()
    if loaded.has_tensors and settings.hardware.gpu is None and runs_here:  # profiles of real machines are for planning
        loaded.build(settings.hardware, SPEC).close()
    return settings


@cache
def defaults() -> dict[str, Any]:
    return composed()


def changed(path: str, value: Any) -> dict[str, Any]:
    """The default configuration with one value set, whether or not its key exists."""
    values = copy.deepcopy(defaults())
    place = values
    *parents, key = path.split(".")
    for parent in parents:
        place = place[parent]
    place[key] = value
    return values


def leaves(values: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


@pytest.mark.parametrize(("group", "name"), CHOICES, ids=[f"{group}-{name}" for group, name in CHOICES])
def test_every_choice_composes_and_parses(group, name):
    """And shows every setting of its group: what can be overridden can be seen."""
    values = composed(f"{group}={name}", *NEEDED.get((group, name), []))
    part = getattr(check(values), group)
    if is_dataclass(part):  # what strategies and machines have is checked below
        assert set(values[group]) == {f.name for f in fields(part)}
        assert values[group]["name"] == name


@pytest.mark.parametrize("name", names_in("machine"))
def test_every_machine_is_built_as_the_profile_says(name):
    loaded = load_machine(composed(f"machine={name}")["machine"])
    values = composed(f"machine={name}", f"hardware={'laptop' if loaded.has_tensors else 'a40'}")
    settings = parse_settings(values)
    module = importlib.import_module(f"harness.machine.{name}")
    assert set(values["machine"]) == {"name", *(f.name for f in fields(module.Config))}
    chosen = loaded.values["name"]
    if chosen == "cuda" and not device_found():
        with pytest.raises(ConfigError, match="machine.name: cuda needs an NVIDIA GPU"):
            loaded.build(settings.hardware, SPEC)
        return
    machine = loaded.build(settings.hardware, SPEC)
    machine.close()
    assert machine.name == chosen
    assert {tier: t.capacity_bytes for tier, t in machine.tiers.items()} == settings.hardware.capacities_bytes


@pytest.mark.parametrize(
    "overrides",
    [
        ["dataset.num_requests=7", "experiment=balanced", "seed=3", "hardware.h2d_gb_s=1e-1"],
        ["strategy=flexgen", "strategy.policy.batch_size=3", "dataset.path=null", "machine.poison=true"],
        ["model=deepseek-v2", "model.spec.dense_layers=[]", "hardware=t4x2", "results_dir=/a b/c-d_0"],
        ["routing=skewed", "strategy=fate", "routing.hit_rates=[[0.85],[0.8]]", "dataset.output_lengths=a_b"],
    ],
)
def test_figures_and_tests_compose_as_hydra_does(overrides):
    """They have the files from a cache and set values in them."""
    assert composing.with_settings(*composing.parted(overrides)) is not None, "nothing is left to Hydra"
    by_hydra = OmegaConf.to_container(composing.by_hydra(overrides), resolve=True)
    assert composed(*overrides) == composed(*overrides) == by_hydra


def test_the_default_machine_is_that_of_this_computer():
    """And its configuration is that of the machine itself, so that runs are named and compared as such."""
    chosen = load_machine(composed()["machine"]).values
    assert chosen["name"] == ("cuda" if device_found() else "emulated")
    if not device_found():
        assert chosen == composed("machine=emulated")["machine"]


def test_every_group_offers_a_choice():
    assert {group for group in GROUPS if names_in(group)} == set(GROUPS)
    folders = {path.name for path in CONF.iterdir() if path.is_dir()}
    assert folders == {*GROUPS, "training", "hydra"}  # of harness.training; what Hydra itself prints


@pytest.mark.parametrize("name", names_in("strategy"))
def test_a_strategy_is_recorded_by_the_name_it_was_chosen_by(name):
    """So that tables tell variants of one package apart."""
    assert parse_settings(composed(f"strategy={name}")).strategy_name == name


@pytest.mark.parametrize("name", names_in("strategy"))
def test_a_strategys_yaml_shows_every_setting_with_its_default(name):
    """Whoever reads the YAML sees all switches; whoever builds a Config in code gets the same behaviour. Of several
    YAMLs of one package, which are variants of a system, one has the defaults, and all have the same keys."""
    values = composed(f"strategy={name}")["strategy"]
    module, config = load_strategy(values)
    assert set(values) - {"package", "name"} == {f.name for f in fields(module.Config)}
    others = [composed(f"strategy={other}")["strategy"] for other in names_in("strategy") if other != name]
    variants = [other for other in others if other["package"] == values["package"]]
    assert all(list(leaves(other)) == list(leaves(values)) for other in variants)
    assert module.Config() in (config, *(load_strategy(other).config for other in variants))


KEY = re.compile(r"^(?P<indent> *)(?P<key>[a-z_0-9]+):")


def keys_of(text: str) -> Iterator[tuple[str, bool]]:
    """(dotted key, whether a comment beside it or right above it explains it); the file's header explains no key."""
    stack: list[tuple[int, str]] = []
    above, in_header = False, True
    for line in text.splitlines():
        if line.lstrip().startswith("#"):
            above = not in_header
            continue
        in_header = False
        if match := KEY.match(line):
            depth = len(match["indent"])
            stack = [(d, key) for d, key in stack if d < depth] + [(depth, match["key"])]
            yield ".".join(key for _, key in stack), above or " #" in line
        above = False


def test_comments_are_found():
    text = "# header\na: 1\nb: 2  # said\n# said\nc:\n  d: 3\n  # said\n  e: 4\nf: 5\n"
    explained = {"a": False, "b": True, "c": True, "c.d": False, "c.e": True, "f": False}
    assert dict(keys_of(text)) == explained


@pytest.mark.parametrize("group", [*GROUPS, "training", "."])
def test_every_key_is_explained(group):
    """Once in its group: in the shared part, or in the file where it first matters."""
    told: dict[str, bool] = {}
    for path in (CONF / group).glob("*.yaml"):
        for key, explained in keys_of(path.read_text(encoding="utf-8")):
            told[key] = told.get(key, False) or explained
    if group == "experiment":  # it sets keys that are explained where they belong
        told = {key: said for key, said in told.items() if key.split(".")[0] not in defaults()}
    silent = [key for key, said in told.items() if not said and not key.startswith(("defaults", "hydra"))]
    assert not silent, f"conf/{group}: no comment explains {', '.join(silent)}"


MISTAKES = [
    ("strategy.pakcet_mb", 1.0, "did you mean 'packet_mb'"),
    ("strategy.packet_mb", "big", "valid number"),
    ("strategy.packet_mb", 0.0, "between 0.001"),
    ("strategy.name", 3, "must be a text or null"),
    ("strategy.package", "strategies.nowhere", "no package"),
    ("strategy.package", "", "dotted name"),
    ("strategy.package", ".moelens", "dotted name"),
    ("model.pth", "x", "unknown key"),
    ("model.dtype", "float64", "float32"),
    ("model.recipe.num_layers", "six", "valid integer"),
    ("model.recipe.num_layers", 0, "at least 1"),
    ("model.recipe.family", "mixture", "mixtral"),
    ("dataset.num_requets", 8, "did you mean 'num_requests'"),
    ("dataset.lengths.maen", 8.0, "did you mean 'mean'"),
    ("model.recipe.num_layer", 8, "did you mean 'num_layers'"),
    ("dataset.num_requests", "8", "valid integer"),
    ("dataset.num_requests", 0, "1 or more"),
    ("dataset.lengths.mean", 1e9, "must lie in"),
    ("machine.watchdog", 1.0, "did you mean 'watchdog_s'"),
    ("machine.watchdog_s", "long", "valid number"),
    ("machine.poison", 1, "valid boolean"),
    ("hardware.device_memory", 1.0, "unknown key"),
    ("hardware.device_memory_gb", "much", "valid number"),
    ("hardware.device_memory_gb", 0.0, "> 0"),
    ("hardware.h2d_gb_s", -1.0, "> 0"),
    ("experiment.nam", "x", "unknown key"),
    ("experiment.name", 3, "valid string"),
    ("wandb.mode", "sometimes", "offline"),
    ("verify", "some", "sample"),
    ("kv_cache_gb", 0, "lie between 1e-9"),
    ("results_dir", " ", "must name a folder"),
    ("kv_block_tokens", 1.5, "valid integer"),
    ("verify_requests", 0, ">= 1"),
    ("sede", 0, "did you mean 'seed'"),
    ("repeats", 0, "must be 1 to 1000"),
]


@pytest.mark.parametrize(("field", "value", "told"), MISTAKES, ids=[f"{f}={v}" for f, v, _ in MISTAKES])
def test_a_mistake_is_answered_with_the_field_and_what_is_valid(field, value, told):
    with pytest.raises(ConfigError) as caught:
        check(changed(field, value))
    assert caught.value.field == field
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


LEAVES = sorted(leaves(composed()))


@given(path=st.sampled_from(LEAVES), data=st.data())
def test_any_misspelt_key_is_named(path, data):
    parent, dot, key = path.rpartition(".")
    at = data.draw(st.integers(0, len(key) - 1))
    misspelt = f"{parent}{dot}{key[:at]}{data.draw(st.sampled_from('qxz'))}{key[at + 1 :]}"
    if misspelt in LEAVES:
        return
    with pytest.raises(ConfigError) as caught:
        check(changed(misspelt, 1))
    assert caught.value.field == misspelt


@given(path=st.sampled_from(LEAVES))
def test_any_value_of_a_wrong_type_is_named(path):
    with pytest.raises(ConfigError) as caught:
        check(changed(path, {"no": ["such", "thing"]}))
    assert caught.value.field.startswith(path)


def value_at(path: str) -> Any:
    place: Any = defaults()
    for key in path.split("."):
        place = place[key]
    return place


FLOATS = [path for path in LEAVES if isinstance(value_at(path), float) and not path.startswith("routing.")]


@pytest.mark.parametrize("path", FLOATS)
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_no_number_may_be_infinite(path, value):
    with pytest.raises(ConfigError) as caught:
        check(changed(path, value))
    assert caught.value.field == path
    assert "must be a finite number" in caught.value.message
