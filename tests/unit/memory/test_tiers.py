"""Tiers account for every byte by name, and refuse what does not fit with the names of the holders."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.memory.tiers import MemoryCapacityError, Tier, make_tiers


def test_what_does_not_fit_is_refused_with_who_holds_what():
    tier = Tier("device", 10_000_000)
    tier.reserve("activations", 2_000_000)
    tier.reserve("weight buffer 0", 3_500_000)
    tier.reserve("activations", 1_000_000)
    with pytest.raises(MemoryCapacityError) as e:
        tier.reserve("kv staging", 4_000_000)
    text = str(e.value)
    assert "device memory: 'kv staging' needs 4 MB, 3.5 MB of 10 MB are free" in text
    assert "weight buffer 0 3.5 MB, activations 3 MB" in text
    assert tier.used_bytes == 6_500_000
    assert "kv staging" not in tier.holders()
    tier.reserve("what is left", 3_500_000)
    assert tier.free_bytes == 0


def test_host_memories_together_stay_within_the_modules():
    """Each of them would have room, and the device has memory of its own."""
    tiers = make_tiers({"device": 50, "pinned": 80, "host": 80, "ram": 100})
    tiers["device"].reserve("activations", 50)
    tiers["pinned"].reserve("kv cache", 60)
    with pytest.raises(MemoryCapacityError, match="^ram memory: 'weights' needs 41 B, 40 B of 100 B are free"):
        tiers["host"].reserve("weights", 41)
    weights = tiers["host"].reserve("weights", 40)
    assert [tiers[name].free_bytes for name in ("pinned", "host", "ram")] == [0, 0, 0]
    assert tiers["host"].limit is tiers["ram"] and tiers["device"].limit is tiers["device"]
    tiers["host"].release(weights)
    assert [tiers[name].free_bytes for name in ("pinned", "host", "ram")] == [20, 40, 40]
    assert tiers["pinned"].limit is tiers["pinned"]
    for tier in tiers.values():
        tier.check_integrity()


def test_an_empty_tier_says_so():
    with pytest.raises(MemoryCapacityError, match="Held: nothing"):
        Tier("pinned", 10).reserve("too much", 11)


@given(st.lists(st.tuples(st.booleans(), st.sampled_from("abc"), st.integers(0, 40)), max_size=60))
def test_accounting_against_a_model(steps):
    tier, held, peak = Tier("device", 100), [], 0
    for reserves, name, nbytes in steps:
        used = sum(b.nbytes for b in held)
        if reserves and used + nbytes > 100:
            with pytest.raises(MemoryCapacityError):
                tier.reserve(name, nbytes)
        elif reserves:
            held.append(tier.reserve(name, nbytes))
        elif held:
            tier.release(held.pop(nbytes % len(held)))
        used = sum(b.nbytes for b in held)
        peak = max(peak, used)
        assert (tier.used_bytes, tier.free_bytes, tier.peak_bytes) == (used, 100 - used, peak)
        by_name = {n: sum(b.nbytes for b in held if b.name == n) for n in {b.name for b in held}}
        assert tier.holders() == by_name
        assert list(tier.holders().values()) == sorted(by_name.values(), reverse=True)
        tier.check_integrity()


def test_a_buffer_is_released_once():
    tier = Tier("device", 100)
    buffer = tier.reserve("a", 10)
    tier.release(buffer)
    with pytest.raises(KeyError):
        tier.release(buffer)
    with pytest.raises(KeyError):
        tier.release(tier.reserve("b", 10).sub("part", 0, 5))


def test_memory_is_provided_when_reserved_and_taken_back_when_released():
    events = []
    tier = Tier("device", 100, lambda b: events.append(("back", b.name)), lambda b: events.append(("unback", b.name)))
    buffer = tier.reserve("a", 60)
    with pytest.raises(MemoryCapacityError):
        tier.reserve("b", 60)
    tier.release(buffer)
    assert events == [("back", "a"), ("unback", "a")]


def test_a_reservation_that_memory_refuses_is_not_accounted_for():
    def refuse(buffer):
        raise MemoryError("the system has no more")

    tier = Tier("host", 100, refuse)
    with pytest.raises(MemoryError):
        tier.reserve("a", 60)
    assert (tier.used_bytes, tier.peak_bytes, tier.holders()) == (0, 0, {})


def test_sub_buffers_are_named_after_their_parents_and_lie_within_them():
    root = Tier("device", 100).reserve("weights", 100)
    layer = root.sub("layer 1", 20, 60)
    expert = layer.sub("expert 3", 10, 50)
    assert (expert.tier, expert.name) == ("device", "weights/layer 1/expert 3")
    assert (expert.offset_bytes, expert.nbytes, expert.root) == (30, 50, root)
    for offset_bytes, nbytes in ((10, 51), (-1, 5), (61, 0)):
        with pytest.raises(AssertionError, match="outside"):
            layer.sub("beyond", offset_bytes, nbytes)


@pytest.mark.parametrize("corrupt", [lambda t: setattr(t, "used_bytes", 5), lambda t: setattr(t, "capacity_bytes", 5)])
def test_integrity_check_finds_wrong_accounts(corrupt):
    tier = Tier("device", 100)
    tier.reserve("a", 10)
    tier.check_integrity()
    corrupt(tier)
    with pytest.raises(AssertionError, match="device"):
        tier.check_integrity()
