"""Blocks on two sides behind one face."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.machine.shuffled import ShuffledMachine
from harness.memory.kv_cache import BlockAllocator, KVCache
from harness.memory.split_kv import SplitAllocator, SplitKVCache
from tests.unit.memory.test_kv_cache import BLOCK_SIZE, SPEC, sequence


def split(device: int, host: int) -> SplitAllocator:
    return SplitAllocator(
        BlockAllocator(device, BLOCK_SIZE, on_device=True), BlockAllocator(host, BLOCK_SIZE, on_device=False)
    )


steps = st.lists(st.tuples(st.integers(0, 5), st.one_of(st.none(), st.integers(1, 40))), max_size=40)


@given(device=st.integers(0, 12), host=st.integers(0, 12), steps=steps)
def test_a_sequence_keeps_to_one_side_and_the_sides_do_not_mix(device, host, steps):
    """The model: blocks held by side. `None` releases."""
    blocks, all_sequences = split(device, host), [sequence(i) for i in range(6)]
    for which, num_tokens in steps:
        one = all_sequences[which]
        if num_tokens is None:
            if one.blocks:
                blocks.release(one)
        elif blocks.missing_blocks(one, num_tokens) <= blocks.free_for(one):
            side = one.kv_on_device if one.blocks else None
            blocks.grow(one, num_tokens)
            assert side is None or not one.blocks or one.kv_on_device is side
            assert len(one.blocks) >= blocks.blocks_for(num_tokens)
        else:
            with pytest.raises(AssertionError, match="on one side"):
                blocks.grow(one, num_tokens)
        blocks.check_integrity(all_sequences)
        held = {True: 0, False: 0}
        for s in all_sequences:
            held[s.kv_on_device] += len(s.blocks)
        assert held[True] <= device and held[False] <= host
        assert blocks.num_used == sum(held.values()) == blocks.num_blocks - blocks.num_free
        empty = sequence(99)
        assert blocks.free_for(empty) == max(device - held[True], host - held[False])


@given(device=st.integers(0, 12), host=st.integers(0, 12), sizes=st.lists(st.integers(1, 5), max_size=20))
def test_the_device_comes_first(device, host, sizes):
    """Whoever is on the host found too few blocks on the device."""
    blocks, free = split(device, host), {True: device, False: host}
    for number, size in enumerate(sizes):
        one = sequence(number)
        if blocks.free_for(one) < size:
            continue
        blocks.grow(one, size * BLOCK_SIZE)
        assert one.kv_on_device is (free[True] >= size)
        free[one.kv_on_device] -= size


def test_memory_of_either_side_is_accounted_for_and_given_back():
    machine = ShuffledMachine(capacities_bytes={"device": 100_000, "pinned": 100_000, "device1": 100_000}, seed=0)
    block_bytes = BLOCK_SIZE * SPEC.kv_bytes_per_token
    cache = SplitKVCache(
        KVCache(machine, SPEC, capacity_bytes=3 * block_bytes, block_size=BLOCK_SIZE, tier="device"),
        KVCache(machine, SPEC, capacity_bytes=5 * block_bytes, block_size=BLOCK_SIZE),
    )
    KVCache(machine, SPEC, block_size=BLOCK_SIZE, tier="device", rank=1, like=cache.device)
    used = {name: tier.used_bytes for name, tier in machine.tiers.items()}
    assert used == {"device": 3 * block_bytes, "pinned": 5 * block_bytes, "device1": 3 * block_bytes}
    cache.close()
    assert not any(tier.used_bytes for tier in machine.tiers.values())
