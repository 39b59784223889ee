"""Memory behind buffers: apart from each other, aligned, poisoned in tests, given back."""

from __future__ import annotations

import gc
import mmap
import resource
import weakref

import pytest
import torch

from harness.machine.threads.arenas import Arenas


@pytest.fixture
def tiers():
    arenas = Arenas(poison=True)
    return arenas, arenas.tiers({"device": 1 << 20, "pinned": 1 << 20})


def test_new_memory_is_nan_and_aligned(tiers):
    arenas, by_name = tiers
    buffer = by_name["device"].reserve("a", 1000)
    for dtype in ("float32", "bfloat16", "float16"):
        assert torch.isnan(arenas.tensor(buffer, (250,), dtype)).all()
    assert (arenas.tensor(buffer, (125,), "int64") == -1).all()
    assert arenas.bytes_of(buffer).data_ptr() % 4096 == 0


def test_a_parent_and_its_children_share_memory_and_others_do_not(tiers):
    arenas, by_name = tiers
    parent, other = by_name["device"].reserve("parent", 64), by_name["pinned"].reserve("other", 64)
    child = parent.sub("child", 16, 32).sub("grandchild", 8, 8)
    arenas.bytes_of(parent).copy_(torch.arange(64))
    assert arenas.tensor(child, (8,), "uint8").tolist() == list(range(24, 32))
    arenas.bytes_of(other).fill_(1)
    assert arenas.bytes_of(parent).tolist() == list(range(64))


def test_a_shape_that_does_not_fit_is_refused(tiers):
    arenas, by_name = tiers
    buffer = by_name["device"].reserve("small", 64)
    assert arenas.tensor(buffer, (4, 4), "float32").shape == (4, 4)
    with pytest.raises(AssertionError, match="does not fit.*small"):
        arenas.tensor(buffer, (4, 5), "float32")


def test_released_memory_is_freed(tiers):
    arenas, by_name = tiers
    buffer = by_name["device"].reserve("a", 1 << 20)
    memory = weakref.ref(arenas._roots[buffer])
    arenas.memo(buffer.sub("part", 0, 64))["view"] = arenas.tensor(buffer, (16,), "float32")
    by_name["device"].release(buffer)
    gc.collect()
    assert memory() is None
    with pytest.raises(KeyError):
        arenas.bytes_of(buffer)


def test_what_ops_remember_of_a_buffer_is_shared_by_its_parts(tiers):
    arenas, by_name = tiers
    a, b = by_name["device"].reserve("a", 64), by_name["device"].reserve("b", 64)
    arenas.memo(a.sub("part", 0, 16))["known"] = 1
    assert arenas.memo(a) == {"known": 1}
    assert arenas.memo(b) == {}


def test_a_view_is_made_once_and_its_shape_checked_for_every_buffer(tiers, monkeypatch):
    arenas, by_name = tiers
    buffer = by_name["device"].reserve("a", 64)
    view = arenas.tensor(buffer, [4, 4], "float32")
    assert arenas.tensor(buffer, (4, 4), "float32") is view is not arenas.tensor(buffer, (4, 4), "int32")
    assert arenas.tensor(buffer.sub("second half", 32, 32), (2, 4), "float32").data_ptr() == view.data_ptr() + 32
    with pytest.raises(AssertionError, match="does not fit"):
        arenas.tensor(buffer.sub("first half", 0, 32), (4, 4), "float32")
    monkeypatch.setattr("harness.machine.threads.arenas._MAX_VIEWS", 3)
    for rows in range(1, 5):
        arenas.tensor(buffer, (rows, 4), "float32")
    assert len(arenas._views[buffer]) <= 3


@pytest.mark.parametrize("at_hand", [False, True])
def test_pages_at_hand_are_there_before_the_first_op_writes(at_hand):
    arenas = Arenas(poison=False, at_hand=at_hand)
    buffer = arenas.tiers({"device": 1 << 26})["device"].reserve("a", 1 << 26)
    memory = arenas.bytes_of(buffer)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    memory.fill_(1)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    num_pages = memory.nbytes // mmap.PAGESIZE
    assert faults < num_pages / 100 if at_hand else faults > 0
    arenas.close()
