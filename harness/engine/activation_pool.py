"""Device and pinned memory for many micro-batches that are in the model at the same time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from harness.engine.activations import (
    UNBACKED,
    Activations,
    attention_bytes,
    expert_bytes,
    host_attention_bytes,
    state_bytes,
)
from harness.machine.base import Machine
from harness.memory.tiers import PINNED, Buffer
from harness.model.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class PoolSizes:
    """In tokens. `in_pass`: all micro-batches together; `largest`: of one micro-batch; `in_attention`: those between
    QKV and output projection; `hidden`: whose hidden states the device holds; `kept`: those that pinned memory holds.
    """

    in_pass: int
    largest: int
    in_attention: int
    hidden: int
    kept: int

    def device_bytes(self, spec: ModelSpec) -> int:
        state = dict(state_bytes(spec))
        hidden_bytes = self.hidden * state.pop("hidden")
        attention, expert = _sum(attention_bytes(spec)), _sum(expert_bytes(spec))
        return hidden_bytes + self.in_pass * _sum(state) + self.in_attention * attention + self.largest * expert

    def pinned_bytes(self, spec: ModelSpec) -> int:
        return self.in_attention * _sum(host_attention_bytes(spec)) + self.kept * state_bytes(spec)["hidden"]


class PooledActivations(Activations):
    """One micro-batch's share of a pool. `kept_hidden`: where its hidden states wait in pinned memory between layers;
    None where they stay on the device. There are no block tables: nothing attends over a cache on the device."""

    def __init__(self, max_tokens: int, buffers: Mapping[str, Buffer], kept_hidden: Buffer | None) -> None:
        self.max_tokens, self.block_tables = max_tokens, None
        self.kept_hidden = kept_hidden
        for name, buffer in buffers.items():
            setattr(self, name, buffer)


class ActivationPool:
    """Reserved once, cut anew for each pass. What lives from layer to layer is a micro-batch's own; buffers around
    attention are taken in turns, and those behind it are one for all, since the gpu lane runs one op at a time.

    Passes must not overlap: the last op of one has finished before the next is laid out.
    """

    def __init__(self, machine: Machine, spec: ModelSpec, sizes: PoolSizes) -> None:
        assert sizes.largest <= min(sizes.in_pass, sizes.in_attention, sizes.hidden), f"a micro-batch exceeds {sizes}"
        self._sizes = sizes
        device, pinned = machine.tiers["device"], machine.tiers[PINNED]
        self._bytes: dict[str, int] = {}
        self._roots: dict[str, Buffer] = {}
        counts = {"tokens": sizes.in_pass, "sampled": sizes.in_pass, "hidden": sizes.hidden}
        groups = (
            (device, state_bytes(spec), counts),
            (device, attention_bytes(spec), dict.fromkeys(attention_bytes(spec), sizes.in_attention)),
            (device, expert_bytes(spec), dict.fromkeys(expert_bytes(spec), sizes.largest)),
            (pinned, host_attention_bytes(spec), dict.fromkeys(host_attention_bytes(spec), sizes.in_attention)),
            (pinned, {"kept_hidden": state_bytes(spec)["hidden"]}, {"kept_hidden": sizes.kept}),
        )
        for tier, bytes_per_token, tokens in groups:
            for name, nbytes in bytes_per_token.items():
                label = f"micro-batches' {name.replace('_', ' ')}"
                self._roots[name] = tier.reserve(label, tokens[name] * nbytes, backed=name not in UNBACKED)
                self._bytes[name] = nbytes
        self._turn_names = (*attention_bytes(spec), *host_attention_bytes(spec))
        self._shared_names = tuple(expert_bytes(spec))

    def layout(self, sizes: Seq[int]) -> list[PooledActivations]:
        """Buffers for micro-batches of so many tokens each."""
        limits, largest, in_pass = self._sizes, max(sizes), sum(sizes)
        assert largest <= limits.largest, f"a micro-batch of {largest} tokens exceeds {limits.largest}"
        assert in_pass <= limits.in_pass, f"a pass of {in_pass} tokens exceeds {limits.in_pass}"
        is_kept = in_pass > limits.hidden
        assert not is_kept or in_pass <= limits.kept, f"hidden states of {in_pass} tokens fit neither device nor host"
        turns = self._in_turns(self._turn_names, largest, min(limits.in_attention, len(sizes) * largest))
        shared = {name: self._range(name, 0, largest) for name in self._shared_names}
        hidden = self._in_turns(("hidden",), largest, limits.hidden) if is_kept else None
        laid_out, start = [], 0
        for index, size in enumerate(sizes):
            own = {name: self._range(name, start, size) for name in ("tokens", "sampled")}
            own |= turns(index) | shared
            own |= hidden(index) if hidden else {"hidden": self._range("hidden", start, size)}
            kept = self._range("kept_hidden", start, size) if is_kept else None
            laid_out.append(PooledActivations(size, own, kept))
            start += size
        return laid_out

    def _in_turns(self, names: Seq[str], size: int, capacity: int) -> Callable[[int], dict[str, Buffer]]:
        """As many sets of buffers as fit, by the number of the micro-batch that takes one."""
        sets = [{name: self._range(name, turn * size, size) for name in names} for turn in range(capacity // size)]
        return lambda index: dict(sets[index % len(sets)])

    def _range(self, name: str, first_token: int, num_tokens: int) -> Buffer:
        nbytes = self._bytes[name]
        return self._roots[name].sub(f"from token {first_token}", first_token * nbytes, num_tokens * nbytes)


def _sum(sizes: Mapping[str, int]) -> int:
    return sum(sizes.values())
