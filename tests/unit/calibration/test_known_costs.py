"""Calibration of a machine whose costs are known exactly: what it finds must be those. The clock is virtual, so that no
core has to be quiet."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest

from harness.calibration import host_times, op_costs, together, undisturbed
from harness.calibration.joined import TOGETHER
from harness.calibration.measure import measure_all
from harness.calibration.table import (
    AGAIN,
    ALONE,
    AT_REST,
    BESIDE_GPU,
    BESIDE_LINK,
    IN_CACHE,
    LINKS,
    CalibrationTable,
)
from harness.machine.base import CPU, D2H, GPU, H2D, PIN, LaneKind, Op, Work
from harness.machine.emulated import EmulatedMachine
from harness.machine.simulated import SimulatedMachine
from harness.machine.virtual.contention import MeasuredTogether
from harness.machine.virtual.world import World
from harness.model.planned import PlannedModel
from harness.routing.kinds.uniform import UniformRouting
from tests.contract.running import CAPACITIES_BYTES, engine_on
from tests.unit.machine.ops import Quick
from tests.unit.record.recorded import span

LINK_BYTES_S = {LaneKind.H2D: 2e8, LaneKind.D2H: 5e7, LaneKind.PIN: 1e9}
FIXED_S = {LaneKind.GPU: 4e-3, LaneKind.CPU: 3e-3, LaneKind.H2D: 7e-4, LaneKind.D2H: 5e-4, LaneKind.PIN: 9e-4}
SPARED_S = 2e-3  # by each further launch of an op
SUBMIT_S, WAKE_S, HANDOVER_S, BESIDE_S = 3e-5, 2e-4, 1e-4, 3e-4
TURNS_S = {LaneKind.GPU: 6e-5, LaneKind.CPU: 4e-5}
PASS_S, LAY_OUT_S, ACCEPT_S = 2e-3, 3e-5, 1e-6  # of the strategy's thread: a pass, and each sequence in it
SLOWDOWNS = {
    "cpu+gpu": {"cpu": 1.5, "gpu": 1.2},
    "gpu+h2d": {"gpu": 1.1, "h2d": 1.4},
    "cpu+d2h": {"cpu": 1.3, "d2h": 2.0},
    "cpu+gpu+h2d": {"cpu": 1.6, "gpu": 1.3, "h2d": 1.8},
}


def own_s(kind: LaneKind, features: tuple[float, ...]) -> float:
    """An op's time beyond that of the link."""
    return FIXED_S[kind] + sum(1e-6 * (number + 1) * feature for number, feature in enumerate(features))


class KnownCosts:
    def seconds(self, lane, op, work) -> float:
        own = op.joined * own_s(lane.kind, op.cost_features()) - (op.joined - 1) * SPARED_S
        return own + work.link_bytes / LINK_BYTES_S.get(lane.kind, float("inf"))


@pytest.fixture(scope="module", params=[(), (0, 3), (0, 2)], ids=lambda layers: f"dense{list(layers)}")
def found(tiny, request) -> CalibrationTable:
    """A model of four layers, of which some have no experts: the first and the last one, or every second one."""
    model = PlannedModel(replace(tiny.spec, dense_layers=request.param, dense_dim=32 if request.param else 0))
    machine = SimulatedMachine(
        capacities_bytes=CAPACITIES_BYTES, costs=KnownCosts(), contention=MeasuredTogether.of_slowdowns(SLOWDOWNS)
    )
    machine._lanes.host_times(SUBMIT_S, WAKE_S, HANDOVER_S, BESIDE_S)
    machine._lanes.turns({str(kind): seconds for kind, seconds in TURNS_S.items()})
    machine.world = World(UniformRouting(tiny.spec.num_experts, tiny.spec.experts_per_token, seed=0), 8)
    spent = [0.0]  # by the strategy's thread, outside the machine

    def spend(seconds: float, result=None):
        spent[0] += seconds
        return result

    virtual = SimpleNamespace(monotonic=machine.now, sleep=machine._lanes.spend, perf_counter=lambda: spent[0])
    with pytest.MonkeyPatch.context() as patch:
        for module in (host_times, op_costs, together):
            patch.setattr(module, "time", virtual)
        patch.setattr(undisturbed, "read_cpu_times", lambda: None)
        real, accept = host_times.assemble, host_times.accept
        for_pass = lambda *given: spend(PASS_S + LAY_OUT_S * len(given[2]))  # noqa: E731
        patch.setattr(host_times, "assemble", lambda *given: for_pass(*given) if not given[1] else real(*given))
        patch.setattr(host_times, "accept", lambda *given: spend(len(given[0]) * ACCEPT_S, accept(*given)))
        engine = engine_on(machine, model, [], kv_blocks=800, block_size=16)
        return measure_all(
            engine, link_bytes_s=LINK_BYTES_S, packet_bytes=30_000, ram_bytes=20_000_000, meta={}, repeats=1
        )


