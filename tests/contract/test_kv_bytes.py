"""What is cached of a token takes as many bytes as config.json says, in either memory and over the links, by family."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from harness.engine.engine import Engine
from harness.engine.ops.data import LoadKv, OffloadQkv
from harness.engine.strategy import Strategy
from harness.machine.base import Machine, Op
from harness.machine.shuffled import ShuffledMachine
from harness.memory.kv_cache import KVCache
from harness.model import families
from harness.model.spec import ModelSpec
from tests.contract.running import CAPACITIES_BYTES, engine_on, requests, run_to_end, strategy_of
from tests.contract.test_strategies import YAMLS
from tests.tiny_families import VARIANTS, VOCAB_SIZE, tiny_family

pytestmark = pytest.mark.usefixtures("short_probes")

BLOCK_SIZE, NUM_BLOCKS = 4, 60
ON_HOST = {"policy": {"resident_kv": 0.0}}
PLACES = {  # strategy, what differs from its defaults, whether the device attends, whether it has the cache
    "attended on the host": ("flexgen_c", ON_HOST, False, False),
    "staged on the device": ("flexgen", ON_HOST, True, False),
    "on the device": ("deepspeed_zero", {}, True, True),
}


class CountingMachine(ShuffledMachine):
    """Counts the bytes that the ops of each kind bring over a link."""

    def __init__(self) -> None:
        super().__init__(capacities_bytes=CAPACITIES_BYTES, seed=1)
        self.moved_bytes: Counter[str] = Counter()

    def _execute(self, op: Op, ctx: Any, packet: int) -> Any:
        machine = self

        class Counting:
            def __getattr__(self, name: str) -> Any:
                return getattr(ctx, name)

            def move(self, dst: Any, src: Any) -> None:
                machine.moved_bytes[op.kind] += dst.numel() * dst.element_size()
                ctx.move(dst, src)

            def gather(self, dst: Any, *of: Any) -> None:
                machine.moved_bytes[op.kind] += dst.numel() * dst.element_size()
                ctx.gather(dst, *of)

        return super()._execute(op, Counting(), packet)


def cached_numbers(entries: Mapping[str, Any]) -> int:
    """Count by hand what a layer caches of a token."""
    if "kv_lora_rank" in entries:
        return int(entries["kv_lora_rank"] + entries["qk_rope_head_dim"])
    heads = entries.get("num_attention_heads", entries.get("n_heads"))
    kv_heads = entries.get("num_key_value_heads") or entries["attn_config"]["kv_n_heads"]
    hidden = entries.get("hidden_size", entries.get("d_model"))
    return int(2 * kv_heads * entries.get("head_dim", hidden // heads))


def query_numbers(entries: Mapping[str, Any]) -> int:
    """Count by hand what attention over the cache takes of a token's queries."""
    heads = entries.get("num_attention_heads", entries.get("n_heads"))
    if "kv_lora_rank" in entries:
        return int(heads * (entries["kv_lora_rank"] + entries["qk_rope_head_dim"]))
    return int(heads * entries.get("head_dim", entries.get("hidden_size", entries.get("d_model")) // heads))


def contexts(engine: Engine) -> Iterator[tuple[int, list[int]]]:
    """Yield the tokens of each sequence that go through the model, and the contexts that it decodes over."""
    for sequence in engine.sequences:
        prompt, new = sequence.prompt_len, sequence.request.max_new_tokens
        yield prompt + new - 1, list(range(prompt + 1, prompt + new))


def measured(family: str, place: str) -> dict[str, tuple[int, int]]:
    """Run the strategy of a place; return by measurement what was found and what config.json says."""
    entries, checkpoint = VARIANTS[family], tiny_family(family)
    strategy, change, is_attended_there, is_on_device = PLACES[place]
    token_bytes, num_layers = cached_numbers(entries) * 4, checkpoint.spec.num_layers
    work = requests(4, vocab_size=VOCAB_SIZE, longest=20, max_new_tokens=5, seed=2)
    values, machine = YAMLS[strategy] | change, CountingMachine()
    engine = engine_on(machine, checkpoint, work, kv_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, values=values)
    found = {"spec": (checkpoint.spec.kv_bytes_per_token_layer, token_bytes)}

    def build(engine: Engine) -> Strategy:
        strategy = strategy_of(engine, values)
        [cache] = [each for each in (engine.kv.host, engine.kv.device) if each is not None]
        assert cache.on_device is is_on_device
        cache_bytes = num_layers * cache.allocator.num_blocks * BLOCK_SIZE * token_bytes
        found["buffers"] = (sum(buffer.nbytes for layer in cache.layers for buffer in layer), cache_bytes)
        for tier, has_it in (("device", is_on_device), ("pinned", not is_on_device)):
            found[tier] = (machine.tiers[tier].holders().get("kv cache", 0), cache_bytes * has_it)
        machine.drain()
        machine.moved_bytes.clear()  # what the planner has tried out does not count
        return strategy

    run_to_end(engine, build)
    new, read = zip(*contexts(engine), strict=True)
    num_queries = 0 if is_attended_there else sum(map(len, read))
    offloaded = num_layers * (sum(new) * token_bytes + num_queries * query_numbers(entries) * 4)
    loaded = num_layers * sum(map(sum, read)) * token_bytes
    found["offload qkv"] = (machine.moved_bytes["offload qkv"], 0 if is_on_device else offloaded)
    found["load kv"] = (machine.moved_bytes["load kv"], loaded if is_attended_there and not is_on_device else 0)
    return found


def wrong_ones(family: str, place: str) -> dict[str, tuple[int, int]]:
    """Return the measurements whose two numbers differ."""
    return {name: pair for name, pair in measured(family, place).items() if pair[0] != pair[1]}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("family", families.available())
def test_bytes_of_the_cache(family, place):
    assert wrong_ones(family, place) == {}


@pytest.mark.parametrize("place", PLACES)
def test_room_for_a_row_of_each_head_is_noticed(monkeypatch, place):
    """The easy wrong way, which gives the same tokens: here the cache has room for it."""
    init = KVCache.__init__

    def of_heads(self: KVCache, machine: Machine, spec: ModelSpec, *, capacity_bytes: int, **given: Any) -> None:
        wide, [latent] = replace(spec), spec.kv_pieces
        vars(wide)["kv_pieces"] = (latent._replace(num_heads=spec.num_heads),)
        init(self, machine, wide, capacity_bytes=capacity_bytes * spec.num_heads, **given)
        self.pieces = spec.kv_pieces  # so that the run goes on

    monkeypatch.setattr(KVCache, "__init__", of_heads)
    assert wrong_ones("deepseek_v3", place).keys() == {"buffers", "device" if PLACES[place][-1] else "pinned"}


@pytest.mark.parametrize(
    ("op", "place"),
    [(OffloadQkv, "attended on the host"), (OffloadQkv, "staged on the device"), (LoadKv, "staged on the device")],
)
def test_a_row_of_each_head_over_the_link_is_noticed(monkeypatch, op, place):
    """The easy wrong way, which gives the same tokens: here the link carries it."""
    run, num_heads = op.run, VARIANTS["deepseek_v3"]["num_attention_heads"]

    class OfHeads:
        def __init__(self, ctx: Any) -> None:
            self._ctx = ctx

        def __getattr__(self, name: str) -> Any:
            return getattr(self._ctx, name)

        def move(self, dst: Any, src: Any) -> None:
            rows = dst.new_empty(num_heads, *dst.shape)
            self._ctx.move(rows, src.expand_as(rows))
            dst.copy_(rows[0])

        def gather(self, dst: Any, *of: Any) -> None:
            for _ in range(num_heads):
                self._ctx.gather(dst, *of)

    monkeypatch.setattr(op, "run", lambda self, ctx, packet: run(self, OfHeads(ctx), packet))
    assert wrong_ones("deepseek_v3", place).keys() == {op.kind}
