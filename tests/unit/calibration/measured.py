"""A calibration table with few measurements, and ops that it knows or does not know."""

from __future__ import annotations

from harness.calibration.costs import CalibratedCosts
from harness.calibration.table import ALONE, BESIDE_GPU, BESIDE_GPU_AND_LINK, BESIDE_LINK, CalibrationTable, HostTimes
from harness.machine.base import LaneKind, Op, Work
from tests.unit.machine.ops import FreeOp


class Measured(Op):
    kind = "measured"

    def __init__(self, size: float = 4.0, link_bytes: float = 0.0) -> None:
        self.size, self.link_bytes = size, link_bytes

    def work(self) -> Work:
        return Work(flops=10 * self.size, link_bytes=self.link_bytes)

    def cost_features(self) -> tuple[float, ...]:
        return (self.size,)


class New(Measured):
    kind = "new"


class MeasuredOtherwise(Measured):
    cost_key = "measured x3"


class Free(FreeOp):
    kind = "free"


LINE = [((2.0,), 0.2), ((6.0,), 0.6)]


def longer(times: float):
    return [(features, round(times * seconds, 6)) for features, seconds in LINE]


AHEAD = {"ahead": {"gpu: measured": longer(0.5)}, "launching": {"gpu: measured": longer(3)}}


def table(**changes) -> CalibrationTable:
    """Build one with the gpu's op in two companies, the cpu's in three, the link's alone."""
    values = {
        "meta": {"code": "x"},
        "samples": {
            ALONE: {
                "gpu: measured": LINE,
                "cpu: measured": LINE,
                "h2d: measured": [((2.0,), 0.01), ((6.0,), 0.01)],
            },
            BESIDE_LINK: {"gpu: measured": longer(2)},
            BESIDE_GPU: {"cpu: measured": longer(3)},
            BESIDE_GPU_AND_LINK: {"cpu: measured": longer(4)},
        },
        "works": {
            f"{kind}: measured": {(size,): Work(flops=10 * size, link_bytes=0.0) for size in (2.0, 6.0)}
            for kind in LaneKind
        },
        "together": {
            "cpu+gpu": {"cpu": 1.5, "gpu": 1.2},
            "gpu+h2d": {"gpu": 1.25, "h2d": 1.1},
            "cpu+h2d": {"cpu": 1.05, "h2d": 1.0},
            "cpu+gpu+h2d": {"cpu": 1.8, "gpu": 2.0, "h2d": 1.2},
        },
        "memory": {"working_set_gb": [1.0], "read_1_thread": [10.0, 11.0]},
        "host": HostTimes(
            submit_s=1e-5,
            wake_s=2e-5,
            pass_s=1e-3,
            sequence_s=1e-6,
            handover_s=5e-5,
            handover_beside_s=7e-5,
            turns_s={"gpu": 3e-5, "cpu": 2e-5},
        ),
    }
    return CalibrationTable(**(values | changes))


LINK_BYTES_S = {LaneKind.H2D: 1e9, LaneKind.D2H: 5e8, LaneKind.PIN: 2e9}


def costs(*busy: LaneKind) -> CalibratedCosts:
    return CalibratedCosts(table(), LINK_BYTES_S, lambda kind: kind in busy)
