"""HybriMoE's schedule against all schedules, its prefetches, Klotski's planner and correlation, Fate's cache sizes."""

from __future__ import annotations

from itertools import permutations, product
from statistics import fmean

import numpy as np
import pytest

from harness.bench.fitting import Plane
from harness.memory.replacement import LowestRecentScore
from strategies.expert_offload.costs import ExpertCosts
from strategies.expert_offload.placement import Forecast
from strategies.fate import Fate
from strategies.fate.sizes import cache_sizes
from strategies.hybrimoe import HybriMoE
from strategies.hybrimoe.schedule import Times, impacts_s, schedule
from strategies.klotski import Klotski
from strategies.klotski.correlation import Correlation
from strategies.klotski.planner import LayerTimes, num_batches
from tests.unit.strategies.views import view_of

COSTS = ExpertCosts(
    io_s=10.0,
    cpu=Plane(fixed=1.0, weights=(1.0,)),
    gpu=Plane(fixed=1.0, weights=(0.01,)),
    attention_s=2.0,
    prefill_token_s=0.1,
)


def best_end_s(tokens, there, times: Times, link_busy_s: float) -> float:
    """Try every division and every order in which the GPU's experts are brought; the CPU's order does not matter."""

    def gpu_end_s(order) -> float:
        now_s, link_s = 0.0, link_busy_s
        for expert in order:
            link_s += 0.0 if expert in there else times.io_s
            arrival_s = {True: 0.0, False: link_busy_s, None: link_s}[there.get(expert)]
            now_s = max(now_s, arrival_s) + times.gpu_s(tokens[expert])
        return now_s

    ends = []
    for sides in product((True, False), repeat=len(tokens)):
        on_gpu = [expert for expert, side in zip(tokens, sides, strict=True) if side]
        cpu_s = sum(times.cpu_s(tokens[expert]) for expert in tokens if expert not in on_gpu)
        cached = sorted((expert for expert in on_gpu if expert in there), key=lambda expert: not there[expert])
        brought = [expert for expert in on_gpu if expert not in there]
        ends.append(max(cpu_s, min(gpu_end_s([*cached, *order]) for order in permutations(brought))))
    return min(ends)


def drawn_layers(count: int):
    rng = np.random.default_rng(0)
    for _ in range(count):
        experts = range(int(rng.integers(1, 7)))
        tokens = {expert: int(rng.integers(1, 30)) for expert in experts}
        there = {expert: bool(rng.random() < 0.7) for expert in experts if rng.random() < 0.4}
        io_s, start_s, launch_s = rng.uniform(2, 12), rng.uniform(0, 3), rng.uniform(0, 4)
        times = Times(
            io_s, lambda n, start_s=start_s: start_s + 0.5 * n, lambda n, launch_s=launch_s: launch_s + 0.01 * n
        )
        yield tokens, there, times, float(rng.choice([0.0, rng.uniform(0, io_s)]))


def test_the_greedy_schedule_is_near_the_best_of_all():
    """Its mean regret is below 2 % of the best end, its largest below a half; it is never negative."""
    regrets = []
    for tokens, there, times, link_busy_s in drawn_layers(150):
        found = schedule(tokens, there, times, link_busy_s=link_busy_s)
        assert sorted((*found.on_gpu, *found.on_cpu)) == sorted(tokens)
        regrets.append(found.end_s / best_end_s(tokens, there, times, link_busy_s) - 1)
    assert min(regrets) >= -1e-9
    assert 0 < fmean(regrets) < 0.02 and max(regrets) < 0.5


def test_a_schedule_is_one_that_lanes_can_run():
    """Replay it: the link brings one expert after another, the GPU waits for each, the CPU works at the same time."""
    for tokens, there, times, link_busy_s in drawn_layers(50):
        found = schedule(tokens, there, times, link_busy_s=link_busy_s)
        gpu_s, link_s = 0.0, link_busy_s
        for expert in found.on_gpu:
            if expert not in there:
                link_s += times.io_s
            gpu_s = max(gpu_s, 0.0 if there.get(expert) else link_s) + times.gpu_s(tokens[expert])
        assert found.gpu_end_s == pytest.approx(gpu_s) and found.link_end_s == pytest.approx(link_s)
        assert found.cpu_end_s == pytest.approx(sum(times.cpu_s(tokens[expert]) for expert in found.on_cpu))


def test_impacts_are_differences_of_schedules():
    for tokens, there, times, _ in drawn_layers(50):
        asked = list(tokens)[::2]
        before_s = schedule(tokens, there, times).end_s
        expected = {e: before_s - schedule(tokens, {**there, e: True}, times).end_s for e in asked}
        assert impacts_s(tokens, there, times, asked) == pytest.approx(expected, abs=1e-12)
    assert impacts_s({}, {}, times, []) == {}


