"""The host store holds every part once, in the order of first use; resident parts are copies of it."""

from __future__ import annotations

import pytest

from harness.memory.tiers import MemoryCapacityError
from harness.memory.weights import Resident, WeightStore
from tests.unit.memory.parts import NUM_LAYERS, PARTS, FakeFamily, FakeSource, content, machine, read_bytes


def all_parts(store: WeightStore):
    for layer, parts in enumerate(store.layers):
        for name, placed in parts.items():
            yield layer, name, placed
    yield None, "embedding", store.embedding
    yield None, "head", store.head


def test_every_part_is_read_once_into_its_own_place():
    device, source = machine(), FakeSource()
    store = WeightStore(device, source)
    assert sorted(source.parts_read, key=str) == sorted(((layer, n) for layer, n, _ in all_parts(store)), key=str)
    for layer, name, placed in all_parts(store):
        assert device.wait(read_bytes(device, placed)) == [content(layer, name)], (layer, name)


def test_parts_lie_one_behind_another_in_the_order_of_first_use():
    """So that what follows attention in a layer and what precedes it in the next are one transfer (MoE-Lens 6.5)."""
    store = WeightStore(machine(), FakeSource())
    placed = [part for _, _, part in all_parts(store)]
    ends = [part.buffer.offset_bytes + part.buffer.nbytes for part in placed]
    assert [part.buffer.offset_bytes for part in placed] == [0, *ends[:-1]]
    assert all(part.buffer.root is placed[0].buffer.root for part in placed)
    assert [name for layer, name, _ in all_parts(store) if layer == 0] == list(PARTS) == list(store.part_names(0))


def test_the_whole_model_is_accounted_for_in_the_pinned_tier():
    device = machine()
    store = WeightStore(device, FakeSource())
    total_bytes = sum(part.layout.nbytes for _, _, part in all_parts(store))
    assert device.tiers["pinned"].holders() == {"weights": total_bytes}
    assert device.tiers["device"].used_bytes == 0


def test_layer_bytes_is_the_largest_layer():
    layouts = [FakeFamily.layer_parts(None, layer) for layer in range(NUM_LAYERS)]
    sizes = [sum(part.nbytes for part in parts) for parts in layouts]
    assert WeightStore(machine(), FakeSource()).layer_bytes == sizes[1] == max(sizes) > sizes[0]


def test_a_part_that_cannot_be_read_ends_loading_with_its_cause():
    class Broken(FakeSource):
        def read_part(self, layer, layout, out):
            if (layer, layout.name) == (2, "expert.1"):
                raise ValueError("shard 3 is truncated")
            super().read_part(layer, layout, out)

    with pytest.raises(Exception, match="read checkpoint layer 2.*shard 3 is truncated"):
        WeightStore(machine(), Broken())


def test_a_host_too_small_is_refused_before_anything_is_read():
    from harness.machine.shuffled import ShuffledMachine

    small, source = ShuffledMachine(capacities_bytes={"device": 0, "pinned": 1000}, seed=0), FakeSource()
    with pytest.raises(MemoryCapacityError, match="pinned memory: 'weights'"):
        WeightStore(small, source)
    assert source.parts_read == []


@pytest.mark.parametrize("seed", range(3))
def test_resident_parts_are_on_the_device_and_accounted_for(seed):
    device = machine(seed)
    store = WeightStore(device, FakeSource())
    resident = Resident(device, store)
    for name, placed in (("embedding", resident.embedding), ("head", resident.head)):
        assert placed.buffer.tier == "device"
        assert device.wait(read_bytes(device, placed)) == [content(None, name)]
    sizes = {"head": store.head.layout.nbytes, "embedding": store.embedding.layout.nbytes}
    assert device.tiers["device"].holders() == sizes
