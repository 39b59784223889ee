"""The cyclic stream: every reader gets the layer it asked for, whatever order the machine runs ops in."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.machine.base import GPU, H2D, Lane, LaneKind
from harness.machine.emulated import EmulatedMachine
from harness.machine.shuffled import ShuffledMachine
from harness.memory.tiers import device_tier
from harness.memory.transfers import AllGather, CopyShare, share_of
from harness.memory.weights import EXPERTS, Resident, WeightStore, WeightStream, slot_sizes
from tests.unit.machine.ops import Gated, Quick
from tests.unit.memory.parts import NUM_LAYERS, PARTS, FakeSource, ReadBytes, content, machine, read_bytes

NAMES = list(PARTS)


def stream_on(device, depth: int, packet_bytes: int = 100) -> WeightStream:
    return WeightStream(device, WeightStore(device, FakeSource()), depth=depth, packet_bytes=packet_bytes)


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**16),
    depth=st.integers(1, 4),
    packet_bytes=st.sampled_from((64, 100, 10_000)),
    poison=st.booleans(),
    num_readers=st.lists(st.integers(0, 2), min_size=1, max_size=2 * NUM_LAYERS + 2),
    kept=st.sets(st.tuples(st.integers(0, NUM_LAYERS - 1), st.sampled_from(NAMES))),
)
def test_readers_see_their_own_layer(seed, depth, packet_bytes, poison, num_readers, kept):
    """Prefetched `depth` deep and handed on part by part; some parts are never read, some twice, some resident."""
    device = machine(seed, poison=poison)
    store = WeightStore(device, FakeSource())
    resident = Resident(device, store)
    resident.keep("kept weights", kept)
    held = device.tiers["device"].holders()
    assert held.get("kept weights", 0) == sum(store.layers[layer][name].layout.nbytes for layer, name in kept)
    stream = WeightStream(device, store, depth=depth, packet_bytes=packet_bytes, resident=resident)
    streamed = [[p.layout for n, p in store.layers[i].items() if (i, n) not in kept] for i in range(NUM_LAYERS)]
    held = device.tiers["device"].holders()
    assert held["weight buffer 0"] == sum(slot_sizes(streamed).values()), "slots have room for the others alone"
    submitted, submit = [], device.submit
    device.submit = lambda lane, op, **options: submitted.append(op) or submit(lane, op, **options)
    for index in range(min(depth, len(num_readers))):
        for name in NAMES:
            stream.request(index, name)
    reads = []
    for index, count in enumerate(num_readers):
        for name in NAMES:
            placed = stream.part(index, name)
            reads += [(index, name, read_bytes(device, placed)) for _ in range(count)]
            if index + depth < len(num_readers):
                stream.advance(index, name)
            else:
                stream.release(index, name)
    for index, name, ticket in reads:
        assert device.wait(ticket) == [content(index % NUM_LAYERS, name)], (index, name)
    device.drain()
    indices = range(max(len(num_readers), 1))
    wanted = [
        store.layers[i % NUM_LAYERS][n].layout.nbytes for i in indices for n in NAMES if (i % NUM_LAYERS, n) not in kept
    ]
    brought = sum(op.work().link_bytes for op in submitted if op.kind == "weights")
    assert brought == sum(wanted), "each part once, and none that is resident"


def test_a_place_is_requested_only_after_its_release():
    stream = stream_on(machine(), depth=2)
    stream.request(0, "expert.1")
    stream.request(1, "expert.1")
    with pytest.raises(AssertionError, match="0, 'expert.1'. was not released"):
        stream.request(2, "expert.1")
    stream.release(0, "expert.1")
    stream.request(2, "expert.1")


@settings(max_examples=20)
@given(seed=st.integers(0, 2**16), poison=st.booleans(), kept=st.sets(st.sampled_from(NAMES), max_size=4))
def test_one_part_at_a_time_needs_room_for_the_largest(seed, poison, kept):
    device = machine(seed, poison=poison)
    store = WeightStore(device, FakeSource())
    resident = Resident(device, store)
    resident.keep("kept weights", [(layer, name) for layer in range(NUM_LAYERS) for name in kept])
    stream = WeightStream(device, store, depth=1, packet_bytes=100, one_part=True, resident=resident)
    largest_bytes = max(size for name, size in store.slot_bytes.items() if name not in kept)
    assert device.tiers["device"].holders()["weight buffer"] == largest_bytes
    reads = []
    for index in range(2 * NUM_LAYERS):
        for name in NAMES:
            stream.request(index, name)
            reads.append((index, name, read_bytes(device, stream.part(index, name))))
            others = [other for other in NAMES if other not in {name, *kept}]
            if name not in kept and others:
                with pytest.raises(AssertionError, match="was not released"):
                    stream.request(index, others[0])
            stream.release(index, name)
    for index, name, ticket in reads:
        assert device.wait(ticket) == [content(index % NUM_LAYERS, name)], (index, name)
    stream.close()
    assert "weight buffer" not in device.tiers["device"].holders()


def test_only_what_is_in_the_stream_can_be_used_or_released():
    stream = stream_on(machine(), depth=2)
    stream.request(0, "expert.1")
    for call in (stream.part, stream.release):
        for index, name in ((2, "expert.1"), (1, "expert.1"), (0, "expert.0")):
            with pytest.raises(AssertionError, match=f"{name} of {index} is not in the stream"):
                call(index, name)
    stream.release(0, "expert.1")
    with pytest.raises(AssertionError, match="expert.1 of 0 is not in the stream"):
        stream.part(0, "expert.1")


def test_experts_are_found_by_number():
    device = machine()
    stream = stream_on(device, depth=1)
    for name in NAMES:
        stream.request(4, name)
    experts = stream.experts(4)
    assert sorted(experts) == [0, 1, 10]
    for number, placed in experts.items():
        assert device.wait(read_bytes(device, placed)) == [content(4 % NUM_LAYERS, f"expert.{number}")]


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**16),
    depth=st.integers(1, 3),
    packet_bytes=st.sampled_from((64, 100, 10_000)),
    poison=st.booleans(),
    num_indices=st.integers(1, 2 * NUM_LAYERS + 2),
    kept=st.sampled_from(((), ((1, "expert.1"),), ((0, "attention_in"),))),
)
def test_experts_that_come_together_are_those_of_their_layer(seed, depth, packet_bytes, poison, num_indices, kept):
    device = machine(seed, poison=poison)
    store = WeightStore(device, FakeSource())
    resident = Resident(device, store)
    resident.keep("kept weights", kept)
    stream = WeightStream(
        device, store, depth=depth, packet_bytes=packet_bytes, resident=resident, experts_together=True
    )
    together = kept != ((1, "expert.1"),)
    assert (EXPERTS in stream.part_names(0)) == together
    tickets = [ticket for index in range(min(depth, num_indices)) for ticket in stream.request_layer(index)]
    reads = []
    for index in range(num_indices):
        for number, placed in stream.experts(index).items():
            reads.append((read_bytes(device, placed), content(index % NUM_LAYERS, f"expert.{number}")))
        for name in stream.part_names(index):
            if name.startswith("attention"):
                reads.append((read_bytes(device, stream.part(index, name)), content(index % NUM_LAYERS, name)))
            if index + depth < num_indices:
                stream.advance(index, name)
            else:
                stream.release(index, name)
    for ticket, expected in reads:
        assert device.wait(ticket) == [expected]
    for op in (ticket.op for ticket in tickets if ticket.op.layer is not None):  # without those of resident parts
        assert op.pieces == (3 if op.source.layout.name == EXPERTS else 1)
        assert op.packets == op.pieces * -(-op.piece_bytes // packet_bytes), "no packet has bytes of two experts"
    stream.close()


@pytest.mark.parametrize("poison", [True, False])
def test_a_released_place_is_poisoned_after_its_last_reader_in_tests_only(poison):
    device = machine(poison=poison)
    stream = stream_on(device, depth=1)
    stream.request(0, "expert.1")
    placed = stream.part(0, "expert.1")
    before = read_bytes(device, placed)
    stream.release(0, "expert.1")
    after = read_bytes(device, placed)  # a use after release, which no pipeline may submit
    assert device.wait(before) == [content(0, "expert.1")]
    assert device.wait(after) == ([0xFF] if poison else [content(0, "expert.1")])


def test_packets_cover_a_part_exactly():
    device = machine()
    stream = stream_on(device, depth=1, packet_bytes=100)
    ticket = stream.request(1, "expert.1")
    nbytes = stream.part(1, "expert.1").layout.nbytes
    assert nbytes % 100, "the last packet is a short one"
    assert ticket.op.packets == -(-nbytes // 100)
    assert device.wait(read_bytes(device, stream.part(1, "expert.1"))) == [content(1, "expert.1")]
    assert ticket.op.work().link_bytes == nbytes


def test_slots_hold_the_largest_of_each_part_and_are_accounted_for():
    device = machine()
    stream = stream_on(device, depth=2)
    assert device.tiers["device"].holders() == {f"weight buffer {i}": stream._store.layer_bytes for i in (0, 1)}
    stream.close()
    assert device.tiers["device"].used_bytes == 0


def test_cancel_all_withdraws_what_has_not_started_and_empties_the_stream():

    capacities = {"device": 1 << 20, "pinned": 1 << 20}
    device = EmulatedMachine(capacities_bytes=capacities, rates={}, poison=True)
    try:
        stream = stream_on(device, depth=2)
        device.spans.clear()
        blocked = Gated()
        device.submit(H2D, blocked)
        blocked.await_packet(0)
        for index in (0, 1):
            for name in NAMES:
                stream.request(index, name)
        read = read_bytes(device, stream.part(0, "expert.0"))
        stream.cancel_all()
        blocked.open()
        device.drain()
        copied = [s for s in device.spans if s.kind == "weights"]
        assert [(s.layer, s.packet) for s in copied] == [(0, n) for n in range(len(copied))], "one part had a reader"
        assert device.wait(read) == [content(0, "expert.0")]
        for name in NAMES:  # the stream starts again
            stream.request(0, name)
            assert device.wait(read_bytes(device, stream.part(0, name))) == [content(0, name)]
    finally:
        device.close()


def test_a_request_can_follow_another_op():
    device = machine()
    stream = stream_on(device, depth=1)
    first = device.submit(GPU, Quick())
    ticket = stream.request(0, "expert.0", after=[first])
    device.wait(ticket)
    assert first.finished_s <= ticket.started_s
    assert first.done


@given(nbytes=st.integers(1, 5000), num_ranks=st.integers(1, 9))
def test_shares_are_disjoint_and_make_the_whole(nbytes, num_ranks):
    shares = [share_of(nbytes, rank, num_ranks) for rank in range(num_ranks)]
    assert [byte for share in shares for byte in share] == list(range(nbytes))
    assert max(map(len, shares)) <= -(-nbytes // num_ranks) + 63


def gathered(seed: int, num_gpus: int, depth: int, poison: bool) -> tuple[ShuffledMachine, list[WeightStream]]:
    capacities = {device_tier(rank): 1 << 20 for rank in range(num_gpus)} | {"pinned": 1 << 20}
    device = ShuffledMachine(capacities_bytes=capacities, seed=seed, poison=poison, eager=0.3)
    store = WeightStore(device, FakeSource())
    streams = [
        WeightStream(device, store, depth=depth, packet_bytes=100, rank=rank, num_shares=num_gpus)
        for rank in range(num_gpus)
    ]
    return device, streams


def read_all(seed: int, num_gpus: int, depth: int, num_indices: int, *, poison: bool = True) -> bool:
    """Whether every GPU saw every layer whole."""
    device, streams = gathered(seed, num_gpus, depth, poison)
    for index in range(min(depth, num_indices)):
        for stream in streams:
            stream.request_layer(index)
    reads = []
    for index in range(num_indices):
        for name in NAMES:
            parts = [stream.part(index, name) for stream in streams]
            buffers, nbytes, layer = [part.buffer for part in parts], parts[0].layout.nbytes, index % NUM_LAYERS
            for rank in range(num_gpus):
                device.submit(Lane(LaneKind.GPU, rank), AllGather(buffers, rank, nbytes=nbytes, layer=layer))
            for rank, placed in enumerate(parts):
                ticket = device.submit(Lane(LaneKind.GPU, rank), ReadBytes(placed))
                reads.append((ticket, content(index % NUM_LAYERS, name)))
            for stream in streams:
                if index + depth < num_indices:
                    stream.advance(index, name)
                else:
                    stream.release(index, name)
    right = all(device.wait(ticket) == [expected] for ticket, expected in reads)
    for stream in streams:
        stream.close()
    assert all(device.tiers[device_tier(rank)].used_bytes == 0 for rank in range(num_gpus))
    return right


@settings(max_examples=30)
@given(seed=st.integers(0, 2**16), num_gpus=st.integers(2, 4), depth=st.integers(1, 3), num_indices=st.integers(1, 7))
def test_every_gpu_sees_layers_of_which_it_fetched_a_share(seed, num_gpus, depth, num_indices):
    assert read_all(seed, num_gpus, depth, num_indices)


@pytest.mark.parametrize(
    ("cls", "which", "left"),
    [
        (CopyShare, "writes", lambda op: (op.target,)),
        (CopyShare, "writes", lambda op: op.writes[1:]),
        (AllGather, "reads", lambda op: op.reads[:1]),
        (AllGather, "writes", lambda op: ()),
    ],
)
def test_an_undeclared_access_of_a_share_is_caught(monkeypatch, cls, which, left):
    original = cls.__init__

    def forgetful(self, *args, **kwargs):
        original(self, *args, **kwargs)
        setattr(self, which, left(self))

    monkeypatch.setattr(cls, "__init__", forgetful)
    seeds = range(12)  # poison is an access too, which orders those around it
    assert not all(read_all(seed, 3, 2, 7, poison=poison) for seed in seeds for poison in (True, False))
