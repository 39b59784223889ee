"""Define what `conf/llapor.yaml` may say: the recordings, the networks and the optimisation. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any

from harness.config import ConfigError, config, parse, require
from harness.record.wandb_sink import WandbConfig


@config
class GroupSettings:
    """The predictors of one kind of layers are built and trained alike; `ends` are the groups at input and output."""

    pca_dims: int
    width: int
    learning_rate: float
    weight_decay: float
    warmup_epochs: int = 0
    cosine: bool = False  # the rate falls to zero behind the warm-up; false: it stays

    def __post_init__(self) -> None:
        for name in ("pca_dims", "width"):
            require(getattr(self, name) >= 1, name, f"must be at least 1, got {getattr(self, name)}")
        require(self.learning_rate > 0, "learning_rate", f"must be positive, got {self.learning_rate}")
        for name in ("weight_decay", "warmup_epochs"):
            require(getattr(self, name) >= 0, name, f"must be at least 0, got {getattr(self, name)}")


ENDS = GroupSettings(pca_dims=256, width=256, learning_rate=1e-3, weight_decay=0.01, warmup_epochs=5, cosine=True)
MIDDLE = GroupSettings(pca_dims=512, width=512, learning_rate=2e-3, weight_decay=0.05)


@config
class LlaporSettings:
    """Everything that a training of predictors does. `data` is learned from, `test` is another text."""

    out: str
    data: tuple[str, ...] = ()
    test: tuple[str, ...] = ()
    checkpoint: str | None = None
    ends: GroupSettings = field(default_factory=lambda: ENDS)
    middle: GroupSettings = field(default_factory=lambda: MIDDLE)
    balanced_share: float = 0.5
    focal_gamma: float = 2.0
    noise_std: float = 0.1
    mask_share: float = 0.05
    dropout: float = 0.1
    epochs: int = 30
    batch_tokens: int = 512
    most_tokens: int = 65_536
    validation_share: float = 0.2
    online_steps: int = 0
    seed: int = 0
    threads: int | None = None
    progress: bool = True
    wandb: WandbConfig = WandbConfig()

    def __post_init__(self) -> None:
        require(bool(self.out.strip()), "out", "must name a folder, got an empty text")
        require(bool(self.data), "data", "must name recordings, as data=[plays:RUN_FOLDER,code:RUN_FOLDER]")
        for name in ("epochs", "batch_tokens", "most_tokens"):
            require(getattr(self, name) >= 1, name, f"must be at least 1, got {getattr(self, name)}")
        for name in ("balanced_share", "mask_share", "dropout"):
            require(0 <= getattr(self, name) < 1 or (name == "balanced_share" and getattr(self, name) == 1), name,
                    f"must lie between 0 and 1, got {getattr(self, name)}")  # fmt: skip
        share = self.validation_share
        require(0 < share <= 0.5, "validation_share", f"must lie above 0 and be at most 0.5, got {share}")
        for name in ("focal_gamma", "noise_std", "online_steps", "seed"):
            require(getattr(self, name) >= 0, name, f"must be at least 0, got {getattr(self, name)}")
        require(self.threads is None or self.threads >= 1, "threads", f"must be at least 1 or null, got {self.threads}")

    def group(self, name: str) -> GroupSettings:
        """Return the settings of the group "input", "middle" or "output"."""
        return self.middle if name == "middle" else self.ends


def parse_llapor(values: Mapping[str, Any]) -> LlaporSettings:
    """Parse the composed `conf/llapor.yaml`. Raises ConfigError that names the field."""
    return parse(LlaporSettings, values)


def named_folders(field_name: str, words: tuple[str, ...]) -> dict[str, str]:
    """Return the folders by the names of their texts, from `name:folder`. Raises ConfigError."""
    found: dict[str, str] = {}
    for word in words:
        name, given, folder = word.partition(":")
        if not (name and given and folder):
            raise ConfigError(field_name, f"must be name:folder, got '{word}'")
        require(name not in found, field_name, f"names '{name}' twice; give each text another name")
        found[name] = folder
    return found
