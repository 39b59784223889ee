"""The commands beside run.py: mistakes in one line with exit code 2, help without work, plans that tell."""

from __future__ import annotations

import pytest

from harness import plan, validate
from harness.command_line import composed_values
from harness.engine.strategy import weights_tier
from harness.hardware import calibrate
from harness.settings import load_strategy, parse_settings
from tests.composing import names_in

SMALL = ("model=mixtral-8x7b", "hardware=a40", "dataset.num_requests=4", "dataset.max_new_tokens=2")


@pytest.mark.parametrize("command", [plan.main, calibrate.main])
def test_help_is_the_modules_text(command, capsys):
    assert command(["--help"]) == 0
    assert "python -m harness" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "mistake", "field"),
    [
        (plan.main, "kv_cache_bg=1", "kv_cache_bg"),
        (plan.main, "simulate=flase", "simulate"),
        (plan.main, "hardware=a41", "hardware"),
        (plan.main, "strategy.packet_mb=1e-9", "strategy.packet_mb"),
        (plan.main, "hardware.calibrated=true", "hardware.calibrated"),
        (plan.main, "max_simulated_ops=0", "max_simulated_ops"),
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
        (calibrate.main, "out=/dev/null/table.json", "out"),
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
    assert plan.main([*SMALL, "kv_cache_gb=2", "simulate=false"]) == 0
    assert "bottleneck" not in capsys.readouterr().out


def test_a_plan_in_which_nothing_runs_says_why(capsys):
    assert plan.main([*SMALL, "kv_cache_gb=0.003"]) == 1
    assert "every request is rejected; the first: needs" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("strategy", names_in("strategy"))
@pytest.mark.parametrize(
    ("tier", "size_gb", "needs"),
    [
        ("host", 50, ("weights", "93.4 GB", "kv cache", "2 GB")),
        ("device", 3, ("two layers of weights", "5.81 GB", "embedding and head", "524 MB")),
    ],
)
def test_a_plan_that_does_not_fit_shows_every_tier_by_name(strategy, tier, size_gb, needs, capsys):
    """Mixtral-8x7B in bfloat16: 46.7 billion parameters, 1.45 billion a layer."""
    if tier == "host":
        values = composed_values(["machine=simulated", *SMALL, f"strategy={strategy}"])
        tier = weights_tier(load_strategy(parse_settings(values).strategy)[1])
    size = f"hardware.{tier}_memory_gb={size_gb}"
    assert plan.main([*SMALL, f"strategy={strategy}", "kv_cache_gb=2", size]) == 1
    out, err = capsys.readouterr()
    assert "does not fit: " in err and "hardware." in err
    for expected in (*needs, "device", "pinned", "host", f"{size_gb} GB"):
        assert expected in out
    assert out.count("TOO SMALL") == 1


def test_a_long_simulation_stops_and_says_so(capsys):
    arguments = [*SMALL[:2], "dataset.num_requests=20", "dataset.max_new_tokens=8", "kv_cache_gb=0.3"]
    assert plan.main([*arguments, "max_simulated_ops=3000"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "INCOMPLETE stopped after" in out and "of 20 requests finished" in out
    assert "accuracy" not in out, "a part of the run proves no prediction"
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
    told = "hardware.num_gpus: must be 1 for strategy moelens, which uses one GPU; profile 't4x2' has 2"
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


@pytest.mark.parametrize("arguments", [["--repeats", "0"], ["--limit", "0"]])
def test_validation_refuses_what_would_measure_nothing(arguments, tmp_path):
    with pytest.raises(SystemExit) as error:
        validate.main(["--out", str(tmp_path), *arguments])
    assert error.value.code == 2
