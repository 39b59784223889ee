"""The dimensions decide how large a decoder-only MoE model is and how much it computes. Torch-free."""

from __future__ import annotations

import math
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
class Yarn:
    """YaRN stretches RoPE beyond the positions of pre-training (arXiv 2309.00071 §3). The names and defaults are those
    of transformers' `rope_parameters`."""

    factor: float  # the context is so many times the one of pre-training
    original_max_position_embeddings: int  # of pre-training
    beta_fast: float = 32.0  # frequencies that turn more often than this in the original context stay as they are
    beta_slow: float = 1.0  # those that turn less often are divided by `factor`; between the two lies a ramp
    truncate: bool = True  # the ends of the ramp are rounded outwards to whole dimensions
    attention_factor: float | None = None  # of sines and cosines; null: by `factor` and the next two
    mscale: float | None = None
    mscale_all_dim: float | None = None  # with latent attention also of the scores

    def __post_init__(self) -> None:
        positive = ("factor", "original_max_position_embeddings", "beta_slow", "attention_factor")
        for name in (*positive, "mscale", "mscale_all_dim"):
            value = getattr(self, name)
            require(value is None or value > 0, name, f"must be positive, got {value}")
        least = self.beta_slow
        require(self.beta_fast >= least, "beta_fast", f"must be at least beta_slow {least}, got {self.beta_fast}")

    @property
    def table_scale(self) -> float:
        """The factor of all sines and cosines (§3.4: the square root of 1/t)."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._temperature(self.mscale) / self._temperature(self.mscale_all_dim)
        return self._temperature(1.0)

    @property
    def score_scale(self) -> float:
        """The factor by which models with latent attention scale queries and keys once more (DeepSeek-V2 §3.1.4)."""
        return self._temperature(self.mscale_all_dim) if self.mscale_all_dim else 1.0

    def _temperature(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    def ramp(self, theta: float, dim: int) -> tuple[float, float]:
        """Return the first and the last of `dim` / 2 frequencies of the ramp, as fractions unless they are truncated.
        `theta` is RoPE's base, above 1."""
        positions = self.original_max_position_embeddings

        def at(turns: float) -> float:
            return dim * math.log(positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

        first, last = at(self.beta_fast), at(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        return max(first, 0), min(last, dim - 1)


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
class ClampedSwiglu:
    """The activation is (up + 1) * gate * sigmoid(alpha * gate), with gate and up cut at the limit (gpt-oss)."""

    limit: float = 7.0
    alpha: float = 1.702

    def __post_init__(self) -> None:
        for name in ("limit", "alpha"):
            require(getattr(self, name) > 0, name, f"must be positive, got {getattr(self, name)}")


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
    yarn: Yarn | None = None  # how RoPE is stretched; null: it is not
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
    clip_qkv: float | None = None  # queries, keys and values are limited to this absolute value, before RoPE
    o_bias: bool = False
    attention_sinks: bool = False  # one learned logit for each head
    router_bias: bool = False
    correction_bias: bool = False  # added to the router's scores for choosing, not for weighting
    expert_bias: bool = False
    clamped_swiglu: ClampedSwiglu | None = None  # the experts' activation; null: SwiGLU
    router: Router = Router()
    weights: WeightFormat | None = None

    def require_possible(self) -> None:
        """Raise ConfigError naming the first dimension that no model has, or that does not fit another one."""
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
        window, latent, clip = self.sliding_window, self.latent, self.clip_qkv
        require(window is None or window >= 1, "sliding_window", f"must be at least 1 or null, got {window}")
        require(clip is None or clip > 0, "clip_qkv", f"must be positive or null, got {clip}")
        if latent is not None:
            qk_dim = latent.nope_dim + latent.rope_dim
            require(self.head_dim == qk_dim, "head_dim", f"must be nope_dim + rope_dim = {qk_dim}, got {self.head_dim}")


@config
class SpecConfig(Dimensions):
    """The setting `model.spec` gives the public dimensions of a model whose checkpoint need not be here."""

    source: str

    def __post_init__(self) -> None:
        self.require_possible()

    def dimensions(self) -> dict[str, Any]:
        """Return the fields of `Dimensions`, by name."""
        return {field.name: getattr(self, field.name) for field in fields(Dimensions)}
