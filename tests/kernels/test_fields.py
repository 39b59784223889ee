"""One field of many objects, against a loop over them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels import fields


@dataclass(eq=False, slots=True)
class Thing:
    number: int = 0
    flag: bool = False
    entries: list = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Other:
    number: int = 0


numbers = st.integers(-(2**63), 2**63 - 1)
things = st.lists(st.builds(Thing, number=numbers, flag=st.booleans(), entries=st.lists(numbers, max_size=4)))


@given(things, st.booleans())
def test_reading_is_what_a_loop_reads(objects, in_tuple):
    many = tuple(objects) if in_tuple else objects
    assert fields.values(many, "number").tolist() == [one.number for one in objects]
    assert fields.values(many, "flag").tolist() == [int(one.flag) for one in objects]
    assert fields.lengths(many, "entries").tolist() == [len(one.entries) for one in objects]
    some = [one for one in objects if one.entries]
    assert fields.last(some, "entries").tolist() == [one.entries[-1] for one in some]


@given(st.lists(st.lists(numbers, max_size=4).flatmap(lambda one: st.tuples(st.just(one), st.integers(0, len(one))))))
def test_joining_takes_the_first_of_each_list(cut):
    lists, counts = [one for one, _ in cut], np.array([count for _, count in cut], dtype=np.int64)
    assert fields.joined(lists, counts).tolist() == [entry for one, count in cut for entry in one[:count]]


@given(things)
def test_writing_is_what_a_loop_writes(objects):
    before, new = [list(one.entries) for one in objects], [object() for _ in objects]
    fields.assign(objects, "number", new)
    fields.append(objects, "entries", new)
    assert [one.number for one in objects] == new
    assert [one.entries for one in objects] == [[*old, entry] for old, entry in zip(before, new, strict=True)]


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: fields.values(iter([]), "number"), TypeError, "len"),
        (lambda: fields.values({1: 2}, "number"), TypeError, "list or tuple"),
        (lambda: fields.values([Thing(), Other()], "number"), TypeError, "one class"),
        (lambda: fields.values([Thing()], "missing"), AttributeError, "missing"),
        (lambda: fields.values([Thing()], "__init__"), TypeError, "slot"),
        (lambda: fields.values([Thing(number=None)], "number"), TypeError, "int"),
        (lambda: fields.values([Thing(number=2**63)], "number"), OverflowError, "int too"),
        (lambda: fields.lengths([Thing(entries=(1,))], "entries"), TypeError, "must be a list"),
        (lambda: fields.joined([["a"]], np.array([1])), TypeError, "int"),
        (lambda: fields.joined([(1,)], np.array([1])), TypeError, "must be lists"),
        (lambda: fields.joined([[1]], np.array([2])), IndexError, "shorter"),
        (lambda: fields.joined([[1]], np.array([1, 1])), ValueError, "one int64 count"),
        (lambda: fields.joined([[1]], np.array([1], dtype=np.int32)), ValueError, "one int64 count"),
        (lambda: fields.last([Thing()], "entries"), IndexError, "entries is empty"),
        (lambda: fields.assign([Thing()], "number", []), ValueError, "one value"),
        (lambda: fields.append([Thing()], "entries", [1, 2]), ValueError, "one entry"),
        (lambda: fields.append([Thing(entries=None)], "entries", [1]), TypeError, "must be a list"),
    ],
)
def test_what_cannot_be_read_is_an_error(call, error, says):
    with pytest.raises(error, match=says):
        call()


def test_a_field_that_was_never_set_is_an_error():
    bare = Thing.__new__(Thing)
    with pytest.raises(AttributeError, match="number"):
        fields.values([bare], "number")
