"""Calibration on the tiny model: every kind of op that a strategy submits is measured, and the simulator runs on it."""

from __future__ import annotations

import json
import os
import time
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from itertools import combinations
from types import SimpleNamespace

import pytest
import torch

from harness.bench.shapes import Shape
from harness.calibration import fills, local, measure, op_costs, together, undisturbed
from harness.calibration.background import Background, busy_lanes
from harness.calibration.local import CalibrationTable, identity, link_rates, local_table, table_path
from harness.calibration.measure import measure_all
from harness.calibration.op_costs import OpCosts, Recording
from harness.calibration.probes import ContextRoom, LayerProbes
from harness.calibration.table import ALONE, BESIDE_GPU, BESIDE_GPU_AND_LINK, BESIDE_LINK
from harness.cli.overrides import composed_values
from harness.config import ConfigError
from harness.engine.emitter import Emitter
from harness.engine.engine import Engine
from harness.hardware.calibrate import report
from harness.machine.base import CPU, GPU, LaneKind
from harness.machine.emulated import resource
from harness.machine.turn import Turn
from harness.memory.transfers import Poison
from harness.model.checkpoint import Checkpoint
from harness.model.planned import planned_model
from harness.plan.planning import draft_plan, make_plan
from harness.record.terminal import told_estimated
from harness.run.experiment import run_experiment
from harness.settings import parse_settings
from tests.composing import names_in
from tests.contract.running import emulated, engine_on
from tests.tiny_families import tiny_family

LOCAL = ("machine=simulated", "hardware=local")
QUIET = ("verify=off", "wandb.mode=disabled", "progress=false")
OVERRIDES = ("model=mixtral-tiny", "kv_cache_gb=0.002", "dataset.num_requests=6", "dataset.max_new_tokens=3")


RATES = {LaneKind.H2D: 2e8, LaneKind.D2H: 2e8, LaneKind.PIN: 1e9}


@pytest.fixture(scope="module")
def calibrated(tiny) -> CalibrationTable:
    return measured(tiny)


def measured(checkpoint: Checkpoint) -> CalibrationTable:
    """Make few and short measurements: what they say does not matter here."""
    machine = emulated()
    patch = pytest.MonkeyPatch()
    patch.setattr(together, "_STREAM_S", 0.05)
    patch.setattr(undisturbed, "MAX_ATTEMPTS", 1)
    try:
        engine = engine_on(machine, checkpoint, [], kv_blocks=400, block_size=16)
        held = {name: tier.holders() for name, tier in machine.tiers.items()}
        table = measure_all(
            engine, link_bytes_s=RATES, packet_bytes=100_000, ram_bytes=100_000_000, meta={"code": "test"}, repeats=1
        )
        assert {name: tier.holders() for name, tier in machine.tiers.items()} == held, "all memory was given back"
        return table
    finally:
        patch.undo()
        machine.close()


@pytest.mark.parametrize(
    ("device_gb", "room"),
    [(0.1, ContextRoom()), (1, ContextRoom(15_625_000, 62_500_000)), (100, ContextRoom(122_880_000, 3_932_160_000))],
)
def test_contexts_have_a_share_of_a_large_device_but_no_more_than_they_need(device_gb, room):
    """Of Mixtral-8x7B a token has 4096 bytes of keys and values in a layer, and 32 layers."""
    device, spec = SimpleNamespace(capacity_bytes=int(device_gb * 1e9)), planned_model(mixtral().model).spec
    engine = SimpleNamespace(machine=SimpleNamespace(tiers={"device": device}), spec=spec)
    assert ContextRoom.of(engine) == room
    assert room.reserved_bytes < max(0.09 * device_gb * 1e9, 21e6)


def mixtral():
    return parse_settings(composed_values(["model=mixtral-8x7b", "machine=simulated"]))


def test_contexts_take_the_least_where_their_share_leaves_no_room(monkeypatch):
    tried = []

    def fitting(engine, *, reserved_bytes, **others):
        tried.append(sum(reserved_bytes.values()))
        if tried[-1] > ContextRoom().reserved_bytes:
            raise ConfigError("hardware.device_memory_gb", "is too small")
        return 77

    monkeypatch.setattr(measure, "tokens_that_fit", fitting)
    monkeypatch.setattr(LayerProbes, "pinned_bytes", lambda engine, max_tokens: 0)
    device = SimpleNamespace(capacity_bytes=int(2e9))
    engine = SimpleNamespace(
        machine=SimpleNamespace(tiers={"device": device}), spec=planned_model(mixtral().model).spec
    )
    assert measure._room(engine) == (ContextRoom(), 77) and len(tried) == 2


