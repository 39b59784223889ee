"""FlexGen's own cost model, here again as its repository has it for OPT, read for a model with experts.

github.com/FMInference/FlexiGen: experimental/cost_model.py, whose rates were fitted to a T4 on Google's cloud. How it
was extended to Mixtral for MoE-Lightning's Fig. 7 is not published. Its policies for Mixtral are (benchmarks/flexgen of
MoE-Lightning's artifact): all of them keep the cache and the hidden states on the host. So only the share w_g of the
weights that stays on the device is left to choose, as large as there is room. A token's experts together are its FFN,
and keys and values are as wide as they are cached. In words:

* device, at most 80 %: w_g of all weights, two layers of the rest, and a micro-batch's hidden states, projections,
  attention matrix and FFN, of whichever phase needs more;
* host, at most 80 %: the other weights, one layer more of them, the cache of whole requests and all hidden states;
* time: prefill takes the longest of both directions of the link and the GPU; a layer of a decode step takes the link's
  part and then the GPU's, to which attention on the CPU adds up;
* search: micro-batches of 1 to 4, 8, 16, ...; their number grows until throughput no longer does.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import log2

from harness.config import require
from strategies.offloading.planning.memory import Deployment
from strategies.offloading.planning.policy import GivenPolicy
from strategies.offloading.published.as_built import AsBuilt, Published, best_plan, completed, host_bytes, is_in_cache

DEVICE_SHARE = HOST_SHARE = 0.8  # alpha_g, alpha_c
_GIB = 2**30
_TO_GPU, _CACHE_TO_HOST, _HIDDEN_TO_HOST = 12.89 * _GIB, 0.97 * _GIB, 4.82 * _GIB  # bytes a second
_PREFILL, _DECODE, _PREFILL_ATTENTION, _CPU = 21.24e12, 4.3e12, 9.97e12, 0.0123e12  # FLOP/s
_SMALL = (0.0168, 0.0328, 0.0621)  # c1, c2, c3: the CPU is slower on small micro-batches and narrow models
_COST_MODEL = "FlexGen (FMInference/FlexiGen), experimental/cost_model.py"
_SCRIPT = "MoE-Lightning artifact (asplos25), benchmarks/flexgen/mtbench_run_8x7b_moe.py"


def sizes() -> Iterator[int]:
    """Yield the micro-batch sizes that the search tries."""
    yield from (1, 2, 3)
    size = 4
    while True:
        yield size
        size *= 2


def published_plan(deployment: Deployment, given: GivenPolicy | None = None) -> Published:
    """Return the plan with the highest throughput, of those that agree with the given sizes.

    Raises ConfigError where none fits the cost model's shares of device and host, or where there are several GPUs.
    """
    told = "must be best with several GPUs: FlexGen's cost model has one"
    require(deployment.num_gpus == 1, "strategy.planning", told)
    shares = f"{DEVICE_SHARE:.0%} of the device and {HOST_SHARE:.0%} of the host"
    told = f"FlexGen's cost model finds no policy in {shares}"
    return best_plan(partial(_plan, deployment), sizes(), given or GivenPolicy(), told)


def _plan(deployment: Deployment, size: int, batch: int) -> Published | None:
    """Return the plan with as many weights on the device as fit; None where device or host is too small."""
    spec, shape, stored = deployment.spec, deployment.shape, deployment.sizes
    prompt, new, num_layers = shape.prompt_tokens, shape.new_tokens, spec.num_layers
    layer, total, token = stored.layer_bytes, stored.layers_bytes, spec.hidden_dim * spec.dtype_bytes
    kv, whole = spec.kv_bytes_per_token_layer, prompt + new

    room = DEVICE_SHARE * deployment.capacities_bytes["device"] - 2 * layer - _working_bytes(deployment, size)
    resident = min(1.0, room / (total - 2 * layer))
    kept = total * (1 - resident)
    held = max(
        kept + layer * (1 - resident) + batch * prompt * (token + kv * num_layers) + size * prompt * token,
        kept + batch * (token + whole * kv * num_layers) + size * (2 * spec.num_heads * whole + token),
    )
    if resident < 0 or held > HOST_SHARE * host_bytes(deployment) or not is_in_cache(deployment, batch):
        return None
    weights_s = layer * (1 - resident) / _TO_GPU
    prefill_s = max(
        weights_s + batch * prompt * token / _TO_GPU,
        batch * ((prompt + 1) * kv / _CACHE_TO_HOST + prompt * token / _HIDDEN_TO_HOST),
        batch * prompt * (spec.flops_per_token_layer / _PREFILL + 4 * prompt * spec.q_dim / _PREFILL_ATTENTION),
    )
    attention_s = 4 * batch * (prompt + new / 2) * spec.q_dim / (_CPU * _share_of_cpu(size, spec.hidden_dim))
    computing_s = batch * spec.flops_per_token_layer / _DECODE + attention_s
    decode_s = weights_s + batch * token / _TO_GPU + max(batch * token / _HIDDEN_TO_HOST, computing_s)
    run_s = prefill_s + (new - 1) * decode_s  # of a layer
    return Published(
        batch_size=batch, micro_batch_size=size, resident=resident, host_bytes=held, rate=batch * new / run_s
    )  # fmt: skip


def _working_bytes(deployment: Deployment, size: int) -> float:
    """Return what a micro-batch needs on the device in prefill, which is more than in decode while the cache is not
    there."""
    spec, prompt = deployment.spec, deployment.shape.prompt_tokens
    rows = (1 + 4 + 1 + 1 + 2 + 1) * spec.hidden_dim + spec.experts_per_token * spec.expert_dim
    return size * spec.dtype_bytes * (prompt * rows + spec.num_heads * prompt**2)


def _share_of_cpu(size: int, hidden_dim: int) -> float:
    """Return the share of its rate that the CPU reaches."""
    small, narrow = max(0.0, log2(64 / size)), max(0.0, log2(4096 / hidden_dim))
    both, first, second = _SMALL
    return max(0.1, 1 + both * small * narrow - first * small - second * narrow)


def complete(deployment: Deployment, given: GivenPolicy) -> GivenPolicy:
    """Fill in what is not given: the plan's sizes and resident weights, and no cache on the device. Where both sizes
    are given, they need not fit the cost model's memory."""
    kept = 0.0
    if given.batch_size is None or given.micro_batch_size is None:
        plan = published_plan(deployment, given)
        given = completed(given, batch_size=plan.batch_size, micro_batch_size=plan.micro_batch_size)
        kept = plan.resident
    elif (sized := _plan(deployment, given.micro_batch_size, given.batch_size)) is not None:
        kept = sized.resident
    return completed(given, resident_weights=kept, gpu_ffn=True, resident_kv=0.0)


AS_BUILT = AsBuilt(
    complete=complete,
    staging=True,
    padding=True,
    pin_threads=1,
    sources={
        "planner": f"{_COST_MODEL}; cache and hidden states on the host as in {_SCRIPT}'s policies",
        "memory_model": f"{DEVICE_SHARE:.0%} of device and host: {_COST_MODEL}",
        "staging_as_built": "pageable weights (pin_weight=False), which one thread relays through pinned memory: "
        f"{_SCRIPT}; FlexGen, flexgen/pytorch_backend.py",
    },
    as_in_best=(
        "how the cost model was extended to experts (our reading)",
        "a copying thread's rate",
        "the KV cache is pinned, where FlexGen's is pageable",
        "experts are fused, where FlexGen runs them one by one",
        "whole experts stay on the device, where FlexGen keeps single tensors",
        "kernels and their rates",
    ),
)
