"""Device and pinned memory for many micro-batches that are in the model at the same time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from harness.engine.activations import (
    TABLE_ENTRY_BYTES,
    UNBACKED,
    Activations,
    attention_bytes,
    expert_bytes,
    host_attention_bytes,
    host_expert_bytes,
    state_bytes,
)
from harness.machine.base import GpuKernels, Machine
from harness.memory.tiers import PINNED, Buffer, device_tier
from harness.model.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class PoolSizes:
    """The sizes of a pool, in tokens. `in_pass`: all micro-batches together; `largest`: the largest micro-batch;
    `in_attention`: the micro-batches between QKV and output projection; `hidden`: those whose hidden states the device
    holds; `kept`: those whose hidden states pinned memory holds; `host_experts`: those of a pass whose experts run on
    the host. Passes that are in flight at the same time share the buffers around attention and behind it."""

    in_pass: int
    largest: int
    in_attention: int
    hidden: int
    kept: int
    host_experts: int = 0
    passes: int = 1
    padded: bool = False  # prompts

    def device_bytes(self, spec: ModelSpec, kernels: GpuKernels) -> int:
        state = dict(state_bytes(spec))
        state_of_pass_bytes = self.hidden * state.pop("hidden") + self.in_pass * _sum(state)
        attention, expert = _sum(attention_bytes(spec)), _sum(expert_bytes(spec, kernels, padded=self.padded))
        return self.passes * state_of_pass_bytes + self.in_attention * attention + self.largest * expert

    def pinned_bytes(self, spec: ModelSpec) -> int:
        kept_bytes = self.passes * self.kept * state_bytes(spec)["hidden"]
        kept_bytes += self.passes * self.host_experts * _sum(host_expert_bytes(spec))
        return self.in_attention * _sum(host_attention_bytes(spec)) + kept_bytes


class PooledActivations(Activations):
    """One micro-batch's share of a pool.

    `kept_hidden`: where its hidden states wait in pinned memory between layers; None where they stay on the device.
    `block_tables`: None where none of its contexts lies on the device.
    """

    def __init__(
        self,
        max_tokens: int,
        buffers: Mapping[str, Buffer],
        *,
        kept_hidden: Buffer | None,
        block_tables: Buffer | None,
    ) -> None:
        self.max_tokens, self.block_tables = max_tokens, block_tables
        self.kept_hidden = kept_hidden
        for name, buffer in buffers.items():
            setattr(self, name, buffer)


class ActivationPool:
    """A pool of memory for activations is reserved once and divided again for each pass.

    Buffers that live from layer to layer belong to one micro-batch. Buffers around attention are taken in turns, as
    small as the pass needs them. Buffers behind attention exist once for all micro-batches, since the gpu lane runs one
    op at a time.

    Experts on the host still run while others compute, so there each micro-batch has rows of its own. Ops of earlier
    passes may still run when a pass is laid out, on other GPUs or because passes overlap; wherever its buffers share
    bytes with theirs, the ops are ordered byte by byte (`Hazards`). Passes with different numbers (modulo
    `PoolSizes.passes`) share nothing that lives from layer to layer. The device is that of GPU `rank`, and `spec` is
    the part of the model that it computes. GPUs that share a layer have the same hidden states, which wait in pinned
    memory once: only one of their pools `keeps` them. A pass's block tables have an entry for each of the
    `device_blocks` of the KV cache there.
    """

    def __init__(
        self,
        machine: Machine,
        spec: ModelSpec,
        sizes: PoolSizes,
        *,
        rank: int = 0,
        keeps: bool = True,
        device_blocks: int = 0,
    ) -> None:
        assert sizes.largest <= min(sizes.in_pass, sizes.in_attention, sizes.hidden), f"a micro-batch exceeds {sizes}"
        self._sizes, self._device_blocks = sizes, device_blocks
        device, pinned = machine.tiers[device_tier(rank)], machine.tiers[PINNED]
        self._bytes: dict[str, int] = {}
        self._roots: dict[str, Buffer] = {}
        in_passes = sizes.passes * sizes.in_pass
        counts = {"tokens": in_passes, "sampled": in_passes, "hidden": sizes.passes * sizes.hidden}
        kept = {"kept_hidden": state_bytes(spec)["hidden"]} if keeps else {}
        behind = expert_bytes(spec, machine.gpu_kernels, padded=sizes.padded)
        groups = (
            (device, state_bytes(spec), counts),
            (device, attention_bytes(spec), dict.fromkeys(attention_bytes(spec), sizes.in_attention)),
            (device, behind, dict.fromkeys(behind, sizes.largest)),
            (pinned, host_attention_bytes(spec), dict.fromkeys(host_attention_bytes(spec), sizes.in_attention)),
            (pinned, kept, {"kept_hidden": sizes.passes * sizes.kept}),
            (device, {"block_tables": TABLE_ENTRY_BYTES}, {"block_tables": sizes.passes * device_blocks}),
            (
                pinned,
                host_expert_bytes(spec),
                dict.fromkeys(host_expert_bytes(spec), sizes.passes * sizes.host_experts),
            ),
        )
        for tier, bytes_per_token, tokens in groups:
            for name, nbytes in bytes_per_token.items():
                label = f"micro-batches' {name.replace('_', ' ')}"
                self._roots[name] = tier.reserve(label, tokens[name] * nbytes, backed=name not in UNBACKED)
                self._bytes[name] = nbytes
        self._turn_names = (*attention_bytes(spec), *host_attention_bytes(spec))
        self._shared_names = tuple(behind)
        self._host_expert_names = tuple(host_expert_bytes(spec))

    def layout(self, sizes: Seq[int], number: int = 0, *, blocks: Seq[int] | None = None) -> list[PooledActivations]:
        """Return buffers for the micro-batches of the pass with this number. `sizes` has the tokens of each
        micro-batch, and `blocks` its blocks of the KV cache on the device; None: no blocks."""
        limits, largest, in_pass = self._sizes, max(sizes), sum(sizes)
        entries = blocks or [0] * len(sizes)
        assert sum(entries) <= self._device_blocks, f"{sum(entries)} blocks on a device of {self._device_blocks}"
        assert largest <= limits.largest, f"a micro-batch of {largest} tokens exceeds {limits.largest}"
        assert in_pass <= limits.in_pass, f"a pass of {in_pass} tokens exceeds {limits.in_pass}"
        is_kept = in_pass > limits.hidden
        assert not is_kept or in_pass <= limits.kept, f"hidden states of {in_pass} tokens fit neither device nor host"
        around = self._shared_buffers(largest, min(limits.in_attention, len(sizes) * largest))
        turn = number % limits.passes
        first_hidden, first_kept = turn * limits.hidden, turn * limits.kept
        hidden = self._in_turns(("hidden",), largest, limits.hidden, first_hidden) if is_kept else None
        host_names = self._host_expert_names if in_pass <= limits.host_experts else ()
        laid_out, start, entry = [], 0, turn * self._device_blocks
        for index, (size, num_entries) in enumerate(zip(sizes, entries, strict=True)):
            own = {name: self._range(name, turn * limits.in_pass + start, size) for name in ("tokens", "sampled")}
            own |= {name: self._range(name, turn * limits.host_experts + start, size) for name in host_names}
            own |= around(index)
            own |= hidden(index) if hidden else {"hidden": self._range("hidden", first_hidden + start, size)}
            has_place = is_kept and "kept_hidden" in self._roots
            kept = self._range("kept_hidden", first_kept + start, size) if has_place else None
            tables = self._range("block_tables", entry, num_entries) if num_entries else None
            laid_out.append(PooledActivations(size, own, kept_hidden=kept, block_tables=tables))
            start, entry = start + size, entry + num_entries
        return laid_out

    def _shared_buffers(self, size: int, capacity: int) -> Callable[[int], dict[str, Buffer]]:
        """Return a function that gives a micro-batch, by its number, the buffers around attention, in turns, and behind
        it."""
        turns, behind = self._in_turns(self._turn_names, size, capacity), self._in_turns(self._shared_names, size, size)
        return lambda index: turns(index) | behind(index)

    def _in_turns(
        self, names: Seq[str], size: int, capacity: int, first: int = 0
    ) -> Callable[[int], dict[str, Buffer]]:
        """Cut as many sets of buffers as fit; return a function from the number of a micro-batch to the set that it
        takes."""
        places = [first + turn * size for turn in range(capacity // size)]
        sets = [{name: self._range(name, place, size) for name in names} for place in places]
        return lambda index: dict(sets[index % len(sets)])

    def _range(self, name: str, first_token: int, num_tokens: int) -> Buffer:
        nbytes = self._bytes[name]
        return self._roots[name].sub(f"from token {first_token}", first_token * nbytes, num_tokens * nbytes)


def _sum(sizes: Mapping[str, int]) -> int:
    return sum(sizes.values())
