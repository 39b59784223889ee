"""Cut a phase's memory into the buffers of its micro-batches and of its accumulated batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache

from harness.engine.activation_pool import PooledActivations
from harness.engine.activations import attention_bytes, expert_row_bytes, host_attention_bytes, state_bytes
from harness.memory.tiers import Buffer
from harness.model.spec import ModelSpec
from strategies.moegen.memory import NUM_STAGINGS, NUM_TURNS, PhaseSizes, aligned, moved_to_host

_WHOLE = ("tokens", "hidden", "sampled", "normed", "expert_ids", "expert_weights", "moe_out")


class PhaseBuffers:
    """The buffers of one phase, cut out of memory that the other phase cuts too.

    Where tokens accumulate on the device, `rows` (normed hidden states) and `sums` are those of all rows, and each
    micro-batch has its own part of them; micro-batches take the buffers around attention in turns. Where they
    accumulate in pinned memory, micro-batches take all device buffers in turns, and their hidden states wait there.
    """

    def __init__(
        self, spec: ModelSpec, sizes: PhaseSizes, *, device: Buffer, pinned: Buffer, workspace: Buffer, name: str
    ) -> None:
        self.sizes, self._spec, self._workspace, self._name = sizes, spec, workspace, name
        self._cut = dict(self._cut_up(device, sizes.device(spec))) | dict(self._cut_up(pinned, sizes.pinned(spec)))
        self._none = pinned.sub(f"{name} nothing", 0, 0)
        self._row_bytes: Mapping[str, int] = {
            **state_bytes(spec), **attention_bytes(spec), **expert_row_bytes(spec), **host_attention_bytes(spec),
            "kept hidden": spec.hidden_dim * spec.dtype_bytes,
        }  # fmt: skip
        self.micro_batch = cache(self._micro_batch)  # equal ones have equal keys, until sequences end

    def _cut_up(self, root: Buffer, sizes: Mapping[str, int]) -> Iterator[tuple[str, Buffer]]:
        offset_bytes = 0
        for name, nbytes in sizes.items():
            yield name, root.sub(f"{self._name} {name}", offset_bytes, nbytes)
            offset_bytes += aligned(nbytes)

    def __getitem__(self, name: str) -> Buffer:
        """Return a whole buffer by its name in `PhaseSizes`."""
        return self._cut[name]

    @property
    def kv_staging(self) -> list[Buffer]:
        return [self._cut[f"kv/{turn}"] for turn in range(NUM_STAGINGS)] if self.sizes.kv_tokens else []

    def _micro_batch(self, number: int, first_row: int, num_rows: int, *, on_cpu: bool = False) -> PooledActivations:
        """Return the buffers of micro-batch `number`, which has `num_rows` rows of the batch from `first_row` on.

        With `on_cpu` it has rows of its own in pinned memory, where its queries wait for the CPU.
        """
        turn, on_device = number % NUM_TURNS[self.sizes.on_device], self.sizes.on_device
        found = {name: self._cut[f"{name}/{turn}"] for name in attention_bytes(self._spec)}
        for name in _WHOLE:
            found[name] = self._rows(name, first_row, num_rows) if on_device else self._cut[f"{name}/{turn}"]
        for name in host_attention_bytes(self._spec):
            if on_cpu:
                found[name] = self._rows(name, first_row, num_rows)
            elif name in moved_to_host(self._spec):
                found[name] = self._cut[f"{name}/{turn}"]
            else:
                found[name] = self._none
        found["workspace"] = self._workspace
        kept = None if on_device else self._rows("kept hidden", first_row, num_rows)
        return PooledActivations(num_rows, found, kept_hidden=kept, block_tables=None)

    def _rows(self, name: str, first_row: int, num_rows: int) -> Buffer:
        nbytes = self._row_bytes[name]
        return self._cut[name].sub(f"from row {first_row}", first_row * nbytes, num_rows * nbytes)
