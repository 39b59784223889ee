"""Run ops with the GPU kernels, where a tensor's device has them: on the same buffers, without waiting for the
device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import product
from typing import Any

from harness.machine.threads.arenas import tensor_of
from harness.model.functional import AttentionOptions
from harness.model.spec import ModelSpec
from kernels import triton as gpu


def attends(q: Any) -> bool:
    """Return whether the kernels do attention over the cache: to keys and values of heads, or to latents."""
    return gpu.serves(q, "decode")


def attends_in_prompts(spec: ModelSpec, q: Any) -> bool:
    """Return whether the kernels do this model's attention in prompts, which is to keys and values of heads."""
    return gpu.serves(q, "prefill") and spec.expands_prefill


def prefill_attention(options: AttentionOptions, q: Any, k: Any, v: Any, positions: Any, out: Any) -> None:
    """Attend within all prefilling sequences at once; positions [tokens], out [tokens, heads *
    value_dim]."""
    if len(q):
        out = out.view(*q.shape[:2], v.shape[2])
        gpu.causal_attention(q, k, v, positions, out, **options._asdict())


def decode_attention(
    options: AttentionOptions, q: Any, staging: Any, positions: Any, out: Any, *, num_kv_heads: int
) -> None:
    """Attend for all sequences that `LoadKv` staged; positions [seqs] of their new tokens, out [seqs, heads *
    head_dim]."""
    out = out.view(q.shape)
    gpu.staged_decode_attention(q, staging, positions, out, num_kv_heads=num_kv_heads, **options._asdict())


def paged_attention(
    options: AttentionOptions, q: Any, keys: Any, values: Any, blocks: Any, positions: Any, out: Any
) -> None:
    """Attend for all sequences whose cache lies on the device. `blocks` is as `CachedRows.flat_blocks`; positions
    [seqs] of their new tokens, out [seqs, heads * head_dim]."""
    gpu.paged_decode_attention(q, keys, values, blocks, positions, out.view(q.shape), **options._asdict())


def latent_attention(options: AttentionOptions, q: Any, staging: Any, positions: Any, out: Any) -> None:
    """Attend to latents as `decode_attention` does to keys and values; out [seqs, heads * kv_rank]."""
    assert options.window is None and options.sinks is None, "latent attention has neither"
    gpu.staged_latent_attention(q, staging, positions, out.view(*q.shape[:2], -1), scale=options.scale)


def paged_latent_attention(
    options: AttentionOptions, q: Any, latents: Any, blocks: Any, positions: Any, out: Any
) -> None:
    """Attend to latents as `paged_attention` does to keys and values; out [seqs, heads * kv_rank]."""
    assert options.window is None and options.sinks is None, "latent attention has neither"
    gpu.paged_latent_attention(q, latents, blocks, positions, out.view(*q.shape[:2], -1), scale=options.scale)


def numbers(values: Any, device: Any) -> Any:
    """Copy a numpy array to the device for kernels, where an op needs what only the host knows. The copy goes by way of
    pinned memory, which is kept until it has been read: a copy from pageable memory waits until the stream has done
    all work before it."""
    host = tensor_of(values)
    if device.type != "cuda":
        return host.to(device)
    pinned = host.pin_memory()
    there = pinned.new_empty(pinned.shape, device=device)
    if not gpu.serves(there, "copies"):
        return there.copy_(pinned, non_blocking=True)
    gpu.bring(there, pinned)
    gpu.keep(pinned)
    return there


def appends(x: Any) -> bool:
    """Return whether the kernels write new rows into a cache on the device."""
    return gpu.serves(x, "rows")


def append(new_and_cached: Iterable[tuple[Any, Any]], slots: Any, ranges: Iterable[slice]) -> None:
    """Write new rows, [tokens, heads, width], of these ranges of tokens to their slots [tokens] of a cache."""
    for (new, cached), rows in product(new_and_cached, ranges):
        gpu.append_rows(new[rows], slots[rows], cached)


def groups_experts(x: Any) -> bool:
    return gpu.serves(x, "experts")


def experts(
    spec: ModelSpec,
    x: Any,
    ids: Any,
    weights: Any,
    out: Any,
    placed: Mapping[int, tuple[Any, tuple[int, ...]]],
    scratch: Any,
) -> None:
    """Add the weighted outputs of experts, each given by the shape and the addresses of its matrices, to `out`.

    An op's temporaries need no key of their own in `writes`: all ops that use the workspace run on one lane.
    """
    addresses = {expert: found for expert, (_, found) in placed.items()}
    shape = next(iter(placed.values()))[0]
    table = gpu.address_table(addresses, spec.num_experts, x.device)
    gpu.grouped_experts(x, ids, weights, out, table, shape, num_present=len(placed), scratch=scratch)
