"""The work of ops around attention over latents, against a count by hand from the shapes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.engine.activations import Activations
from harness.engine.batch import assemble
from harness.engine.gpus.collectives import OutputProjection
from harness.engine.ops import compute, data, host, paged
from harness.engine.sequences import State
from harness.machine.base import LaneKind, Op, Work
from harness.machine.simulated import SimulatedMachine
from harness.machine.virtual.costs import LaneCost, Roofline
from harness.memory.kv_cache import BlockAllocator, KVCache
from harness.memory.weights import WeightStore
from harness.model.dimensions import LatentAttention
from harness.model.planned import PlannedModel
from harness.model.spec import ModelSpec
from tests.unit.engine.fakes import SPEC as FAKE
from tests.unit.engine.fakes import sequences

# No two dimensions alike: hidden 80, 6 heads, bfloat16. A latent takes 36 + 8 = 44 numbers; a query has 16 + 8 = 24.
LATENT = LatentAttention(kv_rank=36, nope_dim=16, rope_dim=8, value_dim=20, q_rank=28)
SPEC: ModelSpec = replace(
    FAKE, hidden_dim=80, num_heads=6, num_kv_heads=6, head_dim=24, dtype="bfloat16", latent=LATENT
)
ABSORBING = replace(SPEC, latent=replace(LATENT, kv_rank=17))  # 2 x 17 < 16 + 20: a latent takes 25 numbers
PROMPTS, CONTEXTS = (30, 50), (17, 33, 64)
N, PREFILL, DECODE, SEEN = 83, 80, 3, 114  # rows: all, of prompts, decoding; tokens in the contexts
PAIRS = 30 * 31 // 2 + 50 * 51 // 2  # each token sees itself and those before it


class Case:
    """The ops of a micro-batch with prompts and decoding sequences in one layer."""

    def __init__(self, spec: ModelSpec, *, on_device: bool = False) -> None:
        self.machine = SimulatedMachine(
            capacities_bytes=dict.fromkeys(("device", "pinned", "host"), 10**9),
            costs=Roofline(lanes={kind: LaneCost() for kind in LaneKind}),
            host_bytes_s=1e9,
        )
        self.spec, self.parts = spec, WeightStore(self.machine, PlannedModel(spec), tier="pinned").layers[0]
        tier = "device" if on_device else "pinned"
        self.cache = KVCache(self.machine, spec, capacity_bytes=10**7, block_size=8, tier=tier)
        self.acts = Activations(self.machine, spec, max_tokens=N, name="a", device_blocks=100)
        allocator = BlockAllocator(100, 8, on_device=on_device)
        work = sequences(*((prompt, 5) for prompt in PROMPTS), *((context - 1, 5) for context in CONTEXTS))
        for sequence in work[2:]:
            sequence.state, sequence.generated, sequence.num_cached = State.DECODING, [7], sequence.prompt_len
        for sequence in work:
            allocator.grow(sequence, sequence.num_tokens)
        self.batch = assemble(0, work[:2], work[2:], allocator)
        self.own = None, spec, self.batch, self.acts

    def attention_in(self) -> Op:
        return compute.AttentionIn(*self.own, self.parts["attention_in"], 0)

    def attention_out(self) -> Op:
        return compute.AttentionOut(*self.own, self.parts["attention_out"], 0)


HERE, THERE, OTHER = Case(SPEC), Case(SPEC, on_device=True), Case(ABSORBING)
Q, DOWN, UP = 80 * 28 + 28 * 6 * 24, 80 * 44, 36 * 6 * (16 + 20)  # weights; the first two have norms
IN = 2 * (Q + DOWN + UP + 80 + 28 + 36)  # bytes
OUT = 6 * 20 * 80 + 80 * 8


def moved(nbytes: float) -> Work:
    """Over the link, out of one memory and into the other."""
    return Work(device_bytes=nbytes, host_bytes=nbytes, link_bytes=nbytes)


CASES: dict[str, tuple[Op, Work]] = {
    "attention in, where prompts are expanded": (
        HERE.attention_in(),
        Work(
            flops=2 * (N * (Q + DOWN) + PREFILL * UP + DECODE * 36 * 6 * 16),
            device_bytes=IN + 2 * (N * (80 + 44) + PREFILL * 6 * (24 + 24 + 20) + DECODE * 6 * 44),
        ),
    ),
    "attention in, where prompts attend to latents": (
        OTHER.attention_in(),
        Work(
            flops=2 * N * (Q + 80 * 25 + 17 * 6 * 16),
            device_bytes=2 * (Q + 80 * 25 + 17 * 6 * 36 + 80 + 28 + 17) + 2 * N * (80 + 25 + 6 * 25),
        ),
    ),
    "prefill attention, expanded": (
        compute.PrefillAttention(*HERE.own, 0, None),
        Work(flops=PAIRS * 2 * 6 * (24 + 20), device_bytes=PREFILL * 2 * 6 * (24 + 24 + 20 + 20)),
    ),
    "prefill attention to latents": (
        compute.PrefillAttention(*OTHER.own, 0, None),
        Work(flops=PAIRS * 2 * 6 * (25 + 17), device_bytes=PREFILL * 2 * (6 * 25 + 25 + 6 * 17)),
    ),
    "attention out, where decode attends to latents": (
        HERE.attention_out(),
        Work(
            flops=2 * (N * OUT + DECODE * 36 * 6 * 20),
            device_bytes=2 * (OUT + 36 * 6 * 20 + 80) + 2 * N * (6 * 20 + 3 * 80),
        ),
    ),
    "attention out, where all attend to latents": (
        OTHER.attention_out(),
        Work(
            flops=2 * N * (OUT + 17 * 6 * 20),
            device_bytes=2 * (OUT + 17 * 6 * 20 + 80) + 2 * N * (6 * 20 + 3 * 80),
        ),
    ),
    "output projection of a share": (
        OutputProjection(*HERE.own, HERE.parts["attention_out"], 0),
        Work(
            flops=2 * (N * 6 * 20 * 80 + DECODE * 36 * 6 * 20),
            device_bytes=2 * (6 * 20 * 80 + 36 * 6 * 20) + N * (6 * 20 * 2 + 80 * 4),
        ),
    ),
    "decode attention": (
        host.DecodeAttention(*HERE.own, 0, HERE.cache, None),
        Work(flops=SEEN * 2 * 6 * (44 + 36), host_bytes=SEEN * 44 * 2),
    ),
    "decode attention over what was staged": (
        compute.DecodeAttentionDevice(*HERE.own, 0, range(1, 3), HERE.acts.moe_out, None),
        Work(flops=(33 + 64) * 2 * 6 * (44 + 36), device_bytes=(33 + 64) * 44 * 2),
    ),
    "decode attention in device memory": (
        paged.DecodeAttentionPaged(*THERE.own, 0, THERE.cache, None),
        Work(flops=SEEN * 2 * 6 * (44 + 36), device_bytes=SEEN * 44 * 2),
    ),
    "append": (host.AppendKv(SPEC, HERE.batch, HERE.acts, 0, HERE.cache), Work(host_bytes=2 * N * 44 * 2)),
    "offload": (data.OffloadQkv(*HERE.own[1:], 0), moved(2 * (N * 44 + DECODE * 6 * 44))),
    "offload without queries": (data.OffloadQkv(*HERE.own[1:], 0, queries=False), moved(2 * N * 44)),
    "load results": (data.LoadAttention(*HERE.own[1:], 0), moved(DECODE * 6 * 36 * 2)),
    "load latents": (
        data.LoadKv(*HERE.own[1:], 0, HERE.cache, range(2), HERE.acts.moe_out),
        moved((17 + 33) * 44 * 2),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_work_is_what_the_shapes_say(case):
    """Within 3 %: attention counts half a token less than each token and those before it, a part its norms or not."""
    op, expected = CASES[case]
    assert op.work() == pytest.approx(expected, rel=0.03)


def test_which_way_prompts_attend_is_the_one_with_fewer_flops():
    for kv_rank in range(1, 60):
        spec = replace(SPEC, latent=replace(LATENT, kv_rank=kv_rank))
        ways = {True: 24 + 20, False: kv_rank + 8 + kv_rank}
        assert ways[spec.expands_prefill] == min(ways.values())
