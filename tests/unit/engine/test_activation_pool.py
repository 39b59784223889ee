"""The pool of many micro-batches: what is planned is what is reserved, and nobody's memory is another's."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.engine.activation_pool import ActivationPool, PoolSizes
from harness.engine.activations import attention_bytes, expert_bytes, host_attention_bytes, state_bytes
from tests.unit.engine.fakes import SPEC, engine

OWN = ("tokens", "sampled")
BYTES = {**state_bytes(SPEC), **attention_bytes(SPEC), **expert_bytes(SPEC, None), **host_attention_bytes(SPEC)}


def pool_of(sizes: PoolSizes):
    machine = engine([]).machine
    return machine, ActivationPool(machine, SPEC, sizes)


def overlap(a, b) -> bool:
    apart = a.offset_bytes + a.nbytes <= b.offset_bytes or b.offset_bytes + b.nbytes <= a.offset_bytes
    return a.root is b.root and not apart


@settings(max_examples=80)
@given(counts=st.lists(st.integers(1, 9), min_size=1, max_size=7), turns=st.integers(1, 4), spills=st.booleans())
def test_micro_batches_share_only_what_they_may(counts, turns, spills):
    largest, in_pass = max(counts), sum(counts)
    hidden = 2 * largest if spills else max(in_pass, 2 * largest)
    sizes = PoolSizes(in_pass=in_pass, largest=largest, in_attention=turns * largest, hidden=hidden, kept=in_pass)
    machine, pool = pool_of(sizes)
    assert machine.tiers["device"].used_bytes == sizes.device_bytes(SPEC, None)
    assert machine.tiers["pinned"].used_bytes == sizes.pinned_bytes(SPEC)
    acts = pool.layout(counts)
    is_kept = in_pass > hidden
    for one, count in zip(acts, counts, strict=True):
        assert one.max_tokens == count
        assert (one.kept_hidden is not None) == is_kept
        for name, nbytes in BYTES.items():
            assert getattr(one, name).nbytes >= count * nbytes, name
        buffers = set(one.all_buffers())
        assert not any(overlap(a, b) for a, b in itertools.combinations(buffers, 2))
    for (i, one), (j, other) in itertools.combinations(enumerate(acts), 2):
        own = (*OWN, "kept_hidden") if is_kept else (*OWN, "hidden")
        for name in own:
            assert not overlap(getattr(one, name), getattr(other, name)), name
        for group, names in (
            (turns, attention_bytes(SPEC)),
            (turns, host_attention_bytes(SPEC)),
            (1, expert_bytes(SPEC, None)),
        ):
            for name in names:
                mine, others = getattr(one, name), getattr(other, name)
                assert overlap(mine, others) == (mine is others), f"{name}: memory is shared under one key only"
                assert (mine is others) == (i % min(group, len(acts)) == j % min(group, len(acts)) or group == 1), name


@pytest.mark.parametrize(
    ("counts", "told"),
    [((5,), "micro-batch of 5 tokens exceeds 4"), ((4, 4, 4), "pass of 12 tokens exceeds 10"), ((3, 4, 3), "neither")],
)
def test_what_does_not_fit_is_an_error(counts, told):
    _, pool = pool_of(PoolSizes(in_pass=10, largest=4, in_attention=8, hidden=8, kept=9))
    with pytest.raises(AssertionError, match=told):
        pool.layout(counts)


@settings(max_examples=60)
@given(
    counts=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=5), min_size=2, max_size=6),
    passes=st.integers(2, 4),
    spills=st.booleans(),
)
def test_passes_in_flight_share_nothing_that_lives_from_layer_to_layer(counts, passes, spills):
    """What else they share is ordered byte by byte, so that it may be cut anew for each pass."""
    largest, in_pass = max(map(max, counts)), max(map(sum, counts))
    hidden = 2 * largest if spills else max(in_pass, 2 * largest)
    sizes = PoolSizes(
        in_pass=in_pass, largest=largest, in_attention=2 * largest, hidden=hidden, kept=in_pass, passes=passes
    )
    machine, pool = pool_of(sizes)
    assert machine.tiers["device"].used_bytes == sizes.device_bytes(SPEC, None)
    assert machine.tiers["pinned"].used_bytes == sizes.pinned_bytes(SPEC)
    laid_out = [pool.layout(each, number) for number, each in enumerate(counts)]
    for before, after in itertools.combinations(range(len(counts)), 2):
        if after - before >= passes:
            continue
        own = [[getattr(one, name) for one in laid_out[at] for name in (*OWN, "hidden")] for at in (before, after)]
        assert not any(overlap(one, other) for one, other in itertools.product(*own))
