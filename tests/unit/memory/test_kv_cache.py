"""Blocks against a model, planted corruption, and where the pieces of a layer lie."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from harness.engine.sequences import Sequence, State
from harness.machine.base import CPU
from harness.machine.shuffled import ShuffledMachine
from harness.memory.kv_cache import BlockAllocator, KVCache
from harness.model.dimensions import LatentAttention
from harness.workload.request import Request
from tests.unit.engine.fakes import SPEC as FAKE
from tests.unit.machine.ops import FreeOp

NUM_BLOCKS, BLOCK_SIZE = 12, 4


def sequence(number: int = 0, prompt_len: int = 3) -> Sequence:
    return Sequence(Request(request_id=number, prompt_ids=(7,) * prompt_len, max_new_tokens=50, text=None))


class AllocatorModel(RuleBasedStateMachine):
    """The model: how many blocks each sequence must have; which ones is the allocator's choice."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = BlockAllocator(NUM_BLOCKS, BLOCK_SIZE)
        self.sequences = [sequence(i) for i in range(4)]
        self.held = [0] * 4

    @rule(which=st.integers(0, 3), num_tokens=st.integers(0, 30))
    def grow(self, which, num_tokens):
        wanted = max(self.held[which], (num_tokens + BLOCK_SIZE - 1) // BLOCK_SIZE)
        missing = wanted - self.held[which]
        before = list(self.sequences[which].blocks)
        assert self.allocator.missing_blocks(self.sequences[which], num_tokens) == missing
        if missing > NUM_BLOCKS - sum(self.held):
            with pytest.raises(AssertionError, match="free"):
                self.allocator.grow(self.sequences[which], num_tokens)
            assert self.sequences[which].blocks == before
            return
        self.allocator.grow(self.sequences[which], num_tokens)
        self.held[which] = wanted
        assert self.sequences[which].blocks[: len(before)] == before, "tokens in the cache have moved"

    @rule(which=st.integers(0, 3))
    def release(self, which):
        blocks = list(self.sequences[which].blocks)
        self.sequences[which].num_cached = len(blocks) * BLOCK_SIZE
        assert self.allocator.release(self.sequences[which]) == blocks
        assert (self.sequences[which].blocks, self.sequences[which].num_cached) == ([], 0)
        self.held[which] = 0

    @precondition(lambda self: sum(self.held))
    @rule(data=st.data())
    def a_stolen_block_is_found(self, data):
        """Corruption is undone again, so that the run goes on."""
        owner = data.draw(st.sampled_from([i for i in range(4) if self.held[i]]))
        thief = data.draw(st.sampled_from([i for i in range(4) if i != owner]))
        self.sequences[thief].blocks.append(self.sequences[owner].blocks[-1])
        with pytest.raises(AssertionError, match="table"):
            self.allocator.check_integrity(self.sequences)
        self.sequences[thief].blocks.pop()

    @invariant()
    def every_block_has_one_place(self):
        self.allocator.check_integrity(self.sequences)
        assert [len(s.blocks) for s in self.sequences] == self.held
        assert self.allocator.num_used == sum(self.held)
        assert self.allocator.num_free == NUM_BLOCKS - sum(self.held)
        everything = [b for s in self.sequences for b in s.blocks]
        assert len(set(everything)) == len(everything)
        assert all(0 <= b < NUM_BLOCKS for b in everything)


AllocatorModel.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestAllocatorModel = AllocatorModel.TestCase


def lose_block(allocator, a, b):
    allocator._free.pop()


def free_twice(allocator, a, b):
    allocator._free[0] = allocator._free[1]


def free_held(allocator, a, b):
    allocator._free[0] = a.blocks[0]


def list_twice(allocator, a, b):
    a.blocks.append(a.blocks[0])


def forget(allocator, a, b):
    a.blocks.pop()
    a.num_cached = 0


def swap_tables(allocator, a, b):
    a.blocks[0], b.blocks[0] = b.blocks[0], a.blocks[0]


def take_free(allocator, a, b):
    a.blocks.append(allocator._free[0])


def cache_beyond(allocator, a, b):
    a.num_cached = len(a.blocks) * BLOCK_SIZE + 1


def cache_without_blocks(allocator, a, b):
    allocator.release(b)
    b.num_cached = 1


@pytest.mark.parametrize(
    "corrupt",
    [
        lose_block, free_twice, free_held, list_twice, forget, swap_tables, take_free, cache_beyond,
        cache_without_blocks,
    ],
)  # fmt: skip
@pytest.mark.parametrize("order", [1, -1])
def test_integrity_check_finds_corruption(corrupt, order):
    allocator, a, b = BlockAllocator(NUM_BLOCKS, BLOCK_SIZE), sequence(0), sequence(1)
    allocator.grow(a, 9)
    allocator.grow(b, 5)
    a.num_cached, b.num_cached = 9, 5
    allocator.check_integrity([a, b][::order])
    corrupt(allocator, a, b)
    with pytest.raises(AssertionError):
        allocator.check_integrity([a, b][::order])


def test_a_sequence_cannot_release_what_another_holds():
    allocator, a, b = BlockAllocator(NUM_BLOCKS, BLOCK_SIZE), sequence(0), sequence(1)
    allocator.grow(a, 4)
    b.blocks = list(a.blocks)
    with pytest.raises(AssertionError, match="another sequence"):
        allocator.release(b)


SPEC = replace(FAKE, head_dim=4)
LATENT = replace(
    SPEC, head_dim=10, latent=LatentAttention(kv_rank=9, nope_dim=6, rope_dim=4, value_dim=6), num_kv_heads=4
)
NUMBERS = {SPEC: 2 * 2 * 4, LATENT: 9 + 4}  # cached of a token in a layer


class Write(FreeOp):
    """One value into every place of a layer's piece."""

    def __init__(self, cache, layer, piece, value):
        self.cache, self.of_layer, self.piece, self.value = cache, layer, piece, value

    def run(self, ctx, packet):
        self.cache.views(ctx, self.of_layer)[self.piece].fill_(self.value)


class Read(FreeOp):
    def __init__(self, cache, layer, piece):
        self.cache, self.of_layer, self.piece = cache, layer, piece

    def run(self, ctx, packet):
        return self.cache.views(ctx, self.of_layer)[self.piece].clone()


@pytest.fixture(params=NUMBERS, ids=["keys and values", "latent"])
def cache(request):
    machine = ShuffledMachine(capacities_bytes={"pinned": 100_000}, seed=0)
    block_bytes = BLOCK_SIZE * 3 * NUMBERS[request.param] * 4
    capacity_bytes = 5 * block_bytes + block_bytes - 1
    return machine, KVCache(machine, request.param, capacity_bytes=capacity_bytes, block_size=BLOCK_SIZE)


def places(kv):
    return [(layer, piece) for layer, buffers in enumerate(kv.layers) for piece in range(len(buffers))]


def test_capacity_is_cut_to_whole_blocks_and_accounted_for(cache, request):
    machine, kv = cache
    numbers = NUMBERS[request.node.callspec.params["cache"]]
    assert kv.allocator.num_blocks == 5
    assert machine.tiers["pinned"].holders() == {"kv cache": 5 * BLOCK_SIZE * 3 * numbers * 4}


def test_layers_and_pieces_lie_apart(cache):
    machine, kv = cache
    for value, place in enumerate(places(kv)):
        machine.submit(CPU, Write(kv, *place, value))
    machine.drain()
    for value, place in enumerate(places(kv)):
        assert (machine.wait(machine.submit(CPU, Read(kv, *place))) == value).all()


def test_released_blocks_are_poisoned_in_every_layer_and_no_others(cache):
    machine, kv = cache
    a, b = sequence(0), sequence(1)
    kv.allocator.grow(a, 7)
    kv.allocator.grow(b, 7)
    for place in places(kv):
        machine.wait(machine.submit(CPU, Write(kv, *place, 1.0)))
    freed = list(a.blocks)
    a.state = State.FINISHED
    kv.release(a)
    for place in places(kv):
        content = machine.wait(machine.submit(CPU, Read(kv, *place)))
        assert torch.isnan(content[freed]).all()
        assert (content[b.blocks] == 1).all()
    kv.allocator.check_integrity([a, b])


def test_a_cache_smaller_than_a_block_has_none():
    machine = ShuffledMachine(capacities_bytes={"pinned": 100_000}, seed=0)
    assert KVCache(machine, SPEC, capacity_bytes=10, block_size=BLOCK_SIZE).allocator.num_blocks == 0
