"""Ops of one cost key with equal cost features have equal work: a table of measured costs looks up nothing else."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from harness.config import parse
from harness.engine.activations import Activations
from harness.engine.batch import MicroBatch, assemble
from harness.engine.gpus import collectives
from harness.engine.ops import compute, host, paged
from harness.engine.ops.experts import Experts
from harness.engine.sequences import State
from harness.machine.base import LaneKind, Op
from harness.machine.simulated import SimulatedMachine
from harness.machine.virtual.costs import LaneCost, Roofline
from harness.memory.kv_cache import BlockAllocator, KVCache
from harness.memory.placed import PlacedPart
from harness.model import families
from harness.model.config import ModelConfig
from harness.model.planned import PlannedModel, planned_model
from tests.tiny_families import VARIANTS, runnable
from tests.unit.engine.fakes import sequences

CONF = Path(__file__).parents[3] / "conf/model"
PUBLISHED = sorted(path.stem for path in CONF.glob("*.yaml") if path.stem != "checkpoint")
LENGTHS = (1, 2, 3, 7, 20, 150, 300)  # of prompts and contexts: within all windows, and beyond them
MAX_TOKENS, NUM_BLOCKS, BLOCK_SIZE = 1200, 200, 16


def model_of(name: str) -> PlannedModel:
    if name in VARIANTS:
        family = families.layout(VARIANTS[name]["model_type"])
        return PlannedModel(family.spec_from_config(VARIANTS[name], name, "bfloat16"), family)
    planned = planned_model(parse(ModelConfig, yaml.safe_load((CONF / f"{name}.yaml").read_text()), "model"))
    return PlannedModel(planned.spec, families.layout(planned.spec.family))


def micro_batch(rng: random.Random) -> MicroBatch:
    """Draw up to three prompts and three decoding sequences with their caches on either side."""
    prompts, contexts = (rng.choices(LENGTHS, k=rng.randint(0, 3)) for _ in range(2))
    work = sequences(*((length, 2) for length in [*prompts, *contexts, 1]))
    for sequence in work[len(prompts) :]:
        sequence.state, sequence.generated, sequence.num_cached = State.DECODING, [7], sequence.prompt_len
    blocks = BlockAllocator(NUM_BLOCKS, BLOCK_SIZE)
    for sequence in work:
        blocks.grow(sequence, sequence.num_tokens)
        sequence.kv_on_device = rng.random() < 0.5
    return assemble(0, work[: len(prompts)], work[len(prompts) :], blocks)


class Ops:
    """All kinds of op that compute, over any micro-batch and layer of a model."""

    def __init__(self, model: PlannedModel) -> None:
        free = Roofline(lanes={kind: LaneCost() for kind in LaneKind})
        capacities_bytes = dict.fromkeys(("device", "pinned"), 10**13)
        machine = SimulatedMachine(capacities_bytes=capacities_bytes, costs=free, host_bytes_s=1e9)
        self.model, self.spec = model, model.spec
        self.buffer = machine.tiers["pinned"].reserve("weights", 10**12)
        self.acts = Activations(machine, self.spec, max_tokens=MAX_TOKENS, name="a", device_blocks=NUM_BLOCKS)
        nbytes = NUM_BLOCKS * BLOCK_SIZE * self.spec.kv_bytes_per_token
        self.host, self.device = (
            KVCache(machine, self.spec, capacity_bytes=nbytes, block_size=BLOCK_SIZE, tier=tier)
            for tier in ("pinned", "device")
        )

    def placed(self, layout) -> PlacedPart:
        return PlacedPart(layout, self.buffer, (self.buffer,))

    def over(self, batch: MicroBatch, layer: int) -> Iterator[Op]:
        spec, acts, family = self.spec, self.acts, self.model.family
        own, on_host, on_device = (None, spec, batch, acts), batch.on_host, batch.on_device
        parts = {layout.name: self.placed(layout) for layout in family.layer_parts(spec, layer)}
        yield compute.Embed(*own, self.placed(family.embedding_part(spec)))
        yield compute.AttentionIn(*own, parts["attention_in"], layer)
        if batch.prefill:
            yield compute.PrefillAttention(*own, layer, None)
        for rows in (range(on_host.num_decode), range(1)) if on_host.num_decode else ():
            yield compute.DecodeAttentionDevice(*own, layer, rows, acts.moe_out, None)
        for op in (compute.AttentionOut, collectives.OutputProjection, collectives.AfterAttention):
            yield op(*own, parts["attention_out"], layer)
        for num_sums in (1, 2):
            yield compute.Combine(*own, layer, (acts.moe_out,) * num_sums)
        yield compute.Head(*own, self.placed(family.head_part(spec)))
        experts = [part for part in parts.values() if part.layout.expert is not None]
        for some in (experts[:1], experts[-1:], experts) if experts else ():
            yield Experts(*own, tuple(some), tuple(part.layout.expert for part in some), layer)
        yield host.AppendKv(spec, batch, acts, layer, self.host)
        yield paged.AppendKvOnDevice(spec, batch, acts, layer, self.device)
        if on_host.num_decode:
            yield host.DecodeAttention(*own, layer, self.host, None)
        if on_device.num_decode:
            yield paged.DecodeAttentionPaged(*own, layer, self.device, None)


@pytest.mark.parametrize("name", [*runnable(), *PUBLISHED])
def test_key_and_features_tell_the_work(name):
    """Of any two ops. Left out are links, whose bytes count by their rate, and experts whose routing is known: their
    bytes depend on how tokens spread over them."""
    rng, ops = random.Random(name), Ops(model_of(name))
    found = defaultdict(list)
    last = ops.spec.num_layers - 1
    for _ in range(40):
        batch = micro_batch(rng)
        for layer in sorted({0, 1, 2, 3, last} & set(range(last + 1))):
            for op in ops.over(batch, layer):
                found[op.cost_key, op.cost_features()].append((op, op.work()))
    for (key, features), alike in found.items():
        (first, work), *others = alike
        for op, its_work in others:
            told = f"{key} {features}: {op} of {op.batch.num_tokens} and {first} of {first.batch.num_tokens} tokens"
            assert its_work == pytest.approx(work, rel=1e-9), told
    several = {type(op) for alike in found.values() for op, _ in alike if len({o.batch for o, _ in alike}) > 1}
    assert several >= {compute.AttentionIn, compute.AttentionOut, compute.Combine, host.DecodeAttention}
