"""MoE-Lightning's own planner states memory and time in its own way, here again as its artifact has them.

github.com/caoshiyi/artifacts, branch asplos25: fastmoe/backend/optimizer.py and utils.py. In words:

* device: all but the experts, a share r_w of the experts, two layers of what is streamed, the hidden states of all
  prompts of the batch and twice those of a micro-batch, two micro-batches' cache of a layer, and 1.2 times what unfused
  experts write for a micro-batch; together at most 86 % of the memory;
* host: the experts that are not on the device, two layers of them pinned, the cache of whole requests and the hidden
  states of all prompts; together at most 80 %;
* time of a layer: the largest of link, CPU attention's reading, and the GPU's reading of all experts once a micro-batch
  (its terms for arithmetic are smaller with every size that fits);
* search: micro-batches of 1 to 4 and then every 32nd size; their number grows until throughput no longer does; r_w is
  as large as the device allows, and whole experts are kept.

Rates are those it takes for a card it does not name: 16 GiB/s to the device and 300 GiB/s in it (T4; an L4 has 285),
and the 100 GiB/s of host memory of its README. GPUs that share layers count as one, with the link of one. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import count

from strategies.offloading.planning.memory import Deployment
from strategies.offloading.planning.policy import GivenPolicy
from strategies.offloading.published.as_built import AsBuilt, Published, best_plan, completed, host_bytes, is_in_cache

DEVICE_SHARE, HOST_SHARE = 0.86, 0.80
LINK_BYTES_S, DEVICE_BYTES_S, HOST_BYTES_S = 16 * 2**30, 300 * 2**30, 100 * 2**30
_FEWEST = 2  # micro-batches that CGOPipe takes turns between; the artifact's planner does not ask for them
_OPTIMIZER = "MoE-Lightning artifact (asplos25), fastmoe/backend/optimizer.py"


def sizes() -> Iterator[int]:
    """Yield the micro-batch sizes that the planner tries."""
    yield from (1, 2, 3)
    yield from count(4, 32)


def published_plan(deployment: Deployment, given: GivenPolicy | None = None) -> Published:
    """Return the plan with the most sequences a second, of those that agree with the given sizes.

    Raises ConfigError where none fits the planner's shares of device and host.
    """
    shares = f"{DEVICE_SHARE:.0%} of the device and {HOST_SHARE:.0%} of the host"
    told = f"MoE-Lightning's planner finds no policy in {shares}"
    return best_plan(partial(_plan, deployment), sizes(), given or GivenPolicy(), told, fewest=_FEWEST)


def _plan(deployment: Deployment, size: int, batch: int) -> Published | None:
    """Return the plan with as many resident experts as the device allows; None where device or host is too small."""
    spec, shape, gpus = deployment.spec, deployment.shape, deployment.num_gpus
    prompt, new, width = shape.prompt_tokens, shape.new_tokens, spec.dtype_bytes
    experts, num_layers = gpus * deployment.sizes.experts_bytes, spec.num_layers
    others = gpus * (deployment.sizes.layers_bytes - deployment.sizes.all_experts_bytes)
    token, kv = spec.hidden_dim * width, gpus * spec.kv_bytes_per_token_layer
    unfused = 1.2 * size * prompt * spec.experts_per_token * gpus * (spec.hidden_dim + 3 * spec.expert_dim) * width
    in_prefill = gpus * (2 * size + batch) * prompt * token + 2 * size * prompt * kv
    working = max(in_prefill, gpus * batch * 2 * token) + unfused + 2 * experts
    room = DEVICE_SHARE * gpus * deployment.capacities_bytes["device"] - others - working
    resident = min(1.0, room / (experts * (num_layers - 2)))
    host = experts * (num_layers + 2) * (1 - resident) + batch * (
        (prompt + new) * kv * num_layers + gpus * prompt * token
    )
    if resident < 0 or host > HOST_SHARE * host_bytes(deployment) or not is_in_cache(deployment, batch):
        return None
    moved = (spec.hidden_dim + gpus * spec.expert_dim) * width  # input and output of a token
    layer_s = max(
        experts * (1 - resident) / LINK_BYTES_S,
        -(-batch // size) * (experts + size * moved) / (gpus * DEVICE_BYTES_S),
        batch * ((prompt + new) * kv + 2 * token) / HOST_BYTES_S,
    )
    return Published(batch_size=batch, micro_batch_size=size, resident=resident, host_bytes=host, rate=batch / layer_s)


def complete(deployment: Deployment, given: GivenPolicy) -> GivenPolicy:
    """Fill in what is not given: the planner's sizes, whole resident experts, attention on the CPU, no cache on the
    device. Where both sizes are given, they need not fit the planner's memory."""
    kept, num_experts = 0, deployment.spec.num_experts
    if given.batch_size is None or given.micro_batch_size is None:
        plan = published_plan(deployment, given)
        given = completed(given, batch_size=plan.batch_size, micro_batch_size=plan.micro_batch_size)
        kept = int(plan.resident * num_experts)
    elif (sized := _plan(deployment, given.micro_batch_size, given.batch_size)) is not None:
        kept = int(sized.resident * num_experts)
    share = kept / num_experts * deployment.sizes.experts_bytes / deployment.sizes.layer_bytes
    return completed(given, resident_weights=share, gpu_attention=False, gpu_ffn=True, resident_kv=0.0)


AS_BUILT = AsBuilt(
    complete=complete,
    staging=True,
    padding=False,
    pin_threads=1,
    sources={
        "planner": f"{_OPTIMIZER}; rates of utils.py and README.md",
        "memory_model": f"{DEVICE_SHARE:.0%} of the device, {HOST_SHARE:.0%} of the host: {_OPTIMIZER}",
        "staging_as_built": "one worker copies pages into pinned memory: its fastmoe/backend/execution_engine.py",
    },
    as_in_best=(
        "a copying thread's rate",
        "attention's weights come with the pages, where the artifact keeps them on the device",
        "prefill stages whole layers as decode does, where the artifact copies them from pageable memory",
        "kernels and their rates",
        "at least two micro-batches, which its pipeline needs and its planner does not ask for",
        "the KV cache is no larger than kv_cache_gb",
    ),
)
