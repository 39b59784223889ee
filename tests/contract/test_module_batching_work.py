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
from harness.machine.base import D2H, H2D, LaneKind, TicketState
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


def parts_by_pass(run):
    """What the link brings for each pass, by (layer, part): for a pass itself the parts of its present and later
    layers, and behind them, ahead, those of the next one's first layers."""
    found = [[] for _ in run.tickets]
    for number, tickets in enumerate(run.tickets):
        layer = 0
        for op in (t.op for t in tickets if t.op.layer is not None and t.state is not TicketState.CANCELLED):
            if isinstance(op, CopyWeights):
                found[number + (op.layer < layer)].append((op.layer, op.source.layout.name))
            elif not isinstance(op, LoadKv):  # which comes for the next layer
                layer = op.layer
    return found[: len(run.passes)]


def require_each_once(run, num_slots=6):
    """For each pass: whatever its ops read has come for it, no part came twice, and so no more bytes than the model
    has."""
    store, spec = run.engine.store, run.engine.spec
    sizes = {
        (layer, name): part.layout.nbytes for layer, parts in enumerate(store.layers) for name, part in parts.items()
    }
    for number, parts in enumerate(parts_by_pass(run)):
        assert len(parts) == len(set(parts)), f"pass {number} brings a part twice"
        wanted = {(layer, name) for layer in range(spec.num_layers) for name in store.dense(layer)}
        for layer in range(spec.num_layers):
            experts = store.experts(layer)
            wanted |= {(layer, experts[e].layout.name) for e in np.flatnonzero(run.tokens(number, layer))}
        assert wanted <= set(parts), f"pass {number} brings not all that it reads"
        assert sum(sizes[part] for part in parts) <= sum(sizes.values()) < spec.model_bytes
        few = 1 - (1 - spec.experts_per_token / spec.num_experts) ** run.passes[number].num_tokens < 0.5
        spare = len(parts) - len(wanted) - (num_slots if number == 1 else 0)  # which a pass of many tokens wants ahead
        assert not few or spare <= 0, f"pass {number} brings what few tokens do not need"


@pytest.mark.parametrize("on_device", [True, False])
@pytest.mark.parametrize(
    ("model", "batch", "micro_batch"), [(SPARSE, 4, 1), (SPARSE, 12, 1), (SPARSE, 12, 5), (DENSE, 3, 1), (DENSE, 40, 7)]
)
def test_each_pass_brings_every_weight_once_at_the_most(model, batch, micro_batch, on_device):
    sizes = {"attention_batch": micro_batch, "prefill_attention_batch": micro_batch, "expert_slots": 6}
    policy = sizes | {"on_device": on_device, "cpu_attention": 0.5}
    run = Watched(policy, model=model, num_requests=batch, prompt=20, new_tokens=4).run()
    assert [record.mode for record in run.passes] == ["prefill", *["decode"] * 3]
    require_each_once(run)
    ops = [op for number in range(len(run.tickets)) for op in run.ops(number, CopyWeights)]
    spans = [span for span in run.machine.spans if span.kind == "weights" and span.layer is not None]
    told = sum(span.work.link_bytes for span in spans)
    assert 0 < told <= (1 + 1e-9) * sum(op.work().link_bytes for op in ops), "nothing but these ops brings weights"


@pytest.mark.parametrize("fault", ["twice and none", "twice", "more than few tokens need"])
def test_a_pass_that_brings_weights_otherwise_is_noticed(fault):
    """Over all passes the first fault brings no byte more or less."""
    run = Watched({"expert_slots": 6}, model=SPARSE, num_requests=4, prompt=20, new_tokens=4).run()
    require_each_once(run)
    of_first, of_third = (
        [t for t in run.tickets[n] if isinstance(t.op, CopyWeights) and t.op.layer == 1] for n in (0, 2)
    )
    there = {ticket.op.source for ticket in of_third}
    brought = next(t for t in of_first if (t.op.source in there) == (fault != "more than few tokens need"))
    run.tickets[2].insert(run.tickets[2].index(of_third[0]), brought)
    if fault == "twice and none":
        run.tickets[0].remove(brought)
    with pytest.raises(AssertionError, match="pass [02] brings"):
        require_each_once(run)


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
        sequence.__post_init__()
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


