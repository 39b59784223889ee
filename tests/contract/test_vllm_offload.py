"""vLLM with offloaded weights: what stays on the device is never moved again, and a full KV cache preempts."""

from __future__ import annotations

from collections import Counter

import pytest
import yaml

from harness.config import ConfigError
from harness.engine.engine import Engine
from harness.engine.strategy import Strategy
from harness.machine.base import GPU, LaneKind
from harness.memory.tiers import device_tier
from tests.conftest import ROOT
from tests.contract.running import CAPACITIES_BYTES, check_tokens, emulated, engine_on, requests, run_to_end, shuffled
from tests.contract.running import strategy_of as built

YAML = yaml.safe_load((ROOT / "conf/strategy/vllm_offload.yaml").read_text())
TIGHT = {"num_gpu_blocks_override": 24, "cpu_offload_gb": 1.0}  # of 4 tokens; a request needs up to 15
PREFETCH = [False, True]


def engine_of(machine, tiny, *, count: int = 12, new: int = 30, longest: int = 30, num_gpus: int = 1) -> Engine:
    work = requests(count, vocab_size=tiny.spec.vocab_size, longest=longest, max_new_tokens=new)
    return engine_on(machine, tiny, work, kv_blocks=8, num_gpus=num_gpus)


def run(tiny, engine: Engine, **change) -> tuple[Strategy, list, list]:
    """Run to the end, check the tokens, and return the strategy, its passes and what the scheduler planned."""
    made, plans = [], []

    def build(on: Engine) -> Strategy:
        made.append(strategy := built(on, YAML | change))
        schedule = strategy.scheduler.next_pass

        def noting():
            if (plan := schedule()) is not None:
                lengths = [(s, s.num_tokens, len(s.generated)) for s in plan.prefill]
                plans.append((plan, lengths, len(plan.decode)))
            return plan

        strategy.scheduler.next_pass = noting
        return strategy

    passes = run_to_end(engine, build)
    report = check_tokens(tiny, engine.sequences)
    assert report.checked == len(engine.sequences)
    assert report.ok, report.first_mismatch
    return made[0], passes, plans


def moved_bytes(engine: Engine, rank: int = 0) -> int:
    spans = [s for s in engine.machine.spans if s.kind == "weights" and s.lane.rank == rank]
    assert all(span.lane.kind is LaneKind.H2D for span in spans)
    return round(sum(span.work.link_bytes for span in spans))


def layers_bytes(engine: Engine) -> int:
    return sum(part.layout.nbytes for layer in engine.store.layers for part in layer.values())


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("prefetch", PREFETCH)
def test_preempted_sequences_are_prefilled_again_with_what_they_generated(tiny, seed, prefetch):
    engine = engine_of(shuffled(seed), tiny, count=8)
    _, passes, plans = run(tiny, engine, **TIGHT, prefetch=prefetch)
    num_preemptions = sum(p.num_preemptions for p in passes)
    assert num_preemptions > 2
    assert max(p.kv_blocks_used for p in passes) <= passes[0].kv_blocks_total == 24
    again = [(s, tokens, generated) for _, lengths, _ in plans for s, tokens, generated in lengths if generated]
    assert len(again) == num_preemptions, "each preempted sequence comes back once"
    assert all(tokens == s.prompt_len + generated for s, tokens, generated in again)
    prefilled = sum(tokens for _, lengths, _ in plans for _, tokens, _ in lengths)
    assert sum(p.num_prefill_tokens for p in passes) == prefilled


def test_prompts_join_decoding_sequences_only_under_continuous_batching(tiny):
    for continuous in (True, False):
        engine = engine_of(shuffled(1), tiny)
        _, passes, plans = run(tiny, engine, **TIGHT, continuous_batching=continuous)
        mixed = [plan for plan, lengths, num_decode in plans if lengths and num_decode]
        assert bool(mixed) == continuous
        assert continuous or not sum(p.num_preemptions for p in passes)


@pytest.mark.parametrize("continuous", [True, False])
def test_no_more_sequences_run_than_are_allowed(tiny, continuous):
    engine = engine_of(shuffled(2), tiny, new=6)
    change = {"max_num_seqs": 3, "continuous_batching": continuous}
    _, passes, _ = run(tiny, engine, **change)
    assert max(p.num_sequences for p in passes) == 3


def test_a_pass_has_no_more_tokens_than_are_allowed(tiny):
    """A prompt is never cut: one that exceeds the limit is its pass's only prompt."""
    engine = engine_of(shuffled(3), tiny, new=6)
    longest = max(s.max_tokens for s in engine.sequences)
    _, passes, plans = run(tiny, engine, max_num_batched_tokens=10)
    sizes = [p.num_prefill_tokens + p.num_decode_tokens for p in passes]
    assert max(sizes) <= longest
    assert {len(lengths) for size, (_, lengths, _) in zip(sizes, plans, strict=True) if size > 10} == {1}
    assert max(num_decode for _, _, num_decode in plans) <= 10
    engine = engine_of(shuffled(3), tiny, new=6)
    _, passes, _ = run(tiny, engine, max_num_batched_tokens=50)
    assert longest < 50
    assert 40 < max(p.num_prefill_tokens + p.num_decode_tokens for p in passes) <= 50


