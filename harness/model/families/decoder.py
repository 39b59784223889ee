"""Compute the math that most families share: RMS norms, grouped-query attention with RoPE, a linear router over SwiGLU
experts. `families/__init__.py` states each contract; a family says what differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from harness.model import functional
from harness.model.families import MoeInput
from harness.model.functional import AttentionOptions
from harness.model.linear import linear
from harness.model.spec import ModelSpec
from kernels import triton as gpu

Weights = Mapping[str, Tensor]


class Decoder:
    def embed(self, spec: ModelSpec, w: Weights, token_ids: Tensor) -> Tensor:
        return F.embedding(token_ids, w["embed"])

    def norm(self, spec: ModelSpec, x: Tensor, weight: Tensor) -> Tensor:
        """Normalise hidden states [tokens, hidden]: in front of attention, behind it, and before the head."""
        return functional.rms_norm(x, weight, spec.norm_eps)

    def attention_in(
        self, spec: ModelSpec, w: Weights, hidden: Tensor, positions: Tensor, layer: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        num_tokens = hidden.shape[0]
        projected = self._project(spec, w, hidden)
        q, k, v = (x.reshape(num_tokens, -1, spec.head_dim) for x in projected)
        del projected
        tables = functional.rope_tables(
            spec.rope_theta, spec.head_dim, spec.max_positions, hidden.dtype, hidden.device, spec.yarn
        )
        if gpu.serves(q, "rows"):
            return *gpu.rotate(q, k, positions, *tables), v
        cos, sin = (table[positions] for table in tables)
        return functional.apply_rope(q, cos, sin), functional.apply_rope(k, cos, sin), v

    def _project(self, spec: ModelSpec, w: Weights, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute queries, keys and values before RoPE, each [tokens, heads * head_dim]."""
        qkv = linear(self.norm(spec, hidden, w["input_norm"]), w["qkv"])
        if spec.qkv_bias:
            qkv = qkv + w["qkv_bias"]
        q, k, v = qkv.split((spec.q_dim, spec.kv_dim, spec.kv_dim), dim=-1)
        if spec.qk_norm:
            q, k = (self._norm_heads(spec, x, w[name]) for x, name in ((q, "q_norm"), (k, "k_norm")))
        if spec.clip_qkv is not None:
            q, k, v = (x.clamp(-spec.clip_qkv, spec.clip_qkv) for x in (q, k, v))
        return q, k, v

    def _norm_heads(self, spec: ModelSpec, x: Tensor, weight: Tensor) -> Tensor:
        """Normalise queries or keys [tokens, heads * head_dim] over as many entries as the weight has: those of each
        head, or all."""
        return functional.rms_norm(x.unflatten(-1, (-1, weight.numel())), weight, spec.norm_eps).flatten(1)

    def attention_options(self, spec: ModelSpec, w: Weights, layer: int) -> AttentionOptions:
        return AttentionOptions(spec.attention_scale, spec.window(layer), w.get("sinks"))

    def prefill_attention(
        self, spec: ModelSpec, w: Weights, q: Tensor, k: Tensor, v: Tensor, seq_lens: Sequence[int], layer: int
    ) -> Tensor:
        return functional.causal_attention(q, k, v, seq_lens, self.attention_options(spec, w, layer))

    def decode_attention(
        self, spec: ModelSpec, w: Weights, q: Tensor, k: Tensor, v: Tensor, context_len: int, layer: int
    ) -> Tensor:
        return functional.decode_attention(q, k, v, context_len, self.attention_options(spec, w, layer))

    def output_projection(self, spec: ModelSpec, w: Weights, attn: Tensor, layer: int) -> Tensor:
        return linear(attn, w["o"])

    def after_attention(self, spec: ModelSpec, w: Weights, projected: Tensor, residual: Tensor, layer: int) -> MoeInput:
        residual = residual + projected
        if spec.o_bias:
            residual = residual + w["o_bias"]  # here, since the GPUs' `projected` are summed
        normed = self.norm(spec, residual, w["post_norm"])
        if spec.is_dense(layer):
            return MoeInput(residual, normed, None, None, functional.swiglu(normed, w["gate_up"], w["down"]))
        ids, weights = self.route(spec, w, self.router_logits(spec, w, normed, layer), layer)
        return MoeInput(residual, normed, ids, weights, self.shared_experts(spec, w, normed))

    def shared_experts(self, spec: ModelSpec, w: Weights, normed: Tensor) -> Tensor | None:
        """Compute what the shared experts give, [tokens, hidden], scaled by their gate; None without any."""
        if not spec.shared_expert_dim:
            return None
        out = functional.swiglu(normed, w["shared_gate_up"], w["shared_down"])
        return linear(normed, w["shared_gate"]).sigmoid() * out if spec.shared_expert_gate else out

    def router_logits(self, spec: ModelSpec, w: Weights, normed: Tensor, layer: int) -> Tensor:
        return linear(normed, w["router"])

    def route(self, spec: ModelSpec, w: Weights, logits: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        router, bias = spec.router, w.get("correction_bias")
        if gpu.serves(logits, "routing"):
            return gpu.choose_experts(
                logits,
                spec.experts_per_token,
                scoring=router.scoring,
                renormalise=router.renormalise,
                scale=router.scale,
                choice_bias=bias,
                num_groups=router.num_groups,
                groups_per_token=router.groups_per_token,
                group_score_experts=router.group_score_experts,
            )
        return functional.choose_experts(logits, spec.experts_per_token, router, bias)

    def foresee(self, spec: ModelSpec, w: Weights, logits: Tensor, count: int, layer: int) -> tuple[Tensor, Tensor]:
        router, bias = spec.router, w.get("correction_bias")
        if router.num_groups == 1 and gpu.serves(logits, "routing"):
            return gpu.foresee_experts(
                logits, count, spec.experts_per_token, steepness=functional.STEEPNESS, least=functional.LEAST_SHARE,
                scoring=router.scoring, choice_bias=bias,
            )  # fmt: skip
        return functional.foresee_experts(logits, count, spec.experts_per_token, router, bias)

    def expert(self, spec: ModelSpec, w: Weights, x: Tensor) -> Tensor:
        return functional.swiglu(x, w["gate_up"], w["down"])

    def expert_matrices(self, spec: ModelSpec, w: Weights) -> gpu.ExpertMatrices:
        gate, up = w["gate_up"].chunk(2)
        return gpu.ExpertMatrices(gate=gate, up=up, down=w["down"])

    def head(self, spec: ModelSpec, w: Weights, hidden: Tensor) -> Tensor:
        return linear(self.norm(spec, hidden, w["final_norm"]), w["lm_head"]).float()

    def reference_routers(self, spec: ModelSpec, model: nn.Module) -> list[nn.Module]:
        return [model.model.layers[layer].mlp.gate for layer in spec.moe_layers]  # type: ignore[union-attr, index]

    def reference_scores(self, spec: ModelSpec, router: nn.Module, choice: Tensor) -> tuple[Tensor, Tensor]:
        return choice, choice
