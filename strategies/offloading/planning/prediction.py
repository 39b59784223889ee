"""Predict what a workload reaches under a policy, by MoE-Lightning's performance model. Torch-free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from harness.engine.strategy import Prediction
from strategies.offloading.planning.cost import CostModel
from strategies.offloading.planning.memory import Switches
from strategies.offloading.planning.policy import Policy


def predict(cost: CostModel, policy: Policy, batches: Iterable[int] | None = None) -> Prediction:
    """Predict the generated tokens per second of prefill and decode together, as §5.1 counts them.

    All layers take the same time. The first token of a sequence comes from the prefill, the other n - 1 from a decode
    step each. `batches` has the number of requests of each batch that the scheduler will form. Without it all batches
    are as large as the policy's, but for the last one, whose layers are timed for what is left of the workload. Batches
    that are in flight at the same time are each in another stage, and all end with the one that has the most requests:
    its requests are the `shape` of the workload.
    """
    shape, num_layers = cost.deployment.shape, cost.deployment.spec.num_layers
    in_flight = cost.deployment.blocks_in_flight
    num_requests = cost.deployment.num_requests or in_flight * shape.num_requests
    if batches is None:
        whole, left = divmod(shape.num_requests, policy.batch_size)
        sizes = Counter({policy.batch_size: whole, left: 1})
    else:
        sizes = Counter(batches)
        num_requests = in_flight * sum(sizes.elements())
    prefill_s = decode_s = 0.0
    for size, count in sizes.items():
        if not size * count:
            continue
        each = policy if size == policy.batch_size else smaller(policy, size)
        switches = Switches.of(each)
        prefill_s += count * num_layers * cost.prefill(switches).seconds(each)
        decode_s += count * num_layers * (shape.new_tokens - 1) * cost.decode(switches).seconds(each)
    switches = Switches.of(policy)
    decode, prefill = cost.decode(switches), cost.prefill(switches)
    terms = {"N": policy.batch_size, "mu": policy.micro_batch_size, "r_w": policy.resident_weights}
    terms |= {"r_c": policy.resident_kv, "prefill_s": prefill_s, "decode_s": decode_s}
    terms |= {f"decode layer, {name}, s": seconds for name, seconds in decode.by_resource(policy).items()}
    terms |= {f"prefill layer, {name}, s": seconds for name, seconds in prefill.by_resource(policy).items()}
    equations = "Eq. 12-14"
    if cost.rates.extends_paper:
        equations += ", with the cost of ops and host memory"
    if cost.rates.sized is not None:
        equations += ", at the rates of its sizes"
    return Prediction(
        throughput_tok_s=num_requests * shape.new_tokens / (prefill_s + decode_s),
        model=f"MoE-Lightning's HRM ({equations}), decode bound by {decode.bottleneck(policy)}",
        terms=terms,
    )


def smaller(policy: Policy, batch_size: int) -> Policy:
    """Return the policy for fewer sequences, in micro-batches as full as they go."""
    return Policy(
        batch_size=batch_size,
        micro_batch_size=min(policy.micro_batch_size, batch_size),
        gpu_attention=policy.gpu_attention,
        gpu_ffn=policy.gpu_ffn,
        resident_weights=policy.resident_weights,
        resident_kv=policy.resident_kv,
    )
