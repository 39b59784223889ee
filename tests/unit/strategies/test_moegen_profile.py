"""MoE-Gen's profile: what modules cost over sizes and lengths, and the memory that they take at their peak."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from harness.engine.engine import Engine
from harness.engine.ops.compute import DecodeAttentionDevice, PrefillAttention
from harness.engine.ops.host import DecodeAttention
from harness.engine.temporaries import dense_workspace_bytes, expert_workspace_bytes, head_workspace_bytes
from harness.machine import simulated
from harness.machine.base import Op, Work
from harness.machine.virtual.costs import LaneCost
from harness.memory.tiers import DEVICE
from strategies.moegen import Config, build
from strategies.moegen.memory import phases
from strategies.moegen.module_memory import ModuleMemory
from strategies.moegen.pass_time import pass_time
from strategies.moegen.planner import Deployment
from strategies.moegen.policy import GivenPolicy, PhasePolicy, Policy
from strategies.moegen.profile import ModuleProfiler, measured
from strategies.moegen.recorded import Batch, HashedRouting, _RoutedOnce, first_layers, most_tokens_of_expert, record
from tests.unit.strategies.test_moegen_search import PACKET_BYTES, SMALL, engine_of, pipeline_of, prepared


def test_the_profiler_gives_its_memory_back():
    engine = engine_of()
    before = {name: tier.holders() for name, tier in engine.machine.tiers.items()}
    assert measured(engine, Deployment.of(engine).shape, packet_bytes=PACKET_BYTES) is not None
    assert {name: tier.holders() for name, tier in engine.machine.tiers.items()} == before
    assert engine.kv.allocator.num_used == 0


def test_interpolated_costs_are_those_of_the_machine():
    """The ops of passes whose sizes nobody measured, against what the simulated machine takes for each of them."""
    engine, search, start, profile = prepared(GivenPolicy(**SMALL))
    for batch in (search.prefill_batch(4), search.decode_batch(40)):
        recorded = record(engine, first_layers(engine.spec, 2), start, search.deployment.shape, batch, pipeline_of)
        told, took = Counter(), Counter()
        nodes = zip(recorded.graph.ops, recorded.graph.lanes, strict=True)
        for op, lane in nodes:
            if op is not None and lane is not None and op.work() != Work():
                told[str(lane)] += profile.costs.seconds(lane, op)
                took[str(lane)] += alone_s(engine, lane, op)
        cpu_s = told.pop("cpu"), took.pop("cpu")
        assert told == pytest.approx(took, rel=0.06)
        assert cpu_s[1] <= cpu_s[0] <= 1.3 * cpu_s[1], "it was measured beside the link, which takes host memory too"
    assert not profile.costs.estimated


def alone_s(engine: Engine, lane, op: Op) -> float:
    class Same(Op):
        kind = op.kind

        def work(self):
            return op.work()

    ticket = engine.machine.submit(lane, Same())
    engine.machine.wait(ticket)
    return ticket.finished_s - ticket.started_s


class SteepAttention:
    """A token of a context takes the longer, the longer the context is; all else takes what it does on a roofline."""

    RATES = LaneCost(overhead_s=1e-5, flops_s=5e13, device_bytes_s=5e11, host_bytes_s=1e11, link_bytes_s=2e10)

    def seconds(self, lane, op: Op, work: Work) -> float:
        steep = 1.0
        if isinstance(op, (DecodeAttention, DecodeAttentionDevice, PrefillAttention)):
            rows, attended = op.cost_features()[-2:]
            steep = 20 * (attended / rows / 400) ** 2
        return self.RATES.seconds(work) * steep


@pytest.mark.parametrize(("prompt", "new"), [(200, 400), (600, 60)])
@pytest.mark.parametrize("lengths", ["several", "one"])
def test_lengths_that_attention_is_profiled_over_tell_what_it_takes(prompt, new, lengths, monkeypatch):
    """Of steps at the beginning and at the end of generation, and of prompts. With the contexts halfway and the mean
    prompts alone, as a search sees them, steps are told wrong where contexts grow."""
    points = ModuleProfiler._points

    def of_one_length(profiler):
        for name, shape, modules in points(profiler):
            if name == "modules" or max(shape.prompts or shape.contexts) in (prompt, prompt + new // 2):
                yield name, shape, modules

    if lengths == "one":
        monkeypatch.setattr(ModuleProfiler, "_points", of_one_length)
    monkeypatch.setattr(simulated, "profile_costs", lambda hardware, spec: SteepAttention())
    workload = (f"dataset.lengths.mean={prompt}", f"dataset.lengths.max={prompt}", f"dataset.max_new_tokens={new}")
    engine, search, policy, _ = prepared(
        GivenPolicy(**SMALL), *workload, "hardware.device_memory_gb=4", "hardware.host_gb_s=100000"
    )

    def error(batch: Batch) -> float:
        recorded = record(engine, engine.spec, policy, search.deployment.shape, batch, pipeline_of)
        right = pass_time(recorded, lambda lane, op: SteepAttention().seconds(lane, op, op.work()), engine.spec)
        return search.times.of(policy, batch).seconds / right.seconds - 1

    steps = [error(Batch(num_sequences=40, tokens=prompt + n, decodes=True)) for n in (1, new // 2, new)]
    assert error(search.prefill_batch(4)) == pytest.approx(0, abs=0.05)
    assert steps[1] == pytest.approx(0, abs=0.05)
    if lengths == "several":
        assert steps == pytest.approx([0, 0, 0], abs=0.05)
    elif new > prompt:
        assert steps[0] > 0.15 and steps[2] < -0.15


@pytest.mark.parametrize("told_bytes", [None, 0, 200_000])
def test_memory_is_constrained_by_what_the_device_tells_of_temporaries(told_bytes, monkeypatch):
    """The larger one of what is counted for a token and what the device tells, here of every op alike."""
    engine = engine_of("dataset.max_new_tokens=4", "hardware.device_memory_gb=4")
    num_rows = 0

    def noted(memory, lane, op, rows, *, note=ModuleMemory.note):
        nonlocal num_rows
        num_rows = rows
        note(memory, lane, op, rows)

    monkeypatch.setattr(ModuleMemory, "note", noted)
    monkeypatch.setattr(engine.machine, "peak_temporaries_bytes", lambda: told_bytes and told_bytes * num_rows)
    strategy = build(Config(policy=GivenPolicy(**SMALL)), engine)
    plan, spec = strategy.plan, engine.spec
    counted = {"experts": expert_workspace_bytes(spec, None), "attention out": dense_workspace_bytes(spec, None)}
    for kind, row_bytes in counted.items():
        found = plan["profile"]["memory"][kind]
        assert found["counted_temporaries_bytes"] == row_bytes * found["rows"] and found["buffers_bytes"] > 0
        assert found["temporaries_bytes"] == (told_bytes and told_bytes * found["rows"])
    rows = max(each.micro_batch_rows for each in sizes_of(engine, plan))
    slices = max(each.slice_rows for each in sizes_of(engine, plan))
    most = [max(told_bytes or 0, row_bytes) for row_bytes in counted.values()]
    expected = max(slices * most[0], rows * most[1], head_workspace_bytes(spec))
    assert plan["held_bytes"][DEVICE]["temporaries"] == expected
    assert engine.machine.tiers[DEVICE].holders()["temporaries"] == expected


def sizes_of(engine: Engine, plan):
    names = ("batch_size", "attention_batch", "expert_batch", "on_device")
    prefill = PhasePolicy(**{name: plan[f"prefill_{name}"] for name in names})
    decode = PhasePolicy(**{name: plan[name] for name in (*names, "cpu_attention")})
    policy = Policy(prefill=prefill, decode=decode, expert_slots=plan["expert_slots"])
    return phases(policy, Deployment.of(engine).shape)


@pytest.mark.parametrize("decodes", [False, True])
def test_tokens_that_are_routed_once_choose_as_they_would_each_time(decodes):
    spec, batch = engine_of().spec, Batch(num_sequences=7, tokens=5, decodes=decodes)
    positions = np.tile([5] if decodes else np.arange(5), 7)
    ids = np.repeat(np.arange(7), len(positions) // 7)
    counts = []
    for layer in spec.moe_layers:
        each_time = HashedRouting(spec).experts(ids, positions, layer)
        counts.append(np.bincount(each_time.ravel()).max())
        for rows in (slice(None), slice(len(ids) // 7 * 2, len(ids) // 7 * 6)):  # whole sequences
            found = _RoutedOnce(spec, batch).experts(ids[rows], positions[rows], layer)
            assert found.dtype == np.int64 and (found == each_time[rows]).all()
    assert most_tokens_of_expert(spec, batch, spec.moe_layers) == max(counts)
    assert most_tokens_of_expert(spec, batch, spec.moe_layers[:1]) == counts[0]
