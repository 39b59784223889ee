"""A stated predictor is right as often as was stated, and a machine without tensors says what it says."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import pytest

import harness.machine.virtual.world as simulation
from harness.config import ConfigError
from harness.machine.virtual.world import World
from harness.routing.build import build_predictor, build_routing
from harness.routing.predictors import write_rates
from harness.routing.trace_file import PredictionHeader, TraceRow
from tests.unit.routing.models import MODEL, SYNTHETIC, Model, header, random_experts, write


@dataclass(frozen=True, eq=False)
class Tokens:
    """What the world asks of a micro-batch."""

    request_ids: np.ndarray
    positions: np.ndarray

    @property
    def num_tokens(self) -> int:
        return len(self.positions)


REQUESTS, POSITIONS = np.repeat(np.arange(20), 500), np.tile(np.arange(500), 20)
BATCH = Tokens(REQUESTS, POSITIONS)


def world_of(values: dict, seed: int = 4, model: Model = MODEL) -> World:
    routing = build_routing(values, model, seed)
    return World(routing, model.num_experts, build_predictor(values, routing, model, seed))


def foreseen(world: World, layer: int, distance: int = 1) -> np.ndarray:
    """bool [tokens, ranks]: whether the expert that the router ranks so is among the predicted ones."""
    ids, confidence = world.predicted(BATCH, layer, distance)
    assert ids.shape == confidence.shape == (len(REQUESTS), MODEL.experts_per_token)
    assert all(len(set(row)) == len(row) for row in ids[:200].tolist())
    assert ids.min() >= 0 and ids.max() < MODEL.num_experts
    chosen = world.routing(BATCH, layer)
    return (chosen[:, :, None] == ids[:, None, :]).any(axis=2)


@pytest.mark.parametrize("kind", SYNTHETIC)
@pytest.mark.parametrize("rate", [0.0, 0.3, 0.7, 1.0])
def test_the_share_of_hits_is_the_stated_one(kind, rate):
    found = foreseen(world_of({**SYNTHETIC[kind], "hit_rates": [[rate]]}), layer=3)
    deviation = (rate * (1 - rate) / len(REQUESTS)) ** 0.5  # tokens apart in draws, whatever the routing keeps
    assert found.mean(axis=0) == pytest.approx(rate, abs=4 * deviation)
    assert found.mean() == pytest.approx(rate, abs=2 * deviation)


def test_rates_are_by_rank_and_by_layers_ahead():
    stated = [[0.95, 0.8, 0.4, 0.1], [0.5]]
    world = world_of({**SYNTHETIC["skewed"], "hit_rates": stated})
    for distance, rates in enumerate(stated, start=1):
        found = foreseen(world, 3, distance)
        assert found.mean(axis=0) == pytest.approx(np.broadcast_to(rates, 4), abs=0.02)
        _, confidence = world.predicted(BATCH, 3, distance)
        assert confidence == pytest.approx(np.broadcast_to(rates, confidence.shape)), "its own hit shows in nothing"


def test_misses_fall_on_all_others_alike():
    world = world_of({"name": "uniform", "hit_rates": [[0.0]]})
    ids, _ = world.predicted(BATCH, 2)
    counts = np.bincount(ids.ravel(), minlength=MODEL.num_experts)
    assert counts == pytest.approx(counts.mean(), rel=0.06)


def test_nothing_is_predicted_where_nothing_was_stated_or_could_be_known():
    stated = world_of({"name": "uniform", "hit_rates": [[0.5]]})
    silent = world_of({"name": "uniform"})
    for world, layer, distance in ((stated, 3, 2), (stated, 0, 1), (silent, 3, 1)):
        ids, confidence = world.predicted(BATCH, layer, distance)
        assert ids.shape == confidence.shape == (len(REQUESTS), 0)


def test_the_same_seed_predicts_the_same_and_another_does_not():
    """And a token's prediction depends on no other token that is asked for with it."""
    values = {"name": "skewed", "hit_rates": [[0.5]]}
    one, again, other = (world_of(values, seed).predicted(BATCH, 2)[0] for seed in (4, 4, 5))
    assert (one == again).all()
    assert (one != other).mean() > 0.5
    few = Tokens(REQUESTS[700:720], POSITIONS[700:720])
    assert (world_of(values).predicted(few, 2)[0] == one[700:720]).all()


def test_a_trace_answers_with_its_own_predictions_unless_others_are_stated(tmp_path):
    rng, num_layers = np.random.default_rng(0), len(MODEL.moe_layers)
    predicted = random_experts(rng, Model(num_layers - 1, MODEL.num_experts, 3), 5)
    confidence = rng.random(predicted.shape).astype(np.float32)
    head = header(MODEL, predictions=PredictionHeader(distance=1, experts=3, source="a guess"))
    row = TraceRow(0, 0, random_experts(rng, MODEL, 5), predicted, confidence)
    values = {"name": "trace", "path": str(write(tmp_path / "t.jsonl", head, row))}
    batch = Tokens(np.zeros(5, dtype=np.int64), np.arange(5))
    for column, layer in enumerate(MODEL.moe_layers[1:]):
        ids, likely = world_of(values).predicted(batch, layer)
        assert ids.tolist() == predicted[:, column].tolist()
        assert likely.astype(np.float32).tolist() == confidence[:, column].tolist()
    stated = world_of({**values, "hit_rates": [[1.0]]})
    assert (np.sort(stated.predicted(batch, 3)[0]) == np.sort(stated.routing(batch, 3))).all()


