"""Measure how long a plan takes, for every strategy and models from few large to many small experts.

    taskset -c 1 python -m pytest benchmarks/test_plans.py --benchmark-columns=median,max,rounds

Plans are to answer within two seconds on one core. Nothing is simulated. Each plan's configuration stands in
`extra_info`. With `--quick` or `--benchmark-disable` one model is planned for.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.config import ConfigError
from harness.plan.planning import DoesNotFit, draft_plan
from paper_figures.support import composed

ROOT = Path(__file__).resolve().parents[1]
STRATEGIES = sorted(path.stem for path in (ROOT / "conf" / "strategy").glob("*.yaml"))
AS_BUILT = ("flexgen", "flexgen_c", "moelightning")  # those whose planner as built is another one
_HOST = ("kv_cache_gb=200", "hardware.ram_gb=2600", "dataset.synthetic=lengths")
PROFILES = {
    "mixtral-8x7b, few requests": ("model=mixtral-8x7b", "hardware=a5000"),
    "mixtral-8x7b": ("model=mixtral-8x7b", "hardware=a5000", "dataset.num_requests=3000"),
    "qwen3-30b-a3b": ("model=qwen3-30b-a3b", "hardware=v100-32g", "dataset.num_requests=3000"),
    "deepseek-v2": ("model=deepseek-v2", "hardware=a5000", "dataset.num_requests=3000"),
    "deepseek-r1": ("model=deepseek-r1", "hardware=a40", "dataset.num_requests=3000"),
    "gpt-oss-120b, most requests": ("model=gpt-oss-120b", "hardware=h200", "dataset.num_requests=25000"),
}
_ROUNDS = 3


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("strategy", [*STRATEGIES, *(f"{name}, as built" for name in AS_BUILT)])
def test_plan(benchmark, scale, strategy, profile):
    if scale.quick and profile != next(iter(PROFILES)):
        pytest.skip("only measured at full scale")
    name, _, as_built = strategy.partition(", ")
    planning = ["strategy.planning=as_built"] if as_built else []
    overrides = [f"strategy={name}", *planning, *PROFILES[profile], *_HOST]
    values = composed(*overrides)
    try:
        draft_plan(values, log=lambda text: None)  # loads what is loaded once
    except (ConfigError, DoesNotFit) as error:
        pytest.skip(str(error).splitlines()[0])
    benchmark.extra_info["overrides"] = overrides
    benchmark.pedantic(
        draft_plan, args=(values,), kwargs={"log": lambda text: None}, rounds=1 if scale.quick else _ROUNDS
    )
