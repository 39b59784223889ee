"""CGOPipe (MoE-Lightning §4.1) is one decode step, written line by line as in Algorithm 1, with i and j from 0."""

from __future__ import annotations

from collections.abc import Iterator

from strategies.offloading.steps import Steps

_AHEAD = 2  # micro-batches that the CPU attends ahead of the GPU


def cgopipe(steps: Steps) -> Iterator[None]:
    """Submit one decode step, in which the CPU attends two micro-batches ahead of the GPU.

    While the GPU has micro-batch j, the CPU attends for j + 1 and j + 2, one page of the next layer's weights goes to
    the device, and a later page goes to pinned memory. All lanes are plain FIFOs.

    The index j + 2 runs into the next layer, and the layer after the last is layer 0 of the next step. After the last
    layer there is nothing to attend; the pages that the index would stage there are those of the next prologue.
    """
    for j in range(min(_AHEAD, steps.num_micro_batches)):  # prologue
        steps.pre_attn(0, j)
        steps.offload_qkv(0, j)
        steps.cpu_attn(0, j)
        steps.w_ctopin(1, j)
    for i in range(steps.num_layers):
        for j in range(steps.num_micro_batches):
            steps.load_h(i, j)
            steps.w_pintog(i + 1, j)
            steps.post_attn(i, j)
            # Launch CPU attention two micro-batches ahead.
            if (ahead := steps.ahead(i, j, _AHEAD)) is not None:
                layer, k = ahead
                steps.pre_attn(layer, k)
                steps.offload_qkv(layer, k)
                steps.cpu_attn(layer, k)
                steps.w_ctopin(layer + 1, k)
            yield
