"""A workload is the papers' prompts, real or synthetic, as one tuple of requests. Torch-free, reproducible from a
seed."""

from harness.workload.build import build_workload
from harness.workload.config import DatasetConfig, LengthStatistics
from harness.workload.request import Request, Workload

__all__ = ["DatasetConfig", "LengthStatistics", "Request", "Workload", "build_workload"]
