"""Model families are pairs of modules, one pair per Hugging Face `model_type`, found by name.

`<model_type>_layout.py` (torch-free) has `LAYOUT`, which says which dimensions a config.json has and where every tensor
lies; `<model_type>.py` has `FAMILY`, which adds the math on weight views. Adding the pair adds the family; what most
families share is in `decoder_parts.py` and `decoder.py`.

Shapes below: tokens are flat over all sequences of a batch; `w` maps a part's local tensor names to its views; `layer`
counts all layers from 0. All tensors are in `spec.dtype` on any one device unless a line says otherwise.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import fields
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, cast

from harness.config import ConfigError
from harness.model.dimensions import Dimensions
from harness.model.layout import PartLayout
from harness.model.spec import ModelSpec

if TYPE_CHECKING:
    from torch import Tensor, nn

    from harness.model.functional import AttentionOptions
    from harness.model.recipe import RandomRecipe
    from kernels.triton import ExpertMatrices

LAYOUT_SUFFIX = "_layout"


class MoeInput(NamedTuple):
    """The state of a layer between its attention and its experts. The layer's output is residual + common + the sum
    over k of weight * expert(normed)."""

    residual: Tensor  # [tokens, hidden]
    normed: Tensor  # [tokens, hidden], the experts' input
    expert_ids: Tensor | None  # int64 [tokens, k]; None in a dense layer
    expert_weights: Tensor | None  # float32 [tokens, k]; None in a dense layer
    common: Tensor | None = None  # [tokens, hidden], what shared experts or a dense layer's MLP give; None without


class LatentRows(NamedTuple):
    """The rows in front of a layer's attention over latents. The tokens of expanded prompts come first; the others
    attend to latents."""

    latent: Tensor  # [tokens, kv_rank + rope_dim], what is cached: the normed latent, then the RoPE key of all heads
    absorbed: Tensor  # [others, heads, kv_rank + rope_dim], queries in the latents' space
    q: Tensor  # [expanded, heads, nope_dim + rope_dim]
    k: Tensor  # as q
    v: Tensor  # [expanded, heads, value_dim]


class FamilyLayout(Protocol):
    """The torch-free half of a family: its dimensions and the layout of its tensors. `harmless` has entries of
    config.json that change nothing in this family, with the reasons."""

    harmless: ClassVar[Mapping[str, str]]

    def spec_from_config(self, config: Mapping[str, Any], name: str, dtype: str) -> ModelSpec:
        """Return the model that the entries of config.json describe. `ConfigError` names a missing or impossible
        one."""
        ...

    def reference_entries(self, spec: ModelSpec, entries: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entries of config.json by which transformers makes this model; `entries` are those that were
        read."""
        ...

    def config_from_recipe(self, recipe: RandomRecipe) -> dict[str, Any]:
        """Return entries of config.json for a checkpoint with random weights, without the ids of special tokens."""
        ...

    def layer_parts(self, spec: ModelSpec, layer: int) -> tuple[PartLayout, ...]:
        """Return the layer's parts in the order of first use: attention_in, attention_out, then the experts."""
        ...

    def attention_part(self, spec: ModelSpec, layer: int) -> PartLayout | None:
        """Return the few weights that attention itself uses (sinks), if any. Each device keeps those of all layers for
        the whole run, and so does the host: attention runs where the KV cache is."""
        ...

    def embedding_part(self, spec: ModelSpec) -> PartLayout: ...

    def head_part(self, spec: ModelSpec) -> PartLayout: ...


