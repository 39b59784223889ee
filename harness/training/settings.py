"""Define what `conf/train.yaml` may say: the model, the text, the budget and the optimisation. Torch-free."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal

from harness.config import ConfigError, config, parse, require, require_name
from harness.model import families
from harness.model.recipe import RandomRecipe
from harness.record.wandb_sink import WandbConfig

DEFAULT_TEXT = ("code:python", "documentation:python-docs")  # what every machine has


@config
class StartingPoint:
    """A model to train from scratch, and the rates by which it is trained. Its file is `conf/training/<name>.yaml`."""

    name: str
    recipe: RandomRecipe
    learning_rate: float
    balancing: Literal["auxiliary", "bias", "none"] | None = None  # null: as the family's models were trained
    auxiliary_weight: float = 0.01
    bias_rate: float = 0.005

    def __post_init__(self) -> None:
        require_name(self.name)
        try:
            families.require_recipe(self.recipe)
        except ConfigError as error:
            raise error.below("recipe") from None
        for field in ("learning_rate", "auxiliary_weight", "bias_rate"):
            require(getattr(self, field) > 0, field, f"must be positive, got {getattr(self, field)}")
        require(
            self.balancing != "bias" or self.recipe.correction_bias,
            "balancing",
            f"must be auxiliary, none or null: {self.recipe.family} has no correction bias that could be moved",
        )

    @property
    def chosen_balancing(self) -> Literal["auxiliary", "bias", "none"]:
        """The balancing asked for, else the one by which models of the family were trained."""
        return self.balancing or ("bias" if self.recipe.correction_bias else "auxiliary")


@config
class TrainingSettings:
    """Everything that a training does. `minutes` and `steps` limit it; whichever comes first ends it."""

    training: StartingPoint
    out: str
    text: tuple[str, ...] = DEFAULT_TEXT
    held_out: tuple[str, ...] = ()
    held_out_share: float = 0.05
    max_domain_mb: float = 8.0
    evenness: float = 0.5
    licences: tuple[str, ...] = ()
    minutes: float | None = 10.0
    steps: int | None = None
    batch_sequences: int = 8
    sequence_tokens: int = 256
    warmup_steps: int = 30
    decay_percent: int = 30
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    seed: int = 0
    threads: int | None = None
    log_steps: int = 10
    evaluate_steps: int = 100
    evaluate_windows: int = 32
    checkpoint_steps: int = 100
    resume: bool = False
    progress: bool = True
    wandb: WandbConfig = WandbConfig()

    def __post_init__(self) -> None:
        require(bool(self.out.strip()), "out", "must name a folder, got an empty text")
        require(bool(self.text), "text", "must name at least one text")
        for each in self.licences:
            require(":" in each, "licences", f"must be domain:licence, got '{each}'")
        told = [each.split(":", 1)[0] for each in self.licences]
        require(len(set(told)) == len(told), "licences", f"must name a domain once, got {', '.join(self.licences)}")
        require(self.minutes is not None or self.steps is not None, "minutes", "must be a number where steps is null")
        require(self.minutes is None or self.minutes > 0, "minutes", f"must be positive or null, got {self.minutes}")
        for field, least in (("steps", 0), ("threads", 1)):
            value = getattr(self, field)
            require(value is None or value >= least, field, f"must be at least {least} or null, got {value}")
        counts = "batch_sequences log_steps evaluate_steps evaluate_windows checkpoint_steps"
        for field in counts.split():
            require(getattr(self, field) >= 1, field, f"must be at least 1, got {getattr(self, field)}")
        most = self.training.recipe.max_positions
        require(
            2 <= self.sequence_tokens <= most,
            "sequence_tokens",
            f"must lie between 2 and the model's {most} positions, got {self.sequence_tokens}",
        )
        for field in ("held_out_share", "evenness"):
            require(0 <= getattr(self, field) <= 1, field, f"must lie between 0 and 1, got {getattr(self, field)}")
        require(self.held_out_share <= 0.5, "held_out_share", f"must be at most 0.5, got {self.held_out_share}")
        require(0 <= self.decay_percent <= 90, "decay_percent", f"must lie in 0 to 90, got {self.decay_percent}")
        for field in ("warmup_steps", "weight_decay", "seed"):
            require(getattr(self, field) >= 0, field, f"must be at least 0, got {getattr(self, field)}")
        for field in ("clip_norm", "max_domain_mb"):
            require(getattr(self, field) > 0, field, f"must be positive, got {getattr(self, field)}")


def require_domains(settings: TrainingSettings, domains: Collection[str]) -> None:
    """Raise ConfigError for a licence of a domain that there is not."""
    for each in settings.licences:
        name = each.split(":", 1)[0]
        require(name in domains, "licences", f"'{name}' is no domain of text: {', '.join(domains)}")


def licence_of(settings: TrainingSettings, domain: str) -> str | None:
    """Return what the settings say about a domain's licence."""
    found = dict(each.split(":", 1) for each in settings.licences)
    return found[domain].strip() if domain in found else None


# What may change between an interrupted training and its continuation: nothing of it changes a step.
FREE = {"out", "minutes", "steps", "resume", "progress", "wandb", "checkpoint_steps", "log_steps", "licences"}


def parse_training(values: Mapping[str, Any]) -> TrainingSettings:
    """Parse the composed `conf/train.yaml`. Raises ConfigError that names the field."""
    return parse(TrainingSettings, values)