@pytest.mark.parametrize(
    ("rates", "model", "told"),
    [
        ([[1.5]], MODEL, "between 0 and 1"),
        ([[]], MODEL, "between 0 and 1"),
        ([[0.5, 0.5]], MODEL, "1 rate or 4, got 2"),
        ([[0.5]], Model(num_experts=7), "needs 8 experts or more"),
    ],
)
def test_impossible_rates_are_refused(rates, model, told):
    with pytest.raises(ConfigError, match=told) as caught:
        world_of({"name": "uniform", "hit_rates": rates}, model=model)
    assert caught.value.field == "routing.hit_rates"


@pytest.mark.parametrize("kind", SYNTHETIC)
def test_the_world_answers_ids_and_weights_with_one_draw(kind):
    routing, asked = build_routing(SYNTHETIC[kind], MODEL, 1), []
    draw = routing.experts
    routing.experts = lambda *about: asked.append(about) or draw(*about)
    world = World(routing, MODEL.num_experts)
    assert (world.expert_counts(BATCH, 2) is None) == routing.is_even, "an even routing that nobody has seen"
    (ids, weights), counts = world.route(BATCH, 2), world.expert_counts(BATCH, 2)
    assert (ids == world.routing(BATCH, 2)).all() and len(asked) == 1
    assert weights.shape == ids.shape and weights.sum(axis=1) == pytest.approx(1)
    assert (counts == np.bincount(ids.ravel(), minlength=16)).all()
    assert (world.expert_counts(BATCH, 3) is None) == routing.is_even, "another layer was not seen"
    with pytest.raises(ValueError, match="read-only"):
        ids[0] = 0


def test_the_world_remembers_a_bounded_number_of_draws(monkeypatch):
    monkeypatch.setattr(simulation, "_REMEMBERED_CHOICES", 1000)
    world = world_of(SYNTHETIC["skewed"])
    for start in range(0, 600, 60):
        batch = Tokens(REQUESTS[start : start + 60], POSITIONS[start : start + 60])
        for layer in (1, 2, 1):
            assert world.routing(batch, layer).shape == (60, 4)
        assert sum(drawn.size for drawn in world._drawn.values()) == world._num_choices <= 1000
    assert world.routing(BATCH, 2).shape == (len(REQUESTS), 4), "more than is remembered"


def rates_file(tmp_path, rates, **changes):
    path = tmp_path / "rates.json"
    write_rates(path, rates, "measured: a test")
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return {**SYNTHETIC["skewed"], "hit_rates_path": str(path)}


def test_a_file_states_rates_by_layer_and_rank(tmp_path):
    """The model has layers 1 to 5 with a router."""
    rates = [None, [0.9, 0.8, 0.7, 0.6], [0.1] * 4, [1.0, 0.0, 1.0, 0.0], [0.5] * 4]
    world = world_of(rates_file(tmp_path, [rates, [None, None, [0.3] * 4, None, None]]))
    for layer, row in zip(MODEL.moe_layers, rates, strict=True):
        if row is None:
            assert world.predicted(BATCH, layer)[0].shape[1] == 0
        else:
            assert foreseen(world, layer).mean(axis=0) == pytest.approx(np.array(row), abs=0.02)
            assert world.predicted(BATCH, layer)[1][7] == pytest.approx(row)
    assert foreseen(world, 3, 2).mean() == pytest.approx(0.3, abs=0.02)
    assert world.predicted(BATCH, 4, 2)[0].shape[1] == 0
    assert world.prediction_source == "measured: a test (hit rates by layer and rank of rates.json)"


def test_a_deeper_model_takes_the_rates_of_the_same_depth(tmp_path):
    world = world_of(rates_file(tmp_path, [[[0.2] * 4, [0.9] * 4]]), model=Model(num_layers=9))
    found = [world.predicted(BATCH, layer)[1][0, 0] for layer in range(1, 9)]
    assert found == [0.2] * 4 + [0.9] * 4
    assert "its 2 layers stand for 9 at the same depth" in world.prediction_source


@pytest.mark.parametrize(
    ("rates", "changes", "told"),
    [
        ([[[0.5, 0.5]]], {}, "must have rates of 4 ranks for this model, got 2"),
        ([[[1.5] * 4]], {}, "'rates' must be probabilities"),
        ([[[True] * 4]], {}, "'rates' must be probabilities"),
        ([], {}, "'rates' must be probabilities"),
        ([[[0.5] * 4]], {"version": 2}, '"version": 1'),
        ([[[0.5] * 4]], {"source": None}, '"source"'),
    ],
)
def test_impossible_files_of_rates_are_refused(tmp_path, rates, changes, told):
    with pytest.raises(ConfigError, match=told) as caught:
        world_of(rates_file(tmp_path, rates, **changes))
    assert caught.value.field == "routing.hit_rates_path"


def test_rates_are_stated_in_one_place(tmp_path):
    with pytest.raises(ConfigError, match="give one of the two"):
        world_of({**rates_file(tmp_path, [[[0.5] * 4]]), "hit_rates": [[0.5]]})
    with pytest.raises(ConfigError, match="cannot be read"):
        world_of({"name": "uniform", "hit_rates_path": str(tmp_path / "none.json")})
