"""A refusal of too little device memory states a number that suffices, or that leads to one in one step."""

from __future__ import annotations

import re

import pytest

from harness.memory.tiers import enough
from harness.plan.planning import DoesNotFit, Plan, make_plan
from tests.composing import composed, names_in

TINY_GB = "0.001"
NUMBERS = re.compile(r"(?:must hold|needs) ([0-9.]+) GB|([0-9.]+) GB (?:hold the longest|are needed)")


def plan_with(strategy: str, device_memory_gb: str) -> Plan:
    return make_plan(
        composed(
            f"strategy={strategy}",
            f"hardware.device_memory_gb={device_memory_gb}",
            *("model=mixtral-mini", "machine=simulated", "hardware=a40", "kv_cache_gb=0.005"),
            *("dataset.num_requests=4", "dataset.max_new_tokens=3"),
        )
    )


def stated_gb(refused: DoesNotFit) -> str:
    """The first number of gigabytes that the message says is enough."""
    assert "\n" not in str(refused)
    found = NUMBERS.search(str(refused))
    assert found, refused
    return found[1] or found[2]


@pytest.mark.parametrize("strategy", names_in("strategy"))
def test_what_a_refusal_states_is_enough(strategy):
    """A plan's table adds up to the same. A strategy whose planner wants more says so once."""
    with pytest.raises(DoesNotFit, match=r"^hardware.device_memory_gb: must hold .* got 0.001$") as first:
        plan_with(strategy, TINY_GB)
    told = stated_gb(first.value)
    assert told == enough(sum(first.value.needed["device"].values()))
    try:
        plan = plan_with(strategy, told)
    except DoesNotFit as second:
        assert str(second).startswith(f"hardware.device_memory_gb: {told} GB is too small: "), second
        assert float(stated_gb(second)) > float(told)
        plan = plan_with(strategy, stated_gb(second))
    assert plan.summary["generated_tokens"] > 0


def test_a_number_that_is_enough_is_so_as_a_setting():
    """Settings in gigabytes become whole bytes, of which a float may lose the last."""
    for nbytes in (
        1,
        999,
        11_140_000,
        11_140_001,
        8_200_000,
        27_440_000_001,
        674_321 * 10**6,
        *range(10**7, 10**8, 77_777),
    ):
        told = enough(nbytes)
        assert nbytes <= int(float(told) * 1e9) <= 1.0021 * nbytes + 1, nbytes
        assert len(told.replace(".", "").strip("0")) <= 4
    assert (enough(27_440_000_001), enough(1_234_500, 10**6), enough(4 * 10**9)) == ("27.45", "1.235", "4")
