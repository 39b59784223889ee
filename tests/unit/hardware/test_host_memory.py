"""Host memory relative to model and KV cache: the two settings in which MoE-Lens runs MoE-Lightning (section 7)."""

from __future__ import annotations

import pytest

from harness.config import ConfigError
from harness.plan.planning import draft_plan
from harness.run.session import Session
from harness.settings import Settings, parse_settings
from tests.composing import composed

PARAMETERS = {  # as Hugging Face counts them
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "dbrx": 131_596_523_520,
}
PAPERS_GB = {"mixtral-8x7b": 94, "mixtral-8x22b": 282, "dbrx": 264}  # MoE-Lens Table 3, rounded up


def sized(*overrides: str) -> Settings:
    session = Session.of(composed("machine=simulated", *overrides))
    session.load_model()
    return session.settings


@pytest.mark.parametrize("kv_gb", [70, 210])
@pytest.mark.parametrize("model", PARAMETERS)
@pytest.mark.parametrize("setting", ["host_memory_plus30", "host_memory_x1_25"])
def test_the_papers_settings_in_bytes(setting, model, kv_gb):
    hardware = sized(f"experiment={setting}", f"model={model}", f"kv_cache_gb={kv_gb}").hardware
    model_bytes = 2 * PARAMETERS[model]
    assert model_bytes / 1e9 == pytest.approx(PAPERS_GB[model], rel=0.01)
    together = model_bytes + kv_gb * 10**9
    expected = together + 30 * 10**9 if setting == "host_memory_plus30" else 1.25 * together
    capacities = hardware.capacities_bytes
    assert capacities["ram"] == pytest.approx(expected, rel=1e-5), "alignment of parts is all that is beyond"
    assert capacities["pinned"] == capacities["host"] == capacities["ram"]
    assert capacities["device"] == 16 * 10**9


def test_gigabytes_stay_what_they_are():
    settings = parse_settings(composed("hardware=a40"))
    assert sized("hardware=a40").hardware == settings.hardware


def test_both_together():
    hardware = parse_settings(composed("hardware=a40", "hardware.ram_times=1.5", "hardware.ram_plus_gb=2")).hardware
    assert hardware.holding(10**10).capacities_bytes["ram"] == 17 * 10**9


def test_the_policy_obeys_the_host_memory():
    """5.81 GB of it stage two layers of weights: with little beyond that, micro-batches are smaller than what the
    device would hold, and with less nothing fits."""
    given = ["experiment=host_memory_plus30", "dataset.num_requests=80", "kv_cache_gb=2"]

    def micro_batch_size(plus_gb: float) -> int:
        plan = draft_plan(composed(*given, f"hardware.ram_plus_gb={plus_gb}"))
        ram = plan.machine.tiers["ram"]
        assert ram.used_bytes <= ram.capacity_bytes
        found: int = plan.strategy.plan["micro_batch_size"]
        return found

    assert micro_batch_size(5.85) < micro_batch_size(30)
    with pytest.raises((ConfigError, RuntimeError), match="ram"):
        micro_batch_size(5.7)