class CpuExperts(Op):
    """Experts in one op of the cpu lane, as the table is asked for them."""

    cost_key = "experts x1"

    def __init__(self) -> None:
        self.features: tuple[float, ...] = ()

    def work(self) -> Work:
        return Work()

    def cost_features(self) -> tuple[float, ...]:
        return self.features


def told_s(key: str, kind: LaneKind, features: tuple[float, ...]) -> float:
    """What the machine takes for a sample of the table."""
    *features, joined = features if key.endswith(TOGETHER) else (*features, 1)
    return joined * own_s(kind, tuple(features)) - (joined - 1) * SPARED_S


def test_an_op_alone_costs_what_it_costs_beyond_the_links_time(found):
    kinds = set()
    for key, points in found.samples[ALONE].items():
        kind = LaneKind(key.split(":")[0])
        kinds.add(kind)
        for features, seconds in points:
            assert seconds == pytest.approx(told_s(key, kind, features), rel=1e-6), (key, features)
    assert kinds == set(LaneKind) and set(LINKS) < kinds


def test_a_link_without_a_stated_rate_is_measured_whole():
    ops = op_costs.OpCosts(None, None, link_bytes_s={}, undisturbed=None, max_tokens=1, max_context=1)
    assert ops._seconds(SimpleNamespace(started_s=1.0, finished_s=1.5, lane=PIN)) == 0.5


def test_experts_are_measured_together_and_apart(found):
    for company in (ALONE, BESIDE_LINK):
        assert {"gpu: experts x1", "gpu: experts x8"} <= set(found.samples[company])
    for company in (ALONE, BESIDE_LINK, BESIDE_GPU):
        assert {"cpu: experts x1", f"cpu: experts x1{TOGETHER}"} <= set(found.samples[company])
    for company in (ALONE, BESIDE_LINK):
        assert {f"gpu: experts x1{each}{TOGETHER}" for each in (IN_CACHE, AT_REST)} <= set(found.samples[company])
        given = {f"gpu: experts x1, given rows{each}" for each in ("", AGAIN, IN_CACHE, AT_REST)}
        assert given <= set(found.samples[company])
    assert all("cpu: experts x1, given rows" in found.samples[company] for company in (ALONE, BESIDE_LINK, BESIDE_GPU))
    beside = [found.crowded[ALONE], found.crowded[BESIDE_LINK], found.beside_strategy]
    assert all("gpu: experts x1, given rows, at rest" in by_key for by_key in beside)


def test_experts_of_one_op_cost_what_they_cost_the_machine(found):
    op = CpuExperts()
    for op.features, op.launches in product(((0.0,), (16.0,), (40.0,)), (2, 3, 30)):
        told = op.launches * own_s(LaneKind.CPU, op.features) - (op.launches - 1) * SPARED_S
        assert found.seconds(CPU, op) == pytest.approx(told, rel=1e-6), (op.features, op.launches)


@pytest.mark.parametrize("where", ["", AGAIN, IN_CACHE, AT_REST])
def test_some_experts_on_the_device_cost_what_they_cost_the_machine_wherever_weights_are_found(found, where):
    op = CpuExperts()
    op.weight_keys = ("weights",)
    for op.features, op.launches in product(((0.0,), (16.0,), (40.0,)), (2, 3, 30)):
        told = op.launches * own_s(LaneKind.GPU, op.features) - (op.launches - 1) * SPARED_S
        assert found.seconds(GPU, op, found=where) == pytest.approx(told, rel=1e-6), (op.features, op.launches)


