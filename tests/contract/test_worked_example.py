"""The strategy in docs/experts.md runs as it is printed, on every machine, and its cache is the textbook's."""

from __future__ import annotations

import re
import sys
from collections import OrderedDict
from types import ModuleType

import pytest

from harness.plan.planning import DoesNotFit, make_plan
from tests.composing import composed
from tests.conftest import ROOT
from tests.contract.running import check_tokens, emulated, engine_on, requests, run_to_end, shuffled

NAME = "lru_experts_of_the_docs"
(SOURCE,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/experts.md").read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.fixture
def example(monkeypatch) -> ModuleType:
    module = ModuleType(NAME)
    monkeypatch.setitem(sys.modules, NAME, module)
    exec(compile(SOURCE, "docs/experts.md", "exec"), module.__dict__)
    return module


def test_it_is_short():
    assert len([line for line in SOURCE.splitlines() if line.strip()]) <= 120


@pytest.mark.parametrize("num_slots", [1, 3, None])
@pytest.mark.parametrize("make", [lambda: shuffled(0), lambda: shuffled(1), emulated], ids=["s0", "s1", "emulated"])
def test_it_gives_the_reference_tokens(tiny, example, make, num_slots):
    built, accesses, work = [], [], requests(8, vocab_size=tiny.spec.vocab_size)

    def build(engine):
        strategy = example.build(example.Config(packet_mb=0.004, expert_slots=num_slots), engine)
        slots, acquire = strategy.pipeline.slots, strategy.pipeline.slots.acquire
        slots.acquire = lambda *key, **how: accesses.append(key) or acquire(*key, **how)
        built.append(slots)
        return strategy

    engine = engine_on(make(), tiny, work, kv_blocks=40, values={"package": NAME})
    run_to_end(engine, build)
    report = check_tokens(tiny, engine.sequences)
    assert report.checked == len(work)
    assert report.ok, report.first_mismatch
    (slots,) = built
    num_slots = num_slots or tiny.spec.num_layers * tiny.spec.num_experts
    assert (slots.hits, slots.misses) == lru_hits_and_misses(accesses, num_slots)


@pytest.mark.parametrize("make", [lambda: shuffled(2), emulated], ids=["shuffled", "emulated"])
def test_resident_dense_parts_are_not_transferred(tiny, example, make):
    """Of layers behind those that the stream prefetches when the run ends, so that their transfers are all used."""
    kept = [(2, "attention_in"), (3, "attention_in"), (3, "attention_out")]
    brought, kept_bytes = {}, 0
    for keys in ([], kept):
        work, held = requests(4, vocab_size=tiny.spec.vocab_size), {}

        def build(engine, keys=keys, held=held):
            engine.resident.keep("dense weights", keys)
            held |= engine.machine.tiers["device"].holders()
            return example.build(example.Config(packet_mb=0.004, expert_slots=3), engine)

        engine, submitted = engine_on(make(), tiny, work, kv_blocks=40, values={"package": NAME}), []
        submit = engine.machine.submit
        engine.machine.submit = lambda lane, op, submit=submit, to=submitted, **how: (
            to.append(op) or submit(lane, op, **how)
        )
        passes = run_to_end(engine, build)
        report = check_tokens(tiny, engine.sequences)
        assert report.ok and report.checked == len(work), report.first_mismatch
        moved = (op.work().link_bytes for op in submitted if op.kind == "weights" and op.layer in (2, 3))
        brought[len(keys)] = sum(moved)
        kept_bytes = sum(engine.store.layers[layer][name].layout.nbytes for layer, name in keys)
        assert held.get("dense weights", 0) == kept_bytes
    assert brought[0] - brought[len(kept)] == len(passes) * kept_bytes > 0


def lru_hits_and_misses(accesses: list[tuple[int, int]], num_slots: int) -> tuple[int, int]:
    """What the textbook's cache has, written down a second time."""
    cache: OrderedDict[tuple[int, int], None] = OrderedDict()
    hits = 0
    for key in accesses:
        hits += key in cache
        cache[key] = None
        cache.move_to_end(key)
        if len(cache) > num_slots:
            cache.popitem(last=False)
    return hits, len(accesses) - hits


R1_ON_24_GB = (
    "machine=simulated", "model=deepseek-r1", "hardware=a5000", "kv_cache_gb=4", "dataset.num_requests=2",
    "dataset.max_new_tokens=2", "dataset.lengths.min=1", "dataset.lengths.mean=8", "dataset.lengths.max=9",
    "hardware.pinned_memory_gb=1500", "hardware.host_memory_gb=1500", "hardware.ram_gb=1500",
)  # fmt: skip


def test_deepseek_r1_plans_and_runs_on_a_device_of_24_gb(example):
    plan = make_plan({**composed(*R1_ON_24_GB), "strategy": {"package": NAME}})
    assert plan.settings.hardware.device_memory_gb == 24
    assert plan.summary["generated_tokens"] == 4
    slots = plan.strategy.pipeline.slots
    expert_bytes = plan.engine.store.experts(60)[0].layout.nbytes
    loaded: dict[int, float] = {}
    for span in plan.machine.spans:
        if span.kind == "weights":
            loaded[span.ticket] = loaded.get(span.ticket, 0.0) + span.work.link_bytes
    assert sum(round(nbytes) == expert_bytes for nbytes in loaded.values()) == slots.misses
    assert slots.evictions == slots.misses - slots.num_slots > 0


def test_deepseek_r1_runs_on_a_device_that_holds_one_part_at_a_time():
    """Where less than that is left beside embedding and head, the memory is refused by name."""
    plan = make_plan(composed(*R1_ON_24_GB, "strategy=ondemand", "dataset.num_requests=1"))
    assert plan.summary["generated_tokens"] == 2
    largest_bytes = max(plan.engine.store.slot_bytes.values())
    assert plan.machine.tiers["device"].holders()["weight buffer"] == largest_bytes
    ends_gb = (plan.engine.store.embedding.layout.nbytes + plan.engine.store.head.layout.nbytes) / 1e9
    short = f"hardware.device_memory_gb={ends_gb + 0.99 * largest_bytes / 1e9}"
    with pytest.raises(DoesNotFit, match="hardware.device_memory_gb: must hold .* the largest part of a layer") as told:
        make_plan(composed(*R1_ON_24_GB, "strategy=ondemand", short))
    assert told.value.needed["device"]["the largest part of a layer"] == largest_bytes
    with pytest.raises(DoesNotFit, match="2 layers of weights"):
        make_plan(composed(*R1_ON_24_GB, "strategy=moelens"))
