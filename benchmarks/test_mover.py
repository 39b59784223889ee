"""The data mover: kept rates, unpaced speed against the copy ceiling, and what an urgent copy waits for."""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.conftest import MIB, Scale
from benchmarks.support.decode_data import huge_array
from benchmarks.support.rounds import Rounds

pytest.importorskip("kernels.mover", reason="this version has no data mover")
from kernels.mover import DataMover

PACKET_BYTES = MIB
URGENT_BYTES = MIB
NUM_URGENT = 20


def buffers(num_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    dst, src = (torch.from_numpy(huge_array((num_bytes,), np.uint8)) for _ in range(2))
    src.view(torch.int32).random_()
    dst.fill_(1)
    return dst, src


@pytest.mark.parametrize(("rate_gb_s", "copy_threads"), [(0.5, 1), (1.0, 1), (2.0, 1), (4.0, 1), (4.0, 2)])
def test_rate(benchmark: Any, report: Any, scale: Scale, rate_gb_s: float, copy_threads: int) -> None:
    """Requests of 16 MB, one behind the other, as a strategy submits weights."""
    duration_s = 0.005 if scale.quick else 0.5
    dst, src = buffers(int(rate_gb_s * 1e9 * duration_s) // (16 * 64) * 16 * 64)
    parts = list(zip(dst.chunk(16), src.chunk(16), strict=True))
    with DataMover(packet_bytes=PACKET_BYTES, rate_bytes_s=rate_gb_s * 1e9, num_threads=copy_threads) as mover:

        def run() -> None:
            tickets = [mover.submit([to], [part]) for to, part in parts]
            tickets[-1].wait()

        rounds = Rounds("ours", run, {})
        rounds.measure(benchmark, scale.num_rounds)
    achieved = [src.nbytes / seconds / 1e9 for seconds in rounds.seconds("ours")]
    report(
        rounds,
        kernel="mover_rate",
        shape=f"{rate_gb_s:g} GB/s",
        num_threads=copy_threads,
        asked_gb_s=rate_gb_s,
        gb_s=statistics.median(achieved),
        worst_relative_error=max(abs(rate / rate_gb_s - 1) for rate in achieved),
        relative_error=statistics.median(achieved) / rate_gb_s - 1,
    )
    assert torch.equal(dst, src)


def test_unpaced(benchmark: Any, report: Any, ceilings: Any, scale: Scale, num_threads: int) -> None:
    dst, src = buffers(scale.working_set_bytes)
    others = {"copy ceiling": ceilings.copy(num_threads)}
    depth = max(2, num_threads)
    with DataMover(packet_bytes=PACKET_BYTES, depth=depth, num_threads=num_threads) as mover:
        rounds = Rounds("ours", lambda: mover.submit([dst], [src]).wait(), others, num_threads)
        rounds.measure(benchmark, scale.num_rounds)
    seconds = rounds.median_s("ours")
    report(
        rounds,
        kernel="mover_unpaced",
        shape=f"{src.nbytes >> 20} MiB",
        num_threads=num_threads,
        gb_s=src.nbytes / seconds / 1e9,
        copy_ceiling_gb_s=ceilings.num_bytes / rounds.median_s("copy ceiling") / 1e9,
        share_of_ceiling=rounds.ratio("copy ceiling", "ours") * src.nbytes / ceilings.num_bytes,
    )
    assert torch.equal(dst, src)


@pytest.mark.parametrize(("rate_gb_s", "copy_threads"), [(0.0, 1), (0.0, 2), (1.0, 1), (1.0, 2)])
def test_urgent(benchmark: Any, report: Any, scale: Scale, rate_gb_s: float, copy_threads: int) -> None:
    """Urgent copies of 1 MB, one at a time, while the normal class always has more to do."""
    count = 2 if scale.quick else NUM_URGENT
    dst, src = buffers(64 * MIB)
    urgent_dst, urgent_src = buffers(URGENT_BYTES)
    tickets: list[Any] = []
    with DataMover(packet_bytes=PACKET_BYTES, rate_bytes_s=rate_gb_s * 1e9, num_threads=copy_threads) as mover:

        def run() -> None:
            load = [mover.submit([dst], [src]) for _ in range(8)]
            while not any(ticket.spans() for ticket in load):
                time.sleep(1e-4)
            for _ in range(count):
                if load[-1].state != "waiting":
                    load.append(mover.submit([dst], [src]))
                tickets.append(mover.submit([urgent_dst], [urgent_src], urgent=True))
                tickets[-1].wait()
            for ticket in load:
                if not ticket.cancel():
                    ticket.wait()

        rounds = Rounds("ours", run, {})
        rounds.measure(benchmark, scale.num_rounds)
    delays = [ticket.started_s - ticket.submitted_s for ticket in tickets]
    durations = [ticket.finished_s - ticket.started_s for ticket in tickets]
    waited = [ticket.num_packets_waited for ticket in tickets]
    report(
        rounds,
        kernel="mover_urgent",
        shape="full load, unpaced" if rate_gb_s == 0 else f"full load at {rate_gb_s:g} GB/s",
        num_threads=copy_threads,
        num_urgent=len(tickets),
        depth=mover.depth,
        most_packets_waited=max(waited),
        packet_s=statistics.median(durations),
        median_delay_s=statistics.median(delays),
        worst_delay_s=max(delays),
    )
    assert max(waited) <= mover.depth
