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
        theirs = {name: found.get("model", {}).get(name) for name in ours}
        require(theirs == ours, "predictor_path", f"{path}: is for a model with {theirs}, this one has {ours}")
        return cls(path, found)

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
        settings = self.description["settings"]["middle" if self.shapes()[layer].is_deep else "ends"]
        return parse(GroupSettings, settings)

    def tensors(self, layer: int) -> Arrays:
        """Return the tensors of the predictor for a layer, by name. Raises ConfigError."""
        return {name: self._array(NETWORKS, f"{layer}.{name}") for name in self.shapes()[layer].tensors()}

    def table(self) -> tuple[NDArray[np.int64], NDArray[np.float16], NDArray[np.float32]]:
        """Return the token ids that were seen, ascending; how often each chose each expert [ids, layers, experts]; and
        the popularity of experts [layers, experts]. Raises ConfigError."""
        ids, rates, popular = (self._array(TABLES, name) for name in ("ids", "rates", "popularity"))
        return ids, rates, popular

    def _array(self, file: str, name: str) -> NDArray[Any]:
        try:
            with safe_open(self.path / file, framework="numpy") as content:
                found: NDArray[Any] = content.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise _error(f"{self.path / file}: cannot be read: {error}") from None
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
