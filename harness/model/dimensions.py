"""The dimensions decide how large a decoder-only MoE model is and how much it computes. Torch-free."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Literal

from harness.config import config, require

MOST_EXPERTS = 1_000_000  # experts of all layers together: each has an entry in every layout


def require_countable(field: str, num_layers: int, num_experts: int) -> None:
    """Raise ConfigError naming `field` for a model that no memory holds: listing its parts alone would take minutes."""
    message = f"must be at most {MOST_EXPERTS} with the experts of each layer counted"
    require(num_layers * num_experts <= MOST_EXPERTS, field, f"{message}, got {num_layers} with {num_experts} each")


@config
class LatentAttention:
    """The dimensions of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434 §2.1). Keys and values of all heads
    are projections of one cached latent of `kv_rank` numbers; the heads also share one cached RoPE key of `rope_dim`.
    """

    kv_rank: int
    nope_dim: int  # per head, of a query or key: the part without RoPE
    rope_dim: int  # per head, of a query; shared by all heads, of a key
    value_dim: int  # per head
    q_rank: int | None = None  # null: queries are projected directly

    def __post_init__(self) -> None:
        for name in ("kv_rank", "nope_dim", "rope_dim", "value_dim"):
            require(getattr(self, name) >= 1, name, f"must be at least 1, got {getattr(self, name)}")
        require(self.q_rank is None or self.q_rank >= 1, "q_rank", f"must be at least 1 or null, got {self.q_rank}")


@config
class Router:
    """A router turns logits into experts and weights. Experts are chosen by score (with a correction bias, by score +
    bias), within the best `groups_per_token` of `num_groups` equal groups, and weighed by score."""

    scoring: Literal["softmax", "sigmoid"] = "softmax"  # softmax over all experts, or sigmoid of each
    renormalise: bool = True  # the weights of a token's experts sum to 1 before `scale`
    scale: float = 1.0
    num_groups: int = 1
    groups_per_token: int = 1
    group_score_experts: int = 1  # a group's score is the sum of the scores of so many of its best experts

    def __post_init__(self) -> None:
        require(self.scale > 0, "scale", f"must be positive, got {self.scale}")
        require(self.num_groups >= 1, "num_groups", f"must be at least 1, got {self.num_groups}")
        require(
            1 <= self.groups_per_token <= self.num_groups,
            "groups_per_token",
            f"must lie between 1 and num_groups {self.num_groups}, got {self.groups_per_token}",
        )
        best = self.group_score_experts
        require(best >= 1, "group_score_experts", f"must be at least 1, got {best}")


@config
class WeightFormat:
    """The matrices of some components are published in this format, scales included; everything else is in the model's
    dtype."""

    name: str
    bytes_per_param: float
    components: tuple[str, ...]  # names of `harness.model.components`

    def __post_init__(self) -> None:
        require(self.bytes_per_param > 0, "bytes_per_param", f"must be > 0, got {self.bytes_per_param}")


@config
class Dimensions:
    """A model has these dimensions; the papers' symbols are h hidden_dim, h_i expert_dim, N_e num_experts, N_k
    experts_per_token."""

    family: str  # Hugging Face's `model_type`; where the model is run, a module under harness/model/families
    num_layers: int
    hidden_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int  # of queries and keys; with latent attention nope_dim + rope_dim
    num_experts: int
    experts_per_token: int
    expert_dim: int
    vocab_size: int
    max_positions: int
    rope_theta: float
    norm_eps: float
    sliding_window: int | None = None  # tokens a token sees, itself included
    sliding_layers: Literal["all", "even"] = "all"  # which layers the window holds for, counted from 0
    tie_embeddings: bool = False
    eos_token_id: int | None = None
    latent: LatentAttention | None = None
    shared_expert_dim: int = 0  # width of all shared experts together, which every token passes
    shared_expert_gate: bool = False  # the shared experts' output is scaled by a sigmoid of one projection
    dense_layers: tuple[int, ...] = ()  # layers, from 0, with an ordinary MLP instead of router and experts
    dense_dim: int = 0
    qk_norm: Literal["head", "full"] | None = None  # RMS norm of queries and keys over each head, or over all heads
    qkv_bias: bool = False
    o_bias: bool = False
    attention_sinks: bool = False  # one learned logit for each head
    router_bias: bool = False
    correction_bias: bool = False  # added to the router's scores for choosing, not for weighting
    expert_bias: bool = False
    router: Router = Router()
    weights: WeightFormat | None = None


@config
class SpecConfig(Dimensions):
    """The setting `model.spec` gives the public dimensions of a model whose checkpoint need not be here."""

    source: str

    def __post_init__(self) -> None:
        at_least_one = (
            "num_layers hidden_dim num_heads num_kv_heads head_dim num_experts expert_dim vocab_size max_positions"
        )
        for name in at_least_one.split():
            require(getattr(self, name) >= 1, name, f"must be at least 1, got {getattr(self, name)}")
        require_countable("num_layers", self.num_layers, self.num_experts)
        dense = self.dense_layers
        require(self.num_heads % self.num_kv_heads == 0, "num_kv_heads", f"must divide num_heads {self.num_heads}")
        require(
            1 <= self.experts_per_token <= self.num_experts,
            "experts_per_token",
            f"must lie between 1 and num_experts {self.num_experts}, got {self.experts_per_token}",
        )
        require(
            set(dense) < set(range(self.num_layers)) and sorted(set(dense)) == list(dense),
            "dense_layers",
            f"must ascend, below num_layers {self.num_layers}, and leave a layer with experts, got {list(dense)}",
        )
        require(
            (self.dense_dim >= 1) == bool(dense),
            "dense_dim",
            f"must be at least 1 where dense_layers has any, else 0; got {self.dense_dim}",
        )
        require(self.shared_expert_dim >= 0, "shared_expert_dim", f"must be >= 0, got {self.shared_expert_dim}")
        window, latent = self.sliding_window, self.latent
        require(window is None or window >= 1, "sliding_window", f"must be at least 1 or null, got {window}")
        if latent is not None:
            qk_dim = latent.nope_dim + latent.rope_dim
            require(self.head_dim == qk_dim, "head_dim", f"must be nope_dim + rope_dim = {qk_dim}, got {self.head_dim}")

    def dimensions(self) -> dict[str, Any]:
        """Return the fields of `Dimensions`, by name."""
        return {field.name: getattr(self, field.name) for field in fields(Dimensions)}
