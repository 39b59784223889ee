"""Pages: every reader gets its layer whole, whatever order the machine runs ops in and wherever parts were cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.machine.base import H2D, PIN
from harness.memory.paged_weights import PagedWeights
from harness.memory.weights import Resident, WeightStore
from tests.unit.memory.parts import NUM_LAYERS, PARTS, FakeSource, content, machine, read_bytes

NAMES = list(PARTS)
LAYER_1_BYTES = sum((4 * (size + 33) + 63) // 64 * 64 for size in PARTS.values())  # float32, whole cache lines


def paged(
    device, *, num_pages: int, tier: str = "host", resident_share: float = 0.0, packet_bytes: int = 100, kept=()
) -> PagedWeights:
    store = WeightStore(device, FakeSource(), tier=tier)
    resident = Resident(device, store, embedding=False, head=False)
    resident.keep("kept before", kept)
    return PagedWeights(
        device, store, resident, num_pages=num_pages, packet_bytes=packet_bytes, resident_share=resident_share
    )


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**16),
    num_pages=st.integers(1, 40),
    tier=st.sampled_from(("host", "pinned")),
    share=st.sampled_from((0.0, 0.3, 0.7, 1.0)),
    packet_bytes=st.sampled_from((64, 100, 10_000)),
    poison=st.booleans(),
    ahead=st.integers(0, 3),
    num_readers=st.lists(st.integers(0, 2), min_size=1, max_size=2 * NUM_LAYERS + 2),
    kept=st.sets(st.tuples(st.integers(0, NUM_LAYERS - 1), st.sampled_from(NAMES)), max_size=8),
)
def test_readers_see_their_own_layer(seed, num_pages, tier, share, packet_bytes, poison, ahead, num_readers, kept):
    """Pages of a layer come while the one before it is read, staged `ahead` pages earlier; wherever they lie, parts
    that were kept before are read there, and what lies beside them is streamed."""
    device = machine(seed, poison=poison)
    weights = paged(device, num_pages=num_pages, tier=tier, resident_share=share, packet_bytes=packet_bytes, kept=kept)
    held = device.tiers["device"].holders()
    assert held.get("kept before", 0) == sum(weights._store.layers[i][name].layout.nbytes for i, name in kept)
    submitted, submit = [], device.submit
    device.submit = lambda lane, op, **options: submitted.append(op) or submit(lane, op, **options)
    weights.load(0, num_pages - 1)
    reads = []
    for index, count in enumerate(num_readers):
        for page in range(num_pages):
            weights.stage(index + 1, page + ahead)
            weights.load(index + 1, page)
            name = NAMES[page % len(NAMES)]
            reads += [(index, name, read_bytes(device, weights.part(index, name))) for _ in range(count)]
        if index + 1 < len(num_readers):
            reads += [(index + 1, NAMES[0], read_bytes(device, weights.part(index + 1, NAMES[0])))]
        weights.release(index)
    for index, name, ticket in reads:
        assert device.wait(ticket) == [content(index % NUM_LAYERS, name)], (index, name)
    device.drain()
    streamed = sum(streamed_bytes(weights, index % NUM_LAYERS, share, kept) for index in range(len(num_readers) + 1))
    assert sum(op.work().link_bytes for op in submitted if op.kind == "weights") == streamed
    weights.close()
    held = device.tiers["device"].holders()
    assert set(held) == ({"kept before"} if kept else set()), "what it added was not given back"
    assert set(device.tiers["pinned"].holders()) <= {"weights"}


def streamed_bytes(weights: PagedWeights, layer: int, share: float, kept) -> int:
    """The bytes of a layer without the parts that were kept before and the last parts that fit in the share."""
    sizes = {name: part.layout.nbytes for name, part in weights._store.layers[layer].items()}
    names, left = list(NAMES), share * sum(sizes.values())
    while names and sizes[names[-1]] <= left:
        left -= sizes[names.pop()]
    return sum(sizes[name] for name in names if (layer, name) not in kept)


def test_a_part_reads_every_page_that_it_lies_in_and_no_other():
    device = machine()
    weights = paged(device, num_pages=7)
    for index in (0, 1):
        offset_bytes = 0
        for name in NAMES:
            placed = weights.part(index, name)
            first, last = (
                offset_bytes // weights.page_bytes,
                (offset_bytes + placed.layout.nbytes - 1) // weights.page_bytes,
            )
            starts = [key.offset_bytes // weights.page_bytes for key in placed.keys]
            assert starts == list(range(first, last + 1)), name
            offset_bytes += placed.layout.nbytes
        weights.load(index, 6)


def test_pages_are_equal_and_the_first_parts_lie_in_the_first_pages():
    device = machine()
    weights = paged(device, num_pages=4)
    copied = [t.op for t in weights_tickets(weights, 1)]
    sizes = [op.nbytes for op in copied]
    assert len(sizes) == 4
    assert sum(sizes) == LAYER_1_BYTES, "layer 1 is the largest"
    assert max(sizes[:-1]) - min(sizes) < 4 * 64, "equal up to whole cache lines"
    assert weights.part(1, "attention_in").keys == (copied[0].target,)


def weights_tickets(weights: PagedWeights, index: int):
    weights.load(index, weights.num_pages - 1)
    return [weights._device.tickets((index, number))[-1] for number in range(weights.num_pages_of(index))]


def test_what_is_pinned_is_not_staged():
    for tier, lanes in (("host", {PIN, H2D}), ("pinned", {H2D})):
        device = machine()
        weights = paged(device, num_pages=3, tier=tier)
        weights.load(0, 2)
        assert {ticket.lane for ticket in weights._device.tickets((0, 0))} == lanes
        staged = device.tiers["pinned"].holders()
        assert any("staged pages" in name for name in staged) == (tier == "host")


@pytest.mark.parametrize("share", [0.0, 0.2, 0.4, 0.79, 1.0])
def test_resident_parts_are_the_last_ones_and_within_their_share(share):
    device = machine()
    weights = paged(device, num_pages=3, resident_share=share)
    for layer in range(NUM_LAYERS):
        sizes = [part.layout.nbytes for part in weights._store.layers[layer].values()]
        kept = [name for name in NAMES if weights.part(layer, name).buffer.root.name == "resident layer weights"]
        assert kept == NAMES[len(NAMES) - len(kept) :]
        assert sum(sizes[len(NAMES) - len(kept) :]) <= share * sum(sizes)
        if len(kept) < len(NAMES):
            assert sum(sizes[len(NAMES) - len(kept) - 1 :]) > share * sum(sizes), "one more would have fitted"
        weights.load(layer, 2)
        weights.release(layer)
    slots_bytes = 2 * -(-weights.slot_bytes // weights.page_bytes) * weights.page_bytes
    assert device.tiers["device"].used_bytes == slots_bytes + weights.resident_bytes
    assert device.tiers["pinned"].used_bytes == slots_bytes
    held = device.tiers["device"].holders()
    assert held.get("resident layer weights", 0) == weights.resident_bytes
    assert (share == 1.0) == (weights.slot_bytes == 0)


def test_an_early_reader_fetches_its_pages_first():
    """A schedule may ask for a part before the page that ends it; each page still goes once, and in order."""
    device = machine()
    weights = paged(device, num_pages=10)
    ticket = read_bytes(device, weights.part(0, "expert.0"))
    early = sum((0, number) in weights._device for number in range(10))
    assert 1 < early < 10
    assert device.wait(ticket) == [content(0, "expert.0")]
    weights.load(0, 9)
    device.drain()
    tickets = weights_tickets(weights, 0)
    assert [t.op.source.offset_bytes for t in tickets] == [n * weights.page_bytes for n in range(len(tickets))]


def test_a_layer_in_use_is_not_overwritten():
    weights = paged(machine(), num_pages=3)
    weights.load(0, 2)
    with pytest.raises(AssertionError, match="0, 0. was not released"):
        weights.load(2, 0)
    with pytest.raises(AssertionError, match="layer 1 of the stream was not loaded"):
        weights.release(1)


def test_staging_memory_is_written_again_only_after_its_page_has_left():
    weights = paged(machine(), num_pages=4)
    weights.stage(0, 3)
    weights.load(0, 1)
    weights.stage(2, 1)
    with pytest.raises(AssertionError, match="0, 2. was not released"):
        weights.stage(2, 2)


def test_cancelled_pages_are_forgotten():
    device = machine()
    weights = paged(device, num_pages=3)
    weights.load(0, 2)
    weights.stage(1, 2)
    weights.cancel_all()
    device.drain()
    weights.load(1, 2)
    assert device.wait(read_bytes(device, weights.part(1, "expert.1"))) == [content(1, "expert.1")]
