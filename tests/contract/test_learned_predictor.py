"""A learned predictor runs beside the model: what it says is what its network computes, and its memory is counted."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from harness.config import ConfigError
from harness.engine.ops.data import MicroBatchOp
from harness.llapor import network
from harness.llapor.files import PredictorFolder, write_predictors
from harness.llapor.runtime import stated_shapes
from harness.llapor.shape import PredictorShape
from harness.machine.base import D2H, GPU, Work
from harness.model.planned import planned_model
from harness.settings import load_strategy, parse_settings
from harness.study.prediction import Learned
from strategies.common.predictors import LearnedPredictor, PredictorConfig, build_predictor
from strategies.expert_offload import costs
from strategies.prescope.placer import PreSched
from tests.composing import composed
from tests.contract.placing import placed
from tests.contract.running import check_tokens, emulated, engine_on, requests, run_to_end, shuffled
from tests.contract.simulating import simulated_engine
from tests.unit.study.texts import random_text


class FetchInputs(MicroBatchOp):
    """Fetches what a predictor gets."""

    kind = "fetch inputs"

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.reads = (self.acts.normed, self.acts.expert_ids, self.acts.expert_weights)

    def work(self) -> Work:
        return Work()

    def run(self, ctx, packet):
        n, k = self.batch.num_tokens, self.spec.experts_per_token
        shapes = ((n, self.spec.hidden_dim), (n, k), (n, k))
        dtypes = ("float32", "int64", "float32")
        return [ctx.host_value(ctx.tensor(*each)) for each in zip(self.reads, shapes, dtypes, strict=True)]

    def imagine(self, world):
        return None


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory) -> Path:
    """Predictors of random numbers for the tiny model; that of layer 2 is deep."""
    path, spec = tmp_path_factory.mktemp("predictors"), tiny.spec
    rows, networks = [], {}
    for layer in spec.moe_layers[1:]:
        shape = PredictorShape(spec.hidden_dim, spec.num_experts, 16, 24, is_deep=layer == 2)
        generator = torch.Generator().manual_seed(layer)
        w = network.initial(shape, layer)
        w |= {
            name: torch.randn(size, generator=generator) * 0.3
            for name, size in shape.tensors().items()
            if name not in w
        }
        networks[layer] = {name: each.numpy() for name, each in w.items()}
        rows.append({"layer": layer, "shape": vars(shape)})
    model = {"layers": list(spec.moe_layers), "experts": spec.num_experts, "k": spec.experts_per_token}
    text = random_text(0, layers=len(spec.moe_layers), num_experts=spec.num_experts, lengths=(30, 30))
    told = {"source": "random numbers", "model": {**model, "hidden": spec.hidden_dim}, "predictors": rows}
    told["texts"] = {"held_out": {"name": "other random numbers"}}
    write_predictors(path, told, networks, Learned(text))
    return path


@pytest.fixture
def predicted(monkeypatch):
    """Every prediction: of which layer, from which inputs, and what was predicted."""
    found, request = [], LearnedPredictor.request

    def noted(self, emit, it, layer, *, distance=1):
        prediction = request(self, emit, it, layer, distance=distance)
        if prediction is not None:
            machine = emit._engine.machine
            inputs = machine.wait(machine.submit(D2H, FetchInputs(emit._spec, it.batch, it.acts, layer)))
            found.append((layer + distance, inputs, prediction.result()))
        return prediction

    monkeypatch.setattr(LearnedPredictor, "request", noted)
    return found


@pytest.mark.parametrize("make", [partial(shuffled, 0), partial(shuffled, 1), emulated], ids=["0", "1", "emulated"])
def test_predictions_are_what_the_network_computes_and_no_token_changes(tiny, folder, predicted, make):
    work = requests(6, vocab_size=tiny.spec.vocab_size, longest=20, max_new_tokens=4)
    engine = engine_on(make(), tiny, work, kv_blocks=40)
    run_to_end(engine, partial(placed, predictor="learned", path=str(folder)))
    report = check_tokens(tiny, engine.sequences)
    assert report.ok and report.checked == 6, report.first_mismatch
    read = PredictorFolder.read(folder, tiny.spec, tiny.spec.hidden_dim)
    assert {layer for layer, _, _ in predicted} == set(tiny.spec.moe_layers[1:])
    for layer, inputs, (ids, likely) in predicted:
        w = {name: torch.from_numpy(each) for name, each in read.tensors(layer).items()}
        reduced, routed = network.features(w, *map(torch.from_numpy, inputs))
        chances = network.chances(w, network.logits(w, reduced, routed)).numpy()
        assert ids.shape == likely.shape == (len(inputs[0]), tiny.spec.experts_per_token)
        assert likely == pytest.approx(np.sort(chances, axis=1)[:, ::-1][:, : ids.shape[1]], abs=1e-5)
        assert np.take_along_axis(chances, ids, axis=1) == pytest.approx(likely, abs=1e-5)
    nbytes = sum(shape.layout().nbytes for shape in read.shapes().values())
    assert engine.machine.tiers["device"].holders()["predictors"] == nbytes
    assert not [name for name in engine.machine.tiers["pinned"].holders() if "predictors" in name]


@pytest.mark.parametrize("never", [None, 2])
def test_presched_goes_by_the_predictors_own_validation(tiny, folder, tmp_path, monkeypatch, never):
    """Of a rank that no batch of held-out text hit nothing is prefetched; the tokens are exact."""
    path, found, place = tmp_path / "validated", [], PreSched.place
    shutil.copytree(folder, path)
    told = json.loads((path / "predictors.json").read_text())
    hits = [float(rank != never) for rank in range(tiny.spec.num_experts)]
    for row in told["predictors"]:
        row["batch_hits_by_rank"] = {"1": hits, "16": hits}
    told["texts"] = {"held_out": {"name": "numbers"}}
    (path / "predictors.json").write_text(json.dumps(told))

    def noted(self, view):
        placement = place(self, view)
        for layer, expert in placement.prefetch:
            ranked = np.argsort(-view.ahead[layer].expected, kind="stable").tolist()
            found.append(ranked.index(expert))
        return placement

    monkeypatch.setattr(PreSched, "place", noted)
    monkeypatch.setattr(costs, "_WITHOUT_CLOCK", replace(costs._WITHOUT_CLOCK, io_s=1e-3))
    config = composed("strategy=prescope")["strategy"] | {
        "predictor": "learned", "predictor_path": str(path), "table": "none", "prefetch_slots": 4, "batch_size": 4,
        "packet_mb": 0.004,
    }  # fmt: skip
    engine = engine_on(shuffled(0), tiny, requests(6, vocab_size=tiny.spec.vocab_size, longest=20), kv_blocks=60)
    strategies = []
    run_to_end(engine, lambda on: strategies.append(load_strategy(config).build(on)) or strategies[0])
    validated = strategies[0].plan["hit_rates_validated"]
    assert validated == "the predictor's own: batches of 1, 16 tokens of held-out numbers"
    assert {0, 1, 3} <= set(found) and (2 in found) == (never is None), found
    report = check_tokens(tiny, engine.sequences)
    assert report.ok, report.first_mismatch


def test_a_simulation_charges_for_predictors_of_the_published_size():
    engine, _ = simulated_engine("qwen3-30b-a3b", 2, hit_rate=0.5)
    run_to_end(engine, partial(placed, predictor="learned", packet_mb=1.0))
    spec, shapes = engine.spec, stated_shapes(engine.spec)
    spans = [s for s in engine.machine.spans if s.kind == "predict experts, learned"]
    passes = sum(s.kind == "head" for s in engine.machine.spans)
    assert len(spans) == passes * (spec.num_layers - 1) and {s.lane for s in spans} == {GPU}
    for span in spans:
        shape = shapes[span.layer + 1]
        matrices = shape.pca_dims * spec.hidden_dim + shape.width * (shape.pca_dims + 2 * spec.num_experts)
        matrices += shape.width * spec.num_experts
        matrices += shape.width * (shape.pca_dims + 2 * shape.width) if shape.is_deep else 0
        tokens = span.work.flops / (2 * matrices)
        assert tokens == pytest.approx(round(tokens)) and tokens >= 1
        row_bytes = spec.hidden_dim * 2 + 24 * spec.experts_per_token
        assert span.work.device_bytes == pytest.approx(shape.layout().nbytes + tokens * row_bytes)
        assert shape.layout().nbytes == pytest.approx(4 * matrices, rel=0.01)
    told = build_predictor(PredictorConfig(predictor="learned"), engine).source
    assert told.endswith("not learned (the cost alone); stated: hit rates by rank, one layer ahead and more: 0.5")
    held = engine.machine.tiers["device"].holders()["predictors"]
    assert held == 2 * sum(shape.layout().nbytes for shape in shapes.values())


@pytest.mark.parametrize("name", ["mixtral-8x7b", "deepseek-v2-lite", "qwen3-30b-a3b", "moonlight-16b-a3b"])
def test_stated_predictors_are_about_as_large_as_published(name):
    """PreScope's Table 3: 0.5 to 2.8 MB a layer, in 16 bits, but for the PCA (2.1 to 8.4 MB in Mixtral)."""
    spec = planned_model(parse_settings(composed(f"model={name}")).model).spec
    sizes = [(s.layout().nbytes - 4 * s.pca_dims * s.hidden_dim) / 2 for s in stated_shapes(spec).values()]
    assert len(sizes) == len(spec.moe_layers) - 1
    assert 0.1e6 < min(sizes) < 0.5e6 and 1.5e6 < max(sizes) < 2.8e6


