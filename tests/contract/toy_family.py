"""A made-up family that has what Mixtral's lacks, its checkpoint, and its math once more as a plain loop in float64."""

from __future__ import annotations

import json
import shutil
from collections.abc import Container
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from harness.model import families
from harness.model.checkpoint import Checkpoint
from harness.model.dimensions import Router
from harness.model.families.mixtral import Mixtral
from harness.model.layout import PartLayout, Section, TensorSlice, TensorSource, lay_out
from harness.model.spec import ModelSpec

WINDOW = 5
ROUTER = Router(scoring="sigmoid", renormalise=True, scale=1.5, num_groups=4, groups_per_token=2, group_score_experts=2)
SHARED_DIM = 32
DENSE_LAYER = 1  # of four
INGREDIENTS = ("sinks", "window", "correction bias", "groups", "scale", "shared expert", "dense layer")


class Toy(Mixtral):
    """The toy family has attention sinks, a window in every other layer, grouped sigmoid routing with a correction
    bias, and a shared expert."""

    def spec_from_config(self, config, name: str, dtype: str) -> ModelSpec:  # type: ignore[no-untyped-def]
        spec = super().spec_from_config({**config, "model_type": "mixtral"}, name, dtype)
        extras = {"sliding_window": WINDOW, "sliding_layers": "even", "attention_sinks": True, "correction_bias": True}
        extras |= {"dense_layers": (DENSE_LAYER,), "dense_dim": SHARED_DIM}
        return replace(spec, family="toy", router=ROUTER, shared_expert_dim=SHARED_DIM, **extras)

    def attention_part(self, spec: ModelSpec, layer: int) -> PartLayout:
        name = f"model.layers.{layer}.self_attn.sinks"
        return lay_out("attention", "float32", (TensorSource("sinks", (spec.num_heads,), (name,)),))

    def router_sources(self, spec: ModelSpec, prefix: str) -> tuple[TensorSource, ...]:
        bias = TensorSource("correction_bias", (spec.num_experts,), (prefix + "correction_bias",), dtype="float32")
        return (*super().router_sources(spec, prefix), bias)

    def shared_sources(self, spec: ModelSpec, prefix: str) -> tuple[TensorSource, ...]:
        module, width, hidden = f"{prefix}shared.", spec.shared_expert_dim, spec.hidden_dim
        gate, up = (TensorSlice((Section(0, 1, 1), Section(i, i + 1, 2, interleaved=True)), True) for i in (0, 1))
        fused = TensorSource("shared_gate_up", (2 * width, hidden), (module + "gate_up",) * 2, (width, width))
        return (
            replace(fused, slices=(gate, up)),
            TensorSource("shared_down", (hidden, width), (module + "down",), slices=(TensorSlice((1,)),)),
        )


def make_toy(tiny: Checkpoint, folder: Path, patch: pytest.MonkeyPatch) -> Checkpoint:
    """Make the tiny checkpoint with the toy's tensors beside its own."""
    load = families._load
    toy = SimpleNamespace(LAYOUT=Toy(), FAMILY=Toy())
    patch.setattr(families, "_load", lambda name, suffix: toy if name == "toy" else load(name, suffix))
    shutil.copytree(tiny.folder, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "toy"}))
    spec, generator = tiny.spec, torch.Generator().manual_seed(0)

    def rand(*shape: int, std: float) -> Tensor:
        return torch.randn(*shape, generator=generator) * std

    tensors = load_file(folder / "model.safetensors")
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}."
        tensors[prefix + "self_attn.sinks"] = rand(spec.num_heads, std=1.0)
        tensors[prefix + "correction_bias"] = rand(spec.num_experts, std=0.3)
        tensors[prefix + "shared.gate_up"] = rand(spec.hidden_dim, 2 * SHARED_DIM, std=0.15)  # of either every second
        tensors[prefix + "shared.down"] = rand(3, spec.hidden_dim, SHARED_DIM, std=0.15)  # the second of three
    module = f"model.layers.{DENSE_LAYER}.block_sparse_moe."
    for name, shape in (("w1", (SHARED_DIM, spec.hidden_dim)), ("w3", (SHARED_DIM, spec.hidden_dim))):
        tensors[f"{module}{name}.weight"] = rand(*shape, std=0.15)
    tensors[module + "w2.weight"] = rand(spec.hidden_dim, SHARED_DIM, std=0.15)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return Checkpoint(folder)


