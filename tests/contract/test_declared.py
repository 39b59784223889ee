"""Ops touch what they declare and nothing else, watched at work: every op of every strategy, links included."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable

import pytest

import harness.engine.gpus.collectives as collective
import harness.engine.ops.compute as compute
import harness.engine.ops.data as data
import harness.engine.ops.expert_rows as expert_rows
import harness.engine.ops.experts as experts
import harness.engine.ops.host as host
import harness.engine.ops.paged as paged
import harness.engine.ops.predictions as predictions
import harness.memory.transfers as memory_ops
from harness.engine.engine import Engine
from harness.engine.sequences import Records
from harness.engine.strategy import Strategy
from harness.machine.base import MachineError, Op
from harness.memory.kv_cache import KVCache
from harness.memory.tiers import device_tier
from harness.plan.planning import make_plan
from tests.composing import composed
from tests.contract.placing import placed
from tests.contract.running import CAPACITIES_BYTES, check_tokens, engine_on, requests, run_to_end, strategy_of
from tests.contract.test_strategies import PLANNED
from tests.contract.watching import WatchingMachine, untouched

pytestmark = pytest.mark.usefixtures("short_probes")
ON_GPU = {"attention": "gpu", "gpu_kv_staging_mb": 0.02}
SMALL_DEVICE = 2_240_000  # does not hold the hidden states of a prefill
ACCUMULATED = "attention on both sides, tokens accumulated in host memory"
BY_LOT = "experts predicted and placed by lot"
TURNS = "copies and work in turns"
# Name: strategy, what differs from its defaults, GPUs, bytes of each one's memory.
RUNS: dict[str, tuple[str, dict, int, int]] = {
    **{name: (name, {}, 1, CAPACITIES_BYTES["device"]) for name in PLANNED},
    ACCUMULATED: (
        "moegen_h",
        {
            "policy": {"on_device": False, "attention_batch": 2, "expert_batch": 3, "cpu_attention": 0.5},
        },
        1,
        CAPACITIES_BYTES["device"],
    ),
    "moelens on the gpu": ("moelens", ON_GPU, 1, CAPACITIES_BYTES["device"]),
    "experts on the cpu": (
        "fastdecode",
        {"policy": {"batch_size": 6, "micro_batch_size": 2, "gpu_ffn": False}},
        1,
        CAPACITIES_BYTES["device"],
    ),
    "experts on the cpu or copied": (
        "llamacpp_split",
        {"cpu_moe_layers": 1, "offload_min_tokens": 16, "slots": 3},
        1,
        CAPACITIES_BYTES["device"],
    ),
    "a share of the cache on the device": (
        "flexgen",
        {"padding": True, "policy": {"batch_size": 6, "micro_batch_size": 2, "resident_kv": 0.5}},
        1,
        CAPACITIES_BYTES["device"],
    ),
    "hidden states on the host": (
        "moelightning",
        {"policy": {"batch_size": 24, "micro_batch_size": 4, "gpu_ffn": True, "resident_kv": 0.0}},
        1,
        SMALL_DEVICE,
    ),
    "recording": ("moelens", {}, 1, CAPACITIES_BYTES["device"]),
    "tensor parallel": ("moelightning", {}, 2, CAPACITIES_BYTES["device"]),
    "stages": ("flexgen", {}, 2, CAPACITIES_BYTES["device"]),
    "stages with attention on the cpu": ("flexgen_c", {}, 2, CAPACITIES_BYTES["device"]),
    TURNS: (
        "flexgen",
        {"planning": "as_built", "policy": {"batch_size": 6, "micro_batch_size": 2}},
        1,
        CAPACITIES_BYTES["device"],
    ),
    "turns in each stage": (
        "flexgen",
        {"planning": "as_built", "policy": {"batch_size": 3, "micro_batch_size": 2}},
        2,
        CAPACITIES_BYTES["device"],
    ),
    "shares of layers": ("deepspeed_zero", {}, 2, CAPACITIES_BYTES["device"]),
}

# What ops declare and touch in none of these runs.
EXCUSED = {
    ("PrefillAttention", "reads", "tokens"): "the kernel of a real GPU takes positions from there",
    ("DecodeAttentionPaged", "reads", "tokens"): "the kernel of a real GPU takes positions from there",
    ("DecodeAttentionPaged", "reads", "block_tables"): "the kernel of a real GPU finds blocks by them",
    ("OutputProjection", "reads", "attention decode on device"): "no strategy shares layers that keep a cache there",
}


def watch(tiny, name: str, seed: int = 0, *, planner: bool = True) -> WatchingMachine:
    """Watch a run; without its `planner`, which tries out ops of the same classes, only what comes behind that."""
    if name == BY_LOT:
        machine = WatchingMachine(capacities_bytes=CAPACITIES_BYTES, seed=seed)
        work = requests(6, vocab_size=tiny.spec.vocab_size, longest=24, max_new_tokens=4, seed=5)
        return watched(tiny, engine_on(machine, tiny, work, kv_blocks=400), placed, planner)
    strategy, change, num_gpus, device_bytes = RUNS[name]
    values = PLANNED[strategy] | change
    capacities = CAPACITIES_BYTES | {device_tier(rank): device_bytes for rank in range(num_gpus)}
    machine = WatchingMachine(capacities_bytes=capacities, seed=seed)
    is_small = device_bytes == SMALL_DEVICE
    count, longest = (24, 100) if is_small else (6, 24)
    work = requests(count, vocab_size=tiny.spec.vocab_size, longest=longest, max_new_tokens=4, seed=5)
    engine = engine_on(machine, tiny, work, kv_blocks=400, values=values, num_gpus=num_gpus)
    if name == "recording":
        records = Records(weights=True, sample=lambda requests, positions: positions % 3 > 0)
        for sequence in engine.sequences:
            sequence.records = records
    return watched(tiny, engine, lambda on: strategy_of(on, values), planner)


def watched(tiny, engine: Engine, build: Callable[[Engine], Strategy], planner: bool) -> WatchingMachine:
    assert isinstance(engine.machine, WatchingMachine)

    def planned(on: Engine) -> Strategy:
        engine.machine.watches = planner
        strategy = build(on)
        engine.machine.drain()
        engine.machine.watches = True
        return strategy

    run_to_end(engine, planned)
    report = check_tokens(tiny, engine.sequences)
    assert report.ok and report.checked == len(engine.sequences), report.first_mismatch
    return engine.machine


def test_every_op_touches_what_it_declares_and_nothing_else(tiny):
    machines = [watch(tiny, name, planner=False) for name in (*RUNS, BY_LOT)]
    seen = {cls for machine in machines for cls in machine.seen}
    modules = collective, compute, data, expert_rows, experts, host, paged, predictions, memory_ops
    there = {cls for module in modules for cls in vars(module).values() if inspect.isclass(cls) and issubclass(cls, Op)}
    bases = {base for cls in there for base in cls.__mro__[1:]} - seen
    assert {cls.__name__ for cls in there - bases - seen} == set(), "nobody has watched these"
    assert untouched(machines) == set(EXCUSED), "declared, and never touched: it waits for what is none of its business"


# What an op declares too much: its class, which keys, what it adds to them.
SUPERFLUOUS = (
    (host.DecodeAttention, "writes", ("normed", "hidden")),
    (data.OffloadQkv, "writes", ("host_attention", "moe_out")),
    (host.AppendKv, "reads", ("host_q",)),
    (host.AppendKv, "writes", ("host_k",)),  # which it reads
)


def test_what_an_op_declares_and_never_touches_is_named(tiny, monkeypatch):
    for superfluous in SUPERFLUOUS:
        declare_too_much(monkeypatch, *superfluous)
    planted = {(cls.__name__, which, name) for cls, which, added in SUPERFLUOUS for name in added}
    assert planted <= untouched([watch(tiny, "moelens", planner=False)])


def declare_too_much(monkeypatch, cls: type, which: str, added: tuple[str, ...]) -> None:
    original = cls.__init__

    def greedy(self, *args, **kwargs):
        original(self, *args, **kwargs)
        setattr(self, which, (*getattr(self, which), *(getattr(self.acts, name) for name in added)))

    monkeypatch.setattr(cls, "__init__", greedy)


def forgets(run: str, cls: type, which: str, keys: Callable[[Op], tuple[Hashable, ...]]) -> tuple:
    """In this run the op `cls` leaves `keys(op)` out of what it declares."""
    return run, cls, which, keys


def reads(op):
    return op.reads


def writes(op):
    return op.writes


FORGOTTEN = {
    "experts do not read their weights": forgets("moelens", experts.Experts, "reads", lambda op: op.weight_keys),
    "attention in forgets its weights": forgets("moelens", compute.AttentionIn, "reads", lambda op: op.weight_keys),
    "attention in does not read the positions": forgets(
        "moelens", compute.AttentionIn, "reads", lambda op: (op.acts.tokens,)
    ),
    "attention in does not write keys": forgets("moelens", compute.AttentionIn, "writes", lambda op: (op.acts.k,)),
    "attention out does not read its weights": forgets(
        "moelens", compute.AttentionOut, "reads", lambda op: op.weight_keys
    ),
    "attention out does not read decode attention": forgets(
        "moelens", compute.AttentionOut, "reads", lambda op: ((op.acts.attention, "decode"),)
    ),
    "attention out does not read attention on the device": forgets(
        "deepspeed_zero", compute.AttentionOut, "reads", lambda op: ((op.acts.attention, "decode on device"),)
    ),
    "prefill attention is not declared": forgets("moelens", compute.PrefillAttention, "writes", writes),
    "prefill attention is declared as decode attention": forgets(
        "moelens", compute.PrefillAttention, "writes", lambda op: ((op.acts.attention, "prefill"),)
    ),
    "embeddings are written undeclared": forgets("moelens", compute.Embed, "writes", writes),
    "experts' sums are added unread": forgets("moelens", compute.Combine, "reads", lambda op: op.sums),
    "head does not read": forgets("moelens", compute.Head, "reads", reads),
    "weights are written undeclared": forgets("moelens", memory_ops.CopyWeights, "writes", writes),
    "weights are read undeclared": forgets("moelens", memory_ops.CopyWeights, "reads", reads),
    "a share is read undeclared": forgets("shares of layers", memory_ops.CopyShare, "reads", reads),
    "shares of others are gathered unread": forgets("shares of layers", memory_ops.AllGather, "reads", reads),
    "a whole layer is written undeclared": forgets("shares of layers", memory_ops.AllGather, "writes", writes),
    "a page is written undeclared": forgets("moelightning", memory_ops.CopyPage, "writes", writes),
    "a page is read undeclared": forgets("moelightning", memory_ops.CopyPage, "reads", reads),
    "a page is staged undeclared": forgets("moelightning", memory_ops.StagePage, "writes", writes),
    "a page is staged unread": forgets("moelightning", memory_ops.StagePage, "reads", reads),
    "tokens are uploaded undeclared": forgets("moelens", data.UploadTokens, "writes", writes),
    "block tables are uploaded undeclared": forgets(
        "deepspeed_zero", data.UploadTokens, "writes", lambda op: (op.acts.block_tables,)
    ),
    "offload does not read": forgets("moelens", data.OffloadQkv, "reads", reads),
    "offload does not write": forgets("moelens", data.OffloadQkv, "writes", writes),
    "attention is loaded undeclared": forgets("moelens", data.LoadAttention, "writes", writes),
    "attention is loaded unread": forgets("moelens", data.LoadAttention, "reads", reads),
    "the cache is loaded unread": forgets("flexgen", data.LoadKv, "reads", reads),
    "cached keys are loaded undeclared": forgets("flexgen", data.LoadKv, "writes", writes),
    "the cache is staged unread": forgets(TURNS, data.StageKv, "reads", reads),
    "the cache is staged undeclared": forgets(TURNS, data.StageKv, "writes", writes),
    "the staged cache is loaded unread": forgets(TURNS, data.LoadStagedKv, "reads", reads),
    "hidden states are loaded undeclared": forgets("hidden states on the host", data.LoadHidden, "writes", writes),
    "hidden states are loaded unread": forgets("hidden states on the host", data.LoadHidden, "reads", reads),
    "hidden states are offloaded undeclared": forgets(
        "hidden states on the host", data.OffloadHidden, "writes", writes
    ),
    "hidden states are offloaded unread": forgets("hidden states on the host", data.OffloadHidden, "reads", reads),
    "sampled tokens are fetched unread": forgets("moelens", data.FetchSampled, "reads", reads),
    "routing is fetched unread": forgets("moelens", data.FetchRouting, "reads", reads),
    "inputs of routers are fetched unread": forgets(
        "recording", data.FetchRouting, "reads", lambda op: (op.acts.normed,)
    ),
    "append to the cache is not declared": forgets("moelens", host.AppendKv, "writes", writes),
    "append does not read": forgets("moelens", host.AppendKv, "reads", reads),
    "decode attention does not read the cache": forgets(
        "moelens", host.DecodeAttention, "reads", lambda op: op.kv_keys
    ),
    "decode attention does not read queries": forgets(
        "moelens", host.DecodeAttention, "reads", lambda op: (op.acts.host_q,)
    ),
    "decode attention is not declared": forgets("moelens", host.DecodeAttention, "writes", writes),
    "attention over the loaded cache does not read it": forgets(
        "flexgen", compute.DecodeAttentionDevice, "reads", reads
    ),
    "attention over the loaded cache is not declared": forgets(
        "flexgen", compute.DecodeAttentionDevice, "writes", lambda op: ((op.acts.attention, "decode"),)
    ),
    "newest keys go to the loaded cache undeclared": forgets(
        "flexgen", compute.DecodeAttentionDevice, "writes", lambda op: (op.staging,)
    ),
    "append on the device is not declared": forgets("deepspeed_zero", paged.AppendKvOnDevice, "writes", writes),
    "append on the device does not read": forgets("deepspeed_zero", paged.AppendKvOnDevice, "reads", reads),
    "attention on the device does not read the cache": forgets(
        "deepspeed_zero", paged.DecodeAttentionPaged, "reads", lambda op: op.kv_keys
    ),
    "attention on the device is not declared": forgets("deepspeed_zero", paged.DecodeAttentionPaged, "writes", writes),
    "experts' input is offloaded unread": forgets("experts on the cpu", expert_rows.OffloadExpertInput, "reads", reads),
    "experts' input is offloaded undeclared": forgets(
        "experts on the cpu", expert_rows.OffloadExpertInput, "writes", writes
    ),
    "experts on the cpu do not read": forgets("experts on the cpu", experts.Experts, "reads", reads),
    "experts on the cpu write undeclared": forgets("experts on the cpu", experts.Experts, "writes", writes),
    "experts' sums are loaded unread": forgets("experts on the cpu", expert_rows.LoadExpertSums, "reads", reads),
    "experts' sums are loaded undeclared": forgets("experts on the cpu", expert_rows.LoadExpertSums, "writes", writes),
    "rows are accumulated unread": forgets(ACCUMULATED, expert_rows.OffloadRows, "reads", reads),
    "rows are accumulated undeclared": forgets(ACCUMULATED, expert_rows.OffloadRows, "writes", writes),
    "rows are gathered unread": forgets(ACCUMULATED, expert_rows.Gather, "reads", reads),
    "rows are gathered undeclared": forgets(ACCUMULATED, expert_rows.Gather, "writes", writes),
    "gathered rows are loaded unread": forgets(ACCUMULATED, expert_rows.LoadRows, "reads", reads),
    "gathered rows are loaded undeclared": forgets(ACCUMULATED, expert_rows.LoadRows, "writes", writes),
    "an expert does not read its rows or weights": forgets(ACCUMULATED, experts.Expert, "reads", reads),
    "an expert's results are not declared": forgets(ACCUMULATED, experts.Expert, "writes", writes),
    "an expert's results are offloaded unread": forgets(ACCUMULATED, expert_rows.OffloadResults, "reads", reads),
    "an expert's results are offloaded undeclared": forgets(ACCUMULATED, expert_rows.OffloadResults, "writes", writes),
    "an expert's results are added unread": forgets(ACCUMULATED, expert_rows.AddWeighted, "reads", reads),
    "an expert's results are added undeclared": forgets(ACCUMULATED, expert_rows.AddWeighted, "writes", writes),
    "sums are cleared undeclared": forgets(ACCUMULATED, expert_rows.ClearSums, "writes", writes),
    "a route is fetched without its weights": forgets(
        ACCUMULATED, data.FetchRoute, "reads", lambda op: (op.acts.expert_weights,)
    ),
    "experts are predicted undeclared": forgets(BY_LOT, predictions.PredictExperts, "writes", writes),
    "experts are predicted from what is not read": forgets(BY_LOT, predictions.PredictExperts, "reads", reads),
    "predictions are fetched unread": forgets(BY_LOT, predictions.FetchPrediction, "reads", reads),
    "hidden states are sent unread": forgets("stages", collective.SendHidden, "reads", reads),
    "hidden states are sent undeclared": forgets("stages", collective.SendHidden, "writes", writes),
    "a member does not read the partial sums of others": forgets(
        "tensor parallel", collective.AllReduce, "reads", lambda op: op.partials[1:]
    ),
    "a member does not read the partial sum of the first": forgets(
        "tensor parallel", collective.AllReduce, "reads", lambda op: op.partials[:1]
    ),
    "the sum is not declared": forgets("tensor parallel", collective.AllReduce, "writes", writes),
    "a partial sum is not declared": forgets("tensor parallel", collective.OutputProjection, "writes", writes),
    "the projection does not read its weights": forgets(
        "tensor parallel", collective.OutputProjection, "reads", lambda op: op.weight_keys
    ),
    "what follows does not write the next partial sum": forgets(
        "tensor parallel", collective.AfterAttention, "writes", lambda op: (op.acts.moe_out,)
    ),
}


@pytest.mark.parametrize(("run", "cls", "which", "keys"), FORGOTTEN.values(), ids=FORGOTTEN)
def test_what_an_op_does_not_declare_is_named(tiny, monkeypatch, run, cls, which, keys):
    original = cls.__init__

    def forgetful(self, *args, **kwargs):
        original(self, *args, **kwargs)
        if type(self) is cls:
            left_out = keys(self)
            setattr(self, which, tuple(key for key in getattr(self, which) if key not in left_out))

    monkeypatch.setattr(cls, "__init__", forgetful)
    with pytest.raises(MachineError, match=rf"Undeclared: {cls.__name__} .* and does not declare it"):
        watch(tiny, run)


def wrong_layer(root, layer, partition):
    return (root, 0, partition)


def wrong_partition(root, layer, partition):
    return (root, layer, 0)


@pytest.mark.parametrize("wrong", [wrong_layer, wrong_partition])
@pytest.mark.parametrize("run", ["experts on the cpu", "a share of the cache on the device"])
def test_keys_of_the_cache_stand_for_their_layer_and_partition(tiny, monkeypatch, run, wrong):
    monkeypatch.setattr(KVCache, "region", lambda self, *where: wrong(self._root, *where))
    with pytest.raises(MachineError, match="Undeclared: .*kv cache/(k|v) [0-9]"):
        watch(tiny, run)


def copies_beside_appends(micro_batch_size: int) -> set[str]:
    """Of FlexGen, simulated: whose cached keys come over the link while new ones are appended, seen from the latter."""
    plan = make_plan(
        composed(
            *("machine=simulated", "model=mixtral-8x7b", "model.spec.num_layers=6", "hardware=t4", "kv_cache_gb=20"),
            *("hardware.ram_gb=416", "hardware.pinned_memory_gb=416", "dataset.num_requests=40"),
            *("dataset.max_new_tokens=4", "strategy=flexgen", "strategy.policy.batch_size=40"),
            f"strategy.policy.micro_batch_size={micro_batch_size}",
            *("strategy.policy.resident_kv=0", "strategy.policy.resident_weights=0"),
        )
    )
    appends, loads = ([s for s in plan.machine.spans if s.kind == kind] for kind in ("append kv", "load kv"))
    together = [(a, b) for a in appends for b in loads if a.start_s < b.end_s and b.start_s < a.end_s]
    found = {"another micro-batch" for a, b in together if a.micro_batch != b.micro_batch and a.layer == b.layer}
    return found | {"another layer" for a, b in together if a.layer != b.layer}


@pytest.mark.parametrize(
    ("micro_batch_size", "beside", "region"),
    [
        (20, "another micro-batch", lambda self, layer, partition: (self._root, layer, 0)),
        (40, "another layer", lambda self, layer, partition: (self._root, 0, partition)),
    ],
)
def test_keys_of_the_cache_hold_nothing_up(monkeypatch, micro_batch_size, beside, region):
    """Neither other micro-batches nor other layers; keys that do not tell them apart show in the trace."""
    assert beside in copies_beside_appends(micro_batch_size)
    monkeypatch.setattr(KVCache, "region", region)
    assert beside not in copies_beside_appends(micro_batch_size)
