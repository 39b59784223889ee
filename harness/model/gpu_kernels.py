"""Compile the GPU kernels of a model before its first pass."""

from __future__ import annotations

import torch

from harness.model import families
from harness.model.spec import ModelSpec
from kernels import triton as gpu


def warm_up(spec: ModelSpec, device: torch.device, kv_block_size: int | None = None) -> None:
    """Compile and load what `spec` needs on this device of the kernels that serve it, if any does.
    `kv_block_size` is that of a paged KV cache in device memory."""
    there = torch.empty(0, device=device)
    wanted = [kernel for kernel in gpu.KERNELS if gpu.serves(there, kernel)]
    if not wanted:
        return
    family = families.family(spec.family)
    router, latent = spec.router, None
    if spec.latent is not None:
        latent = gpu.Latent(kv_rank=spec.latent.kv_rank, rope_dim=spec.latent.rope_dim, value_dim=spec.latent.value_dim)
    part = next(part for part in family.layer_parts(spec, spec.moe_layers[-1]) if part.expert is not None)
    views = {t.name: torch.empty(t.shape, dtype=getattr(torch, t.dtype), device="meta") for t in part.tensors}
    gpu.warm_up(
        gpu.Shapes(
            experts=family.expert_matrices(spec, views).shape,
            num_experts=spec.num_experts,
            top_k=spec.experts_per_token,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            latent=latent,
            windows=tuple({spec.window(layer) for layer in range(spec.num_layers)}),
            has_sinks=spec.attention_sinks,
            has_choice_bias=spec.correction_bias,
            scoring=router.scoring,
            renormalise=router.renormalise,
            num_groups=router.num_groups,
            groups_per_token=router.groups_per_token,
            group_score_experts=router.group_score_experts,
            kv_block_size=kv_block_size,
        ),
        device,
        wanted,
    )
