"""Routers of several kinds: the same choices and weights as transformers', and wrong choices told from rounding."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from harness.model import families
from harness.model.dimensions import Router
from harness.model.families.decoder import Decoder
from harness.model.functional import choose_experts
from harness.verify import oracle
from harness.verify.oracle import TOLERANCES
from harness.verify.reference import RouterScores, _RecordedChoice
from tests.unit.engine.fakes import SPEC

NUM_TOKENS, EXPERTS, TOP_K, HIDDEN = 900, 32, 4, 64
GROUPS = {"n_group": 8, "topk_group": 3}
GROUPED = {"num_groups": 8, "groups_per_token": 3}
V3 = {"routed_scaling_factor": 2.5, "norm_topk_prob": True, **GROUPS}
CASES = {
    "qwen3 as it is": (Qwen3MoeTopKRouter, "qwen3_moe", {"norm_topk_prob": False}, Router(renormalise=False)),
    "qwen3 normalised": (Qwen3MoeTopKRouter, "qwen3_moe", {"norm_topk_prob": True}, Router()),
    "deepseek v2": (
        DeepseekV2TopkRouter,
        "deepseek_v2",
        {"topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0, **GROUPS},
        Router(renormalise=False, scale=16.0, **GROUPED),
    ),
    "deepseek v3": (
        DeepseekV3TopkRouter,
        "deepseek_v3",
        V3,
        Router(scoring="sigmoid", scale=2.5, group_score_experts=2, **GROUPED),
    ),
}


def made(case, num_experts=EXPERTS):
    """The router of transformers with random weights, its hidden states, and the spec."""
    cls, model_type, entries, router = CASES[case]
    sizes = {"hidden_size": HIDDEN, "num_experts_per_tok": TOP_K, "num_local_experts": num_experts}
    config = AutoConfig.for_model(model_type, **sizes, n_routed_experts=num_experts, num_experts=num_experts, **entries)
    generator, gate = torch.Generator().manual_seed(5), cls(config)
    gate.weight.data = torch.randn(num_experts, HIDDEN, generator=generator) * HIDDEN**-0.5
    if hasattr(gate, "e_score_correction_bias"):
        gate.e_score_correction_bias = 8 + 0.2 * torch.randn(num_experts, generator=generator)
    hidden = torch.randn(NUM_TOKENS, HIDDEN, generator=generator)
    return gate, hidden, replace(SPEC, num_experts=num_experts, experts_per_token=TOP_K, router=router)


def choices(gate, hidden, spec, dtype=torch.float32):
    bias = getattr(gate, "e_score_correction_bias", None)
    return choose_experts(hidden.to(dtype) @ gate.weight.T.to(dtype), spec.experts_per_token, spec.router, bias)


@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_experts_and_weights_are_those_of_transformers(case):
    gate, hidden, spec = made(case)
    ids, weights = choices(gate, hidden, spec)
    _, their_weights, their_ids = gate(hidden[None] if "v2" in case else hidden)
    order, their_order = ids.argsort(-1), their_ids.argsort(-1)
    assert torch.equal(ids.gather(-1, order), their_ids.gather(-1, their_order))
    torch.testing.assert_close(weights.gather(-1, order), their_weights.gather(-1, their_order).float())


def family_of(gate):
    """The harness's family that has such routers; all but DeepSeek-V3's have what most families share."""
    return families.family("deepseek_v3") if isinstance(gate, DeepseekV3TopkRouter) else Decoder()


def verdict(gate, hidden, spec, ids):
    """What verification finds of recorded experts, and the weights that the replayed router gives them."""
    recorded = _RecordedChoice(spec, ids)
    with recorded:
        _, weights, replayed = gate(hidden[None] if hidden.dim() == 2 and "V2" in type(gate).__name__ else hidden)
    assert torch.equal(replayed, ids)
    scores = family_of(gate).reference_scores(spec, gate, recorded.choice)
    routers = RouterScores(scores[0][None], scores[1][None], recorded.group_shortfall[None])
    found = oracle._Findings()
    oracle._compare_routing(
        spec, type("Three", (), {"request_id": 0})(), ids[None], routers, TOLERANCES["bfloat16"], found
    )
    return found, weights


@pytest.mark.parametrize("num_experts", [EXPERTS, 64, 128, 256])
@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_a_right_choice_passes_and_a_wrong_one_does_not(case, num_experts):
    gate, hidden, spec = made(case, num_experts)
    ids, weights = choices(gate, hidden, spec)
    found, replayed = verdict(gate, hidden, spec, ids)
    assert not found.mismatches and found.worst_router_gap < 1e-5
    torch.testing.assert_close(replayed.float(), weights)
    rounded, _ = choices(gate, hidden, spec, torch.bfloat16)
    found, _ = verdict(gate, hidden, spec, rounded)
    assert not found.mismatches and found.rerouted and found.worst_router_gap < 0.05
    caught, outside = 0, range(40)
    for token in outside:
        wrong = ids[token : token + 1].clone()
        first = token * 7  # somewhere
        wrong[0, -1] = next(e % num_experts for e in range(first, first + TOP_K + 1) if e % num_experts not in wrong)
        caught += bool(verdict(gate, hidden[token : token + 1], spec, wrong)[0].mismatches)
    assert caught > 0.75 * len(outside)


@torch.inference_mode()
def test_experts_of_groups_that_are_not_open_are_told():
    """Their own scores are the best: only those of their groups tell, where these are not nearly equal."""
    gate, hidden, spec = made("deepseek v3")
    free = replace(spec, router=replace(spec.router, num_groups=1, groups_per_token=1))
    anywhere, limited = (choices(gate, hidden, each)[0].sort().values for each in (free, spec))
    fits = torch.tensor([len({e // 4 for e in row}) <= 3 for row in anywhere.tolist()])
    tokens = ((anywhere != limited).any(-1) & fits).nonzero()[:, 0].tolist()
    caught = sum(bool(verdict(gate, hidden[t : t + 1], spec, anywhere[t : t + 1])[0].mismatches) for t in tokens)
    assert 5 <= caught < len(tokens)
