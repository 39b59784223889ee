"""Compiles what a model needs before its first pass."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch

from kernels.triton.copies import bring, gather_kv, gather_numbers
from kernels.triton.decode import paged_decode_attention, staged_decode_attention
from kernels.triton.experts import expert_scratch_bytes, launch
from kernels.triton.foresee import foresee_experts
from kernels.triton.latent import paged_latent_attention, staged_latent_attention
from kernels.triton.matrices import ADDRESSES, ExpertShape
from kernels.triton.prefill import causal_attention
from kernels.triton.routing import choose_experts
from kernels.triton.rows import append_rows, rms_norm, rotate
from kernels.triton.sizes import PAIRS_OF_A_CHUNK
from kernels.triton.tiling import mean_choices


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """The dimensions of latent attention beside `Shapes.head_dim`, which is that of a query or key in prefill."""

    kv_rank: int
    rope_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """The shapes that the kernels of one model are compiled for."""

    experts: ExpertShape
    num_experts: int
    top_k: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    latent: Latent | None = None
    windows: tuple[int | None, ...] = (None,)  # of its layers
    has_sinks: bool = False
    scoring: str = "softmax"
    renormalise: bool = True
    has_choice_bias: bool = False
    num_groups: int = 1
    groups_per_token: int = 1
    group_score_experts: int = 1
    kv_block_size: int | None = None  # of a paged cache on the device, where there is one


def warm_up(shapes: Shapes, device: torch.device, kernels: Collection[str] | None = None) -> None:
    """Launch these kernels, or all, in every tile size that a pass may choose, so that each is compiled and loaded.

    Each runs on few tokens and no expert's weights. This takes seconds, the first time on a machine a minute; Triton
    keeps the results on disk.
    """

    def zeros(*shape: int, of: torch.dtype = shapes.experts.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=of, device=device)

    if kernels is None or "routing" in kernels:
        _route_once(shapes, zeros)
    if kernels is None or "experts" in kernels:
        _run_experts_once(shapes, zeros)
    if kernels is None or "copies" in kernels:
        _copy_once(shapes, zeros)
    if kernels is None or "rows" in kernels:
        _keep_rows_once(shapes, zeros)
    attends = {"prefill", "decode"} if kernels is None else kernels
    if shapes.latent is not None:
        return _attend_latents_once(shapes, shapes.latent, zeros, attends)
    for window in shapes.windows:
        _attend_once(shapes, window, zeros, attends)


def _route_once(shapes: Shapes, zeros: Callable[..., torch.Tensor]) -> None:
    logits = zeros(1, shapes.num_experts)
    scores: dict[str, Any] = {
        "scoring": shapes.scoring,
        "choice_bias": zeros(shapes.num_experts, of=torch.float32) if shapes.has_choice_bias else None,
    }
    choose_experts(
        logits,
        shapes.top_k,
        renormalise=shapes.renormalise,
        num_groups=shapes.num_groups,
        groups_per_token=shapes.groups_per_token,
        group_score_experts=shapes.group_score_experts,
        **scores,
    )
    if shapes.num_groups == 1:
        foresee_experts(logits, 1, shapes.top_k, steepness=1.0, least=1e-30, **scores)


def _keep_rows_once(shapes: Shapes, zeros: Callable[..., torch.Tensor]) -> None:
    rms_norm(zeros(1, shapes.experts.hidden), zeros(shapes.experts.hidden), 1.0)
    if shapes.latent is None:
        heads, table = (shapes.num_heads, shapes.num_kv_heads), zeros(1, 1, shapes.head_dim // 2)
        q, k = (zeros(1, count, shapes.head_dim) for count in heads)
        rotate(q, k, zeros(1, of=torch.int64), table, table)
    for cache in _caches(shapes, zeros):
        append_rows(zeros(1, cache.shape[1], cache.shape[3]), zeros(1, of=torch.int64), cache)


def _caches(shapes: Shapes, zeros: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
    """Return keys and values, or latents, of one block of a paged cache; nothing where there is none on the device."""
    if shapes.kv_block_size is None:
        return []
    latent = shapes.latent
    sizes = [(shapes.num_kv_heads, shapes.head_dim)] * 2 if latent is None else [(1, latent.kv_rank + latent.rope_dim)]
    return [zeros(1, heads, shapes.kv_block_size, width) for heads, width in sizes]


def _run_experts_once(shapes: Shapes, zeros: Callable[..., torch.Tensor]) -> None:
    experts, table = shapes.experts, zeros(shapes.num_experts, ADDRESSES, of=torch.int64)
    for num_tokens in (1, PAIRS_OF_A_CHUNK + 1):  # few pairs are sorted in another way
        ids, weights = (zeros(num_tokens, shapes.top_k, of=kind) for kind in (torch.int64, torch.float32))
        scratch_bytes = expert_scratch_bytes(num_tokens, shapes.top_k, shapes.num_experts, shapes.num_experts, experts)
        scratch = zeros(scratch_bytes, of=torch.uint8)
        tokens = (zeros(num_tokens, experts.hidden), ids, weights, zeros(num_tokens, experts.hidden, of=torch.float32))
        for mean_rows in mean_choices(experts.dtype.itemsize):
            launch(*tokens, table, experts, shapes.num_experts, scratch, mean_rows)


def _copy_once(shapes: Shapes, zeros: Callable[..., torch.Tensor]) -> None:
    for count in (1, 8):  # bytes, and words of eight
        bring(zeros(count, of=torch.uint8), zeros(count, of=torch.uint8))
    caches = _caches(shapes, zeros)
    token_dim = sum(cache.shape[1] * cache.shape[3] for cache in caches)
    numbers = gather_numbers(torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32), token_dim)
    if caches:
        gather_kv(caches, numbers.to(caches[0].device), 1, 1, zeros(token_dim))


def _attend_once(
    shapes: Shapes, window: int | None, zeros: Callable[..., torch.Tensor], attends: Collection[str]
) -> None:
    heads, kv_heads, head_dim = shapes.num_heads, shapes.num_kv_heads, shapes.head_dim
    q, kv, positions = zeros(1, heads, head_dim), zeros(1, kv_heads, head_dim), zeros(1, of=torch.int64)
    options: dict[str, Any] = {
        "scale": 1.0,
        "window": window,
        "sinks": zeros(heads, of=torch.float32) if shapes.has_sinks else None,
    }
    if "prefill" in attends:
        causal_attention(q, kv, kv, positions, torch.empty_like(q), **options)
    if "decode" not in attends:
        return
    staging = zeros(2 * kv_heads * head_dim)
    for splits in (1, 2):  # whole contexts, and shared ones
        options["splits"] = splits
        staged_decode_attention(q, staging, positions, torch.empty_like(q), num_kv_heads=kv_heads, **options)
        if shapes.kv_block_size is not None:
            cache = zeros(1, kv_heads, shapes.kv_block_size, head_dim)
            blocks = zeros(1, of=torch.int32)
            paged_decode_attention(q, cache, cache, blocks, positions, torch.empty_like(q), **options)


def _attend_latents_once(
    shapes: Shapes, latent: Latent, zeros: Callable[..., torch.Tensor], attends: Collection[str]
) -> None:
    """Attend in prefill, if explicit, to keys and values of every head, and in decode to latents."""
    heads, width, positions = shapes.num_heads, latent.kv_rank + latent.rope_dim, zeros(1, of=torch.int64)
    q, v = zeros(1, heads, shapes.head_dim), zeros(1, heads, latent.value_dim)
    if "prefill" in attends:
        causal_attention(q, q, v, positions, torch.empty_like(v), scale=1.0)
    if "decode" not in attends:
        return
    q, out = zeros(1, heads, width), zeros(1, heads, latent.kv_rank)
    staged_latent_attention(q, zeros(width), positions, out, scale=1.0)
    if shapes.kv_block_size is not None:
        cache = zeros(1, 1, shapes.kv_block_size, width)
        paged_latent_attention(q, cache, zeros(1, of=torch.int32), positions, out, scale=1.0)
