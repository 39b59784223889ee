"""DeepSeek-V2 and V2-Lite have latent attention, shared experts, and a softmax router that may be limited to the best
groups. Reproduces transformers' `modeling_deepseek_v2` (float32: the same tokens)."""

from __future__ import annotations

from harness.model.families.deepseek_v2_layout import DeepseekV2Layout
from harness.model.families.latent import LatentDecoder


class DeepseekV2(DeepseekV2Layout, LatentDecoder):
    rotates_in_float32 = True


FAMILY = DeepseekV2()
