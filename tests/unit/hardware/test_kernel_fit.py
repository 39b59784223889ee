from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from harness.config import parse
from harness.hardware.kernel_fit import fit_latencies, fit_rate
from harness.hardware.profile import HardwareConfig
from harness.model.config import ModelConfig
from tests.composing import composed
from tests.conftest import ROOT, SHARED_DATA

DATA = Path(__file__).with_name("l4_kernel_latencies.yaml")


@pytest.fixture(scope="module")
def table() -> dict[str, Any]:
    return yaml.safe_load(DATA.read_text())


@pytest.fixture(scope="module")
def mixtral():
    values = yaml.safe_load((ROOT / "conf/model/mixtral-8x7b.yaml").read_text())
    return parse(ModelConfig, values, "model").planned_spec()


@given(
    rate_gb_s=st.floats(0.1, 5000),
    latency_us=st.floats(0, 100),
    sizes=st.lists(st.integers(10**6, 10**9), min_size=2, max_size=20, unique=True),
)
def test_exact_points_give_their_rate_back(rate_gb_s, latency_us, sizes):
    sizes = [*sizes, 10 * max(sizes)]  # far enough apart that rounding does not decide
    points = [(size, latency_us * 1e-6 + size / rate_gb_s / 1e9) for size in sizes]
    fit = fit_rate(points, with_latency=True)
    assert fit.gb_s == pytest.approx(rate_gb_s, rel=1e-6)
    assert fit.latency_us == pytest.approx(latency_us, rel=1e-6, abs=1e-6 * max(points)[1] * 1e6)
    assert fit.worst_error < 1e-6


def test_noisy_points_give_what_least_squares_gives():
    random = np.random.default_rng(0)
    sizes = random.uniform(1e6, 1e9, 40)
    seconds = (40e-6 + sizes / 12e9) * random.uniform(0.9, 1.1, 40)
    for with_latency in (True, False):
        columns = [np.ones(40), sizes] if with_latency else [sizes]
        solution = np.linalg.lstsq(np.stack(columns, 1) / seconds[:, None], np.ones(40), rcond=None)[0]
        fit = fit_rate(list(zip(sizes.tolist(), seconds.tolist(), strict=True)), with_latency=with_latency)
        assert fit.gb_s == pytest.approx(1e-9 / solution[-1], rel=1e-6)
        assert fit.latency_us == pytest.approx(solution[0] * 1e6 if with_latency else 0, rel=1e-6)
        errors = abs(np.stack(columns, 1) @ solution - seconds) / seconds
        assert fit.worst_error == pytest.approx(errors.max(), rel=1e-6)


@pytest.mark.parametrize("points", [[(1e6, 1e-3)], [(1e6, 1e-3), (1e6, 2e-3)], [(1e6, 1e-3), (2e6, 0.9e-3)]])
def test_points_without_a_rate_are_refused(points):
    with pytest.raises(ValueError, match="rate"):
        fit_rate(points, with_latency=True)


def test_the_fits_lie_within_the_published_ranges(table, mixtral):
    """GB/s as the data set's own remarks give them, point by point."""
    fits = fit_latencies(table, mixtral)
    assert 11.9 <= fits["h2d_gb_s"].gb_s <= 12.4 and fits["h2d_gb_s"].worst_error < 0.01
    assert 36 <= fits["cpu_gb_s"].gb_s <= 50 and fits["cpu_gb_s"].gb_s == pytest.approx(45, rel=0.02)
    assert 217 <= fits["device_gb_s"].gb_s <= 231 and fits["device_gb_s"].worst_error < 0.05
    # MoE-Lightning §6.2: attention on the CPU is 3 to 4 times as fast as the transfer.
    assert 3 <= fits["cpu_gb_s"].gb_s / fits["h2d_gb_s"].gb_s <= 4


def test_the_l4_profile_has_the_fitted_rates(table, mixtral):
    profile = parse(HardwareConfig, composed("hardware=l4")["hardware"], "hardware")
    fits = fit_latencies(table, mixtral)
    for field, fit in fits.items():
        assert getattr(profile, field) == pytest.approx(fit.gb_s, rel=0.002), field
        assert "Fig. 9" in getattr(profile, field).source
    assert profile.transfer_latency_us == pytest.approx(fits["h2d_gb_s"].latency_us, rel=0.01)
    # Two FLOPs each for scores and sums, per query head; a KV head's numbers have two bytes and group_size queries.
    flop_per_byte = mixtral.decode_pair_flops / mixtral.kv_bytes_per_token_layer
    assert flop_per_byte == mixtral.group_size == 4
    assert profile.cpu_gflop_s == pytest.approx(fits["cpu_gb_s"].gb_s * flop_per_byte, rel=0.005)


def test_the_table_is_the_published_one(table):
    path = SHARED_DATA / "l4_kernel_latencies.yaml"
    if not path.exists():
        pytest.skip(f"{path} is not here")
    published = yaml.safe_load(path.read_text())
    assert {key: published[key] for key in table} == table
