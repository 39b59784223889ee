"""Schedule S2 of MoE-Lightning's Figure 6, FastDecode's, overlaps attention on the CPU; weights come as one block."""

from __future__ import annotations

from collections.abc import Iterator

from strategies.offloading.steps import Steps

_AHEAD = 2


def overlapping_cpu_attention(steps: Steps) -> Iterator[None]:
    """Submit one decode step, in which the CPU attends two micro-batches ahead.

    The next layer's weights are requested when the first micro-batch is to enter that layer, and the attention results
    of this layer's last micro-batch wait behind all of them.
    """
    for j in range(min(_AHEAD, steps.num_micro_batches)):
        _attend(steps, 0, j)
    for i in range(steps.num_layers):
        for j in range(steps.num_micro_batches):
            steps.load_h(i, j)
            steps.w_pintog(i + 1, j)
            steps.w_ctopin(i + 2, j)
            steps.post_attn(i, j)
            if (ahead := steps.ahead(i, j, _AHEAD)) is not None:
                _attend(steps, *ahead)
            yield


def _attend(steps: Steps, i: int, j: int) -> None:
    steps.pre_attn(i, j)
    steps.offload_qkv(i, j)
    steps.cpu_attn(i, j)
