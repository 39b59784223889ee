"""Turn router logits into experts and their weights, in one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton import arguments as check
from kernels.triton.device import cdiv, power_of_two

SCORINGS = ("softmax", "sigmoid")


@triton.jit
def scores(
    logits, bias, token, expert, is_token, is_expert,
    NUM_EXPERTS: tl.constexpr, SIGMOID: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Return the scores of experts, and those by which they are chosen: with the bias, and minus infinity in columns
    without an expert. Both are [tokens, columns] in float32."""
    mask = is_token[:, None] & is_expert[None, :]
    x = tl.load(logits + token.to(tl.int64)[:, None] * NUM_EXPERTS + expert[None, :], mask=mask, other=0.0)
    x = tl.where(is_expert[None, :], x.to(tl.float32), float("-inf"))
    if SIGMOID:
        probs = tl.sigmoid(x)
    else:
        probs = tl.exp(x - tl.max(x, axis=1)[:, None])
        probs = probs / tl.sum(probs, axis=1)[:, None]
    choice = probs
    if HAS_BIAS:
        choice += tl.load(bias + expert, mask=is_expert, other=0.0).to(tl.float32)[None, :]
    return probs, tl.where(is_expert[None, :], choice, float("-inf"))


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["ids", "weights"])
def _choose(
    logits, bias, ids, weights, num_tokens, scale,
    NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SIGMOID: tl.constexpr, RENORMALISE: tl.constexpr,
    HAS_BIAS: tl.constexpr, NUM_GROUPS: tl.constexpr, BEST_GROUPS: tl.constexpr, SCORE_EXPERTS: tl.constexpr,
    TOKENS: tl.constexpr, GROUPS: tl.constexpr, MEMBERS: tl.constexpr, CHOICES: tl.constexpr,
):  # fmt: skip
    """Choose experts for TOKENS tokens. The experts of a group are padded to MEMBERS columns, and the groups to
    GROUPS."""
    GROUP_SIZE: tl.constexpr = NUM_EXPERTS // NUM_GROUPS
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    column = tl.arange(0, GROUPS * MEMBERS)
    expert = column // MEMBERS * GROUP_SIZE + column % MEMBERS
    is_token, is_expert = token < num_tokens, (column % MEMBERS < GROUP_SIZE) & (expert < NUM_EXPERTS)
    probs, left = scores(logits, bias, token, expert, is_token, is_expert, NUM_EXPERTS, SIGMOID, HAS_BIAS)
    if BEST_GROUPS < NUM_GROUPS:
        grouped = tl.reshape(left, (TOKENS, GROUPS, MEMBERS))
        is_best = _best_groups(grouped, BEST_GROUPS, SCORE_EXPERTS, TOKENS, GROUPS, MEMBERS)
        grouped = tl.where(is_best[:, :, None], grouped, float("-inf"))
        left = tl.reshape(grouped, (TOKENS, GROUPS * MEMBERS))

    choice = tl.arange(0, CHOICES)
    chosen_ids = tl.zeros((TOKENS, CHOICES), tl.int32)
    chosen = tl.zeros((TOKENS, CHOICES), tl.float32)
    for k in tl.static_range(TOP_K):
        best = tl.argmax(left, axis=1)
        hit = column[None, :] == best[:, None]
        best = best // MEMBERS * GROUP_SIZE + tl.minimum(best % MEMBERS, GROUP_SIZE - 1)
        best = tl.minimum(best, NUM_EXPERTS - 1)  # whatever NaN compares to: a valid id
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


