"""Models of every family can be trained, each by the experts and routers of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from harness.config import parse
from harness.model import families
from harness.model.recipe import RandomRecipe
from harness.training.evaluation import next_token_loss
from harness.training.experts import PACKED
from harness.training.model import WatchedRouters, model_to_train

COMMON = {
    "num_layers": 2, "hidden_dim": 32, "num_heads": 2, "num_kv_heads": 2, "head_dim": 16, "num_experts": 8,
    "experts_per_token": 2, "expert_dim": 16, "vocab_size": 300, "max_positions": 64, "dtype": "float32",
    "init_std": 0.1,
}  # fmt: skip
ROUTER = {"num_groups": 1, "groups_per_token": 1, "group_score_experts": 1}
LATENT = {
    "latent": {"kv_rank": 16, "nope_dim": 8, "rope_dim": 8, "value_dim": 16, "q_rank": None},
    "shared_expert_dim": 16, "dense_layers": [0], "dense_dim": 32,
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {  # what a family's recipe needs beside that
    "dbrx": {"clip_qkv": 2.0},
    "deepseek_v2": LATENT | {"router": {"scoring": "softmax", "renormalise": False, "scale": 1.0, **ROUTER}},
    "deepseek_v3": LATENT
    | {"router": {"scoring": "sigmoid", "renormalise": True, "scale": 2.5, **ROUTER}, "correction_bias": True},
    "gpt_oss": {"sliding_window": 8},
    "qwen2_moe": {"shared_expert_dim": 16},
}


@pytest.mark.parametrize("family", families.available())
def test_a_family_is_trained_as_transformers_computes_it(family):
    """The loss and all gradients are those of transformers' own experts, and every choice of a router is seen."""
    recipe = parse(RandomRecipe, {**COMMON, **OWN.get(family, {}), "family": family})
    families.require_recipe(recipe)
    model, spec = model_to_train(recipe, 0)
    routers = WatchedRouters(model, spec)
    torch.manual_seed(1)
    windows = torch.randint(0, recipe.vocab_size, (2, 33))
    way: str = model.config._experts_implementation
    found = {}
    for experts in (way, "eager"):
        model.config._experts_implementation = experts
        model.zero_grad()
        loss = next_token_loss(model, windows)
        loss.backward()
        found[experts] = [loss.detach(), *(each.grad for each in model.parameters())]
        assert routers.loads().sum(1).tolist() == [64 * 2] * spec.num_moe_layers
    torch.testing.assert_close(found[way], found["eager"], rtol=1e-3, atol=1e-5)
    assert (way == PACKED) == (family != "gpt_oss"), "whose experts have biases, and take turns in one matrix"
    assert sorted(routers.logits[-1][0].topk(2).indices.tolist()) == sorted(routers.expert_ids[-1][0].tolist())
