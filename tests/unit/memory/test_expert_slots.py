"""Expert slots: every reader gets the expert it acquired, whatever is fetched, withdrawn and evicted meanwhile."""

from __future__ import annotations

from collections.abc import Collection

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.memory.expert_slots import ExpertSlots, Key, expert_slot_bytes, num_slots_that_fit
from harness.memory.weights import WeightStore, WeightStream
from tests.unit.memory.parts import NUM_LAYERS, FakeSource, content, machine, read_bytes

EXPERTS = (0, 1, 10)
KEYS = [(layer, expert) for layer in range(NUM_LAYERS) for expert in EXPERTS]


class Oldest:
    """Evicts whatever was told of first."""

    def __init__(self) -> None:
        self.order: list[Key] = []

    def used(self, key: Key) -> None:
        self.order.append(key)

    def victim(self, candidates: Collection[Key]) -> Key:
        assert candidates
        return next(key for key in self.order if key in candidates)


def slots_on(device, num_slots: int) -> ExpertSlots:
    store = WeightStore(device, FakeSource())
    return ExpertSlots(device, store, num_slots=num_slots, packet_bytes=64, replacement=Oldest())


ACTIONS = ("use", "hold", "release", "prefetch", "fill", "withdraw", "evict")
steps = st.lists(st.tuples(st.sampled_from(ACTIONS), st.sampled_from(KEYS)), max_size=40)


@settings(max_examples=150)
@given(seed=st.integers(0, 2**16), num_slots=st.integers(1, 10), poison=st.booleans(), steps=steps)
def test_readers_see_their_own_expert(seed, num_slots, poison, steps):
    """Beside a model of what is held; a step that would be a misuse is left out."""
    device = machine(seed, poison=poison)
    slots, held, reads = slots_on(device, num_slots), [], []
    for what, key in steps:
        there = key in slots
        match what:
            case "use" | "hold" if there or len(set(held)) < num_slots:
                reads.append((key, read_bytes(device, slots.acquire(*key))))
                held += [key] if what == "hold" else []
                if what == "use":
                    slots.release(*key)
                assert key in slots
            case "release" if key in held:
                held.remove(key)
                slots.release(*key)
            case "prefetch":
                assert slots.prefetch(*key) == (key in slots) == (there or len(set(held)) < num_slots)
            case "fill":
                before = slots.evictions
                slots.prefetch(*key, evict=False)
                assert slots.evictions == before
            case "withdraw":
                withdrawn = slots.withdraw(*key)
                assert not (withdrawn and (key in held or not there))
                assert (key in slots) == (there and not withdrawn)
            case "evict" if there and key not in held:
                slots.evict(*key)
                assert key not in slots
        slots.check_integrity()
        assert all(key in slots for key in held), "what is held was taken away"
    for (layer, expert), ticket in reads:
        assert device.wait(ticket) == [content(layer, f"expert.{expert}")]
    slots.close()
    assert "expert slots" not in device.tiers["device"].holders()


def test_a_prefetch_that_has_not_begun_is_withdrawn_and_costs_nothing():
    device = machine()
    device._eager = 0.0  # nothing runs before something is waited for
    slots = slots_on(device, 2)
    assert slots.prefetch(0, 1) and slots.withdraw(0, 1) and (0, 1) not in slots
    assert slots.prefetch(0, 0)
    device.drain()
    assert slots.arrived((0, 0)) and not slots.arrived((0, 1))
    assert not slots.withdraw(0, 0), "it is there already"
    assert (slots.hits, slots.misses, slots.evictions, slots.withdrawals) == (0, 0, 0, 1)


def test_misuse_is_an_error_at_once():
    slots = slots_on(machine(), 1)
    slots.acquire(0, 0)
    for misuse, message in (
        (lambda: slots.acquire(0, 1), "all 1 expert slots are held"),
        (lambda: slots.evict(0, 0), "cannot be evicted"),
        (lambda: slots.evict(1, 0), "cannot be evicted"),
        (lambda: slots.release(0, 1), "is not held"),
    ):
        with pytest.raises(AssertionError, match=message):
            misuse()
    assert not slots.prefetch(0, 1) and not slots.withdraw(0, 0)
    slots.check_integrity()


def test_slots_fill_what_is_left_to_the_byte():
    store = WeightStore(machine(), FakeSource())
    size = expert_slot_bytes(store)
    assert size == max(store.experts(layer)[10].layout.nbytes for layer in range(NUM_LAYERS))
    assert [num_slots_that_fit(store, nbytes) for nbytes in (-1, size - 1, size, 3 * size - 1)] == [0, 0, 1, 2]
    assert num_slots_that_fit(store, 100 * size) == len(KEYS), "no more than the model has"


def test_a_stream_without_experts_holds_the_other_parts_only():
    device = machine()
    store = WeightStore(device, FakeSource())
    stream = WeightStream(device, store, depth=2, packet_bytes=64, experts=False, name="dense")
    dense = {"attention_in", "attention_out"}
    assert set(stream.part_names(0)) == dense
    assert device.tiers["device"].holders() == {
        f"dense {slot}": sum(store.slot_bytes[name] for name in dense) for slot in (0, 1)
    }
    for index in range(2):
        stream.request_layer(index)
    for index in range(2 * NUM_LAYERS):
        for name in stream.part_names(index):
            ticket = read_bytes(device, stream.part(index, name))
            stream.advance(index, name)
            assert device.wait(ticket) == [content(index % NUM_LAYERS, name)]
        assert not stream.experts(index + 1)