def test_costs_and_times_are_positive(calibrated):
    points = [point for by_key in calibrated.samples.values() for points in by_key.values() for point in points]
    assert all(seconds >= 0 for _, seconds in points)
    assert sum(s for _, s in calibrated.samples[ALONE]["gpu: experts x1"]) > 0
    assert calibrated.host.submit_s > 0


def test_the_router_of_probed_micro_batches_sends_tokens_everywhere(tiny):
    """Whatever memory held before: an op over experts takes as long as it has experts."""
    with closing(emulated()) as machine:
        engine = engine_on(machine, tiny, [], kv_blocks=400, block_size=16)
        assert engine.kv.host is not None
        for buffer in (each for layer in engine.kv.host.layers for each in layer):
            machine.submit(CPU, Poison(buffer))
        probes = LayerProbes(engine, room=ContextRoom(), max_tokens=64, packet_bytes=100_000)
        emit, pair = Emitter(engine, serial=True), probes.pair(Shape(contexts=(20,) * 32))
        for it in pair:
            machine.submit(GPU, Poison(it.acts.attention))
            emit.embed(it)
        probes.serial(emit, pair, 0, experts_apart=False)
        chosen = [machine.wait(emit.fetch_routing(it, 0)).expert_ids for it in pair]
        probes.close()
    assert [len(set(ids.ravel().tolist())) for ids in chosen] == [engine.spec.num_experts] * 2


