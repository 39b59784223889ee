"""Define the `model` group of the configuration. Torch-free."""

from __future__ import annotations

from dataclasses import replace

from harness.config import ConfigError, config, require, require_name
from harness.model import families
from harness.model.dimensions import SpecConfig
from harness.model.recipe import RandomRecipe
from harness.model.spec import Dtype, ModelSpec

RANDOM = "random"  # as a path: random weights, made in memory with the dimensions of `spec` or `recipe`


@config
class ModelConfig:
    """A model is a checkpoint, or dimensions without weights.

    `path` (a folder or hub id) comes before everything else; without it weights are random by `recipe`. With `spec`
    alone there are dimensions and no weights: enough to plan and to simulate, and with the path `random` to measure.
    `expand_prefill` says whether prompts attend to keys and values of heads, which their latents are expanded to, or to
    the latents; null: whichever takes fewer FLOPs.
    """

    name: str
    path: str | None = None
    dtype: Dtype | None = None
    recipe: RandomRecipe | None = None
    spec: SpecConfig | None = None
    expand_prefill: bool | None = None

    def __post_init__(self) -> None:
        require_name(self.name)
        if self.recipe is not None:
            try:
                families.require_recipe(self.recipe)
            except ConfigError as error:
                raise error.below("recipe") from None
        require(
            self.has_weights or self.spec is not None,
            "path",
            "missing; give a checkpoint folder or a Hugging Face hub id",
        )

    @property
    def has_weights(self) -> bool:
        return self.path is not None or self.recipe is not None

    def require_weights(self) -> None:
        """Raise ConfigError where only dimensions are given, for machines that run the model."""
        if not self.has_weights:
            message = f"missing: {self.name!r} has dimensions only, for planning; to run it, name its checkpoint"
            raise ConfigError("model.path", message)

    def chosen(self, spec: ModelSpec) -> ModelSpec:
        """Return the model with the choices that dimensions leave open. Raises ConfigError where it has no such
        choice."""
        message = f"must be null: {self.name!r} caches no latents that could be expanded"
        require(self.expand_prefill is None or spec.latent is not None, "model.expand_prefill", message)
        return replace(spec, expand_prefill=self.expand_prefill)

    def planned_spec(self) -> ModelSpec | None:
        """Return the model of `spec`, for planning without a checkpoint; None where there is no `spec`."""
        return ModelSpec.from_config(self.spec, self.name, self.dtype) if self.spec else None
