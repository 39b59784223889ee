"""FlexGen's own cost model, as the port of FlexGen to Mixtral has it: MoE-Lightning's baseline in its Fig. 7.

github.com/lynnliu030/FlexGen, by one of MoE-Lightning's authors: experimental/cost_models/cost_model_moe_t4_7b.py,
cost_model_moe_l4_7b.py and cost_model_moe_t4_22b.py, each with rates that experimental/fit_cost_model_moe.py or
fit_cost_model_moe_22b.py fitted to runs of the port on that card (cost_model_dbrx.py has the third one's). Its results
(experimental/mtbench/results) for Mixtral-8x7B are the policies in benchmarks/flexgen of MoE-Lightning's artifact. All
keep the cache and the hidden states on the host. So only the share w_g of the weights that stays on the device is left
to choose, as large as there is room. The model counts one expert as a token's FFN. In words:

* device, at most 80 %: w_g of all weights, two layers of the rest, and a micro-batch's hidden states, projections,
  attention matrix and FFN, of whichever phase needs more;
* host, at most 80 %: the other weights, one layer more of them, the cache of whole requests and all hidden states;
* time: prefill takes the longest of both directions of the link and the GPU; a layer of a decode step takes the link's
  part and then the GPU's, to which attention on the CPU adds up;
* search: micro-batches of 1 to 4, 8, 16, ...; their number grows until throughput no longer does.

Rates of copies from the device are the values that the fit began with: no run was bound by them.

Several GPUs are stages of a pipeline (flexgen/dist_flex_moe.py), each with a process and so with a thread of its own.
The cost model knows nothing of them: it plans the whole model and all sequences for one GPU. The port's scripts have as
many batches in flight as stages. With two GPUs and as many sequences in *each* batch as planned, 32 tokens failed
(run_script_mtbench_t4_22b_dist_1x2.sh). What was tuned has about as many in both together: half as many micro-batches
(run_script_mtbench_t4_22b_dist_1x2_tuned.sh), or half as large ones (results/tuned_policy_t4_22b). Here each batch has
its share of the planned micro-batches, which are as large as planned. Torch-free.
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
_T4_8X22B = _Fit(
    to_gpu=4.7789 * _GIB, to_host=2.0151 * _GIB,
    prefill=3.5124e12, decode=1.3982e12, prefill_attention=1.3017e12, cpu=4.4980e12,
)  # fmt: skip
_BETWEEN_CARDS = 20 * _GIB  # of device memory: T4 16, L4 24
_BETWEEN_MODELS = 5120  # of a hidden state: Mixtral-8x7B 4,096; Mixtral-8x22B and DBRX 6,144
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

    Where several batches are in flight, the sizes are those of one of them, which has its share of the micro-batches.
    Raises ConfigError where none fits the cost model's shares of device and host.
    """
    shares = f"{DEVICE_SHARE:.0%} of the device and {HOST_SHARE:.0%} of the host"
    told = f"FlexGen's cost model finds no policy in {shares}"
    given, in_flight = given or GivenPolicy(), deployment.blocks_in_flight
    if given.batch_size is not None:
        plan = best_plan(lambda size, batch: _plan(deployment, size, in_flight * batch), sizes(), given, told)
        return replace(plan, batch_size=given.batch_size)
    plan = best_plan(partial(_plan, deployment), sizes(), given, told)
    each = max(1, plan.batch_size // in_flight)
    size = given.micro_batch_size or min(plan.micro_batch_size, each)
    return replace(plan, batch_size=max(1, each // size) * size, micro_batch_size=size)


def _fit_on_t4(spec: ModelSpec) -> _Fit:
    return _T4 if spec.hidden_dim < _BETWEEN_MODELS else _T4_8X22B


def _on_one_gpu(deployment: Deployment) -> Deployment:
    """Return the deployment as the cost model sees it: one GPU has all layers, and all batches are one."""
    layers_bytes = deployment.blocks_in_flight * deployment.sizes.layers_bytes
    sizes = replace(deployment.sizes, layers_bytes=layers_bytes)
    return replace(deployment, sizes=sizes, num_gpus=1, blocks_in_flight=1)


def _plan(deployment: Deployment, size: int, batch: int) -> Published | None:
    """Return the plan with as many weights on the device as fit; None where device or host is too small. The batch is
    all that is in flight."""
    deployment = _on_one_gpu(deployment)
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
    fit = _fit_on_t4(spec) if deployment.capacities_bytes["device"] < _BETWEEN_CARDS else _L4
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
    are given, they need not fit the cost model's memory. Raises ConfigError where GPUs share layers."""
    in_flight, kept = deployment.blocks_in_flight, 0.0
    told = "must be pipeline as built: FlexGen's port has no other way to use several GPUs"
    require(deployment.num_gpus == in_flight, "strategy.parallelism", told)
    if given.batch_size is None or given.micro_batch_size is None:
        plan = published_plan(deployment, given)
        given = completed(given, batch_size=plan.batch_size, micro_batch_size=plan.micro_batch_size)
        kept = plan.resident
    elif (sized := _plan(deployment, given.micro_batch_size, in_flight * given.batch_size)) is not None:
        kept = sized.resident
    return completed(given, resident_weights=kept, gpu_ffn=True, resident_kv=0.0)


def pin_thread_gb_s(spec: ModelSpec) -> float:
    """Return the rate of the port's copies to the device, as fitted on a T4; on an L4 it is 0.3 % more."""
    return _fit_on_t4(spec).to_gpu / 1e9


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
    pin_thread_gb_s=pin_thread_gb_s,
    in_turn=True,
    sources={
        "planner": f"{_COST_MODEL}; cache and hidden states on the host as in {_SCRIPT}'s policies",
        "memory_model": f"{DEVICE_SHARE:.0%} of device and host: {_COST_MODEL}",
        "staging_as_built": "pageable weights and cache (pin_weight=False), relayed through pinned memory by the thread"
        f" that launches the GPU's work: {_SCRIPT}; {_PORT}, flexgen/moe_pytorch_backend.py; "
        f"at {_T4.to_gpu / _GIB:.2f} GiB/s (Mixtral-8x22B {_T4_8X22B.to_gpu / _GIB:.2f}), as fitted: {_COST_MODEL} "
        "(ctog_bdw)",
        "several_gpus_as_built": "each has a process, a thread and as many consecutive layers; as many batches in "
        "flight as GPUs, each through all stages before its next step, and each brings all weights again "
        f"({_PORT}, flexgen/dist_flex_moe.py; experimental/mtbench/mtbench_run_moe_dist.py: num_inner_iterations); "
        "the planned batch divided among them (experimental/mtbench/run_script_mtbench_t4_22b_dist_1x2_tuned.sh)",
        "experts_as_built": f"fused, as here: {_PORT}, flexgen/fused_moe.py",
    },
    as_in_best=(
        "new keys and values go to a pinned cache, where FlexGen's is pageable",
        "whole experts stay on the device, where FlexGen keeps single tensors",
        "hidden states of a prefill wait on the host only where the device has no room",
        "GPUs of a pipeline hand hidden states on by micro-batch, where the port's hand on a whole step's, through "
        "host memory, and wait for it",
        "one queue for the CPU's work of all stages, where each of the port's processes has 16 threads of its own",
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