ATTENDING = {"cpu_attention": 0.5, "attention_batch": 8}
BUSY = {  # policy, the passes that are looked at, and the most that the link is busy without prefetch
    "decode, on the device": (ATTENDING | {"on_device": True}, slice(2, -1), 0.97),
    "decode, in host memory": (ATTENDING | {"on_device": False}, slice(2, -1), 0.7),
    "prefill": ({"prefill_batch_size": 8, "prefill_attention_batch": 4}, slice(1, 3), 0.99),
}


@pytest.mark.parametrize("case", BUSY)
def test_the_link_is_never_idle_where_it_is_what_binds(case):
    """Across layers and passes, as long as a slot is free; and without prefetch it waits for the router."""
    link = {LaneKind.H2D: LaneCost(link_bytes_s=1e10), LaneKind.GPU: LaneCost(overhead_s=5e-4)}
    policy, which, without = BUSY[case]
    seconds = {}
    for prefetch in (True, False):
        run = Watched(policy | {"expert_slots": 40}, num_requests=32, new_tokens=6, costs=link, prefetch=prefetch).run()
        passes = run.passes[which]
        begin, end = passes[0].start_s, passes[-1].end_s
        spans = [s for s in run.machine.spans if s.lane.kind is LaneKind.H2D and begin <= s.start_s < end]
        busy = sum(s.end_s - s.start_s for s in spans) / (end - begin)
        assert busy > 0.99 if prefetch else busy < without
        seconds[prefetch] = end - begin
    assert seconds[False] > 1.01 * seconds[True]


@pytest.mark.parametrize("num_requests", [1, 2])
def test_a_small_batch_brings_what_the_router_has_chosen(num_requests):
    """Once each, but for those that a prefill of two prompts, which is no small batch, has brought ahead."""
    run = Watched({"expert_slots": 3}, num_requests=num_requests).run()

    def brought(number):
        copies = [(op.layer, op.source.layout.expert) for op in run.ops(number, CopyWeights)]
        return [(layer, expert) for layer, expert in copies if expert is not None]

    for number in range(1, len(run.passes)):
        ahead = {key for key in brought(number - 1)[-3:] if key[0] == 0}
        assert len(ahead) == (3 if (num_requests, number) == (2, 1) else 0)
        wanted = {(layer, e) for layer in range(3) for e in np.flatnonzero(run.tokens(number, layer)).tolist()}
        assert sorted(brought(number)) == sorted(wanted - ahead)


def test_the_largest_model_runs_on_a_small_card():
    """DeepSeek-R1, with a batch as large as its keys and values allow (Eq. 2) and slots that the search chooses."""
    given = {"attention_batch": 128, "expert_batch": 512, "prefill_batch_size": 256, "prefill_attention_batch": 64}
    given |= {"prefill_expert_batch": 1024, "dense_slots": 1, "on_device": "true"}
    plan = draft_plan(
        composed(
            "machine=simulated", "strategy=moegen_g", "model=deepseek-r1", "hardware=a5000", "hardware.ram_gb=1000",
            "dataset=gsm8k", "dataset.synthetic=lengths", "dataset.num_requests=240", "dataset.max_new_tokens=2",
            "dataset.min_prompt_tokens=32", "dataset.max_prompt_tokens=32", "dataset.lengths.mean=32",
            "kv_cache_gb=0.8", *(f"strategy.policy.{name}={value}" for name, value in given.items()),
        )
    )  # fmt: skip
    spec, chosen = plan.engine.spec, plan.strategy.plan
    assert chosen["chosen_by"] == "search" and chosen["runners_up"]
    assert chosen["batch_size"] == 0.8e9 // (3 * 16 * spec.kv_bytes_per_token) == 237
    assert plan.machine.tiers["device"].peak_bytes <= 24e9 < spec.model_bytes / 25
    passes, weight_bytes, spans = [], [], plan.machine.spans
    plan.machine.drain()

    def over(record):
        passes.append(record)
        weight_bytes.append(sum(span.work.link_bytes for span in spans if span.kind == "weights"))
        spans.clear()

    spans.clear()
    loop.run(plan.engine, plan.strategy, over)
    assert [(record.mode, record.num_sequences) for record in passes] == [
        ("prefill", 237), ("decode", 237), ("prefill", 3), ("decode", 3),
    ]  # fmt: skip
    assert 0.9 * spec.model_bytes < weight_bytes[1] <= spec.model_bytes and max(weight_bytes) <= spec.model_bytes
    tokens, seconds = 2 * 240, passes[-1].end_s - passes[0].start_s
    assert plan.strategy.prediction.throughput_tok_s == pytest.approx(tokens / seconds, rel=0.1)
    assert plan.machine.tiers["device"].peak_bytes <= 24e9
