"""DeepSeek-V3, R1 and Moonlight have latent attention, shared experts, and a sigmoid router with a correction bias for
the choice of groups and experts. Reproduces transformers' `modeling_deepseek_v3` (float32: the same tokens)."""

from __future__ import annotations

from torch import Tensor, nn

from harness.model.families.deepseek_v3_layout import DeepseekV3Layout
from harness.model.families.latent import LatentDecoder
from harness.model.spec import ModelSpec


class DeepseekV3(DeepseekV3Layout, LatentDecoder):
    def reference_scores(self, spec: ModelSpec, router: nn.Module, choice: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores with the bias, by which the router chooses, and without it."""
        bias: Tensor = router.e_score_correction_bias  # type: ignore[assignment]
        return choice, choice - bias


FAMILY = DeepseekV3()
