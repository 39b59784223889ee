"""How lanes share and disturb each other: closed forms, and properties of any sharing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.config import ConfigError
from harness.engine.ops.host import DecodeAttention
from harness.hardware.profile import MemorySharing
from harness.machine.base import CPU, D2H, GPU, H2D, PIN, Lane, LaneKind, Op, Work
from harness.machine.build import load_machine
from harness.machine.simulated import SimulatedMachine
from harness.machine.virtual.contention import MeasuredTogether, SharedMemory
from harness.machine.virtual.costs import LaneCost, Roofline
from harness.machine.virtual.world import profile_costs
from harness.model.dimensions import LatentAttention
from harness.settings import parse_settings
from tests.composing import composed
from tests.unit.engine.fakes import SPEC

KINDS = tuple(LaneKind)
COSTS = Roofline(lanes={kind: LaneCost(flops_s=1.0) for kind in LaneKind})


class Unit(Op):
    kind = "unit"

    def __init__(self, seconds: float, host: float = 0.0, packets: int = 1) -> None:
        self.seconds, self.host, self.packets = seconds, host, packets

    def work(self) -> Work:
        return Work(flops=self.seconds, host_bytes=self.seconds * self.host)


def machine(contention) -> SimulatedMachine:
    return SimulatedMachine(capacities_bytes={}, costs=COSTS, contention=contention)


MAX_MIN, PROPORTIONAL = MemorySharing
lanes_and_demands = st.lists(
    st.tuples(st.sampled_from([Lane(k, r) for k in KINDS for r in (0, 1)]), st.floats(0, 100) | st.just(0.0)),
    min_size=1, max_size=8, unique_by=lambda entry: entry[0],
)  # fmt: skip


def test_a_link_beside_attention_of_moe_lens_8_2():
    """150 GB/s of memory, a link of 19.5 GB/s for 5 s, attention that could use all of it: the paper saw 6 s."""
    running = [(CPU, 150e9), (H2D, 19.5e9)]
    assert SharedMemory(150e9).speeds(running) == pytest.approx([130.5 / 150, 1.0])
    _, link = SharedMemory(150e9, PROPORTIONAL).speeds(running)
    assert 5 / link == pytest.approx(5.65)
    m = machine(SharedMemory(150e9, PROPORTIONAL))
    transfer = m.submit(H2D, Unit(5.0, host=19.5e9))
    m.submit(CPU, Unit(10.0, host=150e9))
    m.wait(transfer)
    assert transfer.finished_s == pytest.approx(5.65)


@given(lanes_and_demands, st.floats(1.0, 200.0), st.sampled_from(MemorySharing))
def test_memory_is_used_up_before_anyone_slows_down(running, capacity, sharing):
    speeds = SharedMemory(capacity, sharing).speeds(running)
    got = [speed * demand for speed, (_, demand) in zip(speeds, running, strict=True)]
    assert all(0 < speed <= 1 for speed in speeds)
    assert sum(got) == pytest.approx(min(capacity, sum(demand for _, demand in running)))
    for speed, (_, demand) in zip(speeds, running, strict=True):
        if sharing is PROPORTIONAL and demand:
            assert speed == pytest.approx(min(speeds))
        if sharing is MAX_MIN and speed < 1 - 1e-9:
            assert speed * demand >= max(got) - 1e-6, "who is not satisfied has at least as much as anyone"


TABLE = MeasuredTogether.of_slowdowns(
    {
        "cpu+gpu": {"cpu": 1.25, "gpu": 2.0},
        "cpu+h2d": {"cpu": 0.98, "h2d": 1.6},
        "gpu+h2d": {"gpu": 1.0, "h2d": 1.25},
        "cpu+d2h": {"cpu": 2.0, "d2h": 4.0},
        "cpu+gpu+h2d": {"cpu": 1.5, "gpu": 2.5, "h2d": 3.0},
    }
)


@pytest.mark.parametrize(
    ("lanes", "speeds"),
    [
        ([GPU], [1.0]),
        ([GPU, CPU], [0.5, 0.8]),
        ([CPU, H2D], [1.0, 0.625]),  # faster than alone is noise
        ([GPU, CPU, H2D], [0.4, 1 / 1.5, 1 / 3]),  # measured as a set, not the product of pairs
        ([GPU, D2H], [1.0, 1.0]),  # never measured
        ([CPU, H2D, D2H], [0.5, 0.625, 0.25]),  # products of pairs; below a third only where a pair is
        ([GPU, CPU, D2H], [0.5, 0.4, 0.25]),
        ([GPU, Lane(LaneKind.CPU, 1)], [1.0, 1.0]),  # ranks do not interfere
        ([GPU, CPU, Lane(LaneKind.GPU, 1)], [0.5, 0.8, 1.0]),
        ([Lane(LaneKind.GPU, 1), GPU, CPU, Lane(LaneKind.H2D, 1)], [1.0, 0.5, 0.8, 0.8]),  # nor share a slow-down
        ([CPU, PIN], [1.0, 1.0]),
    ],
)
def test_measured_sets_then_pairs(lanes, speeds):
    assert TABLE.speeds([(lane, 0.0) for lane in lanes]) == pytest.approx(speeds)


def test_a_product_of_pairs_is_bounded_by_an_equal_share():
    pairs = {f"gpu+{other}": {"gpu": 2.0, other: 1.0} for other in ("cpu", "h2d", "d2h")}
    table = MeasuredTogether.of_slowdowns(pairs)
    assert table.speeds([(lane, 0.0) for lane in (GPU, CPU, H2D, D2H)])[0] == pytest.approx(0.25)


@pytest.mark.parametrize(
    "table",
    [
        {frozenset({LaneKind.GPU}): {LaneKind.GPU: 0.5}},
        {frozenset({LaneKind.GPU, LaneKind.CPU}): {LaneKind.GPU: 0.5}},
        {frozenset({LaneKind.GPU, LaneKind.CPU}): {LaneKind.GPU: 0.5, LaneKind.CPU: 0.0}},
        {frozenset({LaneKind.GPU, LaneKind.CPU}): {LaneKind.GPU: 0.5, LaneKind.CPU: 1.5}},
    ],
)
def test_tables_that_make_no_sense_are_refused(table):
    with pytest.raises(ValueError, match="gpu"):
        MeasuredTogether(table)


def test_memory_has_a_bandwidth():
    with pytest.raises(ValueError, match="must be > 0"):
        SharedMemory(0.0)


@pytest.mark.parametrize(
    ("chosen", "link_speed"),
    [
        ("machine.memory_sharing=max_min", 1.0),
        ("hardware.memory_sharing=max_min", 1.0),
        ("machine.memory_sharing=proportional", 6 / 14),
        ("machine.memory_sharing=null", 6 / 14),  # a40.yaml
    ],
)
def test_the_profile_says_how_memory_is_shared_unless_the_machine_does(chosen, link_speed):
    values = composed("machine=simulated", chosen, "hardware=a40", "hardware.host_gb_s=6")
    settings = parse_settings(values)
    running = [(CPU, 12e9), (H2D, 2e9)]
    m = load_machine(values["machine"]).build(settings.hardware, SPEC)
    assert m.contention.speeds(running)[1] == pytest.approx(link_speed)
    with pytest.raises(ConfigError, match="machine.memory_sharing.*max_min.*proportional"):
        load_machine(values["machine"] | {"memory_sharing": "fair"})


def test_the_machine_slows_lanes_by_the_table_while_they_run_together():
    """Together the gpu runs at 0.5 and the cpu at 0.8 until the cpu's second is over at 1.25; neither has a demand."""
    m = machine(TABLE)
    gpu, cpu = m.submit(GPU, Unit(1.0)), m.submit(CPU, Unit(1.0))
    m.drain()
    assert cpu.finished_s == pytest.approx(1.25)
    assert gpu.finished_s == pytest.approx(1.25 + (1.0 - 0.625))
    late = m.submit(D2H, Unit(1.0))  # a lane that is new, while nothing runs
    m.drain()
    assert late.finished_s - late.started_s == pytest.approx(1.0)


