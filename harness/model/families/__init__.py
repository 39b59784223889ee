"""Model families: one pair of modules per Hugging Face `model_type`, found by name.

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
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from harness.config import ConfigError
from harness.model.layout import PartLayout
from harness.model.spec import ModelSpec

if TYPE_CHECKING:
    from torch import Tensor, nn

    from harness.model.functional import AttentionOptions
    from harness.model.recipe import RandomRecipe
    from kernels.triton import ExpertMatrices

LAYOUT_SUFFIX = "_layout"


class MoeInput(NamedTuple):
    """What lies between a layer's attention and its experts. The layer's output is residual + common + the sum over k
    of weight * expert(normed)."""

    residual: Tensor  # [tokens, hidden]
    normed: Tensor  # [tokens, hidden], the experts' input
    expert_ids: Tensor | None  # int64 [tokens, k]; None in a dense layer
    expert_weights: Tensor | None  # float32 [tokens, k]; None in a dense layer
    common: Tensor | None = None  # [tokens, hidden], what shared experts or a dense layer's MLP give; None without


class FamilyLayout(Protocol):
    """The torch-free half."""

    def spec_from_config(self, config: Mapping[str, Any], name: str, dtype: str) -> ModelSpec:
        """From the entries of config.json. `ConfigError` names a missing or impossible one."""
        ...

    def config_from_recipe(self, recipe: RandomRecipe) -> dict[str, Any]:
        """Entries of config.json for a checkpoint with random weights, token ids of specials apart."""
        ...

    def layer_parts(self, spec: ModelSpec, layer: int) -> tuple[PartLayout, ...]:
        """In the order of first use: attention_in, attention_out, then the experts."""
        ...

    def attention_part(self, spec: ModelSpec, layer: int) -> PartLayout | None:
        """Return the few weights that attention itself uses (sinks), if any. Each device keeps those of all layers for
        the whole run, and the host beside it: attention runs where the KV cache is."""
        ...

    def embedding_part(self, spec: ModelSpec) -> PartLayout: ...

    def head_part(self, spec: ModelSpec) -> PartLayout: ...


class Family(FamilyLayout, Protocol):
    """Layout and math. The layer is cut where strategies cut it: around attention, and around each expert."""

    def embed(self, spec: ModelSpec, w: Mapping[str, Tensor], token_ids: Tensor) -> Tensor:
        """int64 [tokens] -> hidden [tokens, hidden]."""
        ...

    def attention_in(
        self, spec: ModelSpec, w: Mapping[str, Tensor], hidden: Tensor, positions: Tensor, layer: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q [tokens, heads, head_dim], k and v [tokens, kv_heads, head_dim], contiguous, RoPE applied to q and k."""
        ...

    def attention_options(self, spec: ModelSpec, w: Mapping[str, Tensor], layer: int) -> AttentionOptions:
        """Return scale, window and sinks of a layer's attention, for kernels. Here and in the next two `w` are the
        views of `attention_part`, none where there is none."""
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
        """Causal attention inside each sequence; sequences lie one after another. [tokens, heads * head_dim]."""
        ...

    def decode_attention(
        self, spec: ModelSpec, w: Mapping[str, Tensor], q: Tensor, k: Tensor, v: Tensor, context_len: int, layer: int
    ) -> Tensor:
        """One token of one sequence: q [heads, head_dim] at position context_len - 1, k and v
        [kv_heads, >= context_len, head_dim] with that token's own entry included. [heads * head_dim]."""
        ...

    def output_projection(self, spec: ModelSpec, w: Mapping[str, Tensor], attn: Tensor, layer: int) -> Tensor:
        """[tokens, heads * head_dim] -> [tokens, hidden], linear in attn. Where several GPUs share the heads, their
        results are summed."""
        ...

    def after_attention(
        self, spec: ModelSpec, w: Mapping[str, Tensor], projected: Tensor, residual: Tensor, layer: int
    ) -> MoeInput:
        """Everything behind the output projection `projected` [tokens, hidden] and before the experts; `residual`
        [tokens, hidden] is the layer's input. Where several GPUs share the layer, their `common` are summed."""
        ...

    def router_logits(self, spec: ModelSpec, w: Mapping[str, Tensor], normed: Tensor, layer: int) -> Tensor:
        """[tokens, hidden] -> [tokens, experts], also for predictors, which ask it of another layer's hidden states."""
        ...

    def route(self, spec: ModelSpec, w: Mapping[str, Tensor], logits: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Choose experts by `spec.router`: logits [tokens, experts] -> ids int64 [tokens, k], float32 weights
        [tokens, k]. `w` has what is added to the scores for the choice alone."""
        ...

    def expert(self, spec: ModelSpec, w: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """One expert on its tokens, unweighted: [m, hidden] -> [m, hidden]."""
        ...

    def expert_matrices(self, spec: ModelSpec, w: Mapping[str, Tensor]) -> ExpertMatrices:
        """What `expert` computes with, for kernels that do many experts at once: views of `w`, no copies."""
        ...

    def head(self, spec: ModelSpec, w: Mapping[str, Tensor], hidden: Tensor) -> Tensor:
        """[n, hidden] -> float32 logits [n, vocab]."""
        ...

    def reference_routers(self, spec: ModelSpec, model: nn.Module) -> list[nn.Module]:
        """The modules of the Hugging Face model that choose experts by `topk`, of the layers that have a router."""
        ...

    def reference_scores(self, spec: ModelSpec, router: nn.Module, choice: Tensor) -> tuple[Tensor, Tensor]:
        """Return, from what a reference router's `topk` saw (`choice`, float32 [tokens, experts]), the scores by which
        it chooses, and those by whose size rounding is judged: positive, without a bias. Both in that shape."""
        ...


def available() -> list[str]:
    names = (module.name for module in pkgutil.iter_modules(__path__))
    return sorted(name.removesuffix(LAYOUT_SUFFIX) for name in names if name.endswith(LAYOUT_SUFFIX))


def layout(name: str) -> FamilyLayout:
    """The torch-free half of a family."""
    return cast(FamilyLayout, _load(name, LAYOUT_SUFFIX).LAYOUT)


def family(name: str) -> Family:
    """Layout and math of the family whose Hugging Face `model_type` is `name`."""
    return cast(Family, _load(name, "").FAMILY)


def _load(name: str, suffix: str) -> ModuleType:
    if name not in available():
        raise ConfigError(
            "model.path", f"config.json: model_type: unknown family {name!r}; available: {', '.join(available())}"
        )
    return importlib.import_module(f"{__name__}.{name}{suffix}")