class Family(FamilyLayout, Protocol):
    """A family adds math to its layout. The layer is divided where strategies divide it: around attention, and around
    each expert."""

    def embed(self, spec: ModelSpec, w: Mapping[str, Tensor], token_ids: Tensor) -> Tensor:
        """Look up the embeddings of token ids: int64 [tokens] -> hidden [tokens, hidden]."""
        ...

    def attention_in(
        self, spec: ModelSpec, w: Mapping[str, Tensor], hidden: Tensor, positions: Tensor, layer: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return q [tokens, heads, head_dim], k and v [tokens, kv_heads, head_dim], with RoPE applied to q and k. A
        family that caches latents has `latents_in` instead."""
        ...

    def latents_in(
        self,
        spec: ModelSpec,
        w: Mapping[str, Tensor],
        hidden: Tensor,
        positions: Tensor,
        num_expanded: int,
        layer: int,
    ) -> LatentRows:
        """Compute what attention over latents takes, with keys and values of heads for the first `num_expanded` tokens
        and absorbed queries for the others. Only a family that caches latents has this method and `from_latents`."""
        ...

    def from_latents(self, spec: ModelSpec, w: Mapping[str, Tensor], attn: Tensor, layer: int) -> Tensor:
        """Project attention results out of the latents' space, by the part behind attention: [tokens, heads * kv_rank]
        -> [tokens, heads * value_dim]."""
        ...

    def attention_options(self, spec: ModelSpec, w: Mapping[str, Tensor], layer: int) -> AttentionOptions:
        """Return scale, window and sinks of a layer's attention, for kernels. Here and in the next two methods `w` has
        the views of `attention_part`, or is empty where there is no such part."""
        ...

    def prefill_attention(
        self,
        spec: ModelSpec,
        w: Mapping[str, Tensor],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        seq_lens: Sequence[int],
        layer: int,
    ) -> Tensor:
        """Compute causal attention inside each sequence; sequences lie one after another. Where latents are cached,
        the arguments are those of heads or those of latents: v then has a width of its own.
        Returns [tokens, heads * width of v]."""
        ...

    def decode_attention(
        self, spec: ModelSpec, w: Mapping[str, Tensor], q: Tensor, k: Tensor, v: Tensor, context_len: int, layer: int
    ) -> Tensor:
        """Attend for one token of one sequence. q [heads, head_dim] is at position context_len - 1;
        k and v [kv_heads, >= context_len, head_dim] include that token's own entry. Latents are their own values: v is
        then the beginning of k's rows. Returns [heads * width of v]."""
        ...

    def output_projection(self, spec: ModelSpec, w: Mapping[str, Tensor], attn: Tensor, layer: int) -> Tensor:
        """Project [tokens, heads * value_dim] -> [tokens, hidden], linear in attn. Where several GPUs share the heads,
        their results are summed."""
        ...

    def after_attention(
        self, spec: ModelSpec, w: Mapping[str, Tensor], projected: Tensor, residual: Tensor, layer: int
    ) -> MoeInput:
        """Compute everything behind the output projection `projected` [tokens, hidden] and before the experts.
        `residual` [tokens, hidden] is the layer's input. Where several GPUs share the layer, their `common` are summed.
        """
        ...

    def router_logits(self, spec: ModelSpec, w: Mapping[str, Tensor], normed: Tensor, layer: int) -> Tensor:
        """Compute the router's logits: [tokens, hidden] -> [tokens, experts]. Predictors also call it, with another
        layer's hidden states."""
        ...

    def route(self, spec: ModelSpec, w: Mapping[str, Tensor], logits: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Choose experts by `spec.router`: logits [tokens, experts] -> ids int64 [tokens, k] and float32 weights
        [tokens, k]. If `w` has a correction bias, it is added to the scores for the choice alone."""
        ...

    def foresee(
        self, spec: ModelSpec, w: Mapping[str, Tensor], logits: Tensor, count: int, layer: int
    ) -> tuple[Tensor, Tensor]:
        """Estimate which experts `route` will choose by logits that are like these. Returns ids int64 [tokens, count],
        the best first, and the probability of each, float32 [tokens, count]; those of all experts sum to k."""
        ...

    def expert(self, spec: ModelSpec, w: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Run one expert on its tokens, unweighted: [m, hidden] -> [m, hidden]."""
        ...

    def expert_matrices(self, spec: ModelSpec, w: Mapping[str, Tensor]) -> ExpertMatrices:
        """Return the matrices of `expert`, for kernels that do many experts at once: views of `w`, no copies."""
        ...

    def head(self, spec: ModelSpec, w: Mapping[str, Tensor], hidden: Tensor) -> Tensor:
        """Compute the logits: [n, hidden] -> float32 [n, vocab]."""
        ...

    def reference_routers(self, spec: ModelSpec, model: nn.Module) -> list[nn.Module]:
        """Return the Hugging Face model's modules that choose experts by `topk`, one for each layer that has a
        router."""
        ...

    def reference_scores(self, spec: ModelSpec, router: nn.Module, choice: Tensor) -> tuple[Tensor, Tensor]:
        """Return two kinds of scores, each float32 [tokens, experts], from what a reference router's `topk` saw
        (`choice`, same shape). The router chooses by the first ones. The size of the second ones, positive and without
        a bias, is the measure for rounding."""
        ...


def available() -> list[str]:
    names = (module.name for module in pkgutil.iter_modules(__path__))
    return sorted(name.removesuffix(LAYOUT_SUFFIX) for name in names if name.endswith(LAYOUT_SUFFIX))


def layout(name: str) -> FamilyLayout:
    """Return the torch-free half of a family."""
    return cast(FamilyLayout, _load(name, LAYOUT_SUFFIX).LAYOUT)


def family(name: str) -> Family:
    """Return layout and math of the family whose Hugging Face `model_type` is `name`."""
    return cast(Family, _load(name, "").FAMILY)


def require_recipe(recipe: RandomRecipe) -> None:
    """Raise ConfigError naming the field of a recipe that a checkpoint of its family cannot have."""
    if recipe.family not in available():
        raise ConfigError("family", f"must be one of {', '.join(available())}, got {recipe.family!r}")
    found = layout(recipe.family)
    try:
        spec = found.spec_from_config(found.config_from_recipe(recipe), "random", recipe.dtype)
    except ConfigError as error:
        raise ConfigError("family", f"{recipe.family} cannot have these dimensions ({error.message})") from error
    for field in fields(Dimensions):
        asked, made = getattr(recipe, field.name), getattr(spec, field.name)
        if asked not in (field.default, made):
            raise ConfigError(field.name, f"must be {made!r} for the family {recipe.family}, got {asked!r}")


def _load(name: str, suffix: str) -> ModuleType:
    if name not in available():
        raise ConfigError(
            "model.path", f"config.json: model_type: unknown family {name!r}; available: {', '.join(available())}"
        )
    return importlib.import_module(f"{__name__}.{name}{suffix}")
