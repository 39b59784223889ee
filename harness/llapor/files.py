"""Write predictors to a folder, and read them again: tensors in safetensors, beside a JSON that tells where from.

Torch-free: tensors are read as arrays of numpy.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from harness.config import ConfigError, load_json, parse, require
from harness.llapor.settings import GroupSettings
from harness.llapor.shape import DTYPE, PredictorShape
from harness.routing.base import RoutedModel
from harness.study.prediction import Learned

FORMAT, VERSION = "moe-llapor", 1
DESCRIPTION, NETWORKS, TABLES = "predictors.json", "predictors.safetensors", "tables.safetensors"
RATES, METRICS = "hit_rates.json", "metrics.jsonl"
Arrays = dict[str, NDArray[Any]]
BatchHits = Mapping[int, Mapping[int, NDArray[np.float64]]]  # by layer and tokens of a batch, P_hit by rank [experts]


@dataclass(frozen=True, eq=False)
class PredictorFolder:
    """A folder holds one predictor for each layer with a router but the first, and tables of what tokens chose."""

    path: Path
    description: dict[str, Any]

    @classmethod
    def read(cls, path: Path, model: RoutedModel, hidden_dim: int) -> PredictorFolder:
        """Read the description, and check that the predictors are of this model's form. Raises ConfigError."""
        try:
            found = load_json((path / DESCRIPTION).read_bytes())
        except (OSError, ValueError) as error:
            raise _error(f"{path / DESCRIPTION}: cannot be read: {error}") from None
        known = isinstance(found, dict) and (found.get("format"), found.get("version")) == (FORMAT, VERSION)
        require(known, "predictor_path", f"{path}: must have the format {FORMAT} and the version {VERSION}")
        layers = list(model.moe_layers)
        ours = {"layers": layers, "experts": model.num_experts, "k": model.experts_per_token, "hidden": hidden_dim}
        model_told = found.get("model")
        theirs = {name: model_told.get(name) if isinstance(model_told, dict) else None for name in ours}
        require(theirs == ours, "predictor_path", f"{path}: is for a model with {theirs}, this one has {ours}")
        folder = cls(path, found)
        folder._require_whole(model, hidden_dim)
        return folder

    def _require_whole(self, model: RoutedModel, hidden_dim: int) -> None:
        """Require what is read of the description, each entry in its form. Raises ConfigError."""
        file, layers, experts = self.path / DESCRIPTION, list(model.moe_layers[1:]), model.num_experts
        try:
            shapes, hits = self.shapes(), self.batch_hits
            told = f"{file}: must have predictors of the layers {layers}, has {list(shapes)}"
            require(list(shapes) == layers, "predictor_path", told)
            for layer, shape in shapes.items():
                own = (shape.hidden_dim, shape.num_experts)
                told = f"{file}: layer {layer} must be for {hidden_dim} dimensions and {experts} experts, is for {own}"
                require(own == (hidden_dim, experts) and min(shape.pca_dims, shape.width) > 0, "predictor_path", told)
            for layer, by_size in hits.items():
                told = f"{file}: batch_hits_by_rank of layer {layer} must be {experts} shares for each size of a batch"
                valid = all(
                    size > 0 and rates.shape == (experts,) and (rates >= 0).all() and (rates <= 1).all()
                    for size, rates in by_size.items()
                )
                require(valid, "predictor_path", told)
            require(bool(self.source and self.validated_on), "predictor_path", f"{file}: names no text")
        except ConfigError:
            raise
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise _error(f"{file}: is damaged: {type(error).__name__}: {error}") from None

    @property
    def source(self) -> str:
        """The text that the predictors learned from, for labels."""
        return str(self.description["source"])

    def shapes(self) -> dict[int, PredictorShape]:
        """Return the shape of each layer's predictor, by the model's number of the layer."""
        return {row["layer"]: PredictorShape(**row["shape"]) for row in self.description["predictors"]}

    @property
    def batch_hits(self) -> BatchHits:
        """The share of batches of held-out text in which the expert of each rank got tokens; of no layer where the
        folder does not say. An expert's rank is by the tokens that it is predicted to have."""
        return {
            row["layer"]: {int(size): np.asarray(rates) for size, rates in row["batch_hits_by_rank"].items()}
            for row in self.description["predictors"]
            if "batch_hits_by_rank" in row
        }

    @property
    def validated_on(self) -> str:
        """The held-out text, for labels."""
        return str(self.description["texts"]["held_out"]["name"])

    def trained_with(self, layer: int) -> GroupSettings:
        """Return the settings that the predictor of a layer was trained with. Raises ConfigError."""
        name = "middle" if self.shapes()[layer].is_deep else "ends"
        try:
            return parse(GroupSettings, self.description["settings"][name])
        except (ConfigError, AttributeError, KeyError, TypeError) as error:
            told = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
            raise _error(f"{self.path / DESCRIPTION}: settings.{name}: {told}") from None

    def tensors(self, layer: int) -> Arrays:
        """Return the tensors of the predictor for a layer, by name. Raises ConfigError."""
        shape = self.shapes()[layer]
        return {name: self._array(NETWORKS, f"{layer}.{name}", size) for name, size in shape.tensors().items()}

    def table(self) -> tuple[NDArray[np.int64], NDArray[np.float16], NDArray[np.float32]]:
        """Return the token ids that were seen, ascending; how often each chose each expert [ids, layers, experts]; and
        the popularity of experts [layers, experts]. Raises ConfigError."""
        form = self.description["model"]
        layers, experts = len(form["layers"]), form["experts"]
        ids = self._array(TABLES, "ids", (None,))
        rates = self._array(TABLES, "rates", (len(ids), layers, experts))
        return ids, rates, self._array(TABLES, "popularity", (layers, experts))

    def _array(self, file: str, name: str, shape: tuple[int | None, ...]) -> NDArray[Any]:
        """Return an array of a file, of this shape; None is any number. Raises ConfigError."""
        try:
            with safe_open(self.path / file, framework="numpy") as content:
                found: NDArray[Any] = content.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise _error(f"{self.path / file}: cannot be read: {error}") from None
        told = f"{self.path / file}: {name} must be finite numbers of the shape {shape}, got {found.shape}"
        fits = len(shape) == found.ndim and all(n in (None, m) for n, m in zip(shape, found.shape, strict=True))
        require(fits and bool(np.isfinite(found).all()), "predictor_path", told)
        return found


def _error(message: str) -> ConfigError:
    return ConfigError("predictor_path", message)


def write_predictors(
    path: Path, description: Mapping[str, Any], networks: Mapping[int, Arrays], learned: Learned
) -> None:
    """Write the predictors by layer, the tables of what was seen in the same text, and the description."""
    named = {f"{layer}.{name}": np.ascontiguousarray(each, dtype=DTYPE) for layer, found in networks.items()
             for name, each in found.items()}  # fmt: skip
    save_file(named, path / NETWORKS)
    ids, by_layer = learned.by_word
    rates = np.stack(by_layer, axis=1).astype(np.float16)
    popularity = learned.rates.astype(np.float32)
    save_file({"ids": ids, "rates": np.ascontiguousarray(rates), "popularity": popularity}, path / TABLES)
    text = json.dumps({"format": FORMAT, "version": VERSION, **description}, indent=1)
    (path / DESCRIPTION).write_text(f"{text}\n", encoding="utf-8")
