"""KV cache in device memory, whole or a share of it: the same tokens, and nothing of it crosses the link."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import yaml

from harness.config import ConfigError
from harness.engine.kv_placement import place_kv
from harness.engine.ops.paged import DecodeAttentionPaged
from harness.engine.strategy import Strategy
from harness.machine.base import LaneKind
from harness.machine.shuffled import ShuffledMachine
from harness.settings import load_strategy
from strategies.common.sequential import SequentialPipeline
from strategies.common.static_batches import StaticBatches
from strategies.deepspeed_zero.planner import plan_batch
from tests.conftest import ROOT
from tests.contract.running import (
    CAPACITIES_BYTES,
    check_tokens,
    emulated,
    engine_on,
    requests,
    run_to_end,
    shuffled,
    strategy_of,
)

CACHE_OPS = {"offload qkv", "append kv", "load kv", "decode attention", "load attention"}


def yaml_of(name: str) -> dict:
    return yaml.safe_load((ROOT / f"conf/strategy/{name}.yaml").read_text())


def kinds_run(engine) -> set[str]:
    return {span.kind for span in engine.machine.spans}


def assert_right(tiny, engine) -> None:
    report = check_tokens(tiny, engine.sequences)
    assert report.checked == len(engine.sequences)
    assert report.ok, report.first_mismatch


def test_nothing_of_the_cache_crosses_the_link(tiny):
    engine = engine_on(emulated(), tiny, requests(8, vocab_size=tiny.spec.vocab_size), kv_blocks=40)
    run_to_end(engine, lambda e: strategy_of(e, yaml_of("deepspeed_zero")))
    assert_right(tiny, engine)
    assert not kinds_run(engine) & CACHE_OPS
    assert not [s for s in engine.machine.spans if s.lane.kind is LaneKind.CPU and s.kind != "poison"]
    assert "kv cache" not in engine.machine.tiers["pinned"].holders()
    assert engine.machine.tiers["device"].holders()["kv cache"] > 0


def test_device_memory_bounds_the_batch_and_is_used_up(tiny):
    """Ten times the requests that fit; what is left over is less than one more sequence takes."""
    work = requests(40, vocab_size=tiny.spec.vocab_size)
    capacities = CAPACITIES_BYTES | {"device": 2_500_000}
    engine = engine_on(ShuffledMachine(capacities_bytes=capacities, seed=1), tiny, work, kv_blocks=40)
    built: list[Strategy] = []
    passes = run_to_end(engine, lambda e: built.append(strategy_of(e, yaml_of("deepspeed_zero"))) or built[0])
    assert_right(tiny, engine)
    plan, device = built[0].plan, engine.machine.tiers["device"]
    assert 1 < plan["batch_size"] == plan["batch_size_limit"] < 20
    assert device.free_bytes * plan["batch_size"] < 2 * device.used_bytes
    assert max(p.num_sequences for p in passes) == plan["batch_size"]
    assert all(not (p.num_prefill_tokens and p.num_decode_tokens) for p in passes)


def test_a_batch_that_does_not_fit_is_a_mistake_and_so_is_a_device_that_is_too_small(tiny):
    work = requests(4, vocab_size=tiny.spec.vocab_size)
    engine = engine_on(shuffled(0), tiny, work, kv_blocks=40)
    device, config = engine.machine.tiers["device"], load_strategy(yaml_of("deepspeed_zero")).config
    room_bytes = device.free_bytes - 2 * engine.store.layer_bytes
    sequence_bytes = room_bytes // plan_batch(config, engine).batch_size_limit
    device.reserve("another", room_bytes - 4 * sequence_bytes)  # less what is lost to alignment: room for three
    with pytest.raises(ConfigError, match=r"^strategy.batch_size: must be at most 3, which fill the device"):
        strategy_of(engine, yaml_of("deepspeed_zero") | {"batch_size": 1_000_000})
    device.reserve("one more", device.free_bytes - 2 * engine.store.layer_bytes)
    with pytest.raises(ConfigError, match=r"^hardware.device_memory_gb: .*the smallest request"):
        strategy_of(engine, yaml_of("deepspeed_zero"))


def static(engine, *, prefetch: bool) -> Strategy:
    scheduler = StaticBatches(engine.sequences, engine.kv.allocator, max_pass_tokens=400)
    return Strategy(
        scheduler=scheduler,
        pipeline=SequentialPipeline(engine, max_tokens=400, packet_bytes=50_000, prefetch=prefetch),
    )


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("device_blocks", [9, 20, 34])
def test_a_share_on_the_device(tiny, seed, device_blocks):
    """Micro-batches then have sequences of both kinds."""
    work = requests(12, vocab_size=tiny.spec.vocab_size, longest=30)
    engine = engine_on(shuffled(seed), tiny, work, kv_blocks=40)
    block_bytes = 4 * tiny.spec.kv_bytes_per_token
    place_kv(engine, host_bytes=(40 - device_blocks) * block_bytes, device_bytes=device_blocks * block_bytes)
    run_to_end(engine, lambda e: static(e, prefetch=bool(seed % 2)))
    assert_right(tiny, engine)


@pytest.mark.parametrize("seed", range(3))
def test_a_share_on_the_device_in_the_overlapping_pipeline(tiny, seed):
    work = requests(12, vocab_size=tiny.spec.vocab_size, longest=30)
    engine = engine_on(shuffled(seed), tiny, work, kv_blocks=60)
    block_bytes = 4 * tiny.spec.kv_bytes_per_token
    place_kv(engine, host_bytes=30 * block_bytes, device_bytes=30 * block_bytes)
    values = yaml_of("moelens") | {"overlap_prefill_decode": False, "n_real": 60, "profile_repeats": 1}
    run_to_end(engine, lambda e: strategy_of(e, values))
    assert_right(tiny, engine)


def test_both_sides_are_used_on_the_emulated_machine(tiny):
    engine = engine_on(emulated(), tiny, requests(8, vocab_size=tiny.spec.vocab_size), kv_blocks=60)
    block_bytes = 4 * tiny.spec.kv_bytes_per_token
    place_kv(engine, host_bytes=30 * block_bytes, device_bytes=30 * block_bytes)
    run_to_end(engine, lambda e: static(e, prefetch=True))
    assert_right(tiny, engine)
    assert kinds_run(engine) >= {"append kv", "decode attention", "append kv (device)", "decode attention (paged)"}


@pytest.mark.parametrize("window", [None, 5])
def test_the_kernel_and_the_familys_own_math_agree(tiny, monkeypatch, window):
    """The family's is what runs where device memory is not the host's."""
    compared = []

    def both(self, ctx, q, cached, out):
        self.spec = replace(self.spec, sliding_window=window)
        self.by_family(ctx, q, cached, out)
        again = torch.empty_like(out)
        original(self, ctx, q, cached, again)
        torch.testing.assert_close(out, again, rtol=1e-5, atol=1e-5)
        compared.append(len(out))

    original = DecodeAttentionPaged.by_kernel
    monkeypatch.setattr(DecodeAttentionPaged, "by_kernel", both)
    engine = engine_on(shuffled(0), tiny, requests(6, vocab_size=tiny.spec.vocab_size), kv_blocks=60)
    run_to_end(engine, lambda e: strategy_of(e, yaml_of("deepspeed_zero")))
    assert sum(compared) > 20
