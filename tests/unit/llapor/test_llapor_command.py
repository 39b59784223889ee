"""The command: from recordings to predictors that know more than popularity, and mistakes in one line."""

from __future__ import annotations

import json
import re
import shutil

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from harness.config import ConfigError
from harness.llapor import network
from harness.llapor.__main__ import main
from harness.llapor.examples import read_examples
from harness.llapor.files import PredictorFolder
from harness.llapor.judging import batch_hits_by_rank
from harness.llapor.learning import LayerData, LayerTraining
from harness.llapor.settings import LlaporSettings
from harness.routing.predictors import StatedRates
from tests.tiny_families import tiny_family
from tests.unit.llapor.recordings import EXPERTS, FIRST, HIDDEN, LAYERS, LENGTH, K, write_run
from tests.unit.routing.models import Model

MODEL = Model(num_layers=LAYERS + FIRST, num_experts=EXPERTS, experts_per_token=K, num_dense_layers=FIRST)
QUICK = ["threads=1", "progress=false", "wandb.mode=disabled", "epochs=12", "batch_tokens=64", "ends.warmup_epochs=2",
         "ends.width=32", "middle.width=32", "middle.pca_dims=8", "ends.pca_dims=8", "ends.learning_rate=1e-2",
         "middle.learning_rate=1e-2"]  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folders of three recordings; `copy` has the prompts of `one`."""
    folder = tmp_path_factory.mktemp("runs")
    for seed, name in enumerate(("one", "two", "other")):
        write_run(folder / name, seed, requests=16 if seed < 2 else 8)
    write_run(folder / "copy", 0, requests=2)
    write_run(folder / "weightless", 7, weights=False)
    shutil.copytree(tiny_family("mixtral").folder, folder / "model")
    return folder


@pytest.fixture(scope="module")
def learned(runs, tmp_path_factory):
    out = tmp_path_factory.mktemp("learned") / "out"
    words = [f"data=[one:{runs}/one,two:{runs}/two]", f"test=[other:{runs}/other]", f"out={out}", "online_steps=1"]
    assert main([*words, *QUICK]) == 0
    return out


def description(out):
    return json.loads((out / "predictors.json").read_text())


def test_predictors_know_more_than_popularity_on_another_text(learned):
    (found,) = (each for name, each in description(learned)["judgements"].items() if name == "other")
    named = {way: np.array(each["true_that_are_predicted"])[:, K - 1] for way, each in found.items()}
    assert set(named) == {"popularity", "word", "layer_before", "llapor", "llapor_online"}
    assert (named["llapor"] > named["popularity"] + 0.15).all(), named
    assert named["llapor"].mean() > max(named["word"].mean(), named["layer_before"].mean()) + 0.05, named


def test_every_layer_but_the_first_has_a_predictor_and_a_curve(learned):
    found = description(learned)
    assert [row["layer"] for row in found["predictors"]] == [2, 3, 4]
    assert [row["group"] for row in found["predictors"]] == ["input", "middle", "output"]
    assert [row["shape"]["is_deep"] for row in found["predictors"]] == [False, True, False]
    rows = [json.loads(line) for line in (learned / "metrics.jsonl").read_text().splitlines()]
    assert [(row["layer"], row["epoch"]) for row in rows] == [(layer, e + 1) for layer in (2, 3, 4) for e in range(12)]
    for layer in (2, 3, 4):
        losses = [row["loss"] for row in rows if row["layer"] == layer]
        assert losses[-1] < 0.9 * losses[0]
    assert found["texts"]["fit"]["tokens"] + found["texts"]["held_out"]["tokens"] == 2 * 16 * LENGTH


def test_chances_come_true_on_another_text(learned, runs):
    """The experts' chances sum to as many as are chosen, and the logits are calibrated: no other scale of theirs is
    much likelier. Hits by rank fall with the rank."""
    folder = PredictorFolder.read(learned, MODEL, HIDDEN)
    (other,) = read_examples("test", {"other": str(runs / "other")}, 10**6, 0)
    for row in description(learned)["predictors"]:
        assert row["hit_by_rank"] == sorted(row["hit_by_rank"], reverse=True)
        of_one, of_many = (folder.batch_hits[row["layer"]][size] for size in (1, 64))
        assert of_one[:K] == pytest.approx(row["hit_by_rank"], abs=0.1), "a batch of one token is a token"
        assert of_one.sum() == pytest.approx(K, abs=1e-3) and (of_many >= of_one).all()
        data = LayerData.of(other, row["layer"] - FIRST)
        w = {name: torch.from_numpy(each) for name, each in folder.tensors(row["layer"]).items()}
        ids, likely = network.foresee(w, data.normed, data.ids, data.weights, EXPERTS)
        assert float(likely.sum(dim=1).mean()) == pytest.approx(K, rel=0.1)
        assert (likely.diff(dim=1) <= 0).all() and (ids.sort(dim=1).values == torch.arange(EXPERTS)).all()


def test_hits_of_batches_are_by_the_rank_of_their_tokens_together():
    """Expert 0 is likeliest for all tokens, and never chosen; the others come as they are predicted."""
    rng = np.random.default_rng(0)
    chosen = rng.integers(1, 5, size=(200, 1))
    scores = np.full((200, 6), 0.01)
    np.put_along_axis(scores, chosen, 0.5, axis=1)
    scores[:, 0] = 0.9
    found = batch_hits_by_rank(scores, np.concatenate([chosen, np.full_like(chosen, 5)], axis=1).astype(np.int16))
    assert found[1][:2] == [0.0, 1.0]
    assert found[64][:5] == [0.0, 1.0, 1.0, 1.0, 1.0] and found[64][5] == 1.0, "expert 5 was never predicted"
    assert 0.5 < found[4][2] < 1.0 and found[4][3] < found[4][2]


def test_a_calibration_undoes_what_a_loss_distorts():
    """Outcomes are drawn by probabilities that the logits overstate three times."""
    settings = LlaporSettings(out="unused", data=("unused",))
    data = LayerData(torch.randn(50, 4), torch.zeros(50, 2, dtype=torch.int64), torch.ones(50, 2), torch.ones(50, 6))
    training, generator = LayerTraining(settings, "input", data, seed=0), torch.Generator().manual_seed(0)
    true = torch.randn(4000, 6, generator=generator)
    target = (torch.rand(true.shape, generator=generator) < torch.sigmoid(true)).float()
    training.logits = lambda _: 3 * true + 2
    training.calibrate(LayerData(data.normed, data.ids, data.weights, target))
    assert network.chances(training.weights, 3 * true + 2) == pytest.approx(torch.sigmoid(true), abs=0.03)


def test_a_simulation_can_state_what_was_measured(learned):
    stated = StatedRates.read(learned / "hit_rates.json", MODEL)
    assert set(stated.rates) == {(1, 2), (1, 3), (1, 4)} and stated.source.startswith("measured: LLaPor on other")
    found = description(learned)["judgements"]["other"]["llapor"]["true_that_are_predicted"]
    for place, layer in enumerate((2, 3, 4)):
        assert stated.rates[1, layer].mean() == pytest.approx(found[place][K - 1], abs=1e-3)


def test_records_name_no_folder(learned, runs):
    text = (learned / "predictors.json").read_text() + (learned / "hit_rates.json").read_text()
    assert str(runs) not in text and str(learned.parent) not in text
    assert "data=[one:one,two:two]" in text and "out=out" in text


def test_a_folder_of_another_model_is_refused(learned):
    wider = Model(num_layers=5, num_experts=8, experts_per_token=K, num_dense_layers=FIRST)
    for model, hidden in ((wider, HIDDEN), (MODEL, 16)):
        with pytest.raises(ValueError, match=r"predictor_path: .*is for a model with"):
            PredictorFolder.read(learned, model, hidden)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "data: must name recordings"),
        (["data=[{}/one]"], "data: must be name:folder"),
        (["data=[one:{}/none]"], "data.one: .*none: cannot be read"),
        (["data=[one:{}/weightless]"], "data.one: .*has no weights of the routers; record it with"),
        (["data=[one:{}/one]", "test=[one:{}/other]"], "test.one: is among the texts to learn from"),
        (["data=[one:{}/one]", "test=[again:{}/copy]"], "test.again: 2 of its prompts are also in one"),
        (["data=[one:{}/one]", "epochs=0"], "epochs: must be at least 1, got 0"),
        (["data=[one:{}/one]", "middle.width=0"], "middle.width: must be at least 1, got 0"),
        (["data=[one:{}/one]", "epoch=3"], "epoch: "),
        (["data=[one:{}/one]", "checkpoint={}/none"], "checkpoint: .*none: no such folder"),
        (["data=[one:{}/one]", "checkpoint={}/model"], "checkpoint: .*is a model with .*'experts': .*recording is of"),
    ],
)
def test_mistakes_are_one_line(words, told, runs, tmp_path, capsys):
    given = [word.format(runs) for word in words]
    assert main([*given, f"out={tmp_path}/out", "wandb.mode=disabled"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert re.match(f"error: {told}", line), line
    assert not (tmp_path / "out" / "metrics.jsonl").exists(), "it had begun to learn"


def test_what_was_learned_is_not_overwritten(learned, runs, capsys):
    assert main([f"data=[one:{runs}/one]", f"out={learned}"]) == 2
    assert "holds other predictors" in capsys.readouterr().err


DAMAGES = {
    "a list for the model": lambda it: it | {"model": ["mixtral"]},
    "no source": lambda it: {key: each for key, each in it.items() if key != "source"},
    "texts that are a list": lambda it: it | {"texts": []},
    "predictors of one layer": lambda it: it | {"predictors": it["predictors"][:1]},
    "a predictor that is a number": lambda it: it | {"predictors": [1, *it["predictors"][1:]]},
    "another width": lambda it: it | {"predictors": [with_shape(row, width=31) for row in it["predictors"]]},
    "no width": lambda it: it | {"predictors": [with_shape(row, width=None) for row in it["predictors"]]},
    "more experts": lambda it: it | {"predictors": [with_shape(row, num_experts=9) for row in it["predictors"]]},
    "rates of another number of experts": lambda it: (
        it | {"predictors": [with_hits(r, [0.5]) for r in it["predictors"]]}
    ),
    "rates above one": lambda it: it | {"predictors": [with_hits(row, [1.5] * EXPERTS) for row in it["predictors"]]},
    "no settings": lambda it: it | {"settings": {}},
    "settings of another kind": lambda it: it | {"settings": {"ends": {"width": "wide"}, "middle": {}}},
}


def with_shape(row, **changes):
    return row | {"shape": row["shape"] | changes}


def with_hits(row, rates):
    return row | {"batch_hits_by_rank": {"4": rates}}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_description_is_refused_in_one_line(damage, learned, tmp_path):
    folder = shutil.copytree(learned, tmp_path / "damaged")
    (folder / "predictors.json").write_text(json.dumps(DAMAGES[damage](description(learned))))
    with pytest.raises(ConfigError, match=r"^predictor_path: ") as told:
        found = PredictorFolder.read(folder, MODEL, HIDDEN)
        found.tensors(2), found.trained_with(2)
    assert "\n" not in str(told.value)


def test_tensors_of_another_form_are_refused(learned, tmp_path):
    folder = shutil.copytree(learned, tmp_path / "damaged")
    tables = load_file(folder / "tables.safetensors")
    for name, change in (("rates", lambda it: it[:, :2]), ("popularity", lambda it: it * np.nan)):
        save_file(tables | {name: np.ascontiguousarray(change(tables[name]))}, folder / "tables.safetensors")
        with pytest.raises(ConfigError, match=f"^predictor_path: .*tables.safetensors: {name} must be finite"):
            PredictorFolder.read(folder, MODEL, HIDDEN).table()


def test_a_text_to_test_on_is_not_needed(runs, tmp_path):
    out = tmp_path / "out"
    assert main([f"data=[one:{runs}/one]", f"out={out}", *QUICK]) == 0
    found = description(out)
    assert found["texts"]["tests"] == [] and list(found["judgements"]) == [found["texts"]["held_out"]["name"]]
    assert "LLaPor on one, learned from one" in json.loads((out / "hit_rates.json").read_text())["source"]
