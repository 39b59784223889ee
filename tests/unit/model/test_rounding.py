"""What bfloat16 rounds, and when: each step beside the module of transformers that it stands for."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig
from transformers.models.mixtral import modeling_mixtral as theirs

import kernels
from harness.engine.ops.compute import Combine
from harness.engine.ops.experts import Experts
from harness.engine.ops.views import expert_weights
from harness.memory.placed import PlacedPart
from harness.model import functional
from harness.model.checkpoint import part_views
from harness.model.families.mixtral import FAMILY
from tests.unit.engine.fakes import SPEC

SPEC = replace(SPEC, dtype="bfloat16")
NUM_TOKENS = 200


@pytest.fixture(autouse=True)
def torch_multiplies(monkeypatch):
    """As in transformers, so that products agree to the last bit."""
    monkeypatch.setattr("harness.model.linear.bf16_method", lambda: "native")


@pytest.fixture
def config():
    dimensions = {"hidden_size": SPEC.hidden_dim, "intermediate_size": SPEC.expert_dim}
    config = AutoConfig.for_model("mixtral", **dimensions, num_local_experts=SPEC.num_experts)
    config._experts_implementation = "eager"
    return config


def rand(*shape: int, seed: int, std: float = 1.0, mean: float = 0.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * std + mean).bfloat16()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.inference_mode()
def test_the_norm_rounds_before_its_weight(dtype):
    module = theirs.MixtralRMSNorm(SPEC.hidden_dim, eps=0.01).to(dtype)
    module.weight.copy_(rand(SPEC.hidden_dim, seed=1, std=0.2, mean=1.0))
    x = rand(NUM_TOKENS, SPEC.hidden_dim, seed=2).to(dtype)
    assert torch.equal(functional.rms_norm(x, module.weight, 0.01), module(x))


@torch.inference_mode()
def test_the_routers_softmax_is_in_float32(config):
    gate = theirs.MixtralTopKRouter(config).bfloat16()
    gate.weight.copy_(rand(SPEC.num_experts, SPEC.hidden_dim, seed=3, std=0.125))
    w = {"post_norm": rand(SPEC.hidden_dim, seed=4, std=0.2, mean=1.0), "router": gate.weight}
    projected, residual = (rand(NUM_TOKENS, SPEC.hidden_dim, seed=seed) for seed in (5, 6))
    summed, normed, ids, weights, _ = FAMILY.after_attention(SPEC, w, projected, residual, 0)
    _, expected, expected_ids = gate(normed)
    assert torch.equal(summed, projected + residual) and weights.dtype == torch.float32
    assert torch.equal(ids, expected_ids) and torch.equal(weights, expected)


class Memory:
    """A context of tensors by name."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        self.tensors = tensors

    def memo(self, buffer: str) -> dict:
        return {}

    def num_threads(self) -> int:
        return 1

    def tensor(self, buffer: str, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        raw = self.tensors[buffer].view(-1).view(torch.uint8)
        kind = getattr(torch, dtype)
        return raw[: torch.Size(shape).numel() * kind.itemsize].view(kind).view(shape)


@torch.inference_mode()
def test_experts_are_weighted_and_summed_in_float32(config):
    """transformers sums in bfloat16; the engine rounds once, when the sum joins the residual stream."""
    experts = theirs.MixtralExperts(config).bfloat16()
    experts.gate_up_proj.copy_(rand(*experts.gate_up_proj.shape, seed=7, std=0.125))
    experts.down_proj.copy_(rand(*experts.down_proj.shape, seed=8, std=0.1))
    layouts = FAMILY.layer_parts(SPEC, 0)[2:]
    memory = Memory(
        normed=rand(NUM_TOKENS, SPEC.hidden_dim, seed=9),
        hidden=rand(NUM_TOKENS, SPEC.hidden_dim, seed=10),
        ids=rand(NUM_TOKENS, SPEC.num_experts, seed=11).topk(2).indices,
        weights=rand(NUM_TOKENS, 2, seed=12).float().softmax(-1),
        out=torch.zeros(NUM_TOKENS, SPEC.hidden_dim),
        **{layout.name: torch.zeros(layout.nbytes, dtype=torch.uint8) for layout in layouts},
    )
    for expert, layout in enumerate(layouts):
        views = part_views(layout, memory.tensors[layout.name])
        views["gate_up"].copy_(experts.gate_up_proj[expert])
        views["down"].copy_(experts.down_proj[expert])
    normed, hidden, ids, weights = (memory.tensors[name] for name in ("normed", "hidden", "ids", "weights"))
    parts = tuple(PlacedPart(layout, layout.name, ()) for layout in layouts)
    exact = torch.zeros(NUM_TOKENS, SPEC.hidden_dim, dtype=torch.float64)
    for expert, part in enumerate(parts):
        tokens, slot = (ids == expert).nonzero(as_tuple=True)
        alone = torch.empty(len(tokens), SPEC.hidden_dim)
        kernels.expert_ffns(
            normed[tokens], [len(tokens)], [expert_weights(memory, FAMILY, SPEC, part)], alone, num_threads=1
        )
        exact.index_add_(0, tokens, alone.double() * weights[tokens, slot, None].double())

    names = {"normed": "normed", "expert_ids": "ids", "expert_weights": "weights", "moe_out": "out", "hidden": "hidden"}
    acts, batch = SimpleNamespace(**names, max_tokens=NUM_TOKENS), SimpleNamespace(num_tokens=NUM_TOKENS, index=0)
    Experts(FAMILY, SPEC, batch, acts, parts, tuple(range(SPEC.num_experts)), 0).run(memory, 0)

    def error(got: torch.Tensor) -> float:
        return (got.double() - exact).pow(2).mean().sqrt().item()

    assert error(memory.tensors["out"]) < 1e-3 * error(experts(normed, ids, weights))
    before = hidden.clone()
    Combine(FAMILY, SPEC, batch, acts, 0, ("out",)).run(memory, 0)
    assert torch.equal(hidden, before + memory.tensors["out"].bfloat16())