def test_token_predictions_are_the_shares_that_tokens_of_the_id_had(tiny, folder):
    engine = engine_on(shuffled(0), tiny, requests(1, vocab_size=tiny.spec.vocab_size), kv_blocks=40)
    predictor = build_predictor(PredictorConfig(predictor="token", predictor_path=str(folder)), engine)
    text = random_text(
        0, layers=len(tiny.spec.moe_layers), num_experts=tiny.spec.num_experts, lengths=(30, 30)
    )  # as in `folder`
    batch = SimpleNamespace(num_tokens=3, token_ids=np.array([2, 1, 77]))
    ids, likely = predictor.request(None, SimpleNamespace(batch=batch), 0).result()
    for row, word in enumerate((2, 1)):
        chosen = text.chosen(1)
        shares = (chosen[text.words == word].sum(axis=0) + chosen.mean(axis=0)) / ((text.words == word).sum() + 1)
        assert likely[row] == pytest.approx(np.sort(shares)[::-1][:2], abs=2e-3)
        assert shares[ids[row]] == pytest.approx(likely[row], abs=2e-3)
    assert likely[2] == pytest.approx(np.sort(text.chosen(1).mean(axis=0))[::-1][:2], abs=1e-5), "an unknown id"
    assert predictor.request(None, SimpleNamespace(batch=batch), 3) is None


def test_mistakes_name_the_setting(tiny, folder, tmp_path):
    engine = engine_on(shuffled(0), tiny, requests(1, vocab_size=tiny.spec.vocab_size), kv_blocks=40)
    for kind in ("learned", "token"):
        with pytest.raises(ConfigError, match=r"strategy.predictor_path: missing; .* python -m harness.llapor"):
            build_predictor(PredictorConfig(predictor=kind), engine)
        with pytest.raises(ConfigError, match=r"strategy.predictor_path: .*cannot be read"):
            build_predictor(PredictorConfig(predictor=kind, predictor_path=str(tmp_path)), engine)
    simulated, _ = simulated_engine("qwen3-30b-a3b", 1)
    with pytest.raises(ConfigError, match=r"strategy.predictor: token needs a machine that runs the model"):
        build_predictor(PredictorConfig(predictor="token", predictor_path=str(folder)), simulated)
    with pytest.raises(ConfigError, match=r"strategy.predictor_path: .*is for a model with"):
        build_predictor(PredictorConfig(predictor="learned", predictor_path=str(folder)), simulated)
