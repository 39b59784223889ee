"""Schedule S4 of MoE-Lightning's Figure 6 is FlexGen's: attention is on the GPU, the next micro-batch's KV on its
way."""

from __future__ import annotations

from collections.abc import Iterator

from strategies.offloading.steps import Steps


def gpu_attention(steps: Steps) -> Iterator[None]:
    """Submit one decode step with attention on the GPU.

    The link brings keys and values one micro-batch ahead, then the next layer's weights; where these are not paged,
    they come as one block with the current layer's last micro-batch. New keys and values go back to the cache.
    """
    steps.load_kv(0, 0)
    for i in range(steps.num_layers):
        for j in range(steps.num_micro_batches):
            if (ahead := steps.ahead(i, j, 1)) is not None:
                steps.load_kv(*ahead)
            steps.w_pintog(i + 1, j)
            steps.w_ctopin(i + 2, j)
            steps.pre_attn(i, j)
            steps.offload_kv(i, j)
            steps.gpu_attn(i, j)
            steps.post_attn(i, j)
            yield
