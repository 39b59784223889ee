"""Router logits to experts on the device against float64."""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kernels import triton as gpu

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
quick = settings(max_examples=15)


def scores(logits, scoring):
    wide = logits.double().cpu()
    return wide.softmax(-1) if scoring == "softmax" else wide.sigmoid()


@quick
@given(
    num_tokens=st.integers(0, 40),
    num_experts=st.integers(1, 70),
    share=st.floats(0, 1),
    dtype=st.sampled_from(DTYPES),
    scoring=st.sampled_from(("softmax", "sigmoid")),
    renormalise=st.booleans(),
    has_bias=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_matches_float64(device, num_tokens, num_experts, share, dtype, scoring, renormalise, has_bias, seed):
    top_k = max(1, min(8, round(share * num_experts)))
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_tokens, num_experts, generator=generator).to(device, dtype)
    bias = torch.randn(num_experts, generator=generator).to(device) if has_bias else None
    ids, weights = gpu.choose_experts(
        logits, top_k, scoring=scoring, renormalise=renormalise, scale=2.5, choice_bias=bias
    )
    probs = scores(logits, scoring)
    check_choice(ids.cpu(), weights.cpu(), top_k, probs if bias is None else probs + bias.double().cpu())
    expected = probs.gather(1, ids.cpu())
    expected = 2.5 * (expected / expected.sum(-1, keepdim=True) if renormalise else expected)
    torch.testing.assert_close(weights.double().cpu(), expected, rtol=2e-6, atol=1e-7)


def check_choice(ids, weights, top_k, ranked):
    """Each token has `top_k` experts whose scores in `ranked` are the best."""
    num_tokens, num_experts = ranked.shape
    assert ids.dtype == torch.int64 and ids.shape == weights.shape == (num_tokens, top_k)
    assert all(len(set(row)) == top_k and set(row) <= set(range(num_experts)) for row in ids.tolist())
    best = ranked.sort(dim=-1, descending=True).values[:, :top_k]
    torch.testing.assert_close(ranked.gather(1, ids), best, rtol=0, atol=1e-6)


@settings(max_examples=8)
@given(
    num_tokens=st.integers(1, 40),
    num_groups=st.integers(1, 9),
    size=st.integers(1, 21),
    share=st.floats(0, 1),
    score_experts=st.integers(1, 2),
    dtype=st.sampled_from(DTYPES),
    scoring=st.sampled_from(("softmax", "sigmoid")),
    has_bias=st.booleans(),
    seed=st.integers(0, 10**6),
)
@example(20, 8, 20, 0.4, 1, torch.bfloat16, "softmax", False, 0)  # DeepSeek-V2
@example(20, 8, 32, 0.5, 2, torch.float32, "sigmoid", True, 0)  # DeepSeek-V3
def test_only_experts_of_the_best_groups_are_chosen(
    device, num_tokens, num_groups, size, share, score_experts, dtype, scoring, has_bias, seed
):
    groups_per_token, score_experts = max(1, round(share * num_groups)), min(score_experts, size)
    top_k = min(6, groups_per_token * size)
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_tokens, num_groups * size, generator=generator).to(device, dtype)
    bias = torch.randn(num_groups * size, generator=generator).to(device) if has_bias else None
    groups = {"num_groups": num_groups, "groups_per_token": groups_per_token, "group_score_experts": score_experts}
    ids, weights = gpu.choose_experts(logits, top_k, scoring=scoring, renormalise=False, choice_bias=bias, **groups)
    probs = scores(logits, scoring)
    ranked = probs.clone() if bias is None else probs + bias.double().cpu()
    for row in ranked.unflatten(1, (num_groups, size)):
        of_groups = np.array([sum(sorted(group)[-score_experts:]) for group in row.tolist()])
        row[np.argsort(-of_groups, kind="stable")[groups_per_token:]] = float("-inf")
    check_choice(ids.cpu(), weights.cpu(), top_k, ranked)
    torch.testing.assert_close(weights.double().cpu(), probs.gather(1, ids.cpu()), rtol=2e-6, atol=1e-7)


def test_equal_scores_go_to_the_lower_id(device):
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0], [2.0, 2.0, 2.0, 2.0]], device=device)
    ids, weights = gpu.choose_experts(logits, 2)
    assert ids.tolist() == [[1, 2], [0, 1]]
    assert weights.tolist() == [[0.5, 0.5], [0.5, 0.5]]


def test_equal_groups_go_to_the_lower_one(device):
    logits = torch.tensor([[1.0, 2.0, 0.0, 3.0, 2.0, 1.0]], device=device)  # groups of two with 3 each
    options = {"renormalise": False, "scoring": "sigmoid", "num_groups": 3, "groups_per_token": 1}
    ids, _ = gpu.choose_experts(torch.zeros_like(logits), 2, group_score_experts=2, **options)
    assert ids.tolist() == [[0, 1]]
    ids, _ = gpu.choose_experts(logits, 2, group_score_experts=1, **options)
    assert ids.tolist() == [[3, 2]], "the best expert's group"
    ids, _ = gpu.choose_experts(logits, 2, group_score_experts=2, **options)
    assert ids.tolist() == [[1, 0]], "the best two experts' group"


def test_nan_logits_still_give_valid_ids(device):
    """Poisoned memory gives wrong tokens, never an address outside the weights."""
    logits = torch.full((3, 5), float("nan"), device=device)
    for groups in ({}, {"num_groups": 5, "groups_per_token": 3}):
        ids, _ = gpu.choose_experts(logits, 2, **groups)
        assert ((ids >= 0) & (ids < 5)).all()


def test_results_go_where_asked(device):
    logits = torch.randn(7, 6, device=device)
    ids, weights = torch.empty(7, 2, dtype=torch.int64, device=device), torch.empty(7, 2, device=device)
    found = gpu.choose_experts(logits, 2, ids=ids, weights=weights)
    assert found[0] is ids and found[1] is weights
    torch.testing.assert_close(weights.sum(-1), torch.ones(7, device=device))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": 7}, "top_k: expected 1 to 6"),
        ({"scoring": "relu"}, "scoring: expected one of softmax, sigmoid"),
        ({"logits": torch.zeros(3, 6, dtype=torch.int32)}, "logits: expected bfloat16, float16 or float32"),
        ({"ids": torch.zeros(3, 2, dtype=torch.int32)}, "ids: expected torch.int64"),
        ({"weights": torch.zeros(3, 3)}, "weights: expected shape \\(3, 2\\)"),
        ({"choice_bias": torch.zeros(5)}, "choice_bias: expected shape \\(6,\\)"),
        ({"num_groups": 4}, "num_groups: expected a divisor of 6"),
        ({"num_groups": 3, "groups_per_token": 4}, "groups_per_token: expected 1 to 3"),
        ({"num_groups": 3, "group_score_experts": 3}, "group_score_experts: expected 1 to 2"),
        ({"num_groups": 3, "top_k": 3}, "top_k: expected at most 2"),
    ],
)
def test_wrong_arguments_are_named(device, change, message):
    arguments = {"logits": torch.zeros(3, 6), "top_k": 2} | change
    arguments = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
    with pytest.raises(ValueError, match=message):
        gpu.choose_experts(**arguments)
