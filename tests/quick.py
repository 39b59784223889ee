"""Choose the tests that `pytest -m quick` runs: some of every part of the harness, within a minute on two cores."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ALL = ""
QUICK = {  # file below tests/ -> regular expression that the names of its quick tests match
    "contract/test_families.py": r"shuffled_machine\[mixtral-",
    "kernels/test_kv_append.py": ALL,
    "test_architecture.py": ALL,
    "test_bad_input.py": "out_of_bounds|out_of_the_cache|config_json",
    "test_cli.py": "mistake_is_one_line",
    "test_docs.py": ALL,
    "test_packaging.py": ALL,
    "unit/bench/test_op_bench.py": ALL,
    "unit/bench/test_fitting.py": ALL,
    "unit/calibration/test_table.py": ALL,
    "unit/engine/test_activation_pool.py": ALL,
    "unit/engine/test_batch.py": ALL,
    "unit/engine/test_loop.py": ALL,
    "unit/engine/test_op_work.py": ALL,
    "unit/engine/test_sequences.py": ALL,
    "unit/hardware/test_profiles.py": ALL,
    "unit/hardware/test_steal.py": ALL,
    "unit/llapor/test_learning.py": ALL,
    "unit/machine/test_arenas.py": ALL,
    "unit/machine/test_contention.py": ALL,
    "unit/machine/test_lane_order.py": ALL,
    "unit/machine/test_simulated.py": ALL,
    "unit/memory/test_kv_cache.py": ALL,
    "unit/memory/test_paged_weights.py": ALL,
    "unit/memory/test_tiers.py": ALL,
    "unit/memory/test_weight_stream.py": ALL,
    "unit/model/test_model_layout.py": ALL,
    "unit/model/test_model_linear.py": ALL,
    "unit/model/test_sharding.py": ALL,
    "unit/record/test_summary.py": ALL,
    "unit/record/test_trace.py": ALL,
    "unit/routing/test_draws.py": ALL,
    "unit/routing/test_skewed.py": ALL,
    "unit/routing/test_statistics.py": ALL,
    "unit/strategies/test_equations.py": ALL,
    "unit/strategies/test_scheduling.py": ALL,
    "unit/strategies/test_split.py": ALL,
    "unit/strategies/test_steps.py": ALL,
    "unit/strategies/test_table5.py": ALL,
    "unit/study/test_caches.py": ALL,
    "unit/test_report.py": ALL,
    "unit/test_validate.py": "figures|median|report|marked|kinds",
    "unit/training/test_balancing.py": ALL,
    "unit/verify/test_reference.py": ALL,
    "unit/workload/test_workload_build.py": ALL,
}


def is_quick(path: Path, name: str = "") -> bool:
    """Return whether the test of that name in the file at `path` is quick; without a name, whether any of it is."""
    names = QUICK.get(path.relative_to(HERE).as_posix())
    return names is not None and (not name or re.search(names, name) is not None)


def mark(items: list[pytest.Item]) -> None:
    """Give every quick test its marker."""
    for item in items:
        if item.path.is_relative_to(HERE) and is_quick(item.path, item.name):
            item.add_marker("quick")
