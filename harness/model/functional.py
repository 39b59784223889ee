"""Model families share this layer math. Numerics follow Hugging Face transformers 5: this module rounds what it
rounds."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F

from harness.model.dimensions import ClampedSwiglu, Router, Yarn
from harness.model.linear import linear
from kernels import triton as gpu

LEAST_SHARE = 1e-30  # where a softmax leaves nothing: its inverse is still a float32
STEEPNESS = 12.0  # fits what routers of a trained DeepSeek-V3 choose: likelihood, Brier score and hot experts


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise over the last dimension, in float32, rounded to x's dtype before the multiplication by the weight."""
    if gpu.serves(x, "rows"):
        return gpu.rms_norm(x, weight, eps)
    return weight * normalised(x, eps).to(x.dtype)


def normalised(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Divide x by the root of its mean square over the last dimension, in float32 and not rounded."""
    wide = x.float()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)  # at most two float32 copies at a time


@lru_cache(maxsize=8)
def rope_tables(
    theta: float,
    head_dim: int,
    num_positions: int,
    dtype: torch.dtype,
    device: torch.device,
    yarn: Yarn | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosine and sine, each [positions, 1, head_dim / 2], computed in float32 and rounded to `dtype`."""
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * inverse_frequencies(theta, head_dim, yarn)
    scale = yarn.table_scale if yarn else 1.0
    return tuple((table * scale).to(device, dtype)[:, None, :] for table in (angles.cos(), angles.sin()))  # type: ignore[return-value]


def inverse_frequencies(theta: float, dim: int, yarn: Yarn | None) -> torch.Tensor:
    """Return RoPE's angle for each position, of each pair: float32 [dim / 2]."""
    powers = theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if yarn is None:
        return 1.0 / powers
    first, last = yarn.ramp(theta, dim)
    width = last - first or 0.001
    kept = 1 - ((torch.arange(dim // 2, dtype=torch.float32) - first) / width).clamp(0, 1)
    return 1.0 / (yarn.factor * powers) * (1 - kept) + 1.0 / powers * kept


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool = False) -> torch.Tensor:
    """Rotate pairs of x [tokens, heads, head_dim]: (i, i + head_dim / 2), or (2i, 2i + 1) where they are `interleaved`.

    cos and sin [tokens, 1, head_dim / 2] may be wider than x; the result is rounded once to x's dtype. It has the first
    numbers of all pairs, then the second ones, in either case: scores do not depend on the order.
    """
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    rotated = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, cos.dtype))
    begin, end = rotated.chunk(2, dim=-1)  # in place: one half more than the result at a time
    torch.mul(first, cos, out=begin).sub_(second * sin)
    torch.mul(second, cos, out=end).add_(first * sin)
    return rotated.to(x.dtype)


class AttentionOptions(NamedTuple):
    """A layer attends with these options. `window`: a token sees itself and the window - 1 tokens before it; None: all
    before it. `sinks`: float32 [heads], one more logit for each head, which has no value (gpt-oss)."""

    scale: float
    window: int | None = None
    sinks: torch.Tensor | None = None


def causal_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seq_lens: Sequence[int], options: AttentionOptions
) -> torch.Tensor:
    """Compute grouped-query attention inside each sequence: q [tokens, heads, head_dim], k and v [tokens, kv_heads,
    head_dim].

    Returns [tokens, heads * head_dim].
    """
    assert sum(seq_lens) == q.shape[0], f"sequences hold {sum(seq_lens)} tokens, q has {q.shape[0]}"
    by_sequence = zip(*(x.split(list(seq_lens)) for x in (q, k, v)), strict=True)
    outs = [_causal_sequence(one_q, one_k, one_v, options) for one_q, one_k, one_v in by_sequence]
    return torch.cat(outs) if outs else q.new_empty(0, q.shape[1] * q.shape[2])


def _causal_sequence(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
    length, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    group = num_heads // num_kv_heads
    # KV heads take the batch dimension, and the heads of their group share them by a stride of zero: enable_gqa=True
    # leaves the fused kernel and is 35x slower in bfloat16 on CPUs.
    grouped_q = q.view(length, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)  # [kv_heads, group, length, head_dim]
    shared_k, shared_v = (x.permute(1, 0, 2)[:, None].expand(-1, group, -1, -1) for x in (k, v))
    mask = None
    if options.sinks is not None or (options.window is not None and length > options.window):
        mask = torch.ones(length, length, dtype=torch.bool, device=q.device).tril().triu(1 - (options.window or length))
    if options.sinks is not None:
        out = _with_sinks(
            grouped_q, shared_k, shared_v, mask, options.scale, options.sinks.view(num_kv_heads, group, 1)
        )
    else:
        out = F.scaled_dot_product_attention(
            grouped_q, shared_k, shared_v, attn_mask=mask, is_causal=mask is None, scale=options.scale
        )
    return out.permute(2, 0, 1, 3).reshape(length, num_heads * head_dim)


def decode_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context_len: int, options: AttentionOptions
) -> torch.Tensor:
    """Attend with one query, q [heads, head_dim], to k and v [kv_heads, >= context_len, head_dim]. Returns [heads *
    head_dim]."""
    num_kv_heads, _, head_dim = k.shape
    start = 0 if options.window is None else max(0, context_len - options.window)
    k, v = k[None, :, start:context_len], v[None, :, start:context_len]
    grouped_q = q.view(1, num_kv_heads, -1, head_dim)  # the heads of a group stand as query positions of one KV head
    if options.sinks is not None:
        return _with_sinks(grouped_q, k, v, None, options.scale, options.sinks.view(num_kv_heads, -1)).reshape(-1)
    return F.scaled_dot_product_attention(grouped_q, k, v, scale=options.scale).reshape(-1)


