"""The experts' load is kept in balance as the papers say, and the packed experts are those of transformers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from harness.config import ConfigError
from harness.training.balancing import auxiliary_loss, load_figures, move_biases, router_shares
from harness.training.experts import packed_experts
from harness.training.schedule import Schedule


@pytest.mark.parametrize(("num_experts", "k"), [(8, 2), (64, 8)])
def test_the_auxiliary_loss_is_that_of_transformers_in_each_layer(num_experts, k):
    torch.manual_seed(0)
    layers = [torch.randn(50, num_experts) * 2 for _ in range(3)]
    ids = [logits.topk(k).indices for logits in layers]
    expected = [float(load_balancing_loss_func((logits,), num_experts, k)) for logits in layers]
    found = float(auxiliary_loss(layers, ids, "softmax"))
    assert found == pytest.approx(sum(expected) / 3, rel=1e-5)
    assert found > k * 1.05, "these loads are uneven"


def test_an_even_load_has_the_least_auxiliary_loss():
    logits = torch.eye(4).repeat(3, 1) * 0.01
    ids = logits.topk(1).indices
    assert float(auxiliary_loss([logits], [ids], "sigmoid")) == pytest.approx(1.0, abs=1e-3)
    uneven = torch.tensor([[1.0, 0.0, 0.0, 0.0]]).repeat(12, 1)
    assert float(auxiliary_loss([uneven], [uneven.topk(1).indices], "sigmoid")) > 1.2


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_a_routers_scores_are_shared_out_as_it_scores(scoring):
    """Logits 3, 0, 0, 0: by hand, exp(3) or 1 / (1 + exp(-3)) beside three of 1 or 1/2."""
    shares = router_shares(torch.tensor([[3.0, 0.0, 0.0, 0.0]]), scoring)
    first = math.exp(3) / (math.exp(3) + 3) if scoring == "softmax" else 1 / (1 + 1.5 * (1 + math.exp(-3)))
    assert shares[0].tolist() == pytest.approx([first, *[(1 - first) / 3] * 3], rel=1e-4)


def biased_router(num_experts: int) -> nn.Module:
    router = nn.Module()
    router.register_buffer("e_score_correction_bias", torch.zeros(num_experts))
    return router


def loads_by(router: nn.Module, scores: torch.Tensor) -> torch.Tensor:
    """Count the load where each token takes its two best experts."""
    chosen = (scores + router.e_score_correction_bias).topk(2).indices
    return torch.bincount(chosen.flatten(), minlength=scores.shape[1]).unsqueeze(0)


def test_moved_biases_balance_a_router_that_prefers_some_experts():
    torch.manual_seed(1)
    scores = (torch.randn(2000, 16) + torch.linspace(-1, 1, 16)).sigmoid()
    router = biased_router(16)
    before = load_figures(loads_by(router, scores))[0]
    for _ in range(200):
        move_biases([router], loads_by(router, scores), 0.005)
    after = load_figures(loads_by(router, scores))[0]
    assert before["max_over_mean"] > 2 and before["min_over_mean"] < 0.3
    assert after["max_over_mean"] < 1.1 and after["min_over_mean"] > 0.9


def test_a_bias_moves_by_the_rate_against_its_experts_load():
    router = biased_router(4)
    move_biases([router], torch.tensor([[10, 2, 4, 0]]), 0.5)  # the mean is 4
    assert router.e_score_correction_bias.tolist() == [-0.5, 0.5, 0.0, 0.5]


def test_figures_of_loads():
    even, one = load_figures(torch.tensor([[5, 5, 5, 5], [20, 0, 0, 0]]))
    assert even == {"max_over_mean": 1.0, "min_over_mean": 1.0, "load_entropy": 1.0}
    assert one == {"max_over_mean": 4.0, "min_over_mean": 0.0, "load_entropy": 0.0}


@given(seed=st.integers(0, 10**6), num_experts=st.sampled_from([1, 3, 8]), num_tokens=st.integers(1, 150))
@settings(deadline=None, max_examples=20)
def test_packed_experts_are_those_of_transformers(seed, num_experts, num_tokens):
    """Values and all gradients, with experts that no token chose."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        "mixtral", hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, num_local_experts=num_experts, vocab_size=8,
    )  # fmt: skip
    experts = AutoModelForCausalLM.from_config(config, dtype=torch.float32).model.layers[0].mlp.experts
    config._experts_implementation = "eager"
    k = min(2, num_experts)
    ids = torch.rand(num_tokens, num_experts).topk(k).indices
    gradients = []
    for forward in (experts, lambda *given: packed_experts(experts, *given)):
        torch.manual_seed(seed)
        x = torch.randn(num_tokens, 16, requires_grad=True)
        weights = torch.rand(num_tokens, k, requires_grad=True)
        out = forward(x, ids, weights)
        inputs = (x, weights, experts.gate_up_proj, experts.down_proj)
        gradients.append([out, *torch.autograd.grad((out * torch.randn_like(out)).sum(), inputs)])
    for expected, found in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_minutes_settle_the_steps_that_repeat_the_training():
    by_time = Schedule(peak=1.0, warmup_steps=3, decay_percent=30, minutes=1.0, num_steps=None)
    rates, step = [], 0
    while not by_time.is_over(step):
        by_time.settle(step, seconds=0.37 * step)
        rates.append(by_time.rate(step))
        step += 1
    by_steps = Schedule(peak=1.0, warmup_steps=3, decay_percent=30, minutes=None, num_steps=len(rates))
    assert rates == [by_steps.rate(each) for each in range(len(rates))]
    assert 0.37 * len(rates) == pytest.approx(60, rel=0.03)
    assert rates[:3] == [0.25, 0.5, 0.75] and max(rates) == 1.0 and 0 < rates[-1] < 0.05


def test_the_number_of_steps_may_change_until_the_fall_begins():
    """The fall to zero begins at step 70 of 100."""
    for asked, minutes in ((200, None), (None, 1.0)):
        schedule = Schedule(peak=1.0, warmup_steps=0, decay_percent=30, minutes=minutes, num_steps=asked)
        schedule.go_on(69, 100)
        assert schedule.num_steps == asked
    settled = Schedule(peak=1.0, warmup_steps=0, decay_percent=30, minutes=1.0, num_steps=None)
    settled.go_on(70, 100)
    assert settled.num_steps == 100
    with pytest.raises(ConfigError, match=r"^steps: must be 100 or null"):
        Schedule(peak=1.0, warmup_steps=0, decay_percent=30, minutes=None, num_steps=200).go_on(70, 100)


def test_steps_end_a_training_before_its_minutes():
    schedule = Schedule(peak=1.0, warmup_steps=0, decay_percent=30, minutes=1.0, num_steps=10)
    for step in range(10):
        assert not schedule.is_over(step)
        schedule.settle(step, seconds=0.1 * step)
    assert schedule.is_over(10)
