"""Schedule S2 of MoE-Lightning's Figure 6, after FastDecode: attention on the CPU overlapped, weights as one block."""

from __future__ import annotations

from collections.abc import Iterator

from strategies.common.steps import Steps

_AHEAD = 2


def overlapping_cpu_attention(steps: Steps) -> Iterator[None]:
    """One decode step. The CPU attends two micro-batches ahead; the next layer's weights are requested when its first
    micro-batch is to enter it, and the attention results of this layer's last one wait behind all of them."""
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