class PlainToy:
    """A plain model that computes all of a sequence again for each token, head by head and expert by expert."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.spec, self.num_layers = checkpoint.spec, checkpoint.spec.num_layers
        self.w = {name: tensor.double() for name, tensor in checkpoint.tensors().items()}

    def generate(self, prompt_ids: tuple[int, ...], count: int, without: Container[str] = ()) -> list[int]:
        ids = list(prompt_ids)
        for _ in range(count):
            hidden = self.w["model.embed_tokens.weight"][ids]
            for layer in range(self.num_layers):
                hidden = self._layer(hidden, layer, without)
            last = self._norm(hidden[-1], "model.norm.weight") @ self.w["lm_head.weight"].T
            ids.append(int(last.argmax()))
        return ids[len(prompt_ids) :]

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.spec.norm_eps).sqrt() * self.w[name]

    def _layer(self, hidden: Tensor, layer: int, without: Container[str]) -> Tensor:
        prefix = f"model.layers.{layer}."
        x = self._norm(hidden, prefix + "input_layernorm.weight")
        q, k, v = (x @ self.w[f"{prefix}self_attn.{name}_proj.weight"].T for name in "qkv")
        heads = [self._head(q, k, v, head, layer, without) for head in range(self.spec.num_heads)]
        hidden = hidden + torch.cat(heads, -1) @ self.w[prefix + "self_attn.o_proj.weight"].T
        x = self._norm(hidden, prefix + "post_attention_layernorm.weight")
        if layer == DENSE_LAYER:
            weights = [self.w[f"{prefix}block_sparse_moe.{name}.weight"] for name in ("w1", "w3", "w2")]
            dense = torch.stack([self._mlp(token, *weights) for token in x])
            return hidden if "dense layer" in without else hidden + dense
        return hidden + torch.stack([self._experts(token, prefix, without) for token in x])

    def _head(self, q: Tensor, k: Tensor, v: Tensor, head: int, layer: int, without: Container[str]) -> Tensor:
        d, group = self.spec.head_dim, self.spec.num_heads // self.spec.num_kv_heads
        mine, theirs = slice(head * d, head * d + d), slice(head // group * d, head // group * d + d)
        scores = self._turn(q[:, mine]) @ self._turn(k[:, theirs]).T / d**0.5
        distance = torch.arange(len(q))[:, None] - torch.arange(len(q))
        window = WINDOW if layer % 2 == 0 and "window" not in without else len(q)
        scores = scores.exp() * ((distance >= 0) & (distance < window))
        sink = 0.0 if "sinks" in without else self.w[f"model.layers.{layer}.self_attn.sinks"][head].exp()
        return scores @ v[:, theirs] / (scores.sum(-1, keepdim=True) + sink)

    def _turn(self, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        angles = torch.arange(len(x)).double()[:, None] / self.spec.rope_theta ** (torch.arange(half).double() / half)
        turned = torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat((turned.real, turned.imag), -1)

    def _experts(self, x: Tensor, prefix: str, without: Container[str]) -> Tensor:
        scores = 1 / (1 + (-(self.w[prefix + "block_sparse_moe.gate.weight"] @ x)).exp())
        choice = scores if "correction bias" in without else scores + self.w[prefix + "correction_bias"]
        of_pairs = [float(choice[2 * pair] + choice[2 * pair + 1]) for pair in range(4)]  # eight experts in four groups
        open_pairs = range(4) if "groups" in without else sorted(range(4), key=lambda pair: -of_pairs[pair])[:2]
        experts = sorted((e for e in range(8) if e // 2 in open_pairs), key=lambda e: -float(choice[e]))[:2]
        total = scores[experts].sum()
        fused, down = self.w[prefix + "shared.gate_up"].T, self.w[prefix + "shared.down"][1]
        shared = self._mlp(x, fused[::2], fused[1::2], down)
        out = torch.zeros_like(x) if "shared expert" in without else shared
        for expert in experts:
            weights = (
                self.w[f"{prefix}block_sparse_moe.experts.{expert}.{name}.weight"] for name in ("w1", "w3", "w2")
            )
            out = out + self._mlp(x, *weights) * scores[expert] / total * (1.0 if "scale" in without else 1.5)
        return out

    def _mlp(self, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        gated = gate @ x
        return down @ (gated / (1 + (-gated).exp()) * (up @ x))
