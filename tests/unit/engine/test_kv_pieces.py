"""What a KV cache holds of a token, by the family: its bytes, what moves, and what comes back as it was written."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from harness.engine.activations import Activations
from harness.engine.batch import assemble
from harness.engine.ops import data, host, paged
from harness.engine.sequences import State
from harness.machine.base import CPU, D2H, GPU, H2D
from harness.machine.shuffled import ShuffledMachine
from harness.machine.threads.context import HostContext
from harness.memory.kv_cache import KVCache
from harness.model.dimensions import LatentAttention
from tests.unit.engine.fakes import SPEC, sequences

LAYER, BLOCK_SIZE, PROMPTS = 1, 4, (9, 3, 4)
MIXTRAL = replace(SPEC, num_heads=32, num_kv_heads=8, head_dim=128, dtype="bfloat16")
LATENT = replace(
    SPEC,
    num_kv_heads=4,
    head_dim=24,
    latent=LatentAttention(kv_rank=97, nope_dim=16, rope_dim=8, value_dim=16),  # wider than the keys of all heads
)
# By hand: bytes of a token in a layer, and the [num_heads, width] of each piece.
CASES = {
    "keys and values": (MIXTRAL, 2 * 8 * 128 * 2, [(8, 128), (8, 128)]),
    "latent": (LATENT, (97 + 8) * 4, [(1, 105)]),
}


class Counting(HostContext):
    """Counts the bytes that cross the link."""

    moved_bytes = 0

    def move(self, dst, src):
        self.moved_bytes += dst.numel() * dst.element_size()
        super().move(dst, src)

    def gather(self, dst, *of):
        self.moved_bytes += dst.numel() * dst.element_size()
        super().gather(dst, *of)


class Bench:
    """Sequences that have been prefilled, whose tokens lie in one cache, and the rows that went into it."""

    def __init__(self, spec, shapes, tier: str) -> None:
        self.spec, self.shapes, self.on_device = spec, shapes, tier == "device"
        self.machine = ShuffledMachine(capacities_bytes={"device": 1 << 24, "pinned": 1 << 24}, seed=0)
        self.cache = KVCache(self.machine, spec, capacity_bytes=10**6, block_size=BLOCK_SIZE, tier=tier)
        self.acts = Activations(self.machine, spec, max_tokens=sum(PROMPTS), name="a", device_blocks=100)
        self.work = sequences(*((prompt, 5) for prompt in PROMPTS))
        self.written = [[torch.empty(heads, 0, width) for heads, width in shapes] for _ in PROMPTS]

    def run(self, lane, op) -> int:
        """Run the op and return the bytes that it moved."""
        context = Counting(lane, self.machine._arenas)
        op.run(context, 0)
        return context.moved_bytes

    def views(self, buffers, batch):
        context = HostContext(GPU, self.machine._arenas)
        return [
            context.tensor(buffer, (batch.num_tokens, *shape), self.spec.dtype)
            for buffer, shape in zip(buffers, self.shapes, strict=True)
        ]

    def prefill(self):
        return self._append(prefill=self.work, decode=[])

    def decode(self):
        for sequence in self.work:
            sequence.state, sequence.generated, sequence.num_cached = State.DECODING, [7], sequence.prompt_len
        return self._append(prefill=[], decode=self.work)

    def _append(self, prefill, decode):
        """Bring random rows of new tokens into the cache, by its ops."""
        for sequence in self.work:
            self.cache.allocator.grow(sequence, sequence.num_tokens)
        batch = assemble(0, prefill, decode, self.cache.allocator)
        rows = self.views(self.acts.new_kv(self.spec), batch)
        for piece in rows:
            piece.normal_()
        for row, owner in enumerate(batch.request_ids.tolist()):
            mine = self.written[owner]
            mine[:] = [torch.cat((old, new[row, :, None].float()), dim=1) for old, new in zip(mine, rows, strict=True)]
        self.run(H2D, data.UploadTokens(self.spec, batch, self.acts))
        if self.on_device:
            self.run(GPU, paged.AppendKvOnDevice(self.spec, batch, self.acts, LAYER, self.cache))
        else:
            offload = data.OffloadQkv(self.spec, batch, self.acts, LAYER, queries=False)
            self.offloaded_bytes, self.offload_work = self.run(D2H, offload), offload.work()
            self.run(CPU, host.AppendKv(self.spec, batch, self.acts, LAYER, self.cache))
        return batch


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]


@pytest.mark.parametrize("tier", ["pinned", "device"])
def test_a_cache_takes_the_bytes_of_its_pieces(case, tier):
    spec, token_bytes, shapes = case
    bench = Bench(spec, shapes, tier)
    assert spec.kv_bytes_per_token_layer == token_bytes
    num_tokens = bench.cache.allocator.num_blocks * BLOCK_SIZE
    assert num_tokens == 10**6 // (3 * BLOCK_SIZE * token_bytes) * BLOCK_SIZE
    assert bench.machine.tiers[tier].holders()["kv cache"] == 3 * num_tokens * token_bytes
    assert all(sum(b.nbytes for b in buffers) == num_tokens * token_bytes for buffers in bench.cache.layers)


def test_what_is_written_comes_back_and_as_many_bytes_move_as_are_counted(case):
    spec, token_bytes, shapes = case
    bench = Bench(spec, shapes, "pinned")
    for append, num_tokens in ((bench.prefill, sum(PROMPTS)), (bench.decode, len(PROMPTS))):
        batch = append()
        assert bench.offloaded_bytes == bench.offload_work.link_bytes == num_tokens * token_bytes
    context = sum(PROMPTS) + len(PROMPTS)
    staging = bench.machine.tiers["device"].reserve("staging", context * token_bytes)
    load = data.LoadKv(spec, batch, bench.acts, LAYER, bench.cache, range(len(PROMPTS)), staging)
    assert bench.run(H2D, load) == load.work().link_bytes == context * token_bytes
    dtype_bytes = {"bfloat16": 2, "float32": 4}[spec.dtype]
    numbers = HostContext(GPU, bench.machine._arenas).tensor(staging, (staging.nbytes // dtype_bytes,), spec.dtype)
    expected = torch.cat([piece.reshape(-1) for each in batch.sequences for piece in bench.written[number(each)]])
    assert torch.equal(numbers.float(), expected)


def number(sequence) -> int:
    return sequence.request.request_id


def test_a_cache_on_the_device_holds_what_is_appended_there(case):
    spec, _, shapes = case
    bench = Bench(spec, shapes, "device")
    bench.prefill()
    bench.decode()
    pieces = bench.cache.views(HostContext(GPU, bench.machine._arenas), LAYER)
    for sequence in bench.work:
        for piece, written in zip(pieces, bench.written[number(sequence)], strict=True):
            heads, length, width = written.shape
            found = piece[sequence.blocks].transpose(0, 1).reshape(heads, -1, width)[:, :length]
            assert torch.equal(found.float(), written)