@pytest.mark.parametrize(("num_tokens", "num_experts", "draws"), [(4, 8, 6), (40, 8, 2), (101, 2, 1)])
def test_all_experts_run_on_the_host_where_tokens_are_few(num_tokens, num_experts, draws, tiny):
    """Each of them is a launch: tokens choose the next experts in turn, until routers say otherwise. The fewer they
    are, the more draws there are of them."""
    with closing(emulated()) as machine:
        engine = engine_on(machine, tiny, [], kv_blocks=400, block_size=16)
        probes = LayerProbes(engine, room=ContextRoom(), max_tokens=128, packet_bytes=100_000)
        emit = Recording(engine, serial=True)
        probes.host_side(emit, probes.batch(0, Shape(contexts=(20,) * num_tokens)), probes.layer)
        machine.drain()
        probes.close()
    ops = [ticket.op for ticket in emit.tickets if ticket.lane == CPU and ticket.op.kind == "experts"]
    assert [op.launches for op in ops] == [1, 1, 1, *[num_experts] * draws, 1]
    assert [op.experts for op in ops[-2:]] == [tuple(range(num_experts)), (7,)]
    assert set(ops[-2].counts) <= {num_tokens * 2 // 8, num_tokens * 2 // 8 + 1}


@pytest.mark.parametrize("busy", [{"gpu": True}, {"short": GPU}])
def test_a_micro_batch_is_there_before_its_background(busy, tiny, monkeypatch):
    """To make one takes a turn of the gpu lane, which ends what was queued there and nobody has fed since."""
    with closing(emulated()) as machine:
        engine = engine_on(machine, tiny, [], kv_blocks=400, block_size=16)
        probes = LayerProbes(engine, room=ContextRoom(), max_tokens=128, packet_bytes=100_000)
        costs = OpCosts(engine, probes, link_bytes_s=RATES, undisturbed=None, max_tokens=128, max_context=6000)
        queued, held = [], costs._held

        @contextmanager
        def noted(emit):
            queued.append(sum(not ticket.done for ticket in backgrounds[-1]._computing))
            with held(emit):
                yield

        backgrounds = []

        @contextmanager
        def watched(*of, **given):
            with busy_lanes(*of, **given) as found:
                backgrounds.append(found)
                yield found

        costs._held = noted
        monkeypatch.setattr(op_costs, "busy_lanes", watched)
        shape = Shape(contexts=(20,) * 4)
        if busy.get("gpu"):
            costs._host_side(shape, BESIDE_GPU)
        else:
            costs._beside_short_ones(shape, GPU, ALONE)
        probes.close()
    assert queued[0] >= Background.AHEAD // 2


@pytest.mark.parametrize("count", [1, 6, 7, 8, 50])
def test_a_large_cache_is_filled_from_a_run_of_random_numbers(count, monkeypatch):
    """Every number of it, and with a period that no block has."""
    monkeypatch.setattr(fills, "_RUN", 7)
    numbers = torch.full((count + 1,), float("nan"))
    fills._fill(numbers[:count])
    assert numbers[:count].isfinite().all() and numbers[count].isnan()
    assert len(set(numbers[:count].tolist())) == min(count, 7)
    assert torch.equal(numbers[7:count], numbers[: max(0, count - 7)])


def test_every_pair_and_triple_of_lanes_was_measured(calibrated):
    kinds = ("cpu", "d2h", "gpu", "h2d", "pin")
    expected = {"+".join(group) for size in (2, 3) for group in combinations(kinds, size)}
    assert set(calibrated.together) == expected
    assert all(set(group.split("+")) == set(factors) for group, factors in calibrated.together.items())
    assert all(factor > 0 for factors in calibrated.together.values() for factor in factors.values())


def test_ops_of_each_lane_were_measured_in_its_companies(calibrated):
    """The gpu beside the link, all others beside link and gpu too: then their slow-downs hold nothing twice."""
    assert set(calibrated.covered("gpu")) == {ALONE, BESIDE_LINK}
    for kind in ("cpu", "d2h", "pin"):
        assert set(calibrated.covered(kind)) == {ALONE, BESIDE_LINK, BESIDE_GPU, BESIDE_GPU_AND_LINK}
    slowdowns = calibrated.slowdowns()
    assert slowdowns["cpu+gpu+h2d"]["cpu"] == slowdowns["gpu+h2d"]["gpu"] == 1.0
    assert slowdowns["gpu+h2d"]["h2d"] == calibrated.together["gpu+h2d"]["h2d"]


def test_memory_was_measured_on_one_thread_and_on_all(calibrated):
    rates = {name: values for name, values in calibrated.memory.items() if name != "working_set_gb"}
    assert {"read_1_thread", "copy_1_thread"} <= set(rates)
    assert all(0.1 < rate < 10_000 for values in rates.values() for rate in values)


VARIANTS = (
    ["moelens", "strategy.attention=gpu"],
    ["moegen_h", "strategy.search=false", "strategy.policy.on_device=false"],  # tokens accumulate in host memory
    ["llamacpp_split", "strategy.cpu_moe_layers=2", "strategy.slots=2"],  # experts on the CPU, and copied ones
)


@pytest.mark.parametrize("strategy", [*([n] for n in names_in("strategy")), *VARIANTS])
def test_the_simulator_runs_strategies_on_it(calibrated, strategy, tmp_path, monkeypatch):
    """No op of theirs was forgotten: nothing is estimated."""
    monkeypatch.setenv("MOE_HARNESS_CACHE", str(tmp_path))
    values = composed_values([f"strategy={strategy[0]}", *strategy[1:], *LOCAL, *OVERRIDES])
    settings = parse_settings(values)
    calibrated.write(table_path(settings, planned_model(settings.model).spec))
    summary = make_plan(values).summary
    assert summary["generated_tokens"] == 6 * 3
    assert summary["throughput_tok_s"] > 0
    assert summary["estimated"] == {"share": 0.0, "by_kind": {}}


@pytest.fixture(scope="module")
def calibrated_latents() -> CalibrationTable:
    return measured(tiny_family("deepseek_v3"))


@pytest.mark.parametrize("strategy", [["moelens"], ["moelens", "strategy.attention=gpu"], ["deepspeed_zero"]])
def test_the_simulator_runs_latents_on_measurements_of_their_own(calibrated_latents, strategy, tmp_path, monkeypatch):
    """Attention over latents takes what it was measured to take, in host and device memory and staged."""
    monkeypatch.setenv("MOE_HARNESS_CACHE", str(tmp_path))
    folder = tiny_family("deepseek_v3").folder
    model = ("model=deepseek-mini", f"model.path={folder}", *OVERRIDES[1:])
    values = composed_values([f"strategy={strategy[0]}", *strategy[1:], *LOCAL, *model])
    settings = parse_settings(values)
    calibrated_latents.write(table_path(settings, planned_model(settings.model).spec))
    plan = make_plan(values)
    assert plan.summary["generated_tokens"] == 6 * 3
    assert plan.summary["estimated"] == {"share": 0.0, "by_kind": {}}
    assert {span.kind for span in plan.machine.spans} & {
        *("decode attention", "decode attention (device)", "decode attention (paged)"),
    }


def test_the_share_of_a_kind_that_is_missing_is_told(calibrated, tmp_path, monkeypatch):
    """As much of the lanes' time as its spans take, added up one by one."""
    monkeypatch.setenv("MOE_HARNESS_CACHE", str(tmp_path))
    missing = {"gpu: combine", "cpu: append kv"}
    samples = {
        company: {key: points for key, points in by_key.items() if key not in missing}
        for company, by_key in calibrated.samples.items()
    }
    values = composed_values(["strategy=ondemand", *LOCAL, *OVERRIDES])
    settings = parse_settings(values)
    spec = planned_model(settings.model).spec
    replace(calibrated, samples=samples).write(table_path(settings, spec))
    plan = make_plan(values)
    window, spent = plan.summary["window"], {}
    for span in plan.machine.spans:
        inside_s = min(span.end_s, window["end_s"]) - max(span.start_s, window["start_s"])
        name = f"{span.lane} {span.kind}"
        spent[name] = spent.get(name, 0.0) + max(inside_s, 0.0)
    expected = {name: spent[name] / sum(spent.values()) for name in ("gpu combine", "cpu append kv")}
    assert plan.summary["estimated"]["by_kind"] == pytest.approx(expected)
    assert plan.summary["estimated"]["share"] == pytest.approx(sum(expected.values()))
    assert min(expected.values()) > 0 and sum(expected.values()) < 0.9
    assert plan.machine.facts["not measured"].startswith("cpu append kv, gpu combine (estimated")
    told = told_estimated(plan.summary["estimated"])
    assert told.startswith(f"{sum(expected.values()):.1%} of all lanes' time") and "gpu combine" in told


def test_what_a_strategy_works_out_takes_its_thread_time_in_plans_and_runs_alike(calibrated, tmp_path, monkeypatch):
    """It decides behind each router; one that waits for no router has nothing to work out."""
    monkeypatch.setenv("MOE_HARNESS_CACHE", str(tmp_path / "cache"))
    plans = {}
    for strategy in ("fiddler", "moelens"):
        values = composed_values([f"strategy={strategy}", *LOCAL, *OVERRIDES, *QUIET, f"results_dir={tmp_path}"])
        settings = parse_settings(values)
        calibrated.write(table_path(settings, planned_model(settings.model).spec))
        assert draft_plan(values).machine.thinking_s == 0.0, "a plan alone asks for nothing"
        plans[strategy], again = make_plan(values), make_plan(values)
        summary, _ = run_experiment(values)
        for other in (again.summary, summary):
            assert other["throughput_tok_s"] == plans[strategy].summary["throughput_tok_s"]
    assert plans["fiddler"].machine.thinking_s > 0 == plans["moelens"].machine.thinking_s
    assert plans["fiddler"].summary["machine_facts"]["strategy's thread"].endswith(" us behind each wait of a pass")
    [kept] = tmp_path.glob("cache/calibration/thinking-fiddler-*.json")
    assert json.loads(kept.read_text())["thinking_s"] == plans["fiddler"].machine.thinking_s
    kept.write_text(json.dumps({"thinking_s": 1.0}))
    values = composed_values(["strategy=fiddler", *LOCAL, *OVERRIDES, *QUIET, f"results_dir={tmp_path}"])
    assert make_plan(values).summary["throughput_tok_s"] < plans["fiddler"].summary["throughput_tok_s"] / 2


def test_a_table_is_found_again_by_what_was_measured(calibrated, tmp_path, monkeypatch):
    monkeypatch.setenv("MOE_HARNESS_CACHE", str(tmp_path))
    settings = parse_settings(composed_values(["machine=simulated", "hardware=local", *OVERRIDES]))
    spec = planned_model(settings.model).spec
    calibrated.write(table_path(settings, spec))
    assert local_table(settings, spec).together == calibrated.together
    for free in ("hardware.h2d_gb_s=1", "kv_cache_gb=0.001", "strategy=ondemand"):
        other = parse_settings(composed_values([*LOCAL, *OVERRIDES, free]))
        assert identity(other, spec) == identity(settings, spec), f"{free} is not part of the measurement"
    for part in ("hardware.cpu_gb_s=1", "hardware.device_memory_gb=0.1", "kv_block_tokens=8"):
        other = parse_settings(composed_values([*LOCAL, *OVERRIDES, part]))
        assert table_path(other, spec) != table_path(settings, spec)


@pytest.mark.parametrize("pinned_gb", [0.01, 1.0])
def test_the_measured_cache_leaves_half_of_what_the_weights_leave(pinned_gb, calibrated, monkeypatch):
    """Of 32,768 tokens where there is room: 25 MB for this model."""
    seen: list[Engine] = []
    monkeypatch.setattr(local, "measure_all", lambda engine, **given: seen.append(engine) or calibrated)
    local.measure(parse_settings(composed_values([*LOCAL, *OVERRIDES, f"hardware.pinned_memory_gb={pinned_gb}"])))
    blocks, spec, store = seen[0].kv.allocator, seen[0].spec, seen[0].store
    kv_bytes = blocks.num_blocks * blocks.block_size * spec.kv_bytes_per_token
    wanted_bytes = min(32_768 * spec.kv_bytes_per_token, (pinned_gb * 1e9 - store_bytes(store)) / 2)
    assert kv_bytes == pytest.approx(wanted_bytes, rel=0.01)


class Waits(Exception):
    """Something sleeps until another run has ended."""


def waits(seconds: float) -> None:
    raise Waits


@pytest.mark.parametrize("exclusive", [True, False])
def test_it_is_measured_within_the_machines_turn(exclusive, calibrated, tmp_path, monkeypatch):
    """Others wait for it, or are told of it; without `exclusive` it waits for nobody."""
    monkeypatch.setenv("MOE_HARNESS_LOCKS", str(tmp_path))
    settings = parse_settings(composed_values([*LOCAL, *OVERRIDES, f"exclusive={str(exclusive).lower()}"]))

    def measured(*arguments):
        with Turn(resource(), "a run", exclusive=False) as beside:
            assert f"pid {os.getpid()}, calibration" in beside.beside()
        return calibrated

    monkeypatch.setattr(local, "_measured", measured)
    monkeypatch.setattr(time, "sleep", waits)
    with nullcontext() if exclusive else Turn(resource(), "another run"):
        disturbed = local.measure(settings).meta["disturbed"]
    runs = ["a run"] if exclusive else ["another run", "a run"]
    assert disturbed[len(calibrated.meta["disturbed"]) :] == [
        f"everything: pid {os.getpid()}, {name} ran beside it" for name in runs
    ]


def test_a_calibration_waits_for_the_run_that_has_the_turn(tmp_path, monkeypatch):
    monkeypatch.setenv("MOE_HARNESS_LOCKS", str(tmp_path))
    monkeypatch.setattr(local, "_measured", lambda *arguments: pytest.fail("it did not wait"))
    monkeypatch.setattr(time, "sleep", waits)
    with Turn(resource(), "a run"), pytest.raises(Waits):
        local.measure(parse_settings(composed_values([*LOCAL, *OVERRIDES])))


def store_bytes(store) -> int:
    return sum(part.layout.nbytes for parts in store.layers for part in parts.values()) + sum(
        part.layout.nbytes for part in (store.embedding, store.head)
    )


def test_links_need_a_rate():
    settings = parse_settings(composed_values([*LOCAL, "hardware.h2d_gb_s=1"]))
    assert link_rates(settings.hardware)[LaneKind.H2D] == 1e9
    unlimited = parse_settings(composed_values([*LOCAL, "hardware.h2d_gb_s=null"]))
    with pytest.raises(ConfigError, match=r"hardware.h2d_gb_s: must be stated"):
        link_rates(unlimited.hardware)


def test_the_report_names_every_op(calibrated):
    from rich.console import Console

    console = Console(record=True, width=160)
    console.print(report(replace(calibrated, meta={**calibrated.meta, "disturbed": []})))
    text = console.export_text()
    assert all(key in text for key in calibrated.samples[ALONE])
    assert "cpu+gpu+h2d" in text and "GB/s" in text and "no measurement stayed disturbed" in text
    console.print(report(replace(calibrated, meta={**calibrated.meta, "disturbed": ["ops alone"] * 7})))
    assert "DISTURBED all the same, 7: ops alone; " in console.export_text()
