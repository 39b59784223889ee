"""Schedule S3 of MoE-Lightning's Figure 6 is FlexGen's with attention on the CPU: the GPU waits for it each time."""

from __future__ import annotations

from collections.abc import Iterator

from strategies.offloading.steps import Steps


def waiting_for_cpu_attention(steps: Steps) -> Iterator[None]:
    """Submit one decode step, in which a micro-batch goes through the whole layer before the next one enters it.

    The next layer's weights come as one block, requested with the layer's first micro-batch. The attention results of
    the layer's other micro-batches wait behind this block.
    """
    last = steps.num_micro_batches - 1
    for i in range(steps.num_layers):
        for j in range(steps.num_micro_batches):
            steps.pre_attn(i, j)
            steps.offload_qkv(i, j)
            steps.cpu_attn(i, j)
            steps.load_h(i, j)
            steps.w_pintog(i + 1, last)
            steps.w_ctopin(i + 2, last)
            steps.post_attn(i, j)
            yield
