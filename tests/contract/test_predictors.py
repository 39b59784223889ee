"""A strategy asks any predictor in the same way (test_strategies.py has the tokens)."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from harness.config import ConfigError
from strategies.common.predictors import PredictorConfig, build_predictor
from tests.contract.running import engine_on, requests, shuffled
from tests.contract.simulating import simulated_engine

MODEL = "qwen3-30b-a3b"  # 8 of 128 experts; 8 layers here


class Rows(SimpleNamespace):
    """A micro-batch of rows, itself and no other."""

    __hash__ = object.__hash__


def asked(predictor, engine, layer: int, *, num_tokens: int = 3, distance: int = 1):
    """What is predicted for tokens that no emitter has to compute."""
    rows = np.arange(num_tokens)
    batch = Rows(num_tokens=num_tokens, request_ids=rows, positions=rows)
    return predictor.request(None, SimpleNamespace(batch=batch), layer, distance=distance)


def test_statistics_give_the_shares_that_were_observed_until_then():
    engine, _ = simulated_engine(MODEL, 1)
    predictor = build_predictor(PredictorConfig(predictor="statistics"), engine)
    assert asked(predictor, engine, 2).result()[0].shape == (3, 0), "nothing was seen yet"
    rng, counts = np.random.default_rng(0), np.zeros(128)
    for size in (5, 9):
        chosen = np.stack([rng.choice(20, 8, replace=False) for _ in range(size)])
        predictor.observe(None, None, 3, chosen)
        counts += np.bincount(chosen.ravel(), minlength=128)
    prediction = asked(predictor, engine, 2)
    ids, chances = prediction.result()
    assert ids.shape == chances.shape == (3, 8) and (ids == ids[0]).all()
    assert chances[1] == pytest.approx(np.sort(counts / 14)[::-1][:8])
    assert chances[1] == pytest.approx(counts[ids[1]] / 14)
    assert prediction.expected_tokens()[ids[0]] == pytest.approx(3 * counts[ids[0]] / 14)
    assert (asked(predictor, engine, 1, distance=2).result()[0] == ids).all()
    assert asked(predictor, engine, 3).result()[0].size == 0, "another layer"
    assert asked(predictor, engine, 7) is None, "no layer is behind the last"


def test_a_stated_predictor_says_what_the_world_predicts_and_its_source_is_told():
    engine, _ = simulated_engine(MODEL, 1, hit_rate=0.5)
    predictor, world = build_predictor(PredictorConfig(predictor="stated"), engine), engine.machine.world
    assert "predictions" not in engine.machine.facts
    prediction = asked(predictor, engine, 2)
    ids, chances = prediction.result()
    rows = np.arange(3)
    expected, likely = world.predicted(Rows(num_tokens=3, request_ids=rows, positions=rows), 3)
    assert (ids == expected).all() and chances == pytest.approx(likely)
    assert engine.machine.facts["predictions"] == predictor.source == world.prediction_source
    assert predictor.source.startswith("stated: hit rates by rank")
    assert asked(predictor, engine, 7) is None


def test_stated_predictions_need_a_world(tiny):
    engine = engine_on(shuffled(0), tiny, requests(1, vocab_size=tiny.spec.vocab_size), kv_blocks=40)
    with pytest.raises(ConfigError, match=r"strategy.predictor: stated needs machine=simulated"):
        build_predictor(PredictorConfig(predictor="stated"), engine)
    assert build_predictor(PredictorConfig(predictor="none"), engine) is None
