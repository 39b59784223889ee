"""Expert slots: every reader gets the expert it acquired, whatever is fetched, withdrawn and evicted meanwhile."""

from __future__ import annotations

from collections.abc import Collection
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.machine.base import LaneKind
from harness.machine.simulated import SimulatedMachine
from harness.machine.virtual.costs import LaneCost, Roofline
from harness.memory.expert_slots import ExpertSlots, Key, num_slots_that_fit
from harness.memory.tiers import MemoryCapacityError
from harness.memory.weights import WeightStore, WeightStream
from harness.model.layout import PartLayout
from tests.unit.memory.parts import NUM_LAYERS, FakeFamily, FakeSource, content, machine, part, read_bytes

EXPERTS = (0, 1, 10)
KEYS = [(layer, expert) for layer in range(NUM_LAYERS) for expert in EXPERTS]


class Oldest:
    """Evicts whatever was told of first."""

    def __init__(self) -> None:
        self.order: list[Key] = []

    def used(self, key: Key) -> None:
        self.order.append(key)

    def victim(self, candidates: Collection[Key], wanted: Key) -> Key:
        assert candidates
        return next(key for key in self.order if key in candidates)

    def lost(self, key: Key) -> None:
        self.order = [other for other in self.order if other != key]


def slots_on(device, num_slots: int) -> ExpertSlots:
    store = WeightStore(device, FakeSource())
    return ExpertSlots(device, store, num_slots=num_slots, packet_bytes=64, replacement=Oldest())


ACTIONS = ("use", "hurry", "hold", "release", "prefetch", "fill", "withdraw", "evict")
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
            case "use" | "hurry" | "hold" if there or len(set(held)) < num_slots:
                reads.append((key, read_bytes(device, slots.acquire(*key, urgent=what == "hurry"))))
                held += [key] if what == "hold" else []
                if what != "hold":
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
        device.tiers["device"].check_integrity()
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


def arrivals_s(*prefetched: Key, hurried: Key) -> tuple[dict[Key, float], ExpertSlots]:
    """Return when each expert arrives on a link at 1 kB/s, where one is acquired as urgent after the prefetches."""
    costs = Roofline(lanes={kind: LaneCost(link_bytes_s=1000.0) for kind in LaneKind})
    capacities = {"device": 1 << 20, "pinned": 1 << 20, "host": 1 << 20}
    device = SimulatedMachine(capacities_bytes=capacities, costs=costs, host_bytes_s=1e12)
    slots, tickets, submit = slots_on(device, 6), {}, device.submit

    def noted(lane, op, **how):
        if op.kind == "weights":
            tickets[op.layer, op.source.layout.expert] = ticket = submit(lane, op, **how)
            return ticket
        return submit(lane, op, **how)

    device.submit = noted
    for key in prefetched:
        slots.prefetch(*key)
    slots.acquire(*hurried, urgent=True)
    device.drain()
    return {key: ticket.finished_s for key, ticket in tickets.items()}, slots


@pytest.mark.parametrize("hurried", [(0, 10), (2, 1)])
def test_an_urgent_expert_overtakes_prefetches_whether_or_not_it_is_one_of_them(hurried):
    prefetched = ((0, 0), (0, 1), (2, 0), (0, 10))
    arrived_s, slots = arrivals_s(*prefetched, hurried=hurried)
    assert min(arrived_s.values()) == arrived_s[hurried] < 0.6, "before all others, which take 0.5 s and more each"
    assert (slots.hits, slots.misses, slots.withdrawals) == (0, 1, int(hurried in prefetched))


def test_an_urgent_expert_is_not_fetched_twice():
    """One that has begun to arrive is a hit, and so is one whose transfer is urgent already."""
    device = machine()
    device._eager = 0.0  # nothing runs before something is waited for
    slots = slots_on(device, 3)
    slots.prefetch(0, 0)
    device.drain()
    for key, expected in (((0, 0), (1, 0, 0)), ((0, 1), (1, 1, 0)), ((0, 1), (2, 1, 0))):
        slots.acquire(*key, urgent=True)
        slots.release(*key)
        assert (slots.hits, slots.misses, slots.withdrawals) == expected


def test_what_is_spared_goes_last_and_for_no_prefetch():
    device = machine(0)
    slots = slots_on(device, 3)
    first, second, third, *others = KEYS
    for key in (first, second, third):
        slots.prefetch(*key)
    slots.spared = {first, second}
    assert slots.prefetch(*others[0]) and third not in slots, "the oldest that is not spared"
    slots.spared = {first, second, others[0]}
    assert not slots.prefetch(*others[1]), "not for another prefetch"
    slots.acquire(*others[1])
    assert first not in slots and second in slots, "for what a reader wants, the oldest of all"
    slots.release(*others[1])
    device.drain()
    slots.close()
    device.close()


def test_misuse_is_an_error_at_once():
    device = machine()
    slots = slots_on(device, 1)
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
    device.tiers["device"].check_integrity()


class Uneven(FakeFamily):
    """Experts of any sizes, whole cache lines or not; a layer without any is dense."""

    def __init__(self, sizes: list[list[int]]) -> None:
        self.sizes = sizes

    def layer_parts(self, spec, layer: int) -> tuple[PartLayout, ...]:
        experts = [part(f"expert.{number}", size) for number, size in enumerate(self.sizes[layer])]
        return (part("attention_in", 70), *experts)


def uneven_store(device, sizes: list[list[int]]) -> WeightStore:
    source = FakeSource()
    source.family, source.spec = Uneven(sizes), SimpleNamespace(num_layers=len(sizes))
    source.read_part = lambda layer, layout, out: out.fill_(16 * (layer or 0) + (layout.expert or 0))
    return WeightStore(device, source)


@settings(max_examples=60)
@given(
    sizes=st.lists(st.lists(st.integers(1, 400), max_size=4), min_size=1, max_size=5).filter(any),
    others_bytes=st.integers(0, 5000),
    wanted_slots=st.integers(0, 9),
    beyond_bytes=st.sampled_from((-1, 0, 1, 63)),
)
def test_one_slot_more_than_those_that_fit_does_not_fit(sizes, others_bytes, wanted_slots, beyond_bytes):
    """Whatever else lies on the device; and each slot has room for any expert of the model."""
    largest_bytes = max(-(-4 * size // 64) * 64 for experts in sizes for size in experts)  # float32, whole cache lines
    device = machine(device_bytes=max(0, others_bytes + wanted_slots * largest_bytes + beyond_bytes))
    store, tier = uneven_store(device, sizes), device.tiers["device"]
    tier.reserve("others", min(others_bytes, tier.free_bytes))
    num_slots, num_experts = num_slots_that_fit(store, tier.free_bytes), sum(map(len, sizes))
    assert num_slots <= num_experts
    if num_slots < num_experts:
        with pytest.raises(MemoryCapacityError, match="expert slots"):
            ExpertSlots(device, store, num_slots=num_slots + 1, packet_bytes=64, replacement=Oldest())
    if not num_slots:
        return
    slots = ExpertSlots(device, store, num_slots=num_slots, packet_bytes=64, replacement=Oldest())
    for layer, experts in enumerate(sizes):
        for expert in range(len(experts)):
            read = read_bytes(device, slots.acquire(layer, expert))
            slots.release(layer, expert)
            assert device.wait(read) == [16 * layer + expert]


def test_a_model_without_experts_is_refused():
    with pytest.raises(ValueError, match="routed experts"):
        num_slots_that_fit(uneven_store(machine(), [[], []]), 1000)


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
