"""Turn router logits into experts and their weights, in one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton import arguments as check
from kernels.triton.device import cdiv, power_of_two

SCORINGS = ("softmax", "sigmoid")


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["ids", "weights"])
def _choose(
    logits, bias, ids, weights, num_tokens, scale,
    NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SIGMOID: tl.constexpr, RENORMALISE: tl.constexpr,
    HAS_BIAS: tl.constexpr, TOKENS: tl.constexpr, EXPERTS: tl.constexpr, CHOICES: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    expert = tl.arange(0, EXPERTS)
    is_token, is_expert = token < num_tokens, expert < NUM_EXPERTS
    mask = is_token[:, None] & is_expert[None, :]
    x = tl.load(logits + token.to(tl.int64)[:, None] * NUM_EXPERTS + expert[None, :], mask=mask, other=0.0)
    x = tl.where(is_expert[None, :], x.to(tl.float32), float("-inf"))  # [TOKENS, EXPERTS]
    if SIGMOID:
        probs = tl.sigmoid(x)
    else:
        probs = tl.exp(x - tl.max(x, axis=1)[:, None])
        probs = probs / tl.sum(probs, axis=1)[:, None]
    left = probs
    if HAS_BIAS:  # added for the choice, not for the weight
        left += tl.load(bias + expert, mask=is_expert, other=0.0).to(tl.float32)[None, :]
    left = tl.where(is_expert[None, :], left, float("-inf"))

    choice = tl.arange(0, CHOICES)
    chosen_ids = tl.zeros((TOKENS, CHOICES), tl.int32)
    chosen = tl.zeros((TOKENS, CHOICES), tl.float32)
    for k in tl.static_range(TOP_K):
        best = tl.minimum(tl.argmax(left, axis=1), NUM_EXPERTS - 1)  # whatever NaN compares to: a valid id
        hit = expert[None, :] == best[:, None]
        prob = tl.sum(tl.where(hit, probs, 0.0), axis=1)
        left = tl.where(hit, float("-inf"), left)
        chosen_ids = tl.where(choice[None, :] == k, best[:, None], chosen_ids)
        chosen = tl.where(choice[None, :] == k, prob[:, None], chosen)
    if RENORMALISE:
        chosen = chosen / tl.sum(chosen, axis=1)[:, None]
    at = token.to(tl.int64)[:, None] * TOP_K + choice[None, :]
    wanted = is_token[:, None] & (choice < TOP_K)[None, :]
    tl.store(ids + at, chosen_ids.to(ids.dtype.element_ty), mask=wanted)
    tl.store(weights + at, chosen * scale, mask=wanted)


def choose_experts(
    logits: torch.Tensor,
    top_k: int,
    *,
    ids: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
    scoring: str = "softmax",
    renormalise: bool = True,
    scale: float = 1.0,
    choice_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose each token's `top_k` experts by score, best first, the lower id among equals, with their weights.

    logits:      [tokens, experts], any float type, contiguous
    ids:         int64 [tokens, top_k]; weights: float32 [tokens, top_k]; made where not given
    scoring:     softmax over all experts, or sigmoid of each
    choice_bias: [experts], added to the scores for the choice only (DeepSeek-V3's correction bias)
    renormalise: weights sum to 1 before they are multiplied by `scale`

    Returns (ids, weights). Raises ValueError naming the argument.
    """
    check.floats("logits", logits, 2)
    num_tokens, num_experts = logits.shape
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k: expected 1 to {num_experts} (the experts of logits), got {top_k}")
    if scoring not in SCORINGS:
        raise ValueError(f"scoring: expected one of {', '.join(SCORINGS)}, got {scoring!r}")
    shape, like = (num_tokens, top_k), logits
    ids = torch.empty(shape, dtype=torch.int64, device=logits.device) if ids is None else ids
    weights = torch.empty(shape, dtype=torch.float32, device=logits.device) if weights is None else weights
    check.tensor("ids", ids, shape, torch.int64, like)
    check.tensor("weights", weights, shape, torch.float32, like)
    if choice_bias is not None:
        check.tensor("choice_bias", choice_bias, (num_experts,), choice_bias.dtype, like)
    if num_tokens == 0:
        return ids, weights
    width = power_of_two(num_experts)
    tokens = max(1, min(16, 1024 // width))
    _choose[(cdiv(num_tokens, tokens),)](
        logits, logits if choice_bias is None else choice_bias, ids, weights, num_tokens, float(scale),
        NUM_EXPERTS=num_experts, TOP_K=top_k, SIGMOID=scoring == "sigmoid", RENORMALISE=renormalise,
        HAS_BIAS=choice_bias is not None, TOKENS=tokens, EXPERTS=width, CHOICES=power_of_two(top_k), num_warps=4,
    )  # fmt: skip
    return ids, weights
