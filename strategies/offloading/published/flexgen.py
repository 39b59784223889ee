"""FlexGen's own cost model, as the port of FlexGen to Mixtral has it: MoE-Lightning's baseline in its Fig. 7.

github.com/lynnliu030/FlexGen, by one of MoE-Lightning's authors: experimental/cost_models/cost_model_moe_t4_7b.py and
cost_model_moe_l4_7b.py, each with rates that experimental/fit_cost_model_moe.py fitted to runs of the port on that
card. Its results (experimental/mtbench/results) are the policies in benchmarks/flexgen of MoE-Lightning's artifact. All
of them keep the cache and the hidden states on the host. So only the share w_g of the weights that stays on the device
is left to choose, as large as there is room. The model counts one expert as a token's FFN. In words:

* device, at most 80 %: w_g of all weights, two layers of the rest, and a micro-batch's hidden states, projections,
  attention matrix and FFN, of whichever phase needs more;
* host, at most 80 %: the other weights, one layer more of them, the cache of whole requests and all hidden states;
* time: prefill takes the longest of both directions of the link and the GPU; a layer of a decode step takes the link's
  part and then the GPU's, to which attention on the CPU adds up;
* search: micro-batches of 1 to 4, 8, 16, ...; their number grows until throughput no longer does.

Rates of copies from the device are the values that the fit began with: no run was bound by them. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import log2

from harness.config import require
from harness.model.spec import ModelSpec
from strategies.offloading.planning.memory import Deployment
from strategies.offloading.planning.policy import GivenPolicy
from strategies.offloading.published.as_built import AsBuilt, Published, best_plan, completed, host_bytes, is_in_cache

DEVICE_SHARE = HOST_SHARE = 0.8  # alpha_g, alpha_c
_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class _Fit:
    """The rates fitted on one card: `to_gpu` and `to_host` in bytes a second, the others in FLOP/s."""

    to_gpu: float  # ctog_bdw
    to_host: float  # gtoc_bdw_cache, gtoc_bdw_hidden
    prefill: float  # mm_flops_p
    decode: float  # mm_flops_g
    prefill_attention: float  # bmm_flops_p
    cpu: float  # cpu_flops


_T4 = _Fit(
    to_gpu=5.4299 * _GIB, to_host=2.0151 * _GIB,
    prefill=3.5068e12, decode=1.4755e12, prefill_attention=1.3360e12, cpu=4.4999e12,
)  # fmt: skip
_L4 = _Fit(
    to_gpu=5.4443 * _GIB, to_host=2.0151 * _GIB,
    prefill=0.6510e12, decode=0.6031e12, prefill_attention=0.6331e12, cpu=3.7917e12,
)  # fmt: skip
_BETWEEN_THEM = 20 * _GIB  # of device memory: T4 16, L4 24
_SMALL = 0.0070  # c2: arithmetic is slower with small micro-batches
_PORT = "FlexGen's port to Mixtral (lynnliu030/FlexGen)"
_COST_MODEL = f"{_PORT}, experimental/cost_models"
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
    fit = _T4 if deployment.capacities_bytes["device"] < _BETWEEN_THEM else _L4
    slower = max(0.1, 1 - _SMALL * max(0.0, log2(64 / size)))
    flops = spec.flops_per_token_layer - 2 * (spec.experts_per_token - 1) * spec.expert_params
    weights_s = layer * (1 - resident) / fit.to_gpu
    prefill_s = max(
        weights_s + batch * prompt * token / fit.to_gpu,
        batch * ((prompt + 1) * kv + prompt * token) / fit.to_host,
        batch * prompt * (flops / (fit.prefill * slower) + 4 * prompt * spec.q_dim / fit.prefill_attention),
    )
    attention_s = 4 * batch * (prompt + new / 2) * spec.q_dim / (fit.cpu * slower)
    computing_s = batch * flops / (fit.decode * slower) + attention_s
    decode_s = weights_s + batch * token / fit.to_gpu + max(batch * token / fit.to_host, computing_s)
    run_s = prefill_s + (new - 1) * decode_s  # of a layer
    return Published(
        batch_size=batch, micro_batch_size=size, resident=resident, host_bytes=held, rate=batch * new / run_s
    )  # fmt: skip


def _working_bytes(deployment: Deployment, size: int) -> float:
    """Return what a micro-batch needs on the device in prefill, which is more than in decode while the cache is not
    there."""
    spec, prompt = deployment.spec, deployment.shape.prompt_tokens
    rows = (1 + 4 + 1 + 1 + 2 + 1) * spec.hidden_dim + spec.expert_dim
    return size * spec.dtype_bytes * (prompt * rows + spec.num_heads * prompt**2)


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


def cpu_attention_times(spec: ModelSpec) -> float | None:
    """Return how many bytes of host memory the port's attention on the CPU touches for one of the cache.

    Of each number it reads the cache and writes it in float32 (`load_cache`, path 1); where heads share keys and
    values, reads that and writes it for each head (`mha_gen`: expand and reshape); and reads it for the product (bmm).
    None for a cache of latents, which the port does not have.
    """
    if spec.latent is not None:
        return None
    heads, wide = spec.num_heads // spec.num_kv_heads, 4
    repeated = wide + heads * wide if heads > 1 else 0
    return (spec.dtype_bytes + wide + repeated + heads * wide) / spec.dtype_bytes


AS_BUILT = AsBuilt(
    complete=complete,
    staging=True,
    padding=True,
    pin_threads=1,
    pin_thread_gb_s=_T4.to_gpu / 1e9,  # the L4's is 0.3 % more
    in_turn=True,
    sources={
        "planner": f"{_COST_MODEL}; cache and hidden states on the host as in {_SCRIPT}'s policies",
        "memory_model": f"{DEVICE_SHARE:.0%} of device and host: {_COST_MODEL}",
        "staging_as_built": "pageable weights and cache (pin_weight=False), relayed through pinned memory by the thread"
        f" that launches the GPU's work: {_SCRIPT}; {_PORT}, flexgen/moe_pytorch_backend.py; "
        f"at {_T4.to_gpu / _GIB:.2f} GiB/s, as fitted: {_COST_MODEL} (ctog_bdw)",
        "experts_as_built": f"fused, as here: {_PORT}, flexgen/fused_moe.py",
    },
    as_in_best=(
        "new keys and values go to a pinned cache, where FlexGen's is pageable",
        "whole experts stay on the device, where FlexGen keeps single tensors",
        "kernels and their rates",
    ),
)

AS_BUILT_ON_CPU = replace(
    AS_BUILT,
    cpu_attention_times=cpu_attention_times,
    sources=AS_BUILT.sources
    | {
        "attention_as_built": "on a float32 copy of the cache with keys and values repeated for each head, in bytes a "
        f"number: {_PORT}, flexgen/flex_moe.py (load_cache), flexgen/moe_pytorch_backend.py (mha_gen)",
    },
)
