"""Measure the ops a second of the simulated machine, on a stream of ops like VSLPipe's.

    pytest benchmarks/test_simulator.py --benchmark-columns=median,iqr,ops,rounds
    python benchmarks/report_simulator.py                # the same, kept in results/reference/simulator

"core" is the event loop alone, over ops that were submitted before; "end to end" submits, derives dependencies, checks,
records spans and waits once a pass. Building the ops is in neither: that is the strategy's work. The number of ops a
second of each round stands in `extra_info` as `ops_per_s`.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from harness.machine.base import CPU, D2H, GPU, H2D, Lane, LaneKind, Op, Ticket, Work
from harness.machine.simulated import SimulatedMachine
from harness.machine.virtual.costs import LaneCost, Roofline

NUM_LAYERS, NUM_PASSES, NUM_EXPERTS = 32, 32, 8
NUM_ROUNDS = 15
PART_BYTES = {"attention_in": 50e6, "attention_out": 34e6} | {f"expert.{e}": 352e6 for e in range(NUM_EXPERTS)}
PACKET_BYTES = 16e6
# An A40 with its host: NVIDIA A40 data sheet (149.7 TFLOP/s bf16, 696 GB/s), PCIe 4 x16, eight DDR4-3200 channels.
COSTS = Roofline(
    lanes={
        LaneKind.GPU: LaneCost(overhead_s=1e-5, flops_s=149.7e12, device_bytes_s=696e9),
        LaneKind.CPU: LaneCost(overhead_s=1e-5, flops_s=2e12, host_bytes_s=150e9),
        LaneKind.H2D: LaneCost(overhead_s=1e-5, link_bytes_s=25e9),
        LaneKind.D2H: LaneCost(overhead_s=1e-5, link_bytes_s=25e9),
    }
)


class Streamed(Op):
    """An op with its cost computed beforehand."""

    def __init__(
        self, kind: str, layer: int, half: int | None, reads: tuple, writes: tuple, work: Work, packets: int = 1
    ) -> None:
        self.kind, self.layer, self.micro_batch = kind, layer, half  # type: ignore[misc]
        self.reads, self.writes, self.packets, self._work = reads, writes, packets, work

    def work(self) -> Work:
        return self._work


Submission = tuple[Lane, Op, bool]


def weights(slots: list[dict[str, object]], layer: int, index: int) -> Iterator[Submission]:
    """Yield about ten parts a layer, into the slot that the layer before the last has left."""
    for name, nbytes in PART_BYTES.items():
        work = Work(device_bytes=nbytes, host_bytes=nbytes, link_bytes=nbytes)
        packets = max(1, round(nbytes / PACKET_BYTES))
        yield (
            H2D,
            Streamed("weights", layer, None, (("host", layer, name),), (slots[index % 2][name],), work, packets),
            False,
        )


def half_ops(
    acts: dict[str, object], slot: dict[str, object], layer: int, half: int, tokens: int
) -> Iterator[Submission]:
    """Yield GA, C and GB of one half: what `strategies.moelens.vslpipe` submits for a layer."""
    act = acts.__getitem__
    context_bytes = 4096.0 * (300 + (layer * 7 + half * 3 + tokens) % 50) * tokens
    dense = Work(flops=tokens * 1e8, device_bytes=50e6)
    small = Work(link_bytes=tokens * 8192, host_bytes=tokens * 8192)

    def op(kind: str, reads: tuple, writes: tuple, work: Work) -> Op:
        return Streamed(kind, layer, half, reads, writes, work)

    kv = tuple(("kv", layer, partition) for partition in (2 * half, 2 * half + 1))
    attention = ((act("attention"), "prefill"), (act("attention"), "decode"))
    qkv, host_qkv = (act("q"), act("k"), act("v")), (act("host_q"), act("host_k"), act("host_v"))
    yield GPU, op("attention in", (act("tokens"), act("hidden"), slot["attention_in"]), qkv, dense), False
    yield D2H, op("offload qkv", qkv, host_qkv, small), False
    yield GPU, op("prefill attention", qkv, (attention[0],), dense), False
    yield CPU, op("append kv", host_qkv[1:], kv, Work(host_bytes=tokens * 8192)), False
    cpu_work = Work(flops=tokens * 1e7, host_bytes=context_bytes)
    yield CPU, op("decode attention", (host_qkv[0], *kv), (act("host_attention"),), cpu_work), False
    yield H2D, op("load attention", (act("host_attention"),), (attention[1],), small), True
    routed = (act("hidden"), act("normed"), act("expert_ids"), act("expert_weights"), act("moe_out"))
    yield GPU, op("attention out", (*attention, act("hidden"), slot["attention_out"]), routed, dense), False
    experts = tuple(slot[f"expert.{e}"] for e in range(NUM_EXPERTS))
    work = Work(flops=tokens * 7e8, device_bytes=2816e6)
    yield GPU, op("experts", (*routed[1:4], *experts), (act("moe_out"),), work), False
    yield GPU, op("combine", (act("hidden"), act("moe_out")), (act("hidden"),), dense), False


def stream(num_passes: int = NUM_PASSES, num_layers: int = NUM_LAYERS, ranks: int = 1) -> list[list[Submission]]:
    """Return submissions by pass. Further ranks repeat the same on lanes and keys of their own."""
    names = (
        "tokens hidden q k v attention normed expert_ids expert_weights moe_out host_q host_k host_v host_attention"
    ).split()
    passes: list[list[Submission]] = [[] for _ in range(num_passes)]
    for rank in range(ranks):
        lanes = {lane: lane if rank == 0 else Lane(lane.kind, rank) for lane in (GPU, CPU, H2D, D2H)}
        acts = [{name: object() for name in names} for _ in range(2)]
        slots: list[dict[str, object]] = [{name: object() for name in PART_BYTES} for _ in range(2)]
        for number, submissions in enumerate(passes):
            for layer in range(num_layers):
                index = number * num_layers + layer
                mine = [*weights(slots, layer, index)]
                for half in (0, 1):
                    mine += half_ops(acts[half], slots[index % 2], layer, half, 500 + number % 7)
                submissions += [(lanes[lane], op, urgent) for lane, op, urgent in mine]
    return passes


def machine(**settings: object) -> SimulatedMachine:
    values = {"capacities_bytes": {}, "costs": COSTS, "host_bytes_s": 150e9, "world": None} | settings
    return SimulatedMachine(**values)  # type: ignore[arg-type]


def submit_all(on: SimulatedMachine, submissions: list[Submission]) -> Ticket:
    for lane, op, urgent in submissions:
        ticket = on.submit(lane, op, urgent=urgent)
    return ticket


def report(benchmark: object, num_ops: int) -> None:
    if benchmark.stats is None:  # type: ignore[attr-defined]
        return  # a smoke run: everything once, nothing timed
    benchmark.extra_info["num_ops"] = num_ops  # type: ignore[attr-defined]
    benchmark.extra_info["ops_per_s"] = round(num_ops / benchmark.stats.stats.median)  # type: ignore[attr-defined]


def case(ranks: int) -> list[list[Submission]]:
    """Return as many ops whatever the number of ranks; each rank has four lanes, and all share one host memory."""
    return stream(ranks=ranks, num_passes=NUM_PASSES // ranks)


@pytest.mark.parametrize("ranks", [1, 8, 32])
@pytest.mark.parametrize("host_gb_s", [150, 1e6], ids=["contended", "free"])
def test_core_loop(benchmark, host_gb_s, ranks):
    passes = case(ranks)

    def prepared():
        on = machine(host_bytes_s=host_gb_s * 1e9)
        for submissions in passes:
            submit_all(on, submissions)
        gc.collect()
        return (on,), {}

    benchmark.pedantic(lambda on: on.drain(), setup=prepared, rounds=NUM_ROUNDS)
    report(benchmark, sum(map(len, passes)))


@pytest.mark.parametrize("ranks", [1, 8, 32])
def test_end_to_end(benchmark, ranks):
    passes = case(ranks)

    def run(on):
        for submissions in passes:
            on.wait(submit_all(on, submissions))
        on.drain()

    def prepared():
        gc.collect()
        return (machine(submit_s=2e-6, wake_s=2e-5),), {}

    benchmark.pedantic(run, setup=prepared, rounds=NUM_ROUNDS)
    report(benchmark, sum(map(len, passes)))


def test_building_ops(benchmark):
    """Measure, for comparison, what the ops of such a stream cost to make."""
    benchmark.pedantic(stream, rounds=NUM_ROUNDS)
    report(benchmark, sum(map(len, stream())))