def test_prefetch_brings_what_shortens_a_later_layer_by_most():
    """Of four absent experts with 20, 9, 2 and 1 tokens the heaviest is worth most; one that is there is worth
    nothing, nor is one that the CPU does beside the GPU's work."""
    times = Times(COSTS.io_s, COSTS.cpu_s, COSTS.gpu_s)
    tokens = {0: 20.0, 1: 9.0, 2: 2.0, 3: 1.0}
    gains = impacts_s(tokens, {}, times, tokens)
    assert max(gains, key=lambda expert: gains[expert]) == 0 and gains[0] > gains[3] >= 0
    assert impacts_s(tokens, {0: True}, times, [0]) == {0: 0}
    ids = np.repeat(list(tokens), [20, 9, 2, 1])[:, None]
    ahead = {1: Forecast(ids, np.ones(ids.shape), 8)}
    placer = HybriMoE(COSTS, LowestRecentScore(0.5))
    busy = view_of({5: 8}, there=[5], ahead=ahead)
    assert placer.place(busy).prefetch == [(1, 0)], "one begins until the next gate"
    there = view_of({5: 8}, there=[5], ahead=ahead, holds=lambda key: key == (1, 0))
    assert placer.place(there).prefetch == [(1, 1)]
    bound = view_of({5: 8}, there=[5], ahead=ahead, link_busy_s=lambda io_s: 100.0)
    assert placer.place(bound).prefetch == [], "the link is bound until after the next gate"
    queued = view_of({5: 8}, there=[5], ahead=ahead, num_queued=lambda: 1)
    assert placer.place(queued).prefetch == [], "another prefetch is before it"


def test_scores_of_the_gate_reach_the_cache():
    scores = LowestRecentScore(0.5)
    for expert in (0, 1, 4):
        scores.used((0, expert))
    HybriMoE(COSTS, scores).place(view_of({0: 3, 1: 1}, there=[0, 1]))
    assert scores.victim([(0, 0), (0, 1)], (0, 2)) == (0, 1)
    scores.used((0, 1))
    assert scores.victim([(0, 0), (0, 1), (0, 4)], (0, 2)) == (0, 4)


def test_fate_brings_what_fits_until_the_next_gate():
    """Those with the most expected tokens, and one at the least."""
    ids = np.array([[1], [1], [1], [2], [2], [4]])
    ahead = {1: Forecast(ids, np.full(ids.shape, 0.5), 8)}
    assert Fate(COSTS).place(view_of({0: 1}, ahead=ahead)).prefetch == [(1, 1)]
    fast = ExpertCosts(io_s=1.5, cpu=COSTS.cpu, gpu=COSTS.gpu, attention_s=2.0, prefill_token_s=0.1)
    placed = Fate(fast).place(view_of({0: 1, 3: 5}, there=[3], ahead=ahead))
    assert placed.prefetch == [(1, 1), (1, 2)], "2 s of attention and 2.06 s of experts, 1.5 s each"
    assert placed.on_gpu == [3, 0] and not placed.on_cpu


@pytest.mark.parametrize("num_places", [4, 5, 11, 17, 24, 32, 40])
@pytest.mark.parametrize("shallow", [0, 1, 2, 4])
def test_the_first_layers_are_given_all_their_experts(num_places, shallow):
    sizes = cache_sizes(num_places, [1, 2, 3, 4], 8, shallow=shallow)
    assert sum(sizes.values()) == min(num_places, 32) or shallow == 4
    assert all(1 <= size <= 8 for size in sizes.values())
    first, others = list(sizes.values())[:shallow], list(sizes.values())[shallow:]
    assert first == sorted(first, reverse=True)
    assert not others or max(others) - min(others) <= 1
    if others and max(others) > 1:
        assert set(first) <= {8}, "a later layer has more than one only where the first ones have all"


@pytest.mark.parametrize("io_s", [0.0, 0.5, 2.0, 8.0, 50.0])
def test_the_planner_takes_the_fewest_batches_that_hide_the_loads(io_s):
    times = LayerTimes(
        num_experts=16, experts_per_token=2, batch_size=4, resident_share=0.25, io_s=io_s, attention_s=3.0,
        gpu_s=COSTS.gpu_s,
    )  # fmt: skip
    chosen = num_batches(times, 12)
    hides = [times.computes_s(n) >= times.loads_s(n) for n in range(1, 13)]
    assert chosen == (hides.index(True) + 1 if True in hides else 12)
    assert num_batches(times, 1) == 1, "memory holds no more"


def test_active_experts_are_those_of_a_draw():
    """As many as independent tokens reach on average, counted."""
    times = LayerTimes(
        num_experts=16, experts_per_token=2, batch_size=5, resident_share=0, io_s=1, attention_s=1, gpu_s=COSTS.gpu_s
    )
    rng = np.random.default_rng(0)
    drawn = [len({e for _ in range(10) for e in rng.choice(16, 2, replace=False)}) for _ in range(2000)]
    assert times.active(2) == pytest.approx(fmean(drawn), rel=0.02)


def test_correlation_foresees_what_followed_in_the_profile():
    """Tokens of expert 0 went to 5 next, tokens of expert 1 to 6; passes and layers are kept apart."""
    here, following = view_of({0: 6, 1: 4}, layer=1), view_of({5: 6, 6: 4}, layer=2)
    other = view_of({7: 10}, layer=0)
    correlation = Correlation([here, following, other])
    assert correlation.hottest(view_of({0: 2, 1: 3}, layer=1), 4) == [6, 5]
    assert correlation.hottest(view_of({0: 3}, layer=1), 4) == [5]
    assert correlation.hottest(view_of({0: 3}, layer=2), 4) == [], "what follows is another pass"
    placed = Klotski(correlation, 1).place(view_of({0: 2, 1: 3, 2: 9}, there=[0, 1], layer=1))
    assert placed.on_gpu == [1, 0, 2] and placed.prefetch == [(2, 6)] and not placed.on_cpu
