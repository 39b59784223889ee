"""Planners that fill the device: what the pipeline behind them then takes fits, and hardly anything is left."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from harness.config import ConfigError
from harness.engine.activations import device_bytes_per_token
from harness.engine.engine import Engine
from harness.engine.limits import SLACK_BYTES
from harness.engine.strategy import least_weight_bytes
from harness.settings import load_strategy
from kernels import triton as gpu
from tests.composing import composed
from tests.unit.strategies.test_offload_planner import SPEC, engine

CROWD = [400] * 100  # more tokens than any of these devices holds activations of


def filled(name: str, on: Engine, **changes) -> dict[str, Any]:
    """Build the strategy, whose planner is the only one to know how much room there is, and return its plan."""
    module, config = load_strategy({**composed(f"strategy={name}")["strategy"], **changes})
    return module.build(config, on).plan


KERNELS = frozenset(gpu.KERNELS), frozenset()


@pytest.mark.parametrize("kernels", [None, *KERNELS])
@pytest.mark.parametrize(
    ("name", "changes", "num_batches"),
    [
        ("moelens", {"n_real": 100_000}, 2),
        ("moelens", {"n_real": 100_000, "attention": "gpu", "gpu_kv_staging_mb": 900.0}, 2),
        ("ondemand", {"max_pass_tokens": 400_000}, 1),
        ("ondemand", {"max_pass_tokens": 400_000, "prefetch": True}, 1),
    ],
)
def test_activations_take_what_layers_and_staging_leave_of_the_device(name, changes, num_batches, kernels):
    """On a GPU planners count the temporaries of the kernels in use."""
    on = engine(CROWD * (1 if kernels is None else 4), tier="pinned")
    on.machine.gpu_kernels = kernels
    filled(name, on, **changes)
    token_bytes = num_batches * device_bytes_per_token(on.spec, kernels)
    assert on.machine.tiers["device"].free_bytes < SLACK_BYTES + token_bytes


@pytest.mark.parametrize("kernels", [None, *KERNELS])
@pytest.mark.parametrize("prefetch", [False, True])
def test_a_batch_of_deepspeed_takes_what_layers_leave_of_the_device(prefetch, kernels):
    """Each sequence as long as the longest: activations of its prompt and whole blocks for its context."""
    on = engine([200, *CROWD * (1 if kernels is None else 4)], tier="pinned", new=33)
    on.machine.gpu_kernels = kernels
    filled("deepspeed_zero", on, prefetch=prefetch)
    token_bytes = device_bytes_per_token(on.spec, kernels)
    sequence_bytes = 400 * token_bytes + 27 * (16 * on.spec.kv_bytes_per_token + 4)
    assert 0 <= on.machine.tiers["device"].free_bytes - SLACK_BYTES < sequence_bytes


def offloaded(num_layers: int, **changes) -> tuple[dict[str, Any], Engine]:
    """Plan vLLM for so many layers of Mixtral-8x7B on a T4, and 300 requests that take 27 blocks each."""
    on = engine([400] * 300, tier="pinned", spec=replace(SPEC, num_layers=num_layers))
    return filled("vllm_offload", on, **changes), on


@pytest.mark.parametrize("num_layers", [3, 4])
def test_nothing_is_offloaded_where_the_model_fits(num_layers):
    """Beside four layers there is no room for the KV cache of all that may run; this is no reason to move weights."""
    plan, on = offloaded(num_layers, max_num_batched_tokens=4096)
    assert plan["cpu_offload_gb"] == 0
    assert plan["resident_weights_gb"] == pytest.approx(num_layers * on.store.layer_bytes / 1e9)
    assert "weight buffer" not in {name for name, nbytes in on.machine.tiers["device"].holders().items() if nbytes}
    assert (plan["kv_blocks"] >= 27 * 256) == (num_layers == 3)


@pytest.mark.parametrize("num_sequences", [10, 100, 256])
def test_as_much_is_offloaded_as_the_kv_cache_of_all_that_may_run_needs(num_sequences):
    """One part less, and a sequence would lack blocks."""
    plan, on = offloaded(6, max_num_seqs=num_sequences)
    spare_bytes = (plan["kv_blocks"] - 27 * num_sequences) * 16 * on.spec.kv_bytes_per_token
    assert 0 <= spare_bytes < max(on.store.slot_bytes.values())
    assert 0 < plan["cpu_offload_gb"] < 6 * on.store.layer_bytes / 1e9


def test_all_is_offloaded_where_the_kv_cache_needs_more_than_the_device():
    plan, on = offloaded(32)
    assert plan["cpu_offload_gb"] == pytest.approx(32 * on.store.layer_bytes / 1e9)
    assert plan["resident_weights_gb"] == 0
    assert 27 < plan["kv_blocks"] < 27 * 256


def test_a_pass_is_as_long_as_asked_or_as_the_longest_prompt():
    assert offloaded(3)[0]["max_pass_tokens"] == 8192
    assert offloaded(3, max_num_batched_tokens=1000)[0]["max_pass_tokens"] == 1000
    assert offloaded(3, max_num_batched_tokens=100)[0]["max_pass_tokens"] == 431
    on = engine([400] * 3, tier="pinned", spec=replace(SPEC, num_layers=3))
    assert filled("vllm_offload", on)["max_pass_tokens"] == 3 * 431, "there are no more tokens"


def test_sequences_that_no_pass_has_room_for_get_no_room_in_the_cache():
    plan, _ = offloaded(6, max_num_batched_tokens=100)
    assert (plan["max_num_seqs"], plan["batched_tokens"], plan["max_pass_tokens"]) == (100, 100, 431)
    assert plan["cpu_offload_gb"] == offloaded(6, max_num_batched_tokens=100, max_num_seqs=100)[0]["cpu_offload_gb"]


def test_an_error_says_how_much_has_to_be_offloaded():
    with pytest.raises(
        ConfigError, match=r"^strategy.cpu_offload_gb: must be at least [\d.]+ on this device"
    ) as refused:
        offloaded(6, cpu_offload_gb=0.0)
    least_gb = float(re.findall(r"at least ([\d.]+)", refused.value.message)[0])
    assert offloaded(6, cpu_offload_gb=least_gb)[0]["kv_blocks"] >= 27
    with pytest.raises(ConfigError, match=r"^strategy.cpu_offload_gb: "):
        offloaded(6, cpu_offload_gb=least_gb - 0.36)


HOST_EXPERTS = {"gpu_ffn": False, "resident_weights": 0.0, "resident_kv": 0.0}
STREAMED = {"gpu_ffn": True, "resident_weights": 0.0, "resident_kv": 0.0}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("moelens", {}),
        ("ondemand", {}),
        ("ondemand", {"prefetch": True}),
        ("deepspeed_zero", {}),
        ("deepspeed_zero", {"prefetch": False}),
        ("vllm_offload", {"cpu_offload_gb": 1000.0}),
        ("vllm_offload", {"cpu_offload_gb": 1000.0, "prefetch": True}),
        ("flexgen", {"policy": STREAMED}),
        ("flexgen", {"policy": HOST_EXPERTS}),
    ],
)
def test_weights_take_what_the_strategy_states(name, changes):
    """What every strategy states, and refuses less than, is what its streams reserve; pages are rounded up."""
    on = engine([50] * 8, tier="pinned")
    filled(name, on, **changes)
    held = on.machine.tiers["device"].holders()
    taken = sum(nbytes for label, nbytes in held.items() if label.startswith(("weight ", "dense weight ")))
    config = load_strategy({**composed(f"strategy={name}")["strategy"], **changes}).config
    assert sum(least_weight_bytes(config, on).values()) == pytest.approx(taken, rel=1e-4)


def test_pinned_memory_that_is_missing_is_not_told_as_the_devices():
    on = engine(CROWD, tier="pinned")
    pinned = on.machine.tiers["pinned"]
    pinned.reserve("others", pinned.free_bytes - 1_000_000)
    with pytest.raises(ConfigError, match=r"^hardware.pinned_memory_gb: .* room for 24 tokens .*, 431 are needed"):
        filled("moelens", on)


def test_where_no_request_of_deepspeed_fits_every_holder_is_named():
    """The sizes in brackets add up to what is needed."""
    on = engine([50], tier="pinned")
    device = on.machine.tiers["device"]
    device.reserve("others", device.free_bytes - on.store.layer_bytes)
    with pytest.raises(ConfigError, match=r"^hardware.device_memory_gb: .* is too small: ") as refused:
        filled("deepspeed_zero", on)
    needed, named = re.findall(r"small: ([0-9.]+) GB are needed \((.*)\)$", refused.value.message)[0]
    units = {"KB": 1e-6, "MB": 1e-3, "GB": 1.0}
    sizes = [float(size) * units[unit] for size, unit in re.findall(r" ([0-9.]+) (KB|MB|GB)", named)]
    assert all(f"{name} " in named for name in ("others", "2 layers of weights", "the smallest request"))
    assert sum(sizes) == pytest.approx(float(needed), rel=1e-3)


def test_a_batch_of_deepspeed_is_refused_only_for_requests_that_there_are():
    filled("deepspeed_zero", engine([50] * 8, tier="pinned"), batch_size=100_000)
    with pytest.raises(ConfigError, match=r"^strategy.batch_size: must be at most \d+, which fill the device"):
        filled("deepspeed_zero", engine(CROWD, tier="pinned"), batch_size=100_000)
