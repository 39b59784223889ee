"""Compare a family's math with transformers' modules, part by part of each layer, and name the first that differs."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.model.checkpoint import Checkpoint, part_views
from harness.model.families import MoeInput

TOLERANCE = 2e-4  # in standard deviations of what transformers has; float32 stays below 1e-5
EMBEDDING, HEAD = "embedding", "head"
ATTENTION_IN, ATTENTION, DECODE = "attention in", "attention", "decode attention"
ATTENTION_OUT, ROUTER, COMMON, EXPERTS = "attention out", "router", "dense MLP or shared experts", "experts"

Place = tuple[int | None, str]  # layer and part
Weights = dict[tuple[int | None, str], dict[str, Tensor]]  # by layer and name of the part


def weights_of(checkpoint: Checkpoint) -> Weights:
    """Read all parts of a checkpoint; the views may be changed."""
    found = {}
    for layer, part in checkpoint.parts():
        region = torch.empty(part.nbytes, dtype=torch.uint8)
        checkpoint.read_part(layer, part, region)
        found[layer, part.name] = part_views(part, region)
    return found


def first_difference(checkpoint: Checkpoint, weights: Weights, expected: Mapping[Place, Tensor]) -> Place | None:
    """Return layer and part of the first result that is not transformers'; None where all are."""
    for place, got in _computed(checkpoint, weights, expected[None, "token ids"]):
        right = expected[place]
        assert got.shape == right.shape, f"{place}: {tuple(got.shape)}, not {tuple(right.shape)}"
        gap = (got.float() - right).abs().max() / right.std().clamp(min=1e-6)
        if not gap <= TOLERANCE:  # NaN, too
            return place
    return None


@torch.inference_mode()
def _computed(checkpoint: Checkpoint, weights: Weights, token_ids: Tensor) -> Iterator[tuple[Place, Tensor]]:
    """Yield what the family computes for a prompt, in the order in which it computes it."""
    spec, family = checkpoint.spec, checkpoint.family
    positions = torch.arange(len(token_ids))
    hidden = family.embed(spec, weights[None, "embedding"], token_ids)
    yield (None, EMBEDDING), hidden
    for layer in range(spec.num_layers):
        w = weights[layer, "attention_in"]
        if spec.latent:
            rows = family.latents_in(spec, w, hidden, positions, len(token_ids), layer)
            q, k, v = rows.q, rows.k, rows.v
        else:
            q, k, v = family.attention_in(spec, w, hidden, positions, layer)
        yield (layer, ATTENTION_IN), torch.cat([x.flatten(1) for x in (q, k, v)], dim=-1)
        w = weights.get((layer, "attention"), {})
        attention = family.prefill_attention(spec, w, q, k, v, [len(token_ids)], layer)
        yield (layer, ATTENTION), attention
        if spec.latent:
            yield (layer, DECODE), _over_latents(checkpoint, weights, hidden, layer)
        else:
            cached = (x.transpose(0, 1).contiguous() for x in (k, v))  # [kv_heads, tokens, head_dim]
            yield (layer, DECODE), family.decode_attention(spec, w, q[-1], *cached, len(token_ids), layer)
        w = weights[layer, "attention_out"]
        projected = family.output_projection(spec, w, attention, layer)
        found = family.after_attention(spec, w, projected, hidden, layer)
        yield (layer, ATTENTION_OUT), torch.cat((found.residual, found.normed), dim=-1)
        hidden = found.residual
        if found.expert_ids is not None:
            assert found.expert_weights is not None
            yield (layer, ROUTER), _by_expert(spec.num_experts, found.expert_ids, found.expert_weights)
        if found.common is not None:
            yield (layer, COMMON), found.common
            hidden = hidden + found.common
        if found.expert_ids is not None:
            experts = _experts(checkpoint, weights, layer, found)
            yield (layer, EXPERTS), experts
            hidden = hidden + experts
    yield (None, HEAD), family.head(spec, weights[None, "head"], hidden)


def _over_latents(checkpoint: Checkpoint, weights: Weights, hidden: Tensor, layer: int) -> Tensor:
    """Compute the last token's attention over the latents of all, as in decoding: [heads * value_dim]."""
    spec, family, length = checkpoint.spec, checkpoint.family, len(hidden)
    assert spec.latent is not None
    w = weights[layer, "attention_in"]
    rows = family.latents_in(spec, w, hidden, torch.arange(length), length - 1, layer)
    k = rows.latent[None]  # [1, tokens, kv_rank + rope_dim]
    attention_weights = weights.get((layer, "attention"), {})
    attention = family.decode_attention(
        spec, attention_weights, rows.absorbed[0], k, k[..., : spec.latent.kv_rank], length, layer
    )
    return family.from_latents(spec, weights[layer, "attention_out"], attention[None], layer)[0]


