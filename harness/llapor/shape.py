"""State the tensors of a predictor and what it costs to compute. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from harness.model.layout import PartLayout, TensorSource, lay_out

DTYPE = "float32"  # in which predictors are stored and computed


@dataclass(frozen=True)
class PredictorShape:
    """The dimensions of one layer's predictor. `is_deep`: it has the gated residual block."""

    hidden_dim: int
    num_experts: int
    pca_dims: int
    width: int
    is_deep: bool

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor, by name."""
        d, width, experts = self.pca_dims, self.width, self.num_experts
        found: dict[str, tuple[int, ...]] = {"pca": (d, self.hidden_dim), "pca_offset": (d,)}
        found |= {"in": (width, d + 2 * experts), "in_bias": (width,)}
        if self.is_deep:
            found |= {"gate": (width, d), "gate_bias": (width,)}
            found |= {"inner": (width, width), "inner_bias": (width,), "outer": (width, width), "outer_bias": (width,)}
        return found | {"out": (experts, width), "out_bias": (experts,), "calibration": (2,)}

    @property
    def flops_per_token(self) -> int:
        """The operations of all matrix products for one token."""
        return 2 * sum(prod(size) for size in self.tensors().values() if len(size) == 2)

    def layout(self) -> PartLayout:
        """Return the predictor as a part of the weights, which lies on the device."""
        sources = [TensorSource(name, size, (name,)) for name, size in self.tensors().items()]
        return lay_out("predictor", DTYPE, sources)


def shape_of(layout: PartLayout) -> PredictorShape:
    """Return the shape of the predictor whose part this is."""
    sizes = {tensor.name: tensor.shape for tensor in layout.tensors}
    return PredictorShape(
        hidden_dim=sizes["pca"][1],
        num_experts=sizes["out"][0],
        pca_dims=sizes["pca"][0],
        width=sizes["in"][0],
        is_deep="gate" in sizes,
    )