@triton.jit
def _best_groups(
    grouped, BEST_GROUPS: tl.constexpr, SCORE_EXPERTS: tl.constexpr, TOKENS: tl.constexpr, GROUPS: tl.constexpr,
    MEMBERS: tl.constexpr,
):  # fmt: skip
    """Tell which groups are the best by the sum of the scores of their best experts: [TOKENS, GROUPS] of `grouped`
    [TOKENS, GROUPS, MEMBERS]."""
    group, member = tl.arange(0, GROUPS), tl.arange(0, MEMBERS)
    of_groups = tl.zeros((TOKENS, GROUPS), tl.float32)
    for _ in tl.static_range(SCORE_EXPERTS):
        of_groups += tl.max(grouped, axis=2)
        hit = member[None, None, :] == tl.argmax(grouped, axis=2)[:, :, None]
        grouped = tl.where(hit, float("-inf"), grouped)
    is_best = tl.zeros((TOKENS, GROUPS), tl.int1)
    for _ in tl.static_range(BEST_GROUPS):
        hit = group[None, :] == tl.argmax(of_groups, axis=1)[:, None]
        is_best = is_best | hit
        of_groups = tl.where(hit, float("-inf"), of_groups)
    return is_best


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
    num_groups: int = 1,
    groups_per_token: int = 1,
    group_score_experts: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose each token's `top_k` experts by score, best first, the lower id among equals, with their weights.

    logits:      [tokens, experts], any float type, contiguous
    ids:         int64 [tokens, top_k]; weights: float32 [tokens, top_k]; made where not given
    scoring:     softmax over all experts, or sigmoid of each
    choice_bias: [experts], added to the scores for the choice only (DeepSeek-V3's correction bias)
    renormalise: weights sum to 1 before they are multiplied by `scale`

    Experts outside a token's best `groups_per_token` of `num_groups` equal groups are not chosen (DeepSeek-V2 and V3).
    A group's score is the sum of the scores, bias included, of its best `group_score_experts` experts.

    Returns (ids, weights). Raises ValueError naming the argument.
    """
    check.floats("logits", logits, 2)
    num_tokens, num_experts = logits.shape
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k: expected 1 to {num_experts} (the experts of logits), got {top_k}")
    if scoring not in SCORINGS:
        raise ValueError(f"scoring: expected one of {', '.join(SCORINGS)}, got {scoring!r}")
    _check_groups(num_experts, top_k, num_groups, groups_per_token, group_score_experts)
    shape, like = (num_tokens, top_k), logits
    ids = torch.empty(shape, dtype=torch.int64, device=logits.device) if ids is None else ids
    weights = torch.empty(shape, dtype=torch.float32, device=logits.device) if weights is None else weights
    check.tensor("ids", ids, shape, torch.int64, like)
    check.tensor("weights", weights, shape, torch.float32, like)
    if choice_bias is not None:
        check.tensor("choice_bias", choice_bias, (num_experts,), choice_bias.dtype, like)
    if num_tokens == 0:
        return ids, weights
    groups, members = power_of_two(num_groups), power_of_two(num_experts // num_groups)
    tokens = max(1, min(16, 1024 // (groups * members)))
    _choose[(cdiv(num_tokens, tokens),)](
        logits, logits if choice_bias is None else choice_bias, ids, weights, num_tokens, float(scale),
        NUM_EXPERTS=num_experts, TOP_K=top_k, SIGMOID=scoring == "sigmoid", RENORMALISE=renormalise,
        HAS_BIAS=choice_bias is not None, NUM_GROUPS=num_groups, BEST_GROUPS=groups_per_token,
        SCORE_EXPERTS=group_score_experts, TOKENS=tokens, GROUPS=groups, MEMBERS=members,
        CHOICES=power_of_two(top_k), num_warps=4,
    )  # fmt: skip
    return ids, weights


def _check_groups(num_experts: int, top_k: int, num_groups: int, groups_per_token: int, score_experts: int) -> None:
    if num_groups < 1 or num_experts % num_groups:
        raise ValueError(f"num_groups: expected a divisor of {num_experts} (the experts of logits), got {num_groups}")
    if not 1 <= groups_per_token <= num_groups:
        raise ValueError(f"groups_per_token: expected 1 to {num_groups} (num_groups), got {groups_per_token}")
    size = num_experts // num_groups
    if not 1 <= score_experts <= size:
        raise ValueError(f"group_score_experts: expected 1 to {size} (the experts of a group), got {score_experts}")
    if top_k > groups_per_token * size:
        raise ValueError(f"top_k: expected at most {groups_per_token * size} (experts of the best groups), got {top_k}")
