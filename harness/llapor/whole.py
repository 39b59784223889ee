"""Put the whole learning together: from recordings to predictors, their judgement, and what a simulation may state."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

from harness.config import ConfigError, require
from harness.llapor import judging
from harness.llapor.examples import Examples, read_examples, require_apart, split
from harness.llapor.files import METRICS, RATES, write_predictors
from harness.llapor.groups import Group, find_groups, likeness_of
from harness.llapor.learning import LayerData, LayerTraining
from harness.llapor.settings import LlaporSettings, named_folders
from harness.model.checkpoint import Checkpoint
from harness.model.trained import training_label
from harness.record.files import plain
from harness.record.provenance import code_version, environment
from harness.routing.predictors import write_rates
from harness.study.gates import checkpoint_of
from harness.study.prediction import Learned


@dataclass(frozen=True, eq=False)
class Texts:
    """Texts are to fit, to validate, and to test on; they were recorded of `checkpoint`, where its folder is named."""

    fit: Examples
    held_out: Examples
    tests: list[Examples]
    checkpoint: Checkpoint | None = None
    weights: str = "origin not stated: no checkpoint was named"


def read_all(settings: LlaporSettings) -> Texts:
    """Read all recordings. Raises ConfigError naming the setting and the text."""
    data = read_examples("data", named_folders("data", settings.data), settings.most_tokens, settings.seed)
    tests = read_examples("test", named_folders("test", settings.test), settings.most_tokens, settings.seed)
    for each in tests:
        same = (each.header.model, each.inputs.shape[1:]) == (data[0].header.model, data[0].inputs.shape[1:])
        require(same, f"test.{each.name}", f"is of another model than {data[0].name}: {each.header.model}")
    require(data[0].text.num_layers >= 2, "data", "are of a model with one router: there is no layer to predict")
    require_apart(data, tests)
    fit, held_out = split(data, settings.validation_share, settings.seed)
    if settings.checkpoint is None:
        return Texts(fit, held_out, tests)
    folder = Path(settings.checkpoint).expanduser()
    try:
        checkpoint = checkpoint_of(folder, fit.header, fit.inputs.shape[2])
        return Texts(fit, held_out, tests, checkpoint, training_label(folder) or "weights of another origin")
    except ConfigError as error:
        raise ConfigError("checkpoint", error.message) from None


class Learning:
    """Trains a predictor for each layer but the first, then judges and writes all of them."""

    def __init__(
        self,
        settings: LlaporSettings,
        texts: Texts,
        folder: Path,
        console: Console,
        log: Callable[[Mapping[str, Any]], None],
    ) -> None:
        self.settings, self.texts, self.folder, self.console, self._log = settings, texts, folder, console, log
        self.likeness = likeness_of(texts.fit.text, texts.fit.inputs)
        self.groups = find_groups(self.likeness)
        self.trained: dict[int, LayerTraining] = {}
        self._num_rows = 0

    def run(self, command: str) -> dict[str, Any]:
        """Do everything, and return figures for W&B's summary."""
        texts = self.texts
        places = list(enumerate(self.groups, start=1))
        shown = self.settings.progress and self.console.is_terminal
        rounds = track(places, "training predictors", console=self.console, transient=True, disable=not shown)
        for place, group in rounds:
            self.trained[place] = self._train(place, group)
        learned = Learned(texts.fit.text)
        judgements = {
            each.name: judging.all_judged(
                *(self.trained, learned, each),
                judging.routers_on(texts.checkpoint, each),
                self.settings.online_steps,
            )
            for each in [texts.held_out, *texts.tests]
        }
        description = self._description(command, judgements)
        networks = {
            self._layer(place): {name: each.numpy() for name, each in training.weights.items()}
            for place, training in self.trained.items()
        }
        write_predictors(self.folder, plain(description), networks, learned)
        self._write_rates()
        for name, found in judgements.items():
            kind = "held out" if name == texts.held_out.name else "another text"
            print(f"{name} ({kind}):", *judging.told(found, texts.fit.text.k), sep="\n  ")
        print(f"predictors in {self.folder}")
        return {
            name: {way: judging.mean_of_layers(each, "hot_4") for way, each in found.items()}
            for name, found in judgements.items()
        }

    def _layer(self, place: int) -> int:
        return self.texts.fit.header.first_layer + place

    def _train(self, place: int, group: Group) -> LayerTraining:
        data, held_out = LayerData.of(self.texts.fit, place), LayerData.of(self.texts.held_out, place)
        training = LayerTraining(self.settings, group, data, seed=self.settings.seed + place)

        def told(row: dict[str, Any]) -> None:
            row = {"layer": self._layer(place), **row}
            with (self.folder / METRICS).open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            losses = {key: row[key] for key in ("loss", "held_out_loss", "learning_rate")}
            self._num_rows += 1
            self._log({"index": self._num_rows, "epoch": row["epoch"], f"layer {row['layer']:02d}": losses})

        training.run(data, held_out, told)
        return training

    def _description(self, command: str, judgements: Mapping[str, Any]) -> dict[str, Any]:
        fit, held_out, settings = self.texts.fit, self.texts.held_out, self.settings
        header = fit.header
        layers = [header.first_layer + place for place in range(header.layers)]
        hidden = fit.inputs.shape[2]
        return {
            "source": f"learned from {fit.name} ({len(fit):,} tokens) of {header.model}",
            "weights": self.texts.weights,
            "label": "recorded",
            "model": {
                "name": header.model, "layers": layers, "experts": header.experts, "k": header.k, "hidden": hidden,
            },
            "texts": {
                "fit": {"name": fit.name, "tokens": len(fit)},
                "held_out": {"name": held_out.name, "tokens": len(held_out)},
                "tests": [{"name": each.name, "tokens": len(each)} for each in self.texts.tests],
            },
            "likeness": asdict(self.likeness),
            "predictors": [self._row(place, group) for place, group in enumerate(self.groups, start=1)],
            "judgements": judgements,
            "settings": {key: each for key, each in asdict(settings).items()
                         if key not in ("data", "test", "out", "wandb", "checkpoint")},
            "command": command,
            "code": code_version(),
            "environment": environment(),
        }  # fmt: skip

    def _row(self, place: int, group: Group) -> dict[str, Any]:
        training, data = self.trained[place], LayerData.of(self.texts.held_out, place)
        scores, chosen = judging.chances_of(training, data), self.texts.held_out.text.experts[:, place]
        return {
            "layer": self._layer(place),
            "group": group,
            "shape": asdict(training.shape),
            "num_bytes": training.shape.layout().nbytes,
            "seconds_per_32_tokens": judging.seconds_per_batch(training, data),
            "held_out_loss": training.loss(data),
            # P_hit: how often the expert predicted at a rank is chosen, by a token or by any of a batch
            "hit_by_rank": judging.hits_by_rank(scores, chosen)[0],
            "batch_hits_by_rank": judging.batch_hits_by_rank(scores, chosen),
        }

    def _write_rates(self) -> None:
        """State, for simulations, how often an expert is foreseen: on the first text of another kind, else on held-out
        text."""
        judged = self.texts.tests[0] if self.texts.tests else self.texts.held_out
        rates: list[list[float] | None] = [None]
        for place, training in self.trained.items():
            scores = judging.chances_of(training, LayerData.of(judged, place))
            found = judging.hits_by_rank(scores, judged.text.experts[:, place])[1]
            rates.append([float(np.round(rate, 5)) for rate in found])
        fit = self.texts.fit
        source = f"measured: LLaPor on {judged.name}, learned from {fit.name}; {fit.header.model}: {self.texts.weights}"
        write_rates(self.folder / RATES, [rates], source)
