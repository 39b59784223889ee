"""PreSched's decisions beside the optimum of all placements, on cases small enough to try them all."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.bench.fitting import Plane
from harness.memory.expert_slots import Key
from paper_figures.prescope.regret import LinearCosts, best_layer_s, layer_end_s, pending, regrets, two_layers_s
from strategies.expert_offload.costs import ExpertCosts
from strategies.expert_offload.placement import Forecast, LayerView
from strategies.prescope import placer
from strategies.prescope.placer import FixedPrefetching, HitRates, PreSched
from strategies.prescope.presched import Pending, num_prefetches, schedule

tokens_lists = st.lists(st.integers(1, 60), min_size=0, max_size=6)
all_costs = st.builds(
    LinearCosts, gpu=st.floats(0.01, 0.9), alpha=st.floats(0.005, 0.5), sigma=st.floats(0.0, 1.0),
)  # fmt: skip


@settings(deadline=None, max_examples=150)
@given(costs=all_costs, tokens=tokens_lists, busy_s=st.floats(0, 3))
def test_one_layer_alone_is_placed_best(costs, tokens, busy_s):
    """Q1 without predictions is optimal: no subset of the experts gives a shorter layer."""
    found = schedule(costs, pending(tokens), [], busy_s=busy_s, attention_s=0.0)
    reached_s = layer_end_s(costs, tokens, found.on_demand, busy_s)
    assert reached_s == pytest.approx(best_layer_s(costs, tokens, busy_s))
    assert found.layer_s == pytest.approx(reached_s)
    assert found.prefetch == ()


def test_two_layers_are_near_the_optimum():
    """Regret over random cases, with right predictions: it is small, and smaller than that of each layer by itself."""
    rng, found = np.random.default_rng(0), []
    for _ in range(150):
        costs = LinearCosts(alpha=rng.uniform(0.01, 0.3), sigma=rng.uniform(0, 0.3), gpu=rng.uniform(0.05, 0.5))
        first, second = (sorted(rng.integers(1, 20, rng.integers(1, 5)).tolist()) for _ in range(2))
        found.append(regrets(costs, first, second, busy_s=rng.uniform(0, 1), attention_s=rng.uniform(0, 1)))
    ours, alone = zip(*found, strict=True)
    assert min(ours) >= -1e-9, "nothing beats the best of all placements"
    assert np.mean(ours) < 0.06
    assert np.mean(ours) < 0.6 * np.mean(alone)


@given(slow=st.floats(1.0, 5.0))
def test_a_faster_link_takes_experts_from_the_cpu(slow):
    tokens = [3, 5, 8, 13, 21, 34]
    loads = [
        len(schedule(LinearCosts(io_s=io_s), pending(tokens), [], busy_s=0.0, attention_s=0.0).on_demand)
        for io_s in (0.2, 0.2 * slow)
    ]
    assert loads[0] >= loads[1]


def test_the_last_prefetch_needs_a_chance_above_its_overrun():
    """Equation 7: with an overrun of 0.4 of a transfer, it is issued from a hit rate above 0.4 on."""

    def queued(*chances: float) -> list[Pending]:
        return [Pending(expert=number, tokens=1.0, chance=chance) for number, chance in enumerate(chances)]

    for rate, number in ((0.39, 1), (0.41, 2)):
        assert num_prefetches(LinearCosts(), 1.6, queued(1.0, rate, 1.0)) == number
    assert num_prefetches(LinearCosts(), 1.4, queued(0.0, 0.0)) == 1, "no overrun, whatever the chance"
    assert num_prefetches(LinearCosts(), 9.0, queued(1.0, 1.0, 1.0)) == 3
    assert num_prefetches(LinearCosts(), -1.0, queued(1.0, 1.0, 1.0)) == 0


def test_heavy_experts_of_the_next_layer_are_prefetched_before_light_ones_of_this_layer_are_loaded():
    """Figure 1, case 4: the link gets what has most tokens, of either layer."""
    first, second = [4, 5, 6], [30, 40]
    costs = LinearCosts(alpha=0.1, sigma=0.0)
    alone = schedule(costs, pending(first), [], busy_s=0.0, attention_s=0.3)
    both = schedule(costs, pending(first), pending(second), busy_s=0.0, attention_s=0.3)
    assert len(both.prefetch) > len(alone.prefetch) == 0
    assert both.prefetch[0] == 1, "the heaviest first"
    times = {"busy_s": 0.0, "attention_s": 0.3}
    reached = [two_layers_s(costs, first, second, p.on_demand, p.prefetch, **times) for p in (alone, both)]
    assert reached[1] < reached[0]


def test_this_layer_does_not_wait_for_prefetches_that_have_no_room():
    """Where the next layer is heavier, only what can be prefetched of it may keep this layer's experts on the CPU."""
    costs, first, second = LinearCosts(sigma=0.0), [30, 31, 32], [40] * 8
    reached_s = {}
    for most in (0, 1, None):
        found = schedule(
            costs, pending(first), pending(second), busy_s=0.0, attention_s=0.0, most_prefetches=most
        )  # fmt: skip
        reached_s[most] = layer_end_s(costs, first, found.on_demand, 0.0)
    assert reached_s[0] == reached_s[1] == best_layer_s(costs, first, 0.0) < reached_s[None]


