"""gpt-oss has attention with sinks, a window in every second layer, biases, and clamped SwiGLU experts. Reproduces
transformers' `modeling_gpt_oss` (float32: the same tokens)."""

from __future__ import annotations

from torch import Tensor, nn

from harness.model import functional
from harness.model.families.decoder import Decoder, Weights
from harness.model.families.gpt_oss_layout import GptOssLayout
from harness.model.linear import linear
from harness.model.spec import ModelSpec
from kernels import triton as gpu


class GptOss(GptOssLayout, Decoder):
    def norm(self, spec: ModelSpec, x: Tensor, weight: Tensor) -> Tensor:
        """Normalise in float32, the multiplication by the weight included."""
        return (weight.float() * functional.normalised(x, spec.norm_eps)).to(x.dtype)

    def router_logits(self, spec: ModelSpec, w: Weights, normed: Tensor, layer: int) -> Tensor:
        return super().router_logits(spec, w, normed, layer) + w["router_bias"]

    def expert(self, spec: ModelSpec, w: Weights, x: Tensor) -> Tensor:
        assert spec.clamped_swiglu is not None
        gate, up = (linear(x, w["gate_up"]) + w["gate_up_bias"]).chunk(2, dim=-1)
        return linear(functional.clamped_swiglu(gate, up, spec.clamped_swiglu), w["down"]) + w["down_bias"]

    def expert_matrices(self, spec: ModelSpec, w: Weights) -> gpu.ExpertMatrices:
        assert spec.clamped_swiglu is not None
        limit, alpha = spec.clamped_swiglu.limit, spec.clamped_swiglu.alpha
        gate, up = w["gate_up"].chunk(2)
        gate_bias, up_bias = w["gate_up_bias"].chunk(2)
        return gpu.ExpertMatrices(
            gate=gate,
            up=up,
            down=w["down"],
            gate_bias=gate_bias,
            up_bias=up_bias,
            down_bias=w["down_bias"],
            activation=gpu.Activation(name="clamped_swiglu", alpha=alpha, limit=limit),
        )

    def reference_routers(self, spec: ModelSpec, model: nn.Module) -> list[nn.Module]:
        return [model.model.layers[layer].mlp.router for layer in spec.moe_layers]  # type: ignore[union-attr, index]

    def reference_scores(self, spec: ModelSpec, router: nn.Module, choice: Tensor) -> tuple[Tensor, Tensor]:
        """Return the probabilities: this router chooses by its logits, whose size says nothing."""
        probabilities = choice.float().softmax(dim=-1)
        return probabilities, probabilities


FAMILY = GptOss()