def test_lanes_that_appear_while_others_share_change_nothing():
    m = machine(SharedMemory(6.0))
    large, small = m.submit(CPU, Unit(4.0, host=10.0)), m.submit(H2D, Unit(1.0, host=2.0))
    m.wait(small)
    m.wait(m.submit(D2H, Unit(0.5)))
    m.submit(Lane(LaneKind.GPU, 3), Unit(0.5))
    m.drain()
    assert large.finished_s == pytest.approx(1.0 + (4.0 - 0.4) / 0.6)


def test_each_lane_costs_what_the_profile_says_of_it():
    rates = "h2d_gb_s=1 d2h_gb_s=2 pin_gb_s=3 p2p_gb_s=4 cpu_gb_s=5 device_gb_s=6 cpu_gemm_gflop_s=7 kernel_launch_us=8"
    overrides = [f"hardware.{rate}" for rate in f"{rates} cpu_op_us=3 transfer_latency_us=9".split()]
    hardware = parse_settings(composed("machine=simulated", "hardware=t4x2", *overrides)).hardware
    gpu_flop_s = hardware.gemm_flop_s(SPEC.dtype)
    assert profile_costs(hardware, SPEC).lanes == {
        LaneKind.GPU: LaneCost(overhead_s=8e-6, flops_s=gpu_flop_s, device_bytes_s=6e9, link_bytes_s=4e9),
        LaneKind.CPU: LaneCost(overhead_s=3e-6, flops_s=7e9, host_bytes_s=5e9),
        LaneKind.H2D: LaneCost(overhead_s=9e-6, link_bytes_s=1e9),
        LaneKind.D2H: LaneCost(overhead_s=9e-6, link_bytes_s=2e9),
        LaneKind.PIN: LaneCost(link_bytes_s=3e9),
    }


