"""The hash is SplitMix64, whatever the shapes it is asked in."""

from __future__ import annotations

import warnings

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from harness.routing.counters import Stream, derive, fractions, stream
from tests.unit.routing.models import steady

COUNTERS = st.integers(-(2**63), 2**63 - 1)
MASK = 2**64 - 1


def splitmix64(state: int, number: int) -> int:
    """Number `number` of the stream that starts at `state`, in whole numbers without end."""
    z = (state + (number + 1) * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def test_published_numbers_come_out():
    """The first numbers for the seed 1234567, as implementations in many languages are checked against them."""
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert derive(np.array([1234567], dtype=np.uint64), np.arange(4)).tolist() == expected


@steady
@given(seed=st.integers(0, 2**70), counters=st.lists(st.tuples(COUNTERS, COUNTERS), min_size=1, max_size=5))
def test_streams_are_hashes_of_hashes(seed, counters):
    first, second = (np.array(column, dtype=np.int64) for column in zip(*counters, strict=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # wrapping around is meant
        keys = stream(seed, Stream.KEEP, first, second)
        single = stream(seed, Stream.KEEP, counters[0][0], counters[0][1])
    root = splitmix64(seed & MASK, Stream.KEEP)
    assert keys.tolist() == [splitmix64(splitmix64(root, a), b) for a, b in counters]
    assert single.tolist() == keys[:1].tolist()


def test_streams_for_different_ends_differ():
    numbers = [stream(seed, purpose, 3)[0] for seed in range(50) for purpose in Stream]
    assert len(set(numbers)) == len(numbers)


def test_fractions_leave_out_both_ends():
    ends = fractions(np.array([0, MASK], dtype=np.uint64))
    assert 0.0 < ends[0] < 1e-15
    assert 1.0 - 1e-15 < ends[1] < 1.0


def test_fractions_are_uniform():
    values = fractions(stream(7, Stream.EXPERTS, np.arange(200_000)))
    counts = np.histogram(values, bins=100, range=(0, 1))[0]
    chi_square = ((counts - 2000.0) ** 2 / 2000.0).sum()
    assert 40 < chi_square < 175  # 99 degrees of freedom: mean 99, standard deviation 14
    assert abs(np.corrcoef(values[1:], values[:-1])[0, 1]) < 0.01
