"""Every op's work against a count by hand from the shapes: what the simulator, pacing and planners go by."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import harness.engine.ops
from harness.engine.activations import Activations
from harness.engine.batch import assemble
from harness.engine.gpus import collectives as collective
from harness.engine.ops import compute, data, expert_rows, host, paged, predictions, warm_up
from harness.engine.ops.experts import Expert, Experts
from harness.engine.sequences import Records, State
from harness.machine.base import LaneKind, Op, Work
from harness.machine.simulated import SimulatedMachine
from harness.machine.virtual.costs import LaneCost, Roofline
from harness.memory import transfers as memory_ops
from harness.memory.kv_cache import BlockAllocator, KVCache
from harness.memory.placed import PlacedPart
from harness.memory.weights import WeightStore
from harness.model.layout import TensorSource, lay_out
from harness.model.planned import PlannedModel
from harness.model.spec import ModelSpec
from tests.unit.engine.fakes import SPEC as FAKE
from tests.unit.engine.fakes import sequences

# No two dimensions alike: hidden 80, queries 6 x 16 = 96, keys 2 x 16 = 32, experts 112, bfloat16.
SPEC: ModelSpec = replace(FAKE, hidden_dim=80, num_heads=6, expert_dim=112, vocab_size=400, dtype="bfloat16")
PROMPTS, CONTEXTS = (30, 50), (17, 33, 64)
N, PREFILL, DECODE, SEEN = 83, 80, 3, 114  # rows: all, of prompts, decoding; tokens in the contexts
KV = 2 * 32 * 2  # bytes of a token's keys and values in a layer
EXPERT = 3 * 80 * 112  # weights
NUM_SAMPLED = 3 + 5 + 1  # whose position ends in 6: of prompts, and of the context of 17
BLOCKS = 3 + 5 + 8  # of 8 tokens for the contexts
FEW = np.array([1, 2, 5])  # rows
ROUTED = np.array([0, 100, 20, 0, 16, 10, 9, 11])  # of 83 tokens with two experts each

free = Roofline(lanes={kind: LaneCost() for kind in LaneKind})
machine = SimulatedMachine(
    capacities_bytes={"device": 10**9, "device1": 10**9, "pinned": 10**9, "host": 10**9}, costs=free, host_bytes_s=1e9
)
store = WeightStore(machine, PlannedModel(SPEC), tier="pinned")
cache = KVCache(machine, SPEC, capacity_bytes=10**7, block_size=8)
on_device_cache = KVCache(machine, SPEC, capacity_bytes=10**7, block_size=8, tier="device")
acts = Activations(machine, SPEC, max_tokens=N, name="a", host_experts=True, device_blocks=100, num_predicted=3)
other = Activations(machine, SPEC, max_tokens=N, name="b", rank=1)
buffer = machine.tiers["pinned"].reserve("page", 5000)
parts = store.layers[0]


def batch_on(*, device: bool, records: Records | None = None):
    allocator = BlockAllocator(100, 8, on_device=device)
    work = sequences(*((prompt, 5) for prompt in PROMPTS), *((context - 1, 5) for context in CONTEXTS))
    for sequence in work[2:]:
        sequence.state, sequence.generated, sequence.num_cached = State.DECODING, [7], sequence.prompt_len
    for sequence in work:
        allocator.grow(sequence, sequence.num_tokens)
        sequence.kv_on_device, sequence.records = device, records
    return assemble(0, work[:2], work[2:], allocator)


here, there = batch_on(device=False), batch_on(device=True)
recorded = batch_on(device=False, records=Records(weights=True, sample=lambda requests, positions: positions % 10 == 6))
in_float32 = lay_out("attention_out", "bfloat16", (TensorSource("router", (8, 80), ("gate",), dtype="float32"),))
wide_router = PlacedPart(in_float32, buffer, ())
own, experts = (None, SPEC, here, acts), tuple(parts[f"expert.{e}"] for e in range(8))


def moved(nbytes: float) -> Work:
    """Over the link, out of one memory and into the other."""
    return Work(device_bytes=nbytes, host_bytes=nbytes, link_bytes=nbytes)


def seen(op: Experts) -> Experts:
    """An op of a layer whose routing is known."""
    op.foresee(SimpleNamespace(expert_counts=lambda batch, layer: ROUTED))
    return op


def pairs(length: int) -> int:
    """Each token sees itself and those before it."""
    return sum(position + 1 for position in range(length))


CASES: list[tuple[Op, Work]] = [
    (compute.Embed(*own, store.embedding), Work(device_bytes=2 * N * 80 * 2)),
    (
        compute.AttentionIn(*own, parts["attention_in"], 0),
        Work(flops=2 * N * 80 * (96 + 32 + 32), device_bytes=2 * (80 + 80 * 160) + N * (80 + 160) * 2),
    ),
    (
        compute.PrefillAttention(*own, 0, None),
        Work(flops=sum(map(pairs, PROMPTS)) * 2 * 2 * 96, device_bytes=PREFILL * (96 + 32 + 32 + 96) * 2),
    ),
    (
        compute.AttentionOut(*own, parts["attention_out"], 0),
        Work(
            flops=2 * N * (96 * 80 + 80 * 8),
            device_bytes=2 * (96 * 80 + 80 * 8 + 80) + N * (96 + 80 + 80 + 80) * 2,
        ),
    ),
    (
        seen(Experts(*own, experts, tuple(range(8)), 0)),
        Work(flops=2 * 166 * EXPERT, device_bytes=6 * EXPERT * 2 + 166 * (80 + 3 * 112 + 80) * 2),
    ),
    (
        seen(Experts(*own, experts[1:3], (1, 2), 0)),
        Work(flops=2 * 120 * EXPERT, device_bytes=2 * EXPERT * 2 + 120 * (80 + 3 * 112 + 80) * 2),
    ),
    (
        Experts(*own, experts[:4], (0, 1, 2, 3), 0),
        Work(flops=2 * N * EXPERT, device_bytes=4 * EXPERT * 2 + N * (80 + 3 * 112 + 80) * 2),
    ),
    (
        seen(Experts(*own, experts[2:3], (2,), 0, on_host=True, clears=True)),
        Work(flops=2 * 20 * EXPERT, host_bytes=EXPERT * 2 + 20 * (80 + 3 * 112 + 80) * 2),
    ),
    (
        seen(Experts(*own, experts[1:3], (1, 2), 0, on_host=True, clears=True)),
        Work(flops=2 * 120 * EXPERT, host_bytes=2 * EXPERT * 2 + 120 * (80 + 3 * 112 + 80) * 2),
    ),
    (
        Expert(None, SPEC, experts[2], acts.normed, acts.moe_out, 20),
        Work(flops=2 * 20 * EXPERT, device_bytes=EXPERT * 2 + 20 * (80 + 3 * 112 + 80) * 2),
    ),
    (
        Expert(None, SPEC, experts[2], buffer, buffer, 20, on_host=True),
        Work(flops=2 * 20 * EXPERT, host_bytes=EXPERT * 2 + 20 * (80 + 3 * 112 + 80) * 2),
    ),
    (compute.Combine(*own, 0, (acts.moe_out,)), Work(device_bytes=N * 80 * (2 + 4 + 2))),
    (  # hidden states are read and written once for each buffer of sums
        compute.Combine(*own, 0, (acts.moe_out, buffer, other.moe_out)),
        Work(device_bytes=3 * N * 80 * (2 + 4 + 2)),
    ),
    (compute.Head(*own, store.head), Work(flops=2 * 5 * 80 * 400, device_bytes=2 * (80 * 400 + 80))),
    (
        compute.DecodeAttentionDevice(*own, 0, range(1, 3), acts.moe_out, None),
        Work(flops=(33 + 64) * 2 * 2 * 96, device_bytes=(33 + 64) * KV),
    ),
    (host.AppendKv(SPEC, here, acts, 0, cache), Work(host_bytes=2 * N * KV)),
    (host.DecodeAttention(*own, 0, cache, None), Work(flops=SEEN * 2 * 2 * 96, host_bytes=SEEN * KV)),
    (paged.AppendKvOnDevice(SPEC, there, acts, 0, on_device_cache), Work(device_bytes=2 * N * KV)),
    (
        paged.DecodeAttentionPaged(None, SPEC, there, acts, 0, on_device_cache, None),
        Work(flops=SEEN * 2 * 2 * 96, device_bytes=SEEN * KV),
    ),
    (data.UploadTokens(SPEC, there, acts), Work(link_bytes=4 * N * 8 + BLOCKS * 4)),
    (data.UploadTokens(SPEC, here, acts), Work(link_bytes=4 * N * 8)),
    (data.OffloadQkv(SPEC, here, acts, 0), moved(N * KV + DECODE * 96 * 2)),
    (data.OffloadQkv(SPEC, here, acts, 0, queries=False), moved(N * KV)),
    (data.LoadAttention(SPEC, here, acts, 0), moved(DECODE * 96 * 2)),
    (data.LoadKv(SPEC, here, acts, 0, cache, range(3), acts.moe_out), moved(SEEN * KV)),
    (data.LoadKv(SPEC, here, acts, 0, cache, range(2), acts.moe_out), moved((17 + 33) * KV)),
    (
        data.StageKv(SPEC, here, acts, 0, cache, range(2), buffer),
        Work(host_bytes=2 * (17 + 33) * KV, link_bytes=(17 + 33) * KV),
    ),
    (data.LoadStagedKv(SPEC, here, acts, 0, cache, range(2), acts.moe_out, source=buffer), moved((17 + 33) * KV)),
    (data.OffloadHidden(SPEC, here, acts, 0, buffer), moved(N * 80 * 2)),
    (data.LoadHidden(SPEC, here, acts, 0, buffer), moved(N * 80 * 2)),
    (data.FetchSampled(SPEC, here, acts), Work(link_bytes=5 * 8)),
    (data.FetchRouting(SPEC, here, acts, 0), Work(link_bytes=N * 2 * 8)),
    (data.FetchRouting(SPEC, recorded, acts, 0), Work(link_bytes=N * 2 * (8 + 4) + NUM_SAMPLED * 80 * 2)),
    (data.FetchRoute(SPEC, here, acts, 0), Work(link_bytes=N * 2 * (8 + 4))),
    (
        predictions.PredictExperts(*own, parts["attention_out"], 0, 1),
        Work(flops=2 * N * 80 * 8, device_bytes=2 * 80 * 8 + N * (80 * 2 + 3 * (8 + 4))),
    ),
    (
        predictions.PredictExperts(*own, wide_router, 0, 1),
        Work(flops=2 * N * 80 * 8, device_bytes=4 * 80 * 8 + N * (80 * 2 + 3 * (8 + 4))),
    ),
    (predictions.FetchPrediction(SPEC, here, acts, 0, 1), Work(link_bytes=N * 3 * (8 + 4))),
    (expert_rows.OffloadExpertInput(SPEC, here, acts, 0), moved(N * (80 * 2 + 2 * (8 + 4)))),
    (expert_rows.LoadExpertSums(SPEC, buffer, acts.moe_out, 9, 0), moved(9 * 80 * 4)),
    (expert_rows.OffloadResults(SPEC, acts.moe_out, buffer, 9, 0), moved(9 * 80 * 4)),
    (expert_rows.OffloadRows(SPEC, acts.normed, buffer, 9, 0), moved(9 * 80 * 2)),
    (expert_rows.LoadRows(SPEC, buffer, acts.normed, 9, 0), moved(9 * 80 * 2)),
    (expert_rows.Gather(SPEC, buffer, buffer, FEW, 0), Work(host_bytes=3 * 2 * 80 * 2)),
    (expert_rows.AddWeighted(SPEC, buffer, buffer, FEW, FEW / 6, 0), Work(host_bytes=3 * 3 * 80 * 4)),
    (expert_rows.ClearSums(SPEC, buffer, 9, 0), Work(host_bytes=9 * 80 * 4)),
    (
        collective.OutputProjection(*own, parts["attention_out"], 0),
        Work(flops=2 * N * 96 * 80, device_bytes=2 * 96 * 80 + N * (96 * 2 + 80 * 4)),
    ),
    (
        collective.AfterAttention(*own, parts["attention_out"], 0),
        Work(flops=2 * N * 80 * 8, device_bytes=2 * 80 * 8 + N * 80 * (4 * 2 + 4)),
    ),
    (collective.SendHidden(SPEC, here, acts, 0, other), Work(device_bytes=N * 80 * 2, link_bytes=N * 80 * 2)),
    (  # of two GPUs each sends one half of its partial sums and one half of the results
        collective.AllReduce(SPEC, here, acts, 0, partials=(acts, other), to="normed"),
        Work(device_bytes=N * 80 * (4 + 2 + 2 * 2), link_bytes=N * 80 * 2),
    ),
    (
        collective.AllReduce(SPEC, here, acts, 0, partials=(acts, other), to="hidden"),
        Work(device_bytes=N * 80 * (4 + 2 + 2 + 2 * 2), link_bytes=N * 80 * 2),
    ),
    (memory_ops.CopyWeights(experts[0], buffer, layer=0, packet_bytes=1000), moved(2 * EXPERT)),
    (memory_ops.CopyShare(experts[0], buffer, share=range(100, 350), layer=0, packet_bytes=100), moved(250)),
    (memory_ops.CopyPage(buffer, acts.hidden, nbytes=4321, layer=0, packet_bytes=1000), moved(4321)),
    (
        memory_ops.StagePage(buffer, acts.hidden, nbytes=4321, layer=0, packet_bytes=1000),
        Work(host_bytes=2 * 4321, link_bytes=4321),
    ),
    (
        memory_ops.AllGather((buffer, acts.hidden), 1, nbytes=4096, layer=0),
        Work(device_bytes=2 * 2048, link_bytes=2048),
    ),
]


@pytest.mark.parametrize(("op", "expected"), CASES, ids=[type(op).__name__ for op, _ in CASES])
def test_work_is_what_the_shapes_say(op, expected):
    """Within 3 %: attention counts half a token less than each token and those before it, a part its norms or not."""
    assert op.work() == pytest.approx(expected, rel=0.03)


def test_experts_on_the_host_are_launches_where_they_have_tokens():
    """Eight of them, of which two have no tokens, are six launches with as many tokens each as 166 in all are. Each has
    the work of an op of its own, with its own tokens or the expected ones."""
    host = Experts(*own, experts, tuple(range(8)), 0, on_host=True, clears=True)
    apart = [Experts(*own, (part,), (number,), 0, on_host=True) for number, part in enumerate(experts)]
    assert (host.cost_key, host.launches, host.cost_features()) == ("experts x1", 8, (float(N),))
    assert host.launch_works() == [pytest.approx(one.work()) for one in apart]
    assert (seen(host).launches, host.cost_features()) == (6, (pytest.approx(166 / 6 / (2 / 8)),))
    assert host.launch_works() == [seen(one).work() for one in apart if ROUTED[one.experts[0]]]
    alone, device = Experts(*own, experts[:1], (0,), 0, on_host=True), Experts(*own, experts, tuple(range(8)), 0)
    assert (alone.cost_key, seen(alone).launches, seen(device).launches) == ("experts x1", 1, 1)


def test_an_expert_over_given_rows_costs_other_than_one_that_finds_them():
    """Both know their weights, and so whether these are in a cache."""
    found = Experts(*own, experts[:1], (0,), 0)
    given = Expert(*own[:2], experts[0], acts.normed, acts.moe_out, 5)
    assert given.cost_key != found.cost_key and given.weight_keys == found.weight_keys != ()


def test_some_experts_of_a_layer_on_the_device_are_several_single_ones_in_one_launch():
    """Of six one has no tokens: they are five with as many tokens each as 66 in all are."""
    some, whole = Experts(*own, experts[2:], tuple(range(2, 8)), 0), Experts(*own, experts, tuple(range(8)), 0)
    assert (some.cost_key, some.launches, some.joined, some.cost_features()) == ("experts x1", 1, 6, (float(N),))
    assert (seen(some).launches, some.joined, some.cost_features()) == (1, 5, (pytest.approx(66 / 5 / (2 / 8)),))
    assert (seen(whole).cost_key, whole.joined, whole.cost_features()) == ("experts x8", 1, (pytest.approx(166 / 2),))


@pytest.mark.parametrize("on_host", [False, True])
def test_experts_that_nobody_has_seen_are_as_many_as_are_expected_to_have_tokens(on_host):
    """About 22 of 96 experts have any of 4 tokens where there are 128: so many with as many each as all get."""
    spec, few = replace(SPEC, num_experts=128, experts_per_token=8), replace(here, token_ids=here.token_ids[:4])
    draws = np.array([np.random.default_rng(i).permuted(np.tile(np.arange(128), (few.num_tokens, 1)), axis=1)[:, :8]
                      for i in range(500)])  # fmt: skip
    active = np.mean([len(np.unique(draw[draw < 96])) for draw in draws])
    unseen = Experts(None, spec, few, acts, experts[:1] * 96, tuple(range(96)), 0, on_host=on_host)
    assert unseen.joined == pytest.approx(active, abs=1) and active < 30
    (tokens,) = unseen.cost_features()
    assert tokens * 8 / 128 * unseen.joined == pytest.approx(few.num_tokens * 8 * 96 / 128)
    pair = Experts(None, spec, few, acts, experts[:1] * 2, (3, 4), 0, on_host=on_host)
    assert pair.joined == 2, "though less than one has tokens: it is no single expert"
    assert pair.cost_features() == (few.num_tokens,)


def test_no_op_was_forgotten():
    found = [each for module in (memory_ops, *_modules(harness.engine.ops)) for each in vars(module).values()]
    ops = {each for each in found if isinstance(each, type) and issubclass(each, Op) and each.kind != Op.kind}
    set_up = {warm_up.WarmUp, warm_up.StartThreads, warm_up.ViewWeights}
    run_before_anything_is_timed = {memory_ops.Poison, memory_ops.ReadPart, *set_up}
    forgotten = ops - run_before_anything_is_timed - {type(op) for op, _ in CASES}
    assert not forgotten, "count their work by hand in CASES"


def _modules(package):
    return [
        importlib.import_module(f"{package.__name__}.{each.name}") for each in pkgutil.iter_modules(package.__path__)
    ]


@pytest.mark.parametrize(("length", "window"), [(40, 100), (40, 40), (300, 100), (1000, 64)])
def test_a_sliding_window_leaves_each_token_what_lies_within(length, window):
    spec = replace(SPEC, sliding_window=window)
    one = replace(here, prefill_lens=(length,))
    exact = sum(min(position + 1, window) for position in range(length))
    op = compute.PrefillAttention(None, spec, one, acts, 0, None)
    assert op.work().flops == pytest.approx(exact * 4 * 96, rel=0.03)
