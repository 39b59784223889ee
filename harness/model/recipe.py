"""Describe a checkpoint with random weights: its dimensions, and how its weights are drawn. Torch-free."""

from __future__ import annotations

from harness.config import config, require
from harness.model.dimensions import Dimensions
from harness.model.spec import Dtype

NORM_STD = 0.2  # spread of norm weights about 1: enough that a norm left out changes tokens


@config
class RandomRecipe(Dimensions):
    """A checkpoint with random weights has these `Dimensions`; it is made on first use (see `zoo`). What follows from
    the family, such as norms of queries, need not be said."""

    dtype: Dtype
    rope_theta: float = 1e6
    norm_eps: float = 1e-5
    init_std: float | None = None
    embed_std: float = 1.0
    norm_std: float = NORM_STD
    seed: int = 0

    def __post_init__(self) -> None:
        self.require_possible()
        rotated = self.latent.rope_dim if self.latent else self.head_dim
        require(rotated % 2 == 0, "latent.rope_dim" if self.latent else "head_dim", f"must be even, got {rotated}")
        require(self.seed >= 0, "seed", f"must be at least 0, got {self.seed}")
        # 256 bytes and the special tokens make up the smallest byte-level vocabulary.
        require(self.vocab_size >= 260, "vocab_size", f"must be at least 260, got {self.vocab_size}")
        require(self.max_positions >= 2, "max_positions", f"must be at least 2, got {self.max_positions}")
        for name in ("rope_theta", "embed_std", "norm_eps"):
            require(getattr(self, name) > 0, name, f"must be positive, got {getattr(self, name)}")
        require(0 <= self.norm_std <= 0.5, "norm_std", f"must lie between 0 and 0.5, got {self.norm_std}")
        require(
            self.init_std is None or self.init_std > 0, "init_std", f"must be positive or null, got {self.init_std}"
        )

    @property
    def weight_std(self) -> float:
        """Standard deviation of every matrix but the embedding; about unit gain for a normed input by default."""
        return self.init_std if self.init_std is not None else self.hidden_dim**-0.5
