"""Fits of measured costs: exact where the samples lie on a line or a plane, robust against single disturbed samples."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.bench.fitting import Plane, fit, fit_by_length, relative_spread

COUNTS = st.lists(st.integers(1, 4000), min_size=2, max_size=8, unique=True)


@given(COUNTS, st.floats(1e-7, 1e-3), st.floats(0, 0.1), st.floats(0, 3))
def test_a_line_is_followed_and_continued(counts, slope, fixed, beyond):
    found = fit([((float(n),), slope * n + fixed) for n in counts])
    asked = min(counts) + beyond * (max(counts) - min(counts))
    assert found((asked,)) == pytest.approx(slope * asked + fixed, rel=1e-6, abs=1e-9)
    assert found((min(counts) / 2,)) == pytest.approx(slope * min(counts) + fixed), "fixed costs stay"


def test_between_points_the_line_bends_only_at_them():
    found = fit([((1.0,), 1.0), ((3.0,), 2.0), ((4.0,), 5.0)])
    assert [found((x,)) for x in (1, 2, 3, 3.5, 4)] == pytest.approx([1.0, 1.5, 2.0, 3.5, 5.0])
    assert found((5.5,)) == pytest.approx(5.0 + 3.25), "beyond: as from 2.5 to 4"


@given(st.lists(st.floats(0, 10), min_size=1, max_size=12), st.integers(0, 200))
def test_noise_makes_nothing_fall(values, asked):
    """More work never takes less time; the mean over all points stays, and what rises by itself is left alone."""
    samples = [((float(10 * i),), value) for i, value in enumerate(values)]
    found = fit(samples)
    assert found((asked,)) <= found((asked + 1,)) + 1e-9
    assert sum(found.seconds) == pytest.approx(sum(values))
    assert fit([(f, s) for f, s in zip((f for f, _ in samples), sorted(values), strict=True)]).seconds == tuple(
        pytest.approx(s) for s in sorted(values)
    )


def test_one_point_is_a_constant():
    assert fit([((7.0,), 0.25)])((1000.0,)) == 0.25
    assert fit([((7.0,), 0.25)])((1.0,)) == 0.25


@given(
    st.lists(st.tuples(st.integers(1, 200), st.integers(1, 9000)), min_size=6, max_size=12, unique=True),
    st.tuples(st.floats(1e-5, 1e-3), st.floats(0, 1e-4), st.floats(0, 1e-6)),
)
def test_a_plane_is_recovered(points, truth):
    fixed, first, second = truth
    rows = np.array([(1, a, b) for a, b in points], dtype=float)
    if np.linalg.matrix_rank(rows) < 3 or np.linalg.cond(rows / rows.max(axis=0)) > 1e3:
        return  # these points do not determine a plane
    found = fit([((float(a), float(b)), fixed + first * a + second * b) for a, b in points])
    for a, b in points:
        assert found((a, b)) == pytest.approx(fixed + first * a + second * b, rel=1e-4)


@given(st.floats(0, 1e-3), st.floats(0, 1e-4), st.floats(1e-8, 1e-6))
def test_lengths_change_nothing_of_a_plane(fixed, of_row, of_token):
    points = {(float(n), float(n * c)): fixed + of_row * n + of_token * n * c for n in (1, 4, 16) for c in (90, 400)}
    found = fit_by_length(points)
    assert [*found.factors[0], *found.factors[1]] == pytest.approx([1] * 6, rel=1e-3)
    assert found((100.0, 100 * 250.0)) == pytest.approx(fixed + of_row * 100 + of_token * 25_000, rel=1e-2)


def test_at_measured_lengths_the_fit_is_what_was_measured():
    """A token takes 1 us in contexts of 100, and 5 us in those of 300, which do not fit the processor's cache."""
    points = {(float(n), float(n * c)): n * c * s for n in (1, 4, 16) for c, s in ((100, 1e-6), (300, 5e-6))}
    found = fit_by_length(points)
    assert [found(at) for at in points] == pytest.approx(list(points.values()))
    assert [found((64.0, 64.0 * c)) / (64 * c) for c in (100, 300)] == pytest.approx([1e-6, 5e-6], rel=0.05)
    assert 1e-6 < found((16, 16 * 200.0)) / 3200 < 5e-6
    assert found((16, 16 * 600.0)) / found((16, 16 * 300.0)) == pytest.approx(2, rel=0.1), "as for the longest one"


def test_more_work_never_takes_less_time():
    found = fit([((float(a), float(b)), 1.0 - 0.01 * a + 0.1 * b) for a in (1, 2, 5) for b in (1, 3, 9)])
    assert isinstance(found, Plane)
    assert min(found.fixed, *found.weights) >= 0


def test_the_mean_of_repeats_counts_without_what_is_far_out():
    """Short ops wait for the interpreter now and then, which is part of what they cost; a second is not."""
    waits = [((5.0,), 1e-4), ((5.0,), 1e-4), ((5.0,), 1e-4), ((5.0,), 2.1e-3), ((9.0,), 2e-3)]
    assert fit(waits)((5.0,)) == pytest.approx(6e-4)
    assert fit([*waits, ((5.0,), 1.0)])((5.0,)) == pytest.approx(6e-4)
    assert fit([((5.0,), 0.05), ((5.0,), 2e-3)])((5.0,)) == 2e-3, "nor of two measurements the one with a stall"
    assert relative_spread([((5.0,), 1.0), ((5.0,), 1.0), ((5.0,), 1.0)]) == 0.0
    assert relative_spread([((5.0,), 1.0), ((5.0,), 2.0), ((5.0,), 3.0)]) == pytest.approx(0.5)


def test_a_plane_through_scatter_has_its_mean():
    """Half of the measurements 0.1 ms, half 1.9 ms, whatever the features: 1 ms, not the harmonic mean of 0.19 ms."""
    rng = np.random.default_rng(0)
    points = [((float(a), float(b)), 1e-4 if rng.random() < 0.5 else 1.9e-3) for a in range(20) for b in range(20)]
    found = fit(points)
    mean = np.mean([found(features) for features, _ in points])
    assert mean == pytest.approx(np.mean([seconds for _, seconds in points]), rel=0.1)


def test_short_ops_count_as_much_as_long_ones():
    """Ten short ones on a plane, and one a thousand times as long that took a fifth too long."""
    points = [((float(a), float(a % 3)), 1e-6 * a) for a in range(10, 20)]
    found = fit([*points, ((15_000.0, 0.0), 1.2 * 15_000e-6)])
    for features, seconds in points:
        assert found(features) == pytest.approx(seconds, rel=0.1)


def test_without_samples_there_is_nothing_to_fit():
    with pytest.raises(ValueError, match="no samples"):
        fit([])
