"""A training of seconds: it learns, goes on bit by bit after an interruption, and its model runs here."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from harness.cli.overrides import composed_values
from harness.model.checkpoint import Checkpoint
from harness.model.trained import training_label
from harness.run.experiment import run_experiment
from harness.training import loop
from harness.training.__main__ import main
from harness.training.settings import StartingPoint, TrainingSettings, parse_training
from tests.composing import composed, names_in
from tests.unit.training.small_trainings import DEEPSEEK, MIXTRAL, values, write_texts


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A Mixtral after 60 steps."""
    folder = tmp_path_factory.mktemp("trained")
    assert main(values(write_texts(folder), folder / "model", "mixtral", MIXTRAL, "steps=60")) == 0
    return folder / "model"


def test_it_learns_more_than_how_often_tokens_come(trained):
    report = json.loads((trained / "training.json").read_text())
    for losses in report["held_out_loss_nats_per_token"].values():
        assert losses["untrained"] == pytest.approx(math.log(300), rel=0.1), "it knows nothing at first"
        assert losses["trained"] < losses["unigram"] - 0.3
        assert losses["unigram"] < losses["untrained"]
    rows = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 61))
    assert rows[-1]["loss"] < rows[0]["loss"] - 1
    assert rows[-1]["held_out"] == {
        name: losses["trained"] for name, losses in report["held_out_loss_nats_per_token"].items()
    }
    assert report["tokens_seen"] == 60 * 4 * 32 == rows[-1]["tokens"]


def test_no_step_gives_the_model_before_training(trained, tmp_path):
    """The control has the tokenizer and the losses that the trained model's record calls untrained."""
    out = tmp_path / "model"
    assert main(values(write_texts(tmp_path), out, "mixtral", MIXTRAL, "steps=0")) == 0
    losses, learned = (
        json.loads((folder / "training.json").read_text())["held_out_loss_nats_per_token"] for folder in (out, trained)
    )
    for domain, of_control in losses.items():
        assert of_control["trained"] == of_control["untrained"] == learned[domain]["untrained"]
    assert (out / "tokenizer.json").read_text() == (trained / "tokenizer.json").read_text()
    assert (training_label(out) or "").startswith("not trained: the first weights")


def test_the_records_name_the_text_and_no_folder(trained):
    text = (trained / "training.json").read_text()
    report = json.loads(text)
    assert {source["name"] for source in report["texts"]} == {"sums.jsonl", "rhymes.txt"}
    assert all(len(source["sha256"]) == 64 and source["num_bytes"] > 1000 for source in report["texts"])
    assert str(trained.parent) not in text
    assert "text=[sums:sums.jsonl,verses:rhymes.txt]" in report["command"]
    assert {sample["domain"] for sample in report["samples"]} == {"sums", "verses"}