def _experts(checkpoint: Checkpoint, weights: Weights, layer: int, found: MoeInput) -> Tensor:
    assert found.expert_ids is not None and found.expert_weights is not None
    sums = torch.zeros_like(found.normed)
    for expert in found.expert_ids.unique().tolist():
        tokens, rank = (found.expert_ids == expert).nonzero(as_tuple=True)
        y = checkpoint.family.expert(checkpoint.spec, weights[layer, f"expert.{expert}"], found.normed[tokens])
        sums.index_add_(0, tokens, y * found.expert_weights[tokens, rank, None])
    return sums


def _by_expert(num_experts: int, ids: Tensor, weights: Tensor) -> Tensor:
    """Spread the weights of the chosen experts over all: [tokens, experts]. Their order does not matter then."""
    return torch.zeros(len(ids), num_experts).scatter(1, ids, weights.float())


@torch.inference_mode()
def of_transformers(checkpoint: Checkpoint, token_ids: list[int]) -> dict[Place, Tensor]:
    """Return what transformers' own model computes for a prompt, read from the checkpoint's folder in its own way."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        checkpoint.folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    seen: dict[Place, Tensor] = {(None, "token ids"): torch.tensor(token_ids)}
    base = model.get_decoder()
    for index, layer in enumerate(base.layers if hasattr(base, "layers") else base.blocks):
        _watch(seen, index, layer)
    base.get_input_embeddings().register_forward_hook(
        lambda module, args, out: seen.update({(None, EMBEDDING): out[0]})
    )
    with _watched_attention(seen, model):
        seen[None, HEAD] = model(torch.tensor([token_ids]), use_cache=False).logits[0]
    return {place: tensor.clone() for place, tensor in seen.items()}


def _watch(seen: dict[Place, Tensor], index: int, layer: nn.Module) -> None:
    """Note the results of one layer's modules."""
    attention = layer.self_attn if hasattr(layer, "self_attn") else layer.norm_attn_norm.attn
    mlp = layer.mlp if hasattr(layer, "mlp") else layer.ffn
    kept: dict[str, Tensor] = {}

    def before_layer(module: nn.Module, args: Any, kwargs: Any) -> None:
        kept["hidden"] = (args[0] if args else kwargs["hidden_states"])[0]

    def after_attention(module: nn.Module, args: Any, out: Any) -> None:
        kept["residual"] = kept["hidden"] + out[0][0]

    def before_mlp(module: nn.Module, args: Any) -> None:
        seen[index, ATTENTION_OUT] = torch.cat((kept["residual"], args[0][0]), dim=-1)

    def before_experts(module: nn.Module, args: Any) -> None:
        num_experts = module.num_experts
        seen[index, ROUTER] = _by_expert(num_experts, args[1], args[2])

    def after_experts(module: nn.Module, args: Any, out: Tensor) -> None:
        seen[index, EXPERTS] = out.flatten(0, -2)

    def after_mlp(module: nn.Module, args: Any, out: Any) -> None:
        of_all = (out[0] if isinstance(out, tuple) else out)[0]
        seen[index, COMMON] = of_all - seen.get((index, EXPERTS), torch.zeros(()))

    layer.register_forward_pre_hook(before_layer, with_kwargs=True)
    attention.register_forward_hook(after_attention)
    mlp.register_forward_pre_hook(before_mlp)
    mlp.register_forward_hook(after_mlp)
    if hasattr(mlp, "experts"):
        mlp.experts.register_forward_pre_hook(before_experts)
        mlp.experts.register_forward_hook(after_experts)


def _first_numbers_first(x: Tensor, rope_dim: int) -> Tensor:
    """Put all first numbers of the rotated pairs, at the end of each head, before the second ones."""
    rotated = x[..., -rope_dim:]
    return torch.cat((x[..., :-rope_dim], rotated[..., 0::2], rotated[..., 1::2]), dim=-1)


@contextmanager
def _watched_attention(seen: dict[Place, Tensor], model: nn.Module) -> Iterator[None]:
    """Note queries, keys and values, and what attention makes of them."""
    module = sys.modules[type(model).__module__]
    attend = module.eager_attention_forward

    def watched(attention: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        out, scores = attend(attention, query, key, value, *args, **kwargs)
        index = attention.layer_idx
        if hasattr(attention, "qk_rope_head_dim") and not hasattr(module, "apply_rotary_pos_emb_interleave"):
            query, key = (_first_numbers_first(x, attention.qk_rope_head_dim) for x in (query, key))
        by_token = [x[0].transpose(0, 1).flatten(1) for x in (query, key, value)]  # of [1, heads, tokens, head_dim]
        seen[index, ATTENTION_IN] = torch.cat(by_token, dim=-1)
        seen[index, ATTENTION] = out[0].flatten(1)
        seen[index, DECODE] = seen[index, ATTENTION][-1]
        return out, scores

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "eager_attention_forward", watched)
        yield
