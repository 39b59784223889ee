"""Describe a checkpoint with random weights: its dimensions, and how its weights are drawn. Torch-free."""

from __future__ import annotations

from harness.config import config, require
from harness.model.dimensions import require_countable
from harness.model.spec import Dtype

NORM_STD = 0.2  # spread of norm weights about 1: enough that a norm left out changes tokens


@config
class RandomRecipe:
    """The dimensions of a checkpoint with random weights, which is made on first use (see `zoo`)."""

    family: str
    num_layers: int
    hidden_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    experts_per_token: int
    expert_dim: int
    vocab_size: int
    max_positions: int
    dtype: Dtype
    rope_theta: float = 1e6
    sliding_window: int | None = None
    tie_embeddings: bool = False
    init_std: float | None = None
    embed_std: float = 1.0
    norm_std: float = NORM_STD
    norm_eps: float = 1e-5
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden_dim", "num_heads", "num_kv_heads", "num_experts", "expert_dim"):
            require(getattr(self, name) >= 1, name, f"must be at least 1, got {getattr(self, name)}")
        require_countable("num_layers", self.num_layers, self.num_experts)
        require(self.seed >= 0, "seed", f"must be at least 0, got {self.seed}")
        require(self.num_heads % self.num_kv_heads == 0, "num_kv_heads", f"must divide num_heads {self.num_heads}")
        require(self.head_dim >= 2 and self.head_dim % 2 == 0, "head_dim", f"must be even, got {self.head_dim}")
        require(
            1 <= self.experts_per_token <= self.num_experts,
            "experts_per_token",
            f"must lie between 1 and num_experts {self.num_experts}, got {self.experts_per_token}",
        )
        # 256 bytes and the special tokens make up the smallest byte-level vocabulary.
        require(self.vocab_size >= 260, "vocab_size", f"must be at least 260, got {self.vocab_size}")
        require(self.max_positions >= 2, "max_positions", f"must be at least 2, got {self.max_positions}")
        for name in ("rope_theta", "embed_std", "norm_eps"):
            require(getattr(self, name) > 0, name, f"must be positive, got {getattr(self, name)}")
        require(0 <= self.norm_std <= 0.5, "norm_std", f"must lie between 0 and 0.5, got {self.norm_std}")
        std, window = self.init_std, self.sliding_window
        require(std is None or std > 0, "init_std", f"must be positive or null, got {std}")
        require(window is None or window >= 1, "sliding_window", f"must be at least 1 or null, got {window}")

    @property
    def weight_std(self) -> float:
        """Standard deviation of every matrix but the embedding; about unit gain for a normed input by default."""
        return self.init_std if self.init_std is not None else self.hidden_dim**-0.5
