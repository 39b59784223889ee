"""Predict a whole run from the times of its passes: batch after batch, prefill and decode apart."""

from __future__ import annotations

from collections import Counter
from functools import cache
from math import ceil

from harness.engine.strategy import Prediction
from strategies.moegen.policy import Policy
from strategies.moegen.search import Search

_DECIDED = {"path": "their critical path (Eq. 4)", "lane": "the sum of the busiest lane"}


def predict(search: Search, policy: Policy) -> Prediction:
    """Return the throughput of the workload under a policy. The last batch may be smaller than B, and so may the last
    prefill of each; contexts count as halfway through the generation."""
    shape, times = search.deployment.shape, search.times
    steps = max(shape.new_tokens - 1, 0)
    sizes = _parts(shape.num_requests, policy.decode.batch_size)

    @cache
    def prefill_s(batch: int) -> float:
        parts = Counter(_parts(batch, policy.prefill.batch_size))
        return sum(count * times.of(policy, search.prefill_batch(part)).seconds for part, count in parts.items())

    @cache
    def decode_s(batch: int) -> float:
        return steps * times.of(policy, search.decode_batch(batch)).seconds if steps else 0.0

    all_prefill_s, all_decode_s = sum(map(prefill_s, sizes)), sum(map(decode_s, sizes))
    first = times.of(policy, search.prefill_batch(min(policy.prefill.batch_size, sizes[0])))
    told = f"prefill by {_DECIDED[first.decided_by]}"
    terms = {
        "batches": len(sizes),
        "prefill_s": all_prefill_s,
        "decode_s": all_decode_s,
        "prefill_layer_s": first.moe_layer_s,
    }
    if steps:
        step = times.of(policy, search.decode_batch(sizes[0]))
        terms["decode_layer_s"] = step.moe_layer_s
        told += f", decode by {_DECIDED[step.decided_by]}"
    return Prediction(
        throughput_tok_s=shape.num_requests * shape.new_tokens / (all_prefill_s + all_decode_s),
        model=f"MoE-Gen, from the recorded ops: {told}",
        terms=terms,
    )


def _parts(number: int, most: int) -> list[int]:
    """Return how many are in each batch of `number` in all, of which at most `most` are together."""
    return [min(most, number - at * most) for at in range(ceil(number / most))]