def test_the_folder_is_a_model_of_transformers(trained):
    """Its held-out loss there, by transformers' own experts and tokenizer, is the one that was reported."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(trained), AutoTokenizer.from_pretrained(trained)
    rows = [json.loads(line) for line in (trained / "held_out/sums.jsonl").read_text().splitlines()]
    ids = [
        token for row in rows for token in [*tokenizer(f"{row['prompt']}\n{row['continuation']}").input_ids, 1]
    ]  # each between BOS and EOS
    windows = torch.tensor(ids).unfold(0, 33, 1)[np.linspace(0, len(ids) - 33, 4).astype(int)]
    with torch.inference_mode():
        logits = model(windows[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
    report = json.loads((trained / "training.json").read_text())
    assert float(loss) == pytest.approx(report["held_out_loss_nats_per_token"]["sums"]["trained"], abs=2e-4)


def test_it_runs_here_token_for_token(trained, tmp_path):
    summary, _ = run_experiment(
        composed(
            *("experiment=smoke", "model=checkpoint", f"model.path={trained}", "dataset=file", "machine=emulated"),
            *(f"dataset.path={trained}/held_out/sums.jsonl", "dataset.num_requests=6", "dataset.max_new_tokens=8"),
            *(f"results_dir={tmp_path}", "wandb.mode=disabled", "progress=false", "verify=all"),
        )
    )
    assert summary["verify"]["checked"] == 6 and summary["verify"]["mismatched"] == 0
    label = "a small model trained by this harness on 7,680 tokens of sums, verses"
    assert label in summary["weights_source"] and training_label(trained) == label


class Interrupted(Exception):
    """The process ends here."""


@pytest.mark.parametrize(
    ("model", "recipe"),
    [("mixtral", MIXTRAL | {"dtype": "bfloat16"}), ("deepseek", DEEPSEEK)],
    ids=["auxiliary loss", "moved biases"],
)
def test_an_interrupted_training_goes_on_to_the_same_weights(model, recipe, tmp_path, monkeypatch):
    """Killed after step 5, whose last checkpoint is that of step 3: steps 4 and 5 are done again."""
    texts = write_texts(tmp_path)
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    budget = ("steps=8", "checkpoint_steps=3", "evaluate_steps=4")
    assert main(values(texts, whole, model, recipe, *budget)) == 0
    step = loop.Trainer._step

    def interrupted(self: loop.Trainer) -> dict[str, Any]:
        if self.position.step == 5:
            raise Interrupted
        return step(self)

    monkeypatch.setattr(loop.Trainer, "_step", interrupted)
    with pytest.raises(Interrupted):
        main(values(texts, parted, model, recipe, *budget))
    monkeypatch.setattr(loop.Trainer, "_step", step)
    assert main(values(texts, parted, model, recipe, *budget, "resume=true")) == 0
    expected, found = weights(whole), weights(parted)
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
    rows = [json.loads(line)["step"] for line in (parted / "metrics.jsonl").read_text().splitlines()]
    assert rows == list(range(1, 9))
    assert Checkpoint(parted).fingerprint() == Checkpoint(whole).fingerprint()


def test_another_seed_gives_other_first_weights(tmp_path):
    for seed in (1, 2):
        given = ("steps=0", f"seed={seed}")
        assert main(values(write_texts(tmp_path), tmp_path / str(seed), "mixtral", MIXTRAL, *given)) == 0
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(weights(tmp_path / "1")[name], weights(tmp_path / "2")[name])


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["training.balancing=bias"], "training.balancing: must be auxiliary, none or null: mixtral has no correction"),
        (["steps=null"], "minutes: must be a number where steps is null"),
        (["text=[nowhere.txt]"], "text: no such file: 'nowhere.txt'"),
        (["held_out=[verse:python]"], "held_out: 'verse' is no domain of text: sums, verses"),
        (["sequence_tokens=513"], "sequence_tokens: must lie between 2 and the model's 512 positions, got 513"),
        (["sequence_tokens=500", "held_out_share=0.01"], "tokens to hold out; one of sequence_tokens + 1 = 501"),
        (["training.recipe.vocab_size=90000"], "training.recipe.vocab_size: must be at most"),
        (["batch_sequence=3"], "batch_sequence: unknown key; did you mean 'batch_sequences'"),
        (["training=mistral"], "training: there is no 'mistral'; valid are deepseek, mixtral, qwen3"),
        (["licences=[free]"], "licences: must be domain:licence, got 'free'"),
        (["licences=[verse:free]"], "licences: 'verse' is no domain of text: sums, verses"),
        (["licences=[sums:MIT,sums:free]"], "licences: must name a domain once, got sums:MIT, sums:free"),
        (
            ["training.recipe.family=gpt_oss"],
            "training.recipe: transformers cannot run such a model of family gpt_oss (Could not find a `sliding_win",
        ),
    ],
    ids=str,
)
def test_a_mistake_is_one_line(overrides, told, tmp_path, capsys):
    given = values(write_texts(tmp_path), tmp_path / "model", "mixtral", MIXTRAL, "steps=2")
    replaced = [each.partition("=")[0] for each in overrides]
    assert main([*(each for each in given if each.partition("=")[0] not in replaced), *overrides]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert sum(line.startswith("error:") for line in error.splitlines()) == 1 and "Traceback" not in error


def test_a_finished_model_is_not_overwritten(trained, tmp_path, capsys):
    assert main(values(write_texts(tmp_path), trained, "mixtral", MIXTRAL, "steps=2")) == 2
    assert "holds a finished model" in capsys.readouterr().err


def test_other_settings_do_not_continue_a_training(tmp_path, capsys, monkeypatch):
    texts, out = write_texts(tmp_path), tmp_path / "model"
    monkeypatch.setattr("harness.training.result.save_checkpoint", _no_space)
    assert main(values(texts, out, "mixtral", MIXTRAL, "steps=2")) == 1
    assert "failed: no space" in capsys.readouterr().err
    assert main(values(texts, out, "mixtral", MIXTRAL, "steps=4", "weight_decay=0.2", "resume=true")) == 2
    assert "weight_decay: must be as in the training that" in capsys.readouterr().err
    assert main(values(texts, out, "mixtral", MIXTRAL, "steps=2", "threads=2", "resume=true")) == 2
    assert "threads: must be as in the training that" in capsys.readouterr().err
    assert main(values(texts, out, "mixtral", MIXTRAL, "steps=3", "resume=true")) == 2
    assert "steps: must be 2 or null: the rate falls to zero by then already; got 3" in capsys.readouterr().err
    assert main(values(texts, out, "mixtral", MIXTRAL, "steps=2")) == 2
    assert "resume=true goes on with it" in capsys.readouterr().err


def test_a_training_without_a_checkpoint_begins_anew(tmp_path, capsys, monkeypatch):
    """Its rows are not kept twice, nor half a row that a full disk left."""
    texts, out = write_texts(tmp_path), tmp_path / "model"
    out.mkdir()
    (out / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2, "layers": {}')
    assert main(values(texts, out, "mixtral", MIXTRAL, "steps=2", "resume=true")) == 0
    assert "no checkpoint yet: begins anew" in capsys.readouterr().err
    assert [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()] == [1, 2]


@pytest.mark.parametrize("name", ["config.json", "model-00001-of-00002.safetensors"])
def test_another_model_is_not_overwritten(name, tmp_path, capsys):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / name).write_text("precious")
    assert main(values(write_texts(tmp_path), tmp_path / "model", "mixtral", MIXTRAL, "steps=1")) == 2
    assert f"holds another model's {name}; choose another folder" in capsys.readouterr().err
    assert (tmp_path / "model" / name).read_text() == "precious"


def _no_space(*given: object) -> None:
    raise OSError("no space")


@pytest.mark.parametrize("name", names_in("training"))
def test_conf_shows_every_setting_with_its_default(name):
    """Whoever reads conf/train.yaml sees all settings; whoever trains from code gets the same behaviour."""
    shown = composed_values([f"training={name}"], root="train")
    settings = parse_training(shown)
    assert settings == TrainingSettings(training=settings.training, out=f"results/trained/{name}")
    assert set(shown) == {field.name for field in fields(settings)}
    point = StartingPoint(
        name=name, recipe=settings.training.recipe, learning_rate=settings.training.learning_rate
    )  # the rest by default
    assert settings.training == point
    assert set(shown["training"]) == {field.name for field in fields(point)}
