"""Load a model for a run, a plan or a calibration: a checkpoint, weights made in memory, or dimensions alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from harness.config import ConfigError
from harness.model.checkpoint import Checkpoint
from harness.model.config import RANDOM, ModelConfig
from harness.model.linear import bf16_method
from harness.model.planned import PlannedModel, planned_model
from harness.model.random_weights import RandomWeights
from harness.model.spec import ModelSpec
from harness.model.trained import training_label
from harness.model.zoo import ensure


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A source of weights and its description for the records. `tokenizer` and `checkpoint` are those of a checkpoint,
    else None."""

    source: Checkpoint | RandomWeights | PlannedModel
    weights_source: str
    tokenizer: Any = None
    checkpoint: Checkpoint | None = None

    @property
    def spec(self) -> ModelSpec:
        return self.source.spec


def load_model(config: ModelConfig, *, has_tensors: bool, seed: int) -> LoadedModel:
    """Load what a machine needs of the model: its weights where it `has_tensors`, else its dimensions alone. `seed` is
    for weights that are made in memory.

    Raises ConfigError below `model` where the configuration does not give what the machine needs.
    """
    if not has_tensors:
        planned = planned_model(config)
        stored = f"{planned.spec.weights.name} weights, else " if planned.spec.weights else ""
        return LoadedModel(source=planned, weights_source=f"dimensions only, {stored}{planned.spec.dtype}")
    config.require_weights()
    if config.path == RANDOM:
        random = RandomWeights(config, seed=seed)
        return LoadedModel(source=random, weights_source=f"random weights made in memory, {random.spec.dtype}")
    checkpoint = _checkpoint(config)
    if checkpoint.spec.dtype == "bfloat16":
        bf16_method()  # raises where the environment asks for an unknown method
    kind = "random weights" if config.path is None else f"checkpoint {checkpoint.folder.resolve().name}"
    if (trained := training_label(checkpoint.folder)) is not None:
        kind = f"{kind}, {trained}"
    return LoadedModel(
        source=checkpoint,
        weights_source=f"{kind}, {checkpoint.spec.dtype}, fingerprint {checkpoint.fingerprint()}",
        tokenizer=checkpoint.tokenizer(),
        checkpoint=checkpoint,
    )


def _checkpoint(config: ModelConfig) -> Checkpoint:
    folder = ensure(config)
    try:
        checkpoint = Checkpoint(folder, config.dtype)
    except ConfigError as error:
        if config.path is not None:
            raise
        raise ConfigError(error.field, f"{error.message}; remove {folder}, and it is made again") from error
    checkpoint.spec = config.chosen(checkpoint.spec)
    return checkpoint