@pytest.mark.parametrize("offload_share", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("prefetch", PREFETCH)
def test_what_is_resident_is_never_moved_again(tiny, offload_share, prefetch):
    """Without prefetch each pass moves the offloaded bytes; with it the last passes' successors come on top."""
    engine = engine_of(emulated(h2d_gb_s=2.0), tiny, count=6, new=4)
    whole = layers_bytes(engine)
    change = {"cpu_offload_gb": offload_share * whole / 1e9, "prefetch": prefetch}
    strategy, passes, _ = run(tiny, engine, **change)
    offloaded = round(strategy.plan["cpu_offload_gb"] * 1e9)
    assert offload_share * whole <= offloaded + 1 < offload_share * whole + max(engine.store.slot_bytes.values())
    assert round(strategy.plan["resident_weights_gb"] * 1e9) == whole - offloaded
    assert engine.machine.tiers["device"].holders().get("resident weights", 0) == whole - offloaded
    exact = len(passes) * offloaded
    ahead = 2 * engine.store.layer_bytes if prefetch and offloaded else 0
    assert exact <= moved_bytes(engine) <= exact + ahead
    assert {s.layer for s in engine.machine.spans if s.kind == "weights"} <= offloaded_layers(engine, offloaded)


def offloaded_layers(engine: Engine, nbytes: int) -> set[int]:
    """Return the layers in which the first so many bytes of the model lie."""
    found: set[int] = set()
    for layer, parts in enumerate(engine.store.layers):
        if nbytes > 0:
            found.add(layer)
        nbytes -= sum(part.layout.nbytes for part in parts.values())
    return found


@pytest.mark.parametrize("prefetch", PREFETCH)
def test_weights_come_while_others_are_used_only_with_prefetch(tiny, prefetch):
    engine = engine_of(emulated(h2d_gb_s=0.05), tiny, count=6, new=4)
    run(tiny, engine, cpu_offload_gb=1.0, prefetch=prefetch)
    weights = [s for s in engine.machine.spans if s.kind == "weights"]
    computed = [s for s in engine.machine.spans if s.lane == GPU and "poison" not in s.kind]
    overlapping = [1 for w in weights for c in computed if w.start_s < c.end_s and c.start_s < w.end_s]
    assert bool(overlapping) == prefetch


@pytest.mark.parametrize("share", [0.6, 1.0])
@pytest.mark.parametrize("prefetch", PREFETCH)
def test_the_allowed_share_of_the_device_is_used_up(tiny, share, prefetch):
    """Weights offloaded as asked, a pass as long as asked, and KV blocks in all that is left."""
    engine = engine_of(shuffled(0), tiny, new=4)
    change = {"gpu_memory_utilization": share, "prefetch": prefetch, "cpu_offload_gb": 0.0001}
    strategy, _, _ = run(tiny, engine, **change)
    device, block_bytes = engine.machine.tiers["device"], 4 * tiny.spec.kv_bytes_per_token + 4
    allowed = share * CAPACITIES_BYTES["device"]
    assert allowed - (1 << 16) - block_bytes < device.peak_bytes <= allowed
    assert device.holders()["kv cache"] == strategy.plan["kv_blocks"] * (block_bytes - 4)
    assert "kv cache" not in engine.machine.tiers["pinned"].holders()


@pytest.mark.parametrize("num_gpus", [2, 4])
def test_gpus_share_every_layer(tiny, num_gpus):
    """Each keeps, and moves, its share of the same parts."""
    engine = engine_of(shuffled(num_gpus, num_gpus=num_gpus), tiny, num_gpus=num_gpus)
    change = TIGHT | {"cpu_offload_gb": 0.5 * layers_bytes(engine) / 1e9}
    strategy, passes, _ = run(tiny, engine, **change)
    assert sum(p.num_preemptions for p in passes) > 2
    kept = [engine.machine.tiers[device_tier(rank)].holders()["resident weights"] for rank in range(num_gpus)]
    assert len(set(kept)) == 1 and kept[0] == round(strategy.plan["resident_weights_gb"] * 1e9)


def test_what_can_never_fit_is_rejected_beside_what_does(tiny):
    engine = engine_of(shuffled(0), tiny, new=4)
    longest = max(engine.sequences, key=lambda s: s.max_tokens)
    num_blocks = -(-longest.max_tokens // 4) - 1
    run_to_end(engine, lambda e: built(e, YAML | {"num_gpu_blocks_override": num_blocks}))
    rejected = Counter(bool(s.reject_reason) for s in engine.sequences)
    assert 0 < rejected[True] < len(engine.sequences)
    assert longest.reject_reason == f"needs {num_blocks + 1} KV blocks, the cache has {num_blocks}"
    assert check_tokens(tiny, engine.sequences).ok


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_num_seqs": 0}, "^strategy.max_num_seqs: must be > 0, got 0$"),
        ({"max_num_batched_tokens": -1}, "^strategy.max_num_batched_tokens: must be > 0, got -1$"),
        ({"gpu_memory_utilization": 1.1}, "^strategy.gpu_memory_utilization: must be > 0 and at most 1, got 1.1$"),
        ({"gpu_memory_utilization": 0.0}, "^strategy.gpu_memory_utilization: must be > 0 and at most 1, got 0$"),
        ({"cpu_offload_gb": -1.0}, "^strategy.cpu_offload_gb: must be >= 0 or null, got -1.0$"),
        ({"num_gpu_blocks_override": 0}, "^strategy.num_gpu_blocks_override: must be > 0 or null, got 0$"),
        ({"num_gpu_blocks_override": 10**6}, r"^strategy.num_gpu_blocks_override: must be at most \d+, which fill"),
        ({"gpu_memory_utilization": 0.001}, r"^hardware.device_memory_gb: 0.024 GB is too small: 0.\d+ GB are needed"),
    ],
)
def test_a_mistake_names_its_field(tiny, change, message):
    engine = engine_of(shuffled(0), tiny)
    with pytest.raises(ConfigError, match=message):
        built(engine, YAML | change)
