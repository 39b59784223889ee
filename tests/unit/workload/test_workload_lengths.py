"""Length distributions have the published mean and maximum, and draws of any length reach the mean."""

from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.workload import LengthStatistics
from harness.workload.lengths import drawn_lengths, fitted
from harness.workload.streams import Stream, generator


@st.composite
def all_statistics(draw: st.DrawFn) -> LengthStatistics:
    shortest = draw(st.integers(1, 300))
    longest = shortest + draw(st.integers(0, 3000))
    shape: Any = draw(st.sampled_from(["lognormal", "max_entropy", "constant"]))
    mean = longest if shape == "constant" else shortest + draw(st.floats(0, 1)) * (longest - shortest)
    sigma = draw(st.floats(0.05, 5))
    num_prompts = draw(st.none() | st.integers(1, 400))
    return LengthStatistics(
        mean=mean, max=longest, min=shortest, shape=shape, sigma=sigma, num_prompts=num_prompts, source="none"
    )


@settings(max_examples=100)
@given(all_statistics())
def test_fit_has_the_published_mean(statistics: LengthStatistics) -> None:
    lengths, probabilities = fitted(statistics)
    assert lengths[0] == statistics.min and lengths[-1] == statistics.max
    assert probabilities.min() >= 0 and probabilities.sum() == pytest.approx(1)
    assert float(np.dot(lengths, probabilities)) == pytest.approx(statistics.mean, rel=1e-6)


@pytest.mark.parametrize(("shortest", "sigma"), [(1, 1.0), (40, 0.5)])
def test_lognormal_lengths_are_normal_in_the_logarithm_from_the_shortest_on(shortest: int, sigma: float) -> None:
    """So the logarithm of the density of x = log(length - min + 1) is a parabola that opens by 1 / (2 sigma^2)."""
    statistics = LengthStatistics(mean=200, max=900, min=shortest, shape="lognormal", sigma=sigma, source="none")
    lengths, probabilities = fitted(statistics)
    x, height = np.log(lengths - shortest + 1), np.log(probabilities)
    parabola = np.polyfit(x, height, 2)
    assert parabola[0] == pytest.approx(-1 / (2 * sigma**2), rel=1e-6)
    assert np.polyval(parabola, x) == pytest.approx(height, abs=1e-6)


@settings(max_examples=60)
@given(all_statistics(), st.integers(0, 2**32))
def test_each_block_of_draws_has_the_mean_within_one_stratum(statistics: LengthStatistics, seed: int) -> None:
    num = statistics.num_prompts if statistics.num_prompts and statistics.num_prompts <= 256 else 64
    lengths = list(islice(drawn_lengths(statistics, seed), 2 * num))
    assert all(statistics.min <= length <= statistics.max for length in lengths)
    # one draw from each of `num` equally likely slices misses the mean by at most the slices' summed width
    bound = (statistics.max - statistics.min) / num + 1e-6 * statistics.mean
    for block in (lengths[:num], lengths[num:]):
        assert abs(np.mean(block) - statistics.mean) <= bound


def test_lognormal_has_the_median_and_tail_of_the_real_turns() -> None:
    """Quantiles 0.1 to 0.9 of MT-Bench's first turns in Mixtral tokens: 21, 26, 42, 75, 215."""
    statistics = LengthStatistics(mean=77, max=418, min=15, sigma=1.6, source="MoE-Lightning, Table 3")
    lengths, probabilities = fitted(statistics)
    cumulative = np.cumsum(probabilities)
    low, median, high = (int(lengths[np.searchsorted(cumulative, share)]) for share in (0.1, 0.5, 0.9))
    assert 15 <= low <= 26 and 37 <= median <= 47 and 170 <= high <= 240


def test_max_entropy_is_uniform_in_the_middle_and_tilts_towards_the_mean() -> None:
    _, uniform = fitted(LengthStatistics(mean=50.5, max=100, shape="max_entropy", source="none"))
    np.testing.assert_allclose(uniform, 0.01, rtol=1e-6)
    _, tilted = fitted(LengthStatistics(mean=90, max=100, shape="max_entropy", source="none"))
    ratios = tilted[1:] / tilted[:-1]
    np.testing.assert_allclose(ratios, ratios[0])  # geometric: each length more likely by the same factor
    assert ratios[0] > 1


def test_draws_depend_on_the_seed_only() -> None:
    statistics = LengthStatistics(mean=98, max=450, source="none")
    first, again, other = (list(islice(drawn_lengths(statistics, seed), 200)) for seed in (1, 1, 2))
    assert first == again != other
    assert len(set(first)) > 50
    assert first[:64] != first[64:128]  # each block has its own order


def test_streams_of_a_seed_are_independent() -> None:
    draws = {tuple(generator(7, stream, index).integers(2**60, size=2)) for stream in Stream for index in range(3)}
    assert len(draws) == 3 * len(Stream)