def _with_sinks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    sinks: torch.Tensor,
) -> torch.Tensor:
    """Attend in float32 with one logit more in each softmax. q is [..., queries, head_dim], k and v are [..., keys,
    head_dim]. mask [queries, keys] is true where a query sees a key; sinks is [..., queries or 1]."""
    scores = q.float() @ k.float().transpose(-1, -2) * scale  # [..., queries, keys]
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    sink = sinks[..., None].float().expand(*scores.shape[:-1], 1)
    weights = torch.cat((scores, sink), dim=-1).softmax(dim=-1)[..., :-1]
    return (weights @ v.float()).to(q.dtype)


def choose_experts(
    logits: torch.Tensor, top_k: int, router: Router, choice_bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the experts of each token by logits [tokens, experts]; return them and their weights: int64 and float32
    [tokens, top_k].

    Experts are chosen by score + `choice_bias` [experts], within the best groups where the router has groups (as
    DeepSeek-V2 and V3 limit devices), and weighed by score alone.
    """
    scores, choice = _scores(logits, router, choice_bias)
    ids = choice.topk(top_k, dim=-1).indices
    weights = scores.gather(-1, ids)
    if router.renormalise:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return ids, weights * router.scale


def foresee_experts(
    logits: torch.Tensor, count: int, top_k: int, router: Router, choice_bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `count` likeliest experts of each token and how likely each is among the `top_k` that are chosen:
    int64 and float32 [tokens, count].

    The logits [tokens, experts] are an estimate of the router's own. In the best groups the probabilities are
    proportional to a share of each expert, up to 1; all experts' sum to `top_k`. Outside they are 0. A share is the
    softmax score. Sigmoid scores and a `choice_bias` differ little between experts, so there a share grows by a factor
    of e with each 1/`STEEPNESS` of the standard deviation of score + bias.
    """
    scores, choice = _scores(logits, router, choice_bias)
    shares = scores
    if router.scoring != "softmax" or choice_bias is not None:
        every = scores if choice_bias is None else scores + choice_bias
        spread = every.std(dim=-1, correction=0, keepdim=True).clamp_min(LEAST_SHARE)
        shares = ((choice - choice.amax(dim=-1, keepdim=True)) * (STEEPNESS / spread)).exp()
    shares = shares.clamp_min(LEAST_SHARE).masked_fill_(choice.isneginf(), 0.0)
    largest, best = shares.topk(top_k, dim=-1)
    others = shares.scatter(-1, best, 0.0).sum(dim=-1, keepdim=True)
    from_here = largest.flip(-1).cumsum(dim=-1).flip(-1) + others  # of this expert and all with smaller shares
    # Where the first m experts reach 1, the others share top_k - m. More of them at 1 or fewer give a smaller factor.
    factor = (torch.arange(top_k, 0, -1, device=logits.device) / from_here).amax(dim=-1, keepdim=True)
    ids = choice.topk(count, dim=-1).indices
    return ids, (factor * shares.gather(-1, ids)).clamp_max_(1.0)


def _scores(
    logits: torch.Tensor, router: Router, choice_bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scores of all experts, and those by which they are chosen: float32 [tokens, experts]."""
    wide = logits.float()
    scores = wide.softmax(dim=-1) if router.scoring == "softmax" else wide.sigmoid()
    choice = scores if choice_bias is None else scores + choice_bias
    return scores, _in_best_groups(choice, router) if router.num_groups > 1 else choice


def _in_best_groups(choice: torch.Tensor, router: Router) -> torch.Tensor:
    """Return `choice` [tokens, experts] with minus infinity outside each token's best groups."""
    grouped = choice.unflatten(-1, (router.num_groups, -1))  # [tokens, groups, experts of one]
    of_groups = grouped.topk(router.group_score_experts, dim=-1).values.sum(dim=-1)
    best = of_groups.topk(router.groups_per_token, dim=-1).indices
    is_out = torch.ones_like(of_groups, dtype=torch.bool).scatter(-1, best, False)
    return grouped.masked_fill(is_out[..., None], float("-inf")).flatten(-2)


def clamped_swiglu(gate: torch.Tensor, up: torch.Tensor, by: ClampedSwiglu) -> torch.Tensor:
    """Compute (up + 1) * gate * sigmoid(alpha * gate), with the gate below the limit and |up| too (gpt-oss)."""
    gate, up = gate.clamp(max=by.limit), up.clamp(-by.limit, by.limit)
    return (up + 1) * (gate * torch.sigmoid(gate * by.alpha))


def swiglu(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """Compute down(silu(gate x) * up x) with gate stacked over up: [m, hidden] -> [m, hidden]."""
    gate, up = linear(x, gate_up).chunk(2, dim=-1)
    return linear(F.silu(gate) * up, down)
