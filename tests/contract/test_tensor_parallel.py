"""Several GPUs that share every layer: the same tokens, each GPU with its own share, and sums that all agree on."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
import yaml

from harness.engine.engine import Engine
from harness.engine.gpus.collectives import AllReduce
from harness.engine.kv_placement import place_kv
from harness.machine.base import GPU, HOST_KINDS, Lane, LaneKind, MachineError
from harness.machine.shuffled import ShuffledMachine
from harness.machine.threads.context import HostContext
from harness.memory.tiers import device_tier
from tests.conftest import ROOT
from tests.contract.running import check_tokens, emulated, engine_on, requests, run_to_end, shuffled, strategy_of

pytestmark = pytest.mark.usefixtures("short_probes")

ONDEMAND = yaml.safe_load((ROOT / "conf/strategy/ondemand.yaml").read_text())


def engine_of(machine, tiny, num_gpus: int, *, count: int = 8, seed: int = 0, **longest: int) -> Engine:
    work = requests(count, vocab_size=tiny.spec.vocab_size, seed=seed, **longest)
    return engine_on(machine, tiny, work, kv_blocks=40, num_gpus=num_gpus)


def assert_right(tiny, engine) -> None:
    report = check_tokens(tiny, engine.sequences)
    assert report.checked == len(engine.sequences)
    assert report.ok, report.first_mismatch


@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("num_gpus", [2, 4])
@pytest.mark.parametrize("seed", range(3))
def test_shuffled_machine(tiny, num_gpus, prefetch, seed):
    """Four GPUs share two KV heads: each head is then kept by two."""
    engine = engine_of(shuffled(seed, num_gpus=num_gpus), tiny, num_gpus)
    run_to_end(engine, lambda e: strategy_of(e, ONDEMAND | {"prefetch": prefetch}))
    assert_right(tiny, engine)


@pytest.mark.parametrize("num_gpus", [2, 4])
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("host_blocks", [0, 25])
def test_each_gpu_keeps_its_heads_of_a_cache_on_the_device(tiny, num_gpus, seed, host_blocks):
    engine = engine_of(shuffled(seed, num_gpus=num_gpus), tiny, num_gpus, longest=30)
    block_bytes = 4 * engine.spec.kv_bytes_per_token
    place_kv(engine, device_bytes=25 * block_bytes, host_bytes=num_gpus * host_blocks * block_bytes)
    assert engine.kv.allocator.num_blocks == 25 + host_blocks
    run_to_end(engine, lambda e: strategy_of(e, ONDEMAND | {"prefetch": True}))
    assert_right(tiny, engine)
    held = [engine.machine.tiers[device_tier(rank)].holders()["kv cache"] for rank in range(num_gpus)]
    assert held == [25 * block_bytes] * num_gpus


@pytest.mark.parametrize(("num_gpus", "prefetch"), [(2, False), (2, True), (4, True)])
def test_emulated_machine(tiny, num_gpus, prefetch):
    """And each GPU brings its own share of the weights over its own link."""
    engine = engine_of(emulated(num_gpus=num_gpus), tiny, num_gpus)
    passes = run_to_end(engine, lambda e: strategy_of(e, ONDEMAND | {"prefetch": prefetch}))
    assert_right(tiny, engine)
    moved: dict[int, float] = defaultdict(float)
    for span in engine.machine.spans:
        if span.kind == "weights":
            assert span.lane.kind is LaneKind.H2D
            moved[span.lane.rank] += span.work.link_bytes
    assert set(moved) == set(range(num_gpus))
    whole_bytes = engine_on(shuffled(0), tiny, [], kv_blocks=1).store.layer_bytes * tiny.spec.num_layers
    for nbytes in moved.values():
        a_pass = nbytes / len(passes)
        assert whole_bytes / num_gpus < a_pass < 1.2 * whole_bytes / num_gpus  # norms and routers are on all of them
    host_lanes = {span.lane for span in engine.machine.spans if span.lane.kind in HOST_KINDS}
    assert host_lanes == {Lane(LaneKind.CPU)}


def test_only_collectives_touch_the_memory_of_other_gpus(tiny, monkeypatch):
    running, touched = [], defaultdict(set)
    run_packet, tensor = ShuffledMachine._run_packet, HostContext.tensor

    def noted_packet(self, ticket):
        running.append(ticket)
        return run_packet(self, ticket)

    def noted_tensor(self, buffer, shape, dtype):
        if buffer.tier.startswith("device"):
            touched[running[-1].op.kind, self.lane.rank].add(buffer.tier)
        return tensor(self, buffer, shape, dtype)

    monkeypatch.setattr(ShuffledMachine, "_run_packet", noted_packet)
    monkeypatch.setattr(HostContext, "tensor", noted_tensor)
    engine = engine_of(shuffled(0, num_gpus=2), tiny, 2)
    run_to_end(engine, lambda e: strategy_of(e, ONDEMAND | {"prefetch": True}))
    assert touched["all-reduce", 0] == touched["all-reduce", 1] == {"device", "device1"}
    others = {where for where in touched if where[0] != "all-reduce"}
    assert {kind for kind, rank in others if rank == 1} > {"experts", "attention in", "offload qkv"}
    for kind, rank in others:
        assert touched[kind, rank] == {device_tier(rank)}, kind


@pytest.mark.parametrize("num_gpus", [2, 4])
def test_all_gpus_hold_the_same_bits(tiny, num_gpus):
    """Else their routers could disagree. The residual stream after the last layer, and the last choice of experts."""
    machine = shuffled(1, num_gpus=num_gpus)
    engine = engine_of(machine, tiny, num_gpus, count=3)
    at_the_end: dict[str, list[torch.Tensor]] = {}

    def build(engine):
        strategy = strategy_of(engine, ONDEMAND)
        acts, finish = strategy.pipeline._acts, strategy.pipeline.finish

        def keep_and_finish() -> None:
            machine.drain()
            for name, nbytes in (("hidden", 4 * tiny.spec.hidden_dim), ("expert_ids", 8 * tiny.spec.experts_per_token)):
                at_the_end[name] = [machine._arenas.bytes_of(getattr(each, name))[:nbytes].clone() for each in acts]
            finish()

        strategy.pipeline.finish = keep_and_finish
        return strategy

    run_to_end(engine, build)
    assert at_the_end.keys() == {"hidden", "expert_ids"}
    for first, *others in at_the_end.values():
        assert not first.eq(0xFF).all(), "never written"
        assert all(torch.equal(first, other) for other in others)


def outcome(tiny, seed: int) -> str:
    engine = engine_of(shuffled(seed, num_gpus=2), tiny, 2, count=5, seed=5)
    try:  # small packets: weights that nobody waits for come late
        run_to_end(engine, lambda e: strategy_of(e, ONDEMAND | {"prefetch": True, "packet_mb": 0.001}))
        return "right" if check_tokens(tiny, engine.sequences).ok else "wrong tokens"
    except (MachineError, AssertionError):
        return "error"


def lost_share(self, ctx, packet):
    """A GPU's partial sum is left out."""
    self.partials = self.partials[:1]
    return ALL_REDUCE(self, ctx, packet)


def own_twice(self, ctx, packet):
    self.partials = (self.partials[1], self.partials[1])
    return ALL_REDUCE(self, ctx, packet)


ALL_REDUCE = AllReduce.run


@pytest.mark.parametrize("run", [lost_share, own_twice])
def test_a_wrong_sum_is_caught(tiny, monkeypatch, run):
    monkeypatch.setattr(AllReduce, "run", run)
    assert outcome(tiny, 0) == "wrong tokens"


def test_members_of_a_collective_are_in_one_order_on_all_lanes(tiny):
    engine = engine_of(emulated(num_gpus=2), tiny, 2)
    run_to_end(engine, lambda e: strategy_of(e, ONDEMAND | {"prefetch": True}))
    by_lane = defaultdict(list)
    for span in sorted(engine.machine.spans, key=lambda s: s.ticket):
        if span.kind == "all-reduce":
            by_lane[span.lane].append((span.layer, span.ticket))
    first, second = by_lane[GPU], by_lane[Lane(LaneKind.GPU, 1)]
    assert [layer for layer, _ in first] == [layer for layer, _ in second] and len(first) > 8
    assert all(b == a + 1 for (_, a), (_, b) in zip(first, second, strict=True))
