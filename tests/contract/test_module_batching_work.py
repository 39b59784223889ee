"""MoE-Gen's pipeline moves and computes what module-based batching says, no more, and at the right time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from harness.engine import loop
from harness.engine.accumulated import AccumulatedBatch, AccumulatedMemory
from harness.engine.emitter import Emitter
from harness.engine.ops.data import LoadKv
from harness.engine.ops.experts import Expert
from harness.engine.ops.host import AppendKv, DecodeAttention
from harness.machine.base import D2H, H2D, LaneKind
from harness.machine.simulated import SimulatedMachine
from harness.machine.virtual.costs import LaneCost, Roofline
from harness.machine.virtual.world import World
from harness.memory.transfers import CopyWeights
from harness.model.planned import planned_model
from harness.plan.planning import draft_plan
from harness.routing.kinds.uniform import UniformRouting
from harness.settings import parse_settings
from harness.workload.request import Request
from tests.composing import composed
from tests.contract.running import engine_on, shuffled, strategy_of
from tests.contract.simulating import link_bytes
from tests.contract.test_strategies import YAMLS

SPARSE, DENSE = "qwen3-30b-a3b", "mixtral-8x7b"  # 128 experts of which a token has 8, and 8 of which it has 2
FAST, SLOW = LaneCost(overhead_s=1e-6), LaneCost(overhead_s=1e-3)


class Watched:
    """A run on a simulated machine, with all that was submitted, by pass."""

    def __init__(
        self, policy, *, model=SPARSE, num_requests=8, prompt=6, new_tokens=3, costs=None, layers=3, **settings
    ):
        self.model = planned_model(parse_settings(composed(f"model={model}", f"model.spec.num_layers={layers}")).model)
        spec = self.model.spec
        capacities = dict.fromkeys(("device", "pinned", "host"), 10**12)
        lanes = Roofline(lanes=dict.fromkeys(LaneKind, FAST) | (costs or {}))
        self.machine = SimulatedMachine(capacities_bytes=capacities, costs=lanes, host_bytes_s=1e12)
        self.routing = UniformRouting(spec.num_experts, spec.experts_per_token, seed=3)
        self.machine.world = World(self.routing, spec.num_experts)
        like = Request(request_id=0, prompt_ids=(5,) * prompt, max_new_tokens=new_tokens, text=None)
        work = [replace(like, request_id=i) for i in range(num_requests)]
        values = YAMLS["moegen_h"] | {"search": False} | settings
        values |= {"policy": {"resident_experts": 0, "dense_slots": 1} | policy}
        blocks = num_requests * -(-(prompt + new_tokens) // 4)
        self.engine = engine_on(self.machine, self.model, work, kv_blocks=blocks, values=values)
        for sequence in self.engine.sequences:
            sequence.records = None
        self.strategy = strategy_of(self.engine, values)
        self.passes, self.tickets = [], [[]]
        submit = self.machine.submit

        def noted(*args, **how):
            ticket = submit(*args, **how)
            self.tickets[-1].append(ticket)
            return ticket

        self.machine.submit = noted

    def run(self):
        def over(record):
            self.passes.append(record)
            self.tickets.append([])

        loop.run(self.engine, self.strategy, over, check=True)
        return self

    def ops(self, number, kind):
        return [ticket.op for ticket in self.tickets[number] if isinstance(ticket.op, kind)]

    def tokens(self, number, layer):
        """The tokens of each expert in a layer of a pass, by the routing alone."""
        ids, positions = [], []
        for sequence in self.engine.sequences:
            prompt = sequence.prompt_len
            mine = range(prompt) if number == 0 else [prompt + number - 1]
            ids += [sequence.request.request_id] * len(mine)
            positions += mine
        chosen = self.routing.experts(np.array(ids), np.array(positions), layer)
        return np.bincount(chosen.ravel(), minlength=self.engine.spec.num_experts)


@pytest.mark.parametrize("on_device", [True, False])
@pytest.mark.parametrize(("batch", "micro_batch"), [(4, 1), (12, 1), (12, 5)])
def test_a_pass_brings_every_weight_once_at_the_most(batch, micro_batch, on_device):
    sizes = {"attention_batch": micro_batch, "prefill_attention_batch": micro_batch, "expert_slots": 20}
    run = Watched(sizes | {"on_device": on_device, "cpu_attention": 0.5}, num_requests=batch, prompt=20).run()
    num_passes, store = len(run.passes), run.engine.store
    sources = [op.source.buffer.name for number in range(num_passes + 1) for op in run.ops(number, CopyWeights)]
    most = {name: sources.count(name) for name in sources}
    assert max(most.values()) <= num_passes + 1, "what a pass brings for the next one counts for that"
    assert len(most) == sum(map(len, store.layers)), "every part has come"
    brought = sum(op.work().link_bytes for number in range(num_passes) for op in run.ops(number, CopyWeights))
    whole = sum(part.layout.nbytes for parts in store.layers for part in parts.values())
    ahead = 20 * store.experts(0)[0].layout.nbytes + sum(p.layout.nbytes for p in store.dense(0).values())
    assert 0.5 * num_passes * whole < brought <= num_passes * whole + ahead


@pytest.mark.parametrize("on_device", [True, False])
@pytest.mark.parametrize(("model", "slice_tokens"), [(SPARSE, 3), (SPARSE, 1000), (DENSE, 7)])
def test_an_expert_runs_once_over_all_of_its_tokens(model, slice_tokens, on_device):
    policy = {"expert_batch": slice_tokens, "prefill_expert_batch": slice_tokens, "prefill_attention_batch": 2}
    run = Watched(policy | {"on_device": on_device, "attention_batch": 3}, model=model, num_requests=9).run()
    for number in range(len(run.passes)):
        for layer in range(run.engine.spec.num_layers):
            ran = {}
            for op in run.ops(number, Expert):
                if op.layer == layer:
                    ran.setdefault(op.part.layout.expert, []).append(op.num_rows)
            tokens = run.tokens(number, layer)
            assert sorted(ran) == np.flatnonzero(tokens).tolist()
            for expert, sizes in ran.items():
                assert sum(sizes) == tokens[expert]
                assert len(sizes) == -(-tokens[expert] // slice_tokens)
    spec, passes = run.engine.spec, range(len(run.passes))
    routed = sum(run.tokens(number, layer).sum() for number in passes for layer in range(spec.num_layers))
    if not on_device:  # every row comes once for each of its experts, whatever slice it is in
        row_bytes = spec.hidden_dim * spec.dtype_bytes
        assert sum(link_bytes(run.engine, "load rows", H2D)) == pytest.approx(routed * row_bytes)
        assert sum(link_bytes(run.engine, "offload results", D2H)) == pytest.approx(routed * spec.hidden_dim * 4)
        rows = routed / spec.experts_per_token
        assert sum(link_bytes(run.engine, "offload rows", D2H)) == pytest.approx(rows * row_bytes)


@pytest.mark.parametrize("step", ["begin_experts", "add"])
def test_a_step_returns_the_ticket_of_all_that_it_submits(monkeypatch, step):
    run = Watched({"on_device": False, "attention_batch": 2}, model="deepseek-v2-lite")
    of_steps, plain = [], getattr(AccumulatedBatch, step)

    def checked(*args):
        before = len(run.tickets[-1])
        result = plain(*args)
        tickets = result[1] if isinstance(result, tuple) else result
        assert (tickets if isinstance(tickets, list) else [tickets]) == run.tickets[-1][before:]
        of_steps.extend(run.tickets[-1][before:])
        return result

    monkeypatch.setattr(AccumulatedBatch, step, checked)
    run.run()
    assert of_steps


def test_tokens_of_several_gpus_do_not_accumulate(tiny):
    engine = engine_on(shuffled(0), tiny, [], kv_blocks=40)
    memory = AccumulatedMemory.reserve(engine.machine, tiny.spec, max_tokens=8, slice_tokens=4)
    for several in (replace(engine, peers=(replace(engine, rank=1),)), replace(engine, rank=1)):
        with pytest.raises(AssertionError, match="one GPU"):
            AccumulatedBatch(several, Emitter(several), memory)


def test_device_memory_does_not_grow_with_the_batch():
    policy = {"prefill_attention_batch": 50, "attention_batch": 50, "expert_batch": 64, "prefill_expert_batch": 64}
    policy |= {"expert_slots": 4, "cpu_attention": 0.5}

    def peak_bytes(num_requests, on_device):
        sizes = {"batch_size": num_requests, "prefill_batch_size": num_requests, "on_device": on_device}
        run = Watched(policy | sizes, model=DENSE, num_requests=num_requests, prompt=4, new_tokens=2, layers=2).run()
        assert run.passes[-1].num_decode_tokens == num_requests
        return run.machine.tiers["device"].peak_bytes

    assert peak_bytes(100, False) == peak_bytes(3000, False)
    assert peak_bytes(100, True) < peak_bytes(300, True)


@pytest.mark.parametrize(("share", "num_requests", "expected"), [(0.1, 10, 1), (0.37, 100, 37), (0, 10, 0), (1, 7, 7)])
def test_the_cpu_attends_for_its_share_of_the_sequences(share, num_requests, expected):
    run = Watched({"cpu_attention": share, "attention_batch": 8}, num_requests=num_requests, layers=2).run()
    assert len(run.passes) == 3
    for number in (1, 2):
        for layer in range(2):
            rows = [op.batch.on_host.num_decode for op in run.ops(number, DecodeAttention) if op.layer == layer]
            assert sum(rows) == expected
            loaded = [len(op.rows) for op in run.ops(number, LoadKv) if op.layer == layer]
            assert sum(loaded) == num_requests - expected


def test_the_share_holds_while_sequences_end():
    run = Watched({"cpu_attention": 0.37, "attention_batch": 4}, num_requests=30, new_tokens=6)
    for sequence in run.engine.sequences:
        sequence.request = replace(sequence.request, max_new_tokens=2 + sequence.request.request_id % 5)
    run.run()
    left = [record.num_decode_tokens for record in run.passes]
    assert left[1:] == [30, 24, 18, 12, 6]
    for number in range(1, len(left)):
        rows = sum(op.batch.on_host.num_decode for op in run.ops(number, DecodeAttention) if op.layer == 0)
        assert abs(rows - 0.37 * left[number]) <= 1


def test_keys_and_values_are_loaded_while_others_are_appended():
    """Appending takes long here, and the link is free: loading waits for nothing but its buffer."""
    costs = {LaneKind.CPU: SLOW, LaneKind.GPU: LaneCost(overhead_s=1e-4)}
    run = Watched({"cpu_attention": 0, "attention_batch": 2}, num_requests=12, costs=costs).run()
    for number in range(1, len(run.passes)):
        tickets = {(type(t.op), t.op.layer, t.op.micro_batch): t for t in run.tickets[number]}
        for layer in range(run.engine.spec.num_layers):
            for j in range(5):
                appended, loaded = tickets[AppendKv, layer, j], tickets[LoadKv, layer, j + 1]
                assert loaded.started_s < appended.finished_s, f"pass {number}, layer {layer}, micro-batch {j + 1}"


def test_the_link_is_never_idle_where_it_is_what_binds():
    """Across layers and passes, as long as a slot is free; and without prefetch it waits for the router."""
    link = {LaneKind.H2D: LaneCost(link_bytes_s=1e10), LaneKind.GPU: LaneCost(overhead_s=5e-4)}
    seconds = {}
    for prefetch in (True, False):
        policy = {"expert_slots": 40, "cpu_attention": 0.5, "attention_batch": 8, "on_device": True}
        run = Watched(policy, num_requests=32, new_tokens=6, costs=link, prefetch=prefetch).run()
        begin, end = run.passes[2].start_s, run.passes[-2].end_s
        spans = [s for s in run.machine.spans if s.lane.kind is LaneKind.H2D and begin <= s.start_s < end]
        busy = sum(s.end_s - s.start_s for s in spans) / (end - begin)
        assert busy > 0.99 if prefetch else busy < 0.97
        seconds[prefetch] = end - begin
    assert seconds[False] > 1.02 * seconds[True]


@pytest.mark.parametrize("num_requests", [1, 2])
def test_a_small_batch_brings_what_the_router_has_chosen(num_requests):
    run = Watched({"expert_slots": 3}, num_requests=num_requests).run()
    for number in range(1, len(run.passes)):
        brought = [op.source.layout.expert for op in run.ops(number, CopyWeights)]
        wanted = sum(np.count_nonzero(run.tokens(number, layer)) for layer in range(3))
        assert sum(expert is not None for expert in brought) == wanted


def test_the_largest_model_runs_on_a_small_card():
    plan = draft_plan(
        composed(
            "machine=simulated", "strategy=moegen_g", "model=deepseek-r1", "hardware=a5000", "hardware.ram_gb=1000",
            "dataset=gsm8k", "dataset.num_requests=2", "dataset.max_new_tokens=2", "kv_cache_gb=1",
            "dataset.min_prompt_tokens=16", "dataset.max_prompt_tokens=16", "dataset.lengths.mean=16",
        )
    )  # fmt: skip
    assert plan.machine.tiers["device"].peak_bytes <= 24e9
    passes = []
    loop.run(plan.engine, plan.strategy, passes.append)
    assert [record.mode for record in passes] == ["prefill", "decode"]
