"""Share device memory between a pass's activations, resident weights and the KV cache, as vLLM does when it starts."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from harness.config import ConfigError, require
from harness.engine.activations import device_bytes_per_token
from harness.engine.engine import Engine
from harness.engine.limits import SLACK_BYTES
from harness.memory.tiers import enough
from strategies.common.kv_on_device import block_bytes, cache_bytes, device_too_small
from strategies.vllm_offload.config import Config


@dataclass(frozen=True, kw_only=True)
class Split:
    """One way to divide the weights of the layers: the first `num_offloaded` parts stay in host memory."""

    num_offloaded: int
    offloaded_bytes: int  # what crosses the link in every pass
    resident_bytes: int
    stream_bytes: int  # device memory through which the offloaded parts come

    @property
    def device_bytes(self) -> int:
        return self.resident_bytes + self.stream_bytes


@dataclass(frozen=True, kw_only=True)
class Policy:
    max_num_seqs: int
    batched_tokens: int  # of a pass, unless it has one prompt only and this is longer
    max_pass_tokens: int  # for which activations have room
    kv_blocks: int  # of the cache in device memory
    kv_bytes: int
    split: Split
    resident: tuple[tuple[int, str], ...]  # by (layer, name), all behind the parts that are offloaded

    def as_record(self) -> dict[str, Any]:
        return {
            "max_num_seqs": self.max_num_seqs,
            "batched_tokens": self.batched_tokens,
            "max_pass_tokens": self.max_pass_tokens,
            "kv_blocks": self.kv_blocks,
            "kv_gb": self.kv_bytes / 1e9,
            "cpu_offload_gb": self.split.offloaded_bytes / 1e9,
            "resident_weights_gb": self.split.resident_bytes / 1e9,
        }


@dataclass(frozen=True, kw_only=True)
class _Requests:
    """The needs of requests in device memory, beside weights: activations of a pass and blocks of the KV cache."""

    lengths: Seq[int]  # most tokens of each request, the longest first
    token_bytes: int
    block_bytes: int  # with its entry in the block tables
    block_size: int

    def kv_bytes(self, tokens: int) -> int:
        return -(-tokens // self.block_size) * self.block_bytes

    def alone_bytes(self, tokens: int) -> int:
        """Return what a request needs that runs alone. A preempted one is prefilled at almost its full length."""
        return tokens * self.token_bytes + self.kv_bytes(tokens)


def plan_policy(config: Config, engine: Engine) -> Policy:
    """Choose the size of a pass and what is offloaded, and give the KV cache all that is left of the device.

    Offloaded are the first parts of the model, as many as `cpu_offload_gb` asks for. Without that setting these are
    none where the whole model fits beside the KV cache of one request, since 0 is vLLM's own default. Elsewhere they
    are so many that the cache holds `max_num_seqs` sequences at their full length, or as many of them as it can: the
    more sequences share a pass, the fewer times the offloaded weights come.

    Raises ConfigError where not even the smallest request fits.
    """
    device, blocks = engine.machine.tiers["device"], engine.kv.allocator
    requests = _Requests(
        lengths=sorted((s.max_tokens for s in engine.sequences), reverse=True) or [1],
        token_bytes=device_bytes_per_token(engine.spec, engine.machine.gpu_kernels),
        block_bytes=block_bytes(engine),
        block_size=blocks.block_size,
    )
    splits = list(_splits(engine, prefetch=config.prefetch))
    given = _given(config, splits)
    least = given or min(splits, key=lambda split: split.device_bytes)
    room_bytes = int(config.gpu_memory_utilization * device.capacity_bytes) - device.used_bytes - SLACK_BYTES
    fitting = [n for n in requests.lengths if least.device_bytes + requests.alone_bytes(n) <= room_bytes]
    if not fitting:
        raise _nothing_fits(config, engine, splits, room_bytes, requests)
    num_tokens = _pass_tokens(config, requests, fitting[0], spare_bytes=room_bytes - least.device_bytes)
    room_bytes -= num_tokens * requests.token_bytes
    batched_tokens = min(config.max_num_batched_tokens, num_tokens)
    max_num_seqs = min(config.max_num_seqs, batched_tokens)
    split = given or _choose(splits, requests, fitting[:max_num_seqs], room_bytes)
    kv_blocks = (room_bytes - split.device_bytes) // requests.block_bytes
    asked = config.num_gpu_blocks_override
    message = f"must be at most {kv_blocks}, which fill the device, or null, got {asked}"
    require(asked is None or asked <= kv_blocks, "strategy.num_gpu_blocks_override", message)
    kv_blocks = asked or kv_blocks
    return Policy(
        max_num_seqs=max_num_seqs,
        batched_tokens=batched_tokens,
        max_pass_tokens=num_tokens,
        kv_blocks=kv_blocks,
        kv_bytes=cache_bytes(engine, kv_blocks),
        split=split,
        resident=_parts(engine)[split.num_offloaded :],
    )


def _parts(engine: Engine) -> tuple[tuple[int, str], ...]:
    """Return the parts of all layers by (layer, name), in the order of their first use."""
    return tuple((layer, name) for layer, parts in enumerate(engine.store.layers) for name in parts)


def _splits(engine: Engine, *, prefetch: bool) -> Iterator[Split]:
    """Yield every split, from nothing offloaded to everything. The stream has room for the largest offloaded part, or
    with `prefetch` for two layers of offloaded parts (`WeightStream`)."""
    sizes = [engine.store.layers[layer][name].layout.nbytes for layer, name in _parts(engine)]
    names = [name for _, name in _parts(engine)]
    slots: dict[str, int] = {}
    offloaded_bytes = stream_bytes = 0
    yield Split(num_offloaded=0, offloaded_bytes=0, resident_bytes=sum(sizes), stream_bytes=0)
    for number, (name, nbytes) in enumerate(zip(names, sizes, strict=True), start=1):
        offloaded_bytes += nbytes
        grown_bytes = max(0, nbytes - slots.get(name, 0))
        slots[name] = slots.get(name, 0) + grown_bytes
        stream_bytes = stream_bytes + 2 * grown_bytes if prefetch else max(stream_bytes, nbytes)
        yield Split(
            num_offloaded=number,
            offloaded_bytes=offloaded_bytes,
            resident_bytes=sum(sizes) - offloaded_bytes,
            stream_bytes=stream_bytes,
        )


def _given(config: Config, splits: Seq[Split]) -> Split | None:
    """Return the split that `cpu_offload_gb` asks for. As in vLLM, the part that reaches it is offloaded, too, and more
    than there is offloads everything."""
    if config.cpu_offload_gb is None:
        return None
    asked_bytes = int(config.cpu_offload_gb * 1e9)
    return next((split for split in splits if split.offloaded_bytes >= asked_bytes), splits[-1])


def _pass_tokens(config: Config, requests: _Requests, longest: int, *, spare_bytes: int) -> int:
    """Return the tokens of the largest pass: `max_num_batched_tokens`, or the longest prompt that a pass may have.

    Where device memory is short, tokens beyond the longest request's take half of what this request leaves.
    """
    wanted = max(longest, min(config.max_num_batched_tokens, sum(requests.lengths)))
    extra_bytes = (spare_bytes - requests.alone_bytes(longest)) // 2
    return min(wanted, longest + extra_bytes // requests.token_bytes)


def _choose(splits: Seq[Split], requests: _Requests, wanted: Seq[int], room_bytes: int) -> Split:
    """Return the split with the least offloaded that leaves room for the KV cache of requests of the `wanted` lengths;
    see `plan_policy`."""
    if splits[0].device_bytes + requests.kv_bytes(wanted[0]) <= room_bytes:
        return splits[0]
    wanted_bytes = sum(requests.kv_bytes(tokens) for tokens in wanted)
    enough_room = (split for split in splits if split.device_bytes + wanted_bytes <= room_bytes)
    return next(enough_room, min(splits, key=lambda split: split.device_bytes))


def _nothing_fits(
    config: Config, engine: Engine, splits: Seq[Split], room_bytes: int, requests: _Requests
) -> ConfigError:
    """Return an error for `cpu_offload_gb` where offloading more would make room for the smallest request, or else for
    the device."""
    smallest_bytes, given = requests.alone_bytes(requests.lengths[-1]), config.cpu_offload_gb
    enough_room = next((split for split in splits if split.device_bytes + smallest_bytes <= room_bytes), None)
    if given is not None and enough_room is not None:
        told = f"must be at least {enough(enough_room.offloaded_bytes)} on this device, or null, got {given:g}"
        return ConfigError("strategy.cpu_offload_gb", told)
    least = min(splits, key=lambda split: split.device_bytes)
    weights = {"resident weights": least.resident_bytes, "offloaded weights on their way": least.stream_bytes}
    share = config.gpu_memory_utilization
    return device_too_small(engine, weights, smallest_bytes, share=share, share_name="strategy.gpu_memory_utilization")
