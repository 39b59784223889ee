"""Model families: one pair of modules per Hugging Face `model_type`, found by name.

`<model_type>_layout.py` says which dimensions a config.json has and where every tensor lies (torch-free);
`<model_type>.py` is the math on weight views, and re-exports the layout functions. Adding the pair adds the family.

Shapes below: tokens are flat over all sequences of a batch; `w` maps a part's local tensor names to its views. All
tensors are in `spec.dtype` on any one device unless a line says otherwise.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, cast

from harness.config import ConfigError
from harness.model.layout import PartLayout
from harness.model.spec import ModelSpec

if TYPE_CHECKING:
    from torch import Tensor, nn

    from harness.model.config import RandomRecipe
    from kernels.triton import ExpertMatrices

LAYOUT_SUFFIX = "_layout"


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

    def embedding_part(self, spec: ModelSpec) -> PartLayout: ...

    def head_part(self, spec: ModelSpec) -> PartLayout: ...


class Family(FamilyLayout, Protocol):
    """Layout and math. The layer is cut where strategies cut it: around attention, and around each expert."""

    def embed(self, spec: ModelSpec, w: Mapping[str, Tensor], token_ids: Tensor) -> Tensor:
        """int64 [tokens] -> hidden [tokens, hidden]."""
        ...

    def attention_in(
        self, spec: ModelSpec, w: Mapping[str, Tensor], hidden: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q [tokens, heads, head_dim], k and v [tokens, kv_heads, head_dim], contiguous, RoPE applied to q and k."""
        ...

    def prefill_attention(self, spec: ModelSpec, q: Tensor, k: Tensor, v: Tensor, seq_lens: Sequence[int]) -> Tensor:
        """Causal attention inside each sequence; sequences lie one after another. [tokens, heads * head_dim]."""
        ...

    def decode_attention(self, spec: ModelSpec, q: Tensor, k: Tensor, v: Tensor, context_len: int) -> Tensor:
        """One token of one sequence: q [heads, head_dim] at position context_len - 1, k and v
        [kv_heads, >= context_len, head_dim] with that token's own entry included. [heads * head_dim]."""
        ...

    def attention_out(
        self, spec: ModelSpec, w: Mapping[str, Tensor], attn: Tensor, residual: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """attn [tokens, heads * head_dim], residual = the layer's input [tokens, hidden] -> the new residual, its
        normed copy (the experts' input), expert ids int64 [tokens, k] and float32 weights [tokens, k]. The layer's
        output is residual_new + sum over k of weight * expert(normed)."""
        ...

    def output_projection(self, spec: ModelSpec, w: Mapping[str, Tensor], attn: Tensor) -> Tensor:
        """The first half of `attention_out`, linear in attn: [tokens, heads * head_dim] -> [tokens, hidden]. Where
        several GPUs share the heads, their results are summed in between."""
        ...

    def after_attention(
        self, spec: ModelSpec, w: Mapping[str, Tensor], projected: Tensor, residual: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The second half: everything behind the output projection, to the same results as `attention_out`."""
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

    def reference_routers(self, model: nn.Module) -> list[nn.Module]:
        """The modules of the Hugging Face model that choose experts, with one `topk` each, by layer."""
        ...


def available() -> list[str]:
    names = (module.name for module in pkgutil.iter_modules(__path__))
    return sorted(name.removesuffix(LAYOUT_SUFFIX) for name in names if name.endswith(LAYOUT_SUFFIX))


def layout(name: str) -> FamilyLayout:
    """The torch-free half of a family."""
    return cast(FamilyLayout, _load(name, LAYOUT_SUFFIX))


def family(name: str) -> Family:
    """Layout and math of the family whose Hugging Face `model_type` is `name`."""
    return cast(Family, _load(name, ""))


def _load(name: str, suffix: str) -> ModuleType:
    if name not in available():
        raise ConfigError(
            "model.path", f"config.json: model_type: unknown family {name!r}; available: {', '.join(available())}"
        )
    return importlib.import_module(f"{__name__}.{name}{suffix}")