def test_dense_layers_are_measured_apart_where_there_are_any(found, request):
    has_dense = request.node.callspec.params["found"] != ()
    for company in (ALONE, BESIDE_LINK):
        measured = {key for key in found.samples[company] if key.startswith("gpu: attention out")}
        dense = {"gpu: attention out, dense", "gpu: attention out, dense, again"} if has_dense else set()
        assert measured == {f"gpu: attention out{role}" for role in ("", AGAIN, IN_CACHE, AT_REST)} | dense


def test_company_costs_at_most_the_whole_slow_down(found):
    for key, points in found.samples[BESIDE_GPU].items():
        if key.startswith("cpu"):
            for features, seconds in points:
                assert 1 - 1e-9 <= seconds / told_s(key, LaneKind.CPU, features) <= 1.5 + 1e-9


def test_slow_downs_are_those_of_the_machine(found):
    for group, factors in SLOWDOWNS.items():
        assert found.together[group] == pytest.approx(factors, rel=0.02), group
    assert found.together["h2d+pin"] == pytest.approx({"h2d": 1.0, "pin": 1.0}, rel=0.02)


def test_short_ops_are_short_and_measured_beside_the_link_too(found):
    assert found.short_s.keys() == {LaneKind.GPU, LaneKind.CPU}
    assert all(own_s(kind, (0.0,)) <= seconds <= 2 * own_s(kind, (0.0,)) for kind, seconds in found.short_s.items())
    for company in (ALONE, BESIDE_LINK):
        assert {"gpu: experts x1, at rest", "cpu: experts x1", "d2h: fetch routing"} <= found.crowded[company].keys()
    assert f"gpu: experts x1{AT_REST}" in found.samples[BESIDE_LINK]
    assert {f"gpu: experts x1{AT_REST}", "cpu: experts x1", "d2h: fetch routing"} <= found.beside_strategy.keys()


def test_host_times_are_those_of_the_machine(found):
    assert found.host.submit_s == pytest.approx(SUBMIT_S, rel=1e-6)
    assert found.host.wake_s == pytest.approx(WAKE_S, rel=1e-6)
    assert found.host.handover_s == pytest.approx(HANDOVER_S, rel=0.05)  # some ops are submitted late
    assert found.host.handover_beside_s == pytest.approx(BESIDE_S, rel=0.15)  # the others may have nothing just then
    assert found.host.turns_s == pytest.approx(TURNS_S, rel=0.05)
    assert found.host.pass_s == pytest.approx(PASS_S, rel=1e-3)
    assert found.host.sequence_s == pytest.approx(LAY_OUT_S + 2 * ACCEPT_S, rel=1e-3)


def test_packets_of_different_sizes_count_by_the_byte_on_links_alone():
    spans = [span(lane, 0, s, kind, work=Work(link_bytes=nbytes)) for lane, kind in ((H2D, "weights"), (GPU, "experts"))
             for s, nbytes in ((1, 10), (2, 40), (9, 90))]  # fmt: skip
    spans += [span(D2H, 0, 5, "offload qkv", work=Work(link_bytes=1)), span(H2D, 0, 50, "weights")]
    measured = together.Together.__new__(together.Together)
    measured._engine = SimpleNamespace(machine=SimpleNamespace(spans=spans))
    assert measured._median_s(H2D, end_s=9.0) == pytest.approx((1 + 2 + 9) / (10 + 40 + 90))
    assert measured._median_s(GPU, end_s=9.0) == 2


def test_no_op_of_a_chain_begins_before_all_are_submitted():
    machine = EmulatedMachine(capacities_bytes={}, rates={})
    measuring = op_costs.OpCosts.__new__(op_costs.OpCosts)
    measuring._engine = SimpleNamespace(machine=machine)
    emit = SimpleNamespace(tail=())
    with measuring._held(emit):
        ticket = machine.submit(GPU, Quick(), after=emit.tail)
        time.sleep(0.05)
        machine.now()
        assert not ticket.done
    machine.wait(ticket)
    machine.close()
