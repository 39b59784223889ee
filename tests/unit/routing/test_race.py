"""The races in C++ draw what numpy draws from the same numbers, sorted whole."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.routing.counters import derive, fractions
from harness.routing.sampling import race
from kernels import routing


def sorted_whole(keys, num_columns: int, k: int, inverse_rates=None):
    """Sort all numbers of each row; equal ones, but for the bits that a column needs, by column."""
    numbers = derive(keys[:, None], np.arange(num_columns))
    if inverse_rates is not None:
        numbers = (-np.log(fractions(numbers)) * inverse_rates).view(np.uint64)
    ignored = np.uint64(max(num_columns - 1, 0).bit_length())
    return np.argsort(numbers >> ignored, axis=1, kind="stable")[:, :k]


@given(
    seed=st.integers(0, 2**32), num_keys=st.integers(0, 40), num_columns=st.integers(1, 300), share=st.floats(0, 1),
    has_rates=st.booleans(),
)  # fmt: skip
def test_the_first_are_those_of_all_sorted(seed, num_keys, num_columns, share, has_rates):
    rng, k = np.random.default_rng(seed), max(1, round(share * num_columns))
    keys = rng.integers(0, 2**64, num_keys, dtype=np.uint64)
    rates = rng.exponential(size=num_columns) if has_rates else None
    assert np.array_equal(race(keys, num_columns, k, rates), sorted_whole(keys, num_columns, k, rates))


def test_who_never_arrives_is_never_among_the_first():
    rates = np.array([1.0, np.inf, 2.0, np.inf, 0.5])
    drawn = race(np.arange(500, dtype=np.uint64), 5, 3, rates)
    assert {tuple(sorted(row)) for row in drawn.tolist()} == {(0, 2, 4)}


@pytest.mark.parametrize(("k", "rates"), [(0, None), (4, None), (1, np.ones(2))])
def test_a_race_that_cannot_be_is_refused(k, rates):
    with pytest.raises(ValueError, match="k must lie between 1 and the 3 columns|one inverse rate for each of 3"):
        routing.race(np.arange(2, dtype=np.uint64), 3, k, rates)
