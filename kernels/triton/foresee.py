"""Tell the likeliest experts of a router's estimated logits, and how likely each is, in one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton import arguments as check
from kernels.triton.device import cdiv, power_of_two
from kernels.triton.routing import SCORINGS, scores


@triton.jit(do_not_specialize=["num_tokens", "count"], do_not_specialize_on_alignment=["ids", "chances"])
def _foresee(
    logits, bias, ids, chances, num_tokens, count, steepness, least,
    NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SIGMOID: tl.constexpr,
    HAS_BIAS: tl.constexpr, TOKENS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """Choose and weigh the likeliest experts of TOKENS tokens."""
    token, expert = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.arange(0, EXPERTS)
    is_token, is_expert = token < num_tokens, expert < NUM_EXPERTS
    shares, left = scores(logits, bias, token, expert, is_token, is_expert, NUM_EXPERTS, SIGMOID, HAS_BIAS)
    if SIGMOID or HAS_BIAS:  # these differ little between experts
        seen = tl.where(is_expert[None, :], left, 0.0)
        off = tl.where(is_expert[None, :], left - (tl.sum(seen, axis=1) / NUM_EXPERTS)[:, None], 0.0)
        spread = tl.maximum(tl.sqrt(tl.sum(off * off, axis=1) / NUM_EXPERTS), least)
        shares = tl.exp((left - tl.max(left, axis=1)[:, None]) * (steepness / spread)[:, None])
    shares = tl.where(is_expert[None, :], tl.maximum(shares, least), 0.0)
    found_ids, found = tl.zeros((TOKENS, EXPERTS), tl.int32), tl.zeros((TOKENS, EXPERTS), tl.float32)
    factor = tl.zeros((TOKENS,), tl.float32)
    for k in range(0, tl.maximum(TOP_K, count)):
        best = tl.argmax(left, axis=1)
        hit = expert[None, :] == best[:, None]
        # Where the first k reach a probability of 1, the others share what is left of TOP_K.
        rest = tl.sum(tl.where(left == float("-inf"), 0.0, shares), axis=1)
        factor = tl.where(k < TOP_K, tl.maximum(factor, (TOP_K - k) / rest), factor)
        share = tl.sum(tl.where(hit, shares, 0.0), axis=1)
        best = tl.minimum(best, NUM_EXPERTS - 1)  # whatever NaN compares to: a valid id
        found_ids = tl.where(expert[None, :] == k, best[:, None], found_ids)
        found = tl.where(expert[None, :] == k, share[:, None], found)
        left = tl.where(hit, float("-inf"), left)
    place = token.to(tl.int64)[:, None] * count + expert[None, :]
    wanted = is_token[:, None] & (expert < count)[None, :]
    tl.store(ids + place, found_ids.to(ids.dtype.element_ty), mask=wanted)
    tl.store(chances + place, tl.minimum(factor[:, None] * found, 1.0), mask=wanted)


def foresee_experts(
    logits: torch.Tensor,
    count: int,
    top_k: int,
    *,
    steepness: float,
    least: float,
    scoring: str = "softmax",
    choice_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `count` likeliest experts of each token and how likely each is among the `top_k` that are chosen.

    logits:      [tokens, experts], any float type, contiguous
    scoring:     softmax over all experts, or sigmoid of each
    choice_bias: [experts], added to the scores for the choice
    steepness, least: what `harness.model.functional.foresee_experts` explains: shares of sigmoid or biased scores grow
                 by a factor of e with each 1/steepness of their standard deviation; no share is below `least`

    Returns ids, int64, and chances, float32, both [tokens, count]. Raises ValueError naming the argument.
    """
    check.floats("logits", logits, 2)
    num_tokens, num_experts = logits.shape
    for name, value in (("count", count), ("top_k", top_k)):
        if not 1 <= value <= num_experts:
            raise ValueError(f"{name}: expected 1 to {num_experts} (the experts of logits), got {value}")
    if scoring not in SCORINGS:
        raise ValueError(f"scoring: expected one of {', '.join(SCORINGS)}, got {scoring!r}")
    if choice_bias is not None:
        check.tensor("choice_bias", choice_bias, (num_experts,), choice_bias.dtype, logits)
    ids = torch.empty((num_tokens, count), dtype=torch.int64, device=logits.device)
    chances = torch.empty((num_tokens, count), dtype=torch.float32, device=logits.device)
    if num_tokens == 0:
        return ids, chances
    experts = power_of_two(num_experts)
    tokens = max(1, min(16, 1024 // experts))
    _foresee[(cdiv(num_tokens, tokens),)](
        logits, logits if choice_bias is None else choice_bias, ids, chances, num_tokens, count,
        float(steepness), float(least), NUM_EXPERTS=num_experts, TOP_K=top_k, SIGMOID=scoring == "sigmoid",
        HAS_BIAS=choice_bias is not None, TOKENS=tokens, EXPERTS=experts,
    )  # fmt: skip
    return ids, chances