NUM_EXPERTS = 8
# Of an expert of a later layer 0.2 s on the GPU and 0.4 s of attention hide 0.6 s of a transfer: it needs P_hit > 0.4.
COSTS = ExpertCosts(
    io_s=1.0, cpu=Plane(fixed=0.0, weights=(10.0,)), gpu=Plane(fixed=0.2, weights=(0.0,)), attention_s=0.4,
    prefill_token_s=0.0,
)  # fmt: skip
CHANCES = (0.9, 0.8, 0.3, 0.2)


def forecast(chances=CHANCES) -> Forecast:
    """Predict experts 0, 1, ... for one token, with these chances."""
    return Forecast(np.arange(len(chances), dtype=np.int64)[None], np.array([chances]), NUM_EXPERTS)


def view(held: Iterable[Key] = (), *, there: bool = True, ahead=(1,)) -> LayerView:
    """Show layer 0 of a step with one token, for expert 0; the same is predicted of all layers ahead."""
    return LayerView(
        layer=0, num_layers=4, num_experts=NUM_EXPERTS, is_prefill=False, ids=np.array([[0]]),
        weights=np.ones((1, 1), dtype=np.float32), there={0: True} if there else {}, holds=set(held).__contains__,
        ahead=dict.fromkeys(ahead, forecast()),
    )  # fmt: skip


def presched(rates: HitRates) -> PreSched:
    return PreSched(costs=COSTS, group=1, looks_ahead=2, hit_rates=rates)


def test_a_hit_rate_is_that_of_the_rank_among_all_experts():
    predicted = Forecast(np.array([[3, 1, 0]]), np.array([[0.9, 0.6, 0.2]]), NUM_EXPERTS)
    none = HitRates({})
    assert none.at(predicted, 1, 1, 1).tolist() == predicted.likely.tolist(), "none measured: the predictor's own"
    measured = HitRates({1: [(predicted, np.array([[3, 0]]))]})
    moved = Forecast((predicted.ids + 4) % NUM_EXPERTS, predicted.chances, NUM_EXPERTS)
    for each, experts in ((predicted, [3, 1, 0]), (moved, [7, 5, 4])):
        assert measured.at(each, 1, 1, 1)[experts].tolist() == [1.0, 0.0, 1.0]
    assert measured.at(predicted, 1, 2, 2).tolist() == predicted.likely.tolist(), "nothing measured two layers ahead"


