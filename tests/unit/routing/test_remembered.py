"""What is remembered of routing and predictions is what would be drawn anew."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest

from harness.routing import remembered
from harness.routing.build import build_predictor, build_routing
from tests.unit.routing.models import Model

MANY = np.arange(40)
TOKENS = [(MANY, MANY % 7), (MANY, MANY % 8), (MANY + 1, MANY % 7), (MANY[:20], MANY[:20] % 7)]
MODELS = [Model(), Model(num_experts=17), Model(experts_per_token=3), Model(num_dense_layers=1)]
SETTINGS = {
    "uniform": {"name": "uniform"},
    "skewed": {"name": "skewed"},
    "steeper": {"name": "skewed", "zipf_exponent": 3.0},
    "all alike": {"name": "skewed", "zipf_exponent": 0.0},
    "another model": {"name": "skewed", "model_seed": 1},
    "correlated": {"name": "correlated", "keep_token": 0.5, "follow_layer": 0.5, "lookback": 8},
    "keeping": {"name": "correlated", "keep_token": 0.8, "follow_layer": 0.5, "lookback": 8},
    "following": {"name": "correlated", "keep_token": 0.5, "follow_layer": 0.9, "lookback": 8},
    "looking back": {"name": "correlated", "keep_token": 0.5, "follow_layer": 0.5, "lookback": 2},
    "popular": {"name": "correlated", "keep_token": 0.5, "follow_layer": 0.5, "lookback": 8, "zipf_exponent": 3.0},
}
CHANGES = [  # of a question's model, seed, tokens, layer, stated rates and layers ahead
    {}, {"seed": 1}, {"layer": 2}, *({"model": model} for model in MODELS[1:]), *({"tokens": n} for n in (1, 2, 3)),
    {"hit_rates": [[0.5], [0.5]]}, {"hit_rates": [[0.5], [0.5]], "distance": 2}, {"hit_rates": [[0.2], [0.5]]},
    {"hit_rates": [[0.5], [0.5]], "seed": 1}, {"hit_rates": [[0.5], [0.5]], "tokens": 2},
    {"hit_rates": [[0.5], [0.5]], "layer": 2}, {"hit_rates": [[0.5], [0.5]], "model": MODELS[1]},
]  # fmt: skip


def answered(name, *, model=MODELS[0], seed=0, tokens=0, layer=4, hit_rates=None, distance=1) -> np.ndarray:
    values = {**SETTINGS[name], "hit_rates": hit_rates}
    routing = build_routing(values, model, seed)
    predictor = build_predictor(values, routing, model, seed)
    if predictor is None:
        return routing.experts(*TOKENS[tokens], layer)
    return predictor.experts(*TOKENS[tokens], layer, distance)[0]


@pytest.mark.parametrize("remembered_bytes", [3000, 1 << 20])
def test_questions_that_differ_in_one_thing_only_have_their_own_answers(monkeypatch, remembered_bytes):
    questions = [(name, change) for name in SETTINGS for change in CHANGES]
    for name, value in (("_drawn", OrderedDict()), ("_drawn_bytes", 0), ("_REMEMBERED_BYTES", 0)):
        monkeypatch.setattr(remembered, name, value)
    anew = [answered(name, **change) for name, change in questions]
    assert not remembered._drawn, "nothing was remembered"
    monkeypatch.setattr(remembered, "_REMEMBERED_BYTES", remembered_bytes)
    for (name, change), expected in zip([*questions, *questions], [*anew, *anew], strict=True):
        found = answered(name, **change)
        assert found.dtype == np.int64 and np.array_equal(found, expected), (name, change)
        found[:] = -1  # it is the caller's own
    kept_bytes = sum(each.nbytes + remembered._BESIDE_BYTES for each in remembered._drawn.values())
    assert remembered._drawn_bytes == kept_bytes <= remembered_bytes
    assert len(remembered._drawn) > 1
