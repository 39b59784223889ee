"""FlexGen as it is built has one thread, which copies pageable memory and then launches what the GPU computes.

So copies through pinned memory and the work of the GPU take turns, micro-batch by micro-batch: in each turn the thread
copies a part of the next layer and the next micro-batch's keys and values into pinned memory, launches this
micro-batch's work, and waits for it (flexgen/flex_moe.py of FlexGen's port to Mixtral: `load_weight`, `load_cache`,
`compute_layer` and `sync` in `generation_loop_overlap_multi_batch`; `general_copy` in flexgen/moe_pytorch_backend.py).
Its cost model has the sum of the two, too. FlexGen copies all of the next layer in a layer's first turn; here each turn
has its share, which crosses the link in the next turn, while the thread copies the next share. GPUs that are stages of
a pipeline have a process and so such a thread each (flexgen/dist_flex_moe.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from strategies.offloading.steps import Steps


def zigzag_in_turn(steps: Steps) -> Iterator[None]:
    """Submit a prefill in zigzag order."""
    for i, j in _turns(steps):
        steps.begin_work()
        steps.pre_attn(i, j)
        steps.prefill_attn(i, j)
        steps.offload_kv(i, j)
        steps.post_attn(i, j)
        yield


def gpu_attention_in_turn(steps: Steps) -> Iterator[None]:
    """Submit one decode step with attention on the GPU; the next micro-batch's keys and values are copied first."""
    steps.begin_turn()
    steps.load_kv(0, 0)
    for i, j in _turns(steps):
        if (ahead := steps.ahead(i, j, 1)) is not None:
            steps.load_kv(*ahead)
        steps.begin_work()
        steps.pre_attn(i, j)
        steps.offload_kv(i, j)
        steps.gpu_attn(i, j)
        steps.post_attn(i, j)
        yield


def cpu_attention_in_turn(steps: Steps) -> Iterator[None]:
    """Submit one decode step with attention on the CPU, for which the thread waits as well."""
    for i, j in _turns(steps):
        steps.begin_work()
        steps.pre_attn(i, j)
        steps.offload_qkv(i, j)
        steps.cpu_attn(i, j)
        steps.load_h(i, j)
        steps.post_attn(i, j)
        yield


def _turns(steps: Steps) -> Iterator[tuple[int, int]]:
    """Begin each turn with its share of the weights, and yield its layer and micro-batch."""
    for i in range(steps.num_layers):
        for j in range(steps.num_micro_batches):
            steps.begin_turn()
            _bring_weights(steps, i, j)
            yield i, j


def _bring_weights(steps: Steps, i: int, j: int) -> None:
    """Copy this turn's share of the next layer into pinned memory, while that of the turn before crosses the link."""
    if j:
        steps.w_pintog(i + 1, j - 1)
    else:
        steps.w_pintog(i, steps.num_micro_batches - 1)
    steps.w_ctopin(i + 1, j)