@pytest.mark.parametrize("at_once", [1, 100, 1 << 16])
def test_hit_rates_are_those_of_batches_that_are_drawn_one_after_another(monkeypatch, at_once):
    monkeypatch.setattr(placer, "_TOKENS_AT_ONCE", at_once)
    data, num_experts, size = np.random.default_rng(5), 16, 32
    orders = [np.argsort(data.random((50, num_experts)), axis=1) for _ in range(6)]
    validation = [
        (Forecast(predicted[:, :3], data.random((50, 3)), num_experts), routed[:, :2])
        for predicted, routed in zip(orders[::2], orders[1::2], strict=True)
    ]
    hits, rng = [], np.random.default_rng(0)
    for forecast, routed in validation:
        for _ in range(16):
            expected, is_active = [0.0] * num_experts, [False] * num_experts
            for row in rng.choice(len(routed), size=size):
                for expert, chance in zip(forecast.ids[row], forecast.chances[row], strict=True):
                    expected[expert] += chance
                for expert in routed[row]:
                    is_active[expert] = True
            ranked = sorted(range(num_experts), key=lambda expert: -expected[expert])
            hits.append([is_active[expert] for expert in ranked])
    by_rank = HitRates({1: validation}).at(validation[0][0], size, 0, 1)[np.argsort(-validation[0][0].expected)]
    assert by_rank.tolist() == np.mean(hits, axis=0).tolist()


def test_a_predictors_own_validation_goes_first_layer_by_layer_and_by_size():
    by_size = {1: np.full(NUM_EXPERTS, 0.25), 16: np.linspace(1, 0, NUM_EXPERTS)}
    rates = HitRates({1: [(forecast(), np.array([[3, 0]]))]}, own={1: by_size})
    assert rates.at(forecast(), 3, 1, 1).tolist() == [0.25] * NUM_EXPERTS
    for num_tokens in (5, 16, 500):
        assert rates.at(forecast(), num_tokens, 1, 1) == pytest.approx(by_size[16]), num_tokens
    assert rates.at(forecast(), 1, 2, 1)[:4].tolist() == [1.0, 0.0, 0.0, 1.0], "of layer 2 it says nothing"


def test_a_rank_that_never_hits_is_not_prefetched():
    quick = replace(presched(HitRates({})), costs=replace(COSTS, io_s=0.1), group=4)
    assert list(quick.place(view()).prefetch) == [(1, 0), (1, 1), (1, 2), (1, 3)]
    own = {1: {4: np.array([1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0])}}
    told = replace(quick, hit_rates=HitRates({}, own=own))
    assert list(told.place(view()).prefetch) == [(1, 0), (1, 1), (1, 3)]


@pytest.mark.parametrize("measured", [False, True])
def test_experts_that_are_there_do_not_lend_the_others_their_hit_rate(measured):
    """Of the four that are predicted the first two hit: where they are resident, the third is no better for that."""
    rates = HitRates({1: [(forecast(), np.array([[0, 1]]))]} if measured else {})
    assert list(presched(rates).place(view()).prefetch) == [(1, 0)]
    assert list(presched(rates).place(view([(1, 0)])).prefetch) == [(1, 1)]
    assert list(presched(rates).place(view([(1, 0), (1, 1)])).prefetch) == []


def test_a_layer_further_is_asked_where_the_next_one_wants_nothing():
    rates, next_layer = HitRates({}), [(1, expert) for expert in range(len(CHANCES))]
    assert list(presched(rates).place(view(ahead=(1, 2))).prefetch) == [(1, 0)]
    assert list(presched(rates).place(view(next_layer, ahead=(1, 2))).prefetch) == [(2, 0)]
    assert list(presched(rates).place(view(next_layer)).prefetch) == [], "nothing is predicted of it"


def test_fixed_prefetching_fills_the_group_whatever_the_chance():
    fixed = FixedPrefetching(costs=COSTS, group=2, looks_ahead=1)
    assert list(fixed.place(view([(1, 0)])).prefetch) == [(1, 1), (1, 2)]
    absent = fixed.place(view(there=False))
    assert (list(absent.on_gpu), list(absent.on_cpu)) == ([0], []), "its transfer takes less than the CPU's 10 s"
    cheap = FixedPrefetching(costs=replace(COSTS, io_s=10.0), group=2, looks_ahead=1).place(view(there=False))
    assert (list(cheap.on_gpu), list(cheap.on_cpu)) == ([], [0])
