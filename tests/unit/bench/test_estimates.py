"""Rates of a lane, found in ops whose times are known."""

from __future__ import annotations

import numpy as np
import pytest

from harness.bench.estimates import LaneRates
from harness.machine.base import Work

FIXED_S, FLOP_S, BYTE_S = 2e-4, 1e-11, 4e-10


def seconds(work: Work) -> float:
    return FIXED_S + FLOP_S * work.flops + BYTE_S * work.device_bytes


def works() -> list[Work]:
    rng = np.random.default_rng(0)
    return [Work(flops=flops, device_bytes=nbytes) for flops, nbytes in rng.uniform(1e5, 1e9, (20, 2)).tolist()]


def test_known_rates_are_found():
    rates = LaneRates.of([(work, seconds(work)) for work in works()])
    for work in (Work(flops=5e8, device_bytes=3e6), Work(flops=1e6, device_bytes=2e9)):
        assert rates.seconds(work) == pytest.approx(seconds(work), rel=1e-3)


def test_what_others_explain_alone_is_not_free():
    """All FLOPs came with bytes, either of which explains the time; an op with either alone takes some."""
    for bytes_a_flop in (0.01, 100.0):
        ops = [Work(flops=n, device_bytes=bytes_a_flop * n) for n in (10.0, 20.0, 70.0)]
        rates = LaneRates.of([(work, 1e-6 * work.flops) for work in ops])
        alone = (Work(flops=5e9), Work(device_bytes=5e9 * bytes_a_flop))
        assert sum(rates.seconds(work) for work in alone) >= 5e3 * (1 - 1e-9)
        assert min(rates.seconds(work) for work in alone) > 0


def test_work_that_no_measured_op_had_has_no_estimate():
    assert LaneRates.of([(Work(flops=1.0), 1.0)]).seconds(Work(host_bytes=1e9)) is None
