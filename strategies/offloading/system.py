"""Build a strategy from what is given of a policy: MoE-Lightning, and systems that differ from it in their
schedules."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace

from harness.config import require
from harness.engine.engine import Engine
from harness.engine.kv_placement import place_kv
from harness.engine.sequences import Sequence
from harness.engine.strategy import Strategy
from harness.memory.kv_cache import Blocks
from harness.memory.paged_weights import kept_share
from strategies.offloading.batches_in_flight import TakingTurns, dealt_out
from strategies.offloading.config import OffloadingConfig
from strategies.offloading.pipeline import MicroBatchPipeline
from strategies.offloading.planning.cost import Overlap
from strategies.offloading.planning.planner import OffloadPlan, deployment_of, plan_policy
from strategies.offloading.planning.policy import GivenPolicy
from strategies.offloading.request_batching import BatchScheduler
from strategies.offloading.steps import Schedule, zigzag


def complete_policy(
    config: OffloadingConfig,
    engine: Engine,
    *,
    gpu_attention: bool | None = None,
    min_micro_batches: int = 1,
    overlap: Overlap = "all",
    stages: bool = False,
) -> OffloadPlan:
    """Complete what is given of a policy: by the published planner, or with the best that the search finds.

    `gpu_attention` tells whether the schedule attends on the GPU, null where there is a schedule for either. Raises
    ConfigError naming what these pipelines cannot run, or what does not fit.
    """
    given = config.policy
    require_supported(given, num_gpus=len(engine.ranks), min_micro_batches=min_micro_batches)
    if gpu_attention is not None:
        given = replace(given, gpu_attention=gpu_attention)
    if config.as_built is not None:
        deployment = deployment_of(engine, padded=config.is_padded, num_stages=len(engine.ranks) if stages else 1)
        given = config.as_built.complete(deployment, given)
        require_supported(given, num_gpus=len(engine.ranks), min_micro_batches=min_micro_batches)
    if len(engine.ranks) > 1:
        given = replace(given, gpu_ffn=True, resident_kv=0.0)
    return plan_policy(
        engine,
        replace(given, resident_weights=_whole_parts(given, engine)),
        packet_bytes=int(config.packet_mb * 1e6),
        padded=config.is_padded,
        min_micro_batches=min_micro_batches,
        overlap="one thread" if config.is_in_turn else overlap,
        extended=config.extended_model,
        stages=stages,
        relays_kv=config.is_in_turn,
    )


def _whole_parts(given: GivenPolicy, engine: Engine) -> float | None:
    """Return the given r_w as the pipeline can keep it, with a margin so that no part is lost to the last bit."""
    if given.resident_weights is None:
        return None
    share = kept_share(engine.store, given.resident_weights, experts=given.gpu_ffn is not False)
    return min(share * (1 + 1e-9), 1.0)


def require_supported(given: GivenPolicy, *, num_gpus: int = 1, min_micro_batches: int = 1) -> None:
    """Raise ConfigError for what these pipelines cannot run yet, naming the field below `strategy`."""
    field = "strategy.policy"
    if num_gpus > 1:
        require(given.gpu_ffn is not False, f"{field}.gpu_ffn", "must be true or null where there are several GPUs")
        message = f"must be 0 or null where there are several GPUs, got {given.resident_kv}"
        require(not given.resident_kv, f"{field}.resident_kv", message)
    if given.batch_size is not None and given.micro_batch_size is not None:
        require(
            -(-given.batch_size // given.micro_batch_size) >= min(min_micro_batches, given.batch_size),
            f"{field}.micro_batch_size",
            f"must give at least {min_micro_batches} micro-batches of {given.batch_size} sequences, "
            f"got {given.micro_batch_size}",
        )


def build_offloading(
    engine: Engine,
    planned: OffloadPlan,
    schedule: Schedule,
    config: OffloadingConfig,
    *,
    paging: bool,
    min_micro_batches: int = 1,
    prefill: Schedule = zigzag,
) -> Strategy:
    """Build the strategy that runs the schedules `prefill` and, in decode, `schedule`, by the plan.

    With `paging` a layer's weights come in as many pages as there are micro-batches, otherwise as one block. Where the
    plan is for GPUs that are stages of a pipeline, each has a batch in flight.
    """
    policy, memory, num_blocks = planned.policy, planned.memory, planned.deployment.blocks_in_flight
    _place_kv(engine, planned)
    num_pages = policy.num_micro_batches if paging else 1
    pipeline = MicroBatchPipeline(
        engine,
        schedule,
        memory,
        num_pages=num_pages,
        resident_share=policy.resident_weights,
        packet_bytes=int(config.packet_mb * 1e6),
        gpu_ffn=policy.gpu_ffn,
        stages=num_blocks > 1,
        prefill=prefill,
    )

    def scheduler(sequences: list[Sequence], blocks: Blocks) -> BatchScheduler:
        return BatchScheduler(
            sequences,
            blocks,
            num_micro_batches=policy.num_micro_batches,
            micro_batch_size=policy.micro_batch_size,
            batch_size=policy.batch_size,
            micro_batch_prompt_tokens=memory.prompt_tokens,
            prompt_tokens=memory.pool.in_pass,
            micro_batch_cache_tokens=memory.cached_tokens,
            min_micro_batches=min_micro_batches,
            padded=planned.deployment.shape.padded,
        )

    plan = {
        "planning": config.planning,
        **(config.as_built.as_record() if config.as_built else {}),
        "weights_wait_in": "pageable memory" if config.is_staged else "pinned memory",
        **planned.as_record(),
        "pages_per_layer": num_pages,
        "page_mb": pipeline.page_bytes / 1e6,
        "resident_weights_gb": pipeline.resident_bytes / 1e9,
        "resident_kv_gb": planned.device_kv_bytes / 1e9,
        "prefill_micro_batch_tokens": memory.pool.largest,
        "prefill_pass_tokens": memory.pool.in_pass,
        "hidden_states_wait_in": "pinned memory" if memory.pool.kept else "device memory",
    }
    blocks = engine.kv.allocator
    return Strategy(
        scheduler=scheduler(engine.sequences, blocks)
        if num_blocks == 1
        else TakingTurns([scheduler(*share) for share in dealt_out(engine.sequences, blocks, num_blocks)]),
        pipeline=pipeline,
        passes_in_flight=num_blocks,
        prediction=planned.predicted(_formed(scheduler, engine) if num_blocks == 1 else None),
        plan=plan,
    )


def _formed(scheduler: Callable[[list[Sequence], Blocks], BatchScheduler], engine: Engine) -> list[int] | None:
    """Return how many requests each batch will have, from forming them all; None where there is none. The cache may
    have less room for the longest requests than for so many mean ones, and then there are more batches than the
    policy says."""
    blocks = deepcopy(engine.kv.allocator)
    forming, sizes = scheduler([Sequence(each.request) for each in engine.sequences], blocks), []
    while (plan := forming.next_pass()) is not None:
        sizes.append(len(plan.prefill))
        forming.retire(plan, plan.prefill)
        for sequence in plan.prefill:
            blocks.release(sequence)
    return sizes or None


def _place_kv(engine: Engine, planned: OffloadPlan) -> None:
    """Place the share r_c of the batch's KV cache on the device, in addition to the host's cache.

    Less than one block is not placed.
    """
    blocks = engine.kv.allocator
    block_bytes = blocks.block_size * engine.spec.kv_bytes_per_token
    if planned.device_kv_bytes >= block_bytes:
        place_kv(engine, host_bytes=blocks.num_blocks * block_bytes, device_bytes=planned.device_kv_bytes)