@pytest.mark.parametrize(("stated", "gflop_s"), [([], 35), (["hardware.cpu_latent_gflop_s=20"], 20)])
def test_attention_over_latents_is_not_charged_at_the_rate_of_products(stated, gflop_s):
    """As much as it reached of that rate, unless the profile says it; every other op costs what it always did."""
    overrides = ("hardware=a40", "hardware.cpu_gemm_gflop_s=70", "hardware.cpu_gb_s=10", *stated)
    hardware = parse_settings(composed("machine=simulated", *overrides)).hardware
    latent = LatentAttention(kv_rank=32, nope_dim=16, rope_dim=8, value_dim=16)
    costs = profile_costs(hardware, replace(SPEC, head_dim=24, latent=latent))
    plain = profile_costs(hardware, SPEC)
    machines = [SimulatedMachine(capacities_bytes={}, costs=each, host_bytes_s=1e12) for each in (costs, plain)]
    work = Work(flops=7e9, device_bytes=3e6, host_bytes=1e8, link_bytes=1e6)
    assert Attend.kind == DecodeAttention.kind

    def seconds(machine, lane, op) -> float:
        ticket = machine.submit(lane, op)
        machine.wait(ticket)
        return ticket.finished_s - ticket.started_s

    for lane in (CPU, H2D, D2H, Lane(LaneKind.GPU)):
        attends = lane == CPU
        mine, theirs = (seconds(machine, lane, Attend(work)) for machine in machines)
        assert mine == pytest.approx(7 / gflop_s if attends else theirs)
        mine, theirs = (seconds(machine, lane, Other(work)) for machine in machines)
        assert mine == pytest.approx(theirs)
    bound_by_memory = Attend(Work(flops=1e6, host_bytes=1e9))
    assert seconds(machines[0], CPU, bound_by_memory) == pytest.approx(0.1)


class Other(Op):
    kind = "other"

    def __init__(self, work: Work) -> None:
        self._work = work

    def work(self) -> Work:
        return self._work


class Attend(Other):
    kind = "decode attention"
