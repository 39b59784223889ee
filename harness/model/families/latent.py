"""Compute multi-head latent attention (arXiv 2405.04434 §2.1) over a cache of latents. Numerics follow transformers.

Both projections up from the latents are linear. So they can be applied to the latents of the tokens, which become keys
and values of heads (for prompts), or be absorbed: the keys' one into the queries, and the values' one into the results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.model import functional
from harness.model.families import LatentRows
from harness.model.families.decoder import Decoder
from harness.model.linear import linear
from harness.model.spec import ModelSpec

Weights = Mapping[str, Tensor]
NORM_EPS = 1e-6  # of the latents' norms, whatever config.json says of the others


class LatentDecoder(Decoder):
    rotates_in_float32: ClassVar[bool] = False  # rotary embedding, whatever the model's dtype

    def latents_in(
        self, spec: ModelSpec, w: Weights, hidden: Tensor, positions: Tensor, num_expanded: int, layer: int
    ) -> LatentRows:
        assert spec.latent is not None
        kv_rank, nope_dim, first = spec.latent.kv_rank, spec.latent.nope_dim, num_expanded
        x = functional.rms_norm(hidden, w["input_norm"], spec.norm_eps)
        q, down = self._queries(spec, w, x), linear(x, w["kv_a"])
        latent = functional.rms_norm(down[:, :kv_rank], w["kv_a_norm"], NORM_EPS)
        q_rope, k_rope = self._rotate(spec, positions, q[..., nope_dim:], down[:, None, kv_rank:])
        k, v = self._expand(spec, w, latent[:first], k_rope[:first])
        key_up = self._up(spec, w)[:, :nope_dim]  # [heads, nope_dim, kv_rank]
        absorbed = torch.bmm(q[first:, :, :nope_dim].transpose(0, 1), key_up).transpose(0, 1)
        return LatentRows(
            latent=torch.cat((latent, k_rope[:, 0]), dim=-1),
            absorbed=torch.cat((absorbed, q_rope[first:]), dim=-1),
            q=torch.cat((q[:first, :, :nope_dim], q_rope[:first]), dim=-1),
            k=k,
            v=v,
        )

    def _queries(self, spec: ModelSpec, w: Weights, x: Tensor) -> Tensor:
        """Return [tokens, heads, nope_dim + rope_dim], not yet rotated."""
        if "q" in w:
            q = linear(x, w["q"])
        else:
            q = linear(functional.rms_norm(linear(x, w["q_a"]), w["q_a_norm"], NORM_EPS), w["q_b"])
        return q.view(len(x), spec.num_heads, spec.head_dim)

    def _rotate(self, spec: ModelSpec, positions: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate [tokens, heads, rope_dim]."""
        assert spec.latent is not None
        dtype = torch.float32 if self.rotates_in_float32 else q.dtype
        tables = functional.rope_tables(
            spec.rope_theta, spec.latent.rope_dim, spec.max_positions, dtype, q.device, spec.yarn
        )
        cos, sin = (table[positions] for table in tables)
        q_rope, k_rope = (functional.apply_rope(x, cos, sin, interleaved=True) for x in (q, k))
        return q_rope, k_rope

    def _up(self, spec: ModelSpec, w: Weights) -> Tensor:
        """Return the projections of each head up from the latents, [heads, nope_dim + value_dim, kv_rank]."""
        return w["kv_b"].view(spec.num_heads, -1, w["kv_b"].shape[1])

    def _expand(self, spec: ModelSpec, w: Weights, latent: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys [tokens, heads, nope_dim + rope_dim] and values [tokens, heads, value_dim]."""
        assert spec.latent is not None
        dims = spec.latent.nope_dim, spec.latent.value_dim
        k_nope, v = linear(latent, w["kv_b"]).view(len(latent), spec.num_heads, sum(dims)).split(dims, dim=-1)
        return torch.cat((k_nope, k_rope.expand(-1, spec.num_heads, -1)), dim=-1), v

    def from_latents(self, spec: ModelSpec, w: Weights, attn: Tensor, layer: int) -> Tensor:
        up = w["v_up"].view(spec.num_heads, spec.value_dim, -1)
        values = torch.bmm(attn.unflatten(1, (spec.num_heads, -1)).transpose(0, 1), up.transpose(1, 2))
        return values.transpose(0, 1).reshape(len(attn), spec.o_dim)

    def prefill_attention(
        self, spec: ModelSpec, w: Weights, q: Tensor, k: Tensor, v: Tensor, seq_lens: Sequence[int], layer: int
    ) -> Tensor:
        """Attend with values filled up to the width of keys, or the other way round: torch's fused kernel asks for
        equal ones."""
        width, widest = v.shape[-1], max(k.shape[-1], v.shape[-1])
        q, k, v = (x if x.shape[-1] == widest else F.pad(x, (0, widest - x.shape[-1])) for x in (q, k, v))
        out = super().prefill_attention(spec, w, q, k, v, seq_lens, layer)
        return out.unflatten(1, (-1, widest))[..., :width].flatten(1)

    def decode_attention(
        self, spec: ModelSpec, w: Weights, q: Tensor, k: Tensor, v: Tensor, context_len: int, layer: int
    ) -> Tensor:
        """Attend with whole latents as values, of which v is the beginning: no copy, and widths that are equal."""
        out = super().decode_attention(spec, w, q, k, k, context_len, layer)
        return out.view(len(q), -1)[:, : v.shape[-1]].reshape(-1)

    def router_logits(self, spec: ModelSpec, w: Weights, normed: Tensor, layer: int) -> Tensor:
        """Compute the logits in float32, as these routers do."""
        return F.linear(normed.float(), w["router"])
