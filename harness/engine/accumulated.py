"""A batch whose tokens accumulate in host memory, so that an expert sees the tokens of many micro-batches at once.

MoE-Gen calls this module-based batching: attention runs in small micro-batches, and an expert, which is fetched once,
runs over all of its tokens in slices of its own size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from harness.engine.emitter import Emitter
from harness.engine.engine import Engine
from harness.engine.in_flight import InFlight
from harness.engine.ops.expert_rows import (
    AddWeighted,
    ClearSums,
    Gather,
    LoadExpertSums,
    LoadRows,
    OffloadResults,
    OffloadRows,
)
from harness.engine.ops.experts import Expert
from harness.machine.base import CPU, D2H, GPU, H2D, Ticket
from harness.memory.placed import PlacedPart
from harness.memory.tiers import DEVICE, PINNED, Buffer
from harness.memory.transfers import Poison


@dataclass(frozen=True, slots=True, eq=False)
class _Staging:
    """A slice of an expert's tokens is staged here on its way to the device and back. Rows [slice, hidden] in the
    model's dtype and results in float32 are pinned and on the device."""

    pinned_rows: Buffer
    rows: Buffer
    results: Buffer
    pinned_results: Buffer


class AccumulatedBatch:
    """Pinned memory for the normed hidden states of `max_tokens` tokens and for their experts' sums.

    In a layer, `begin`, then `add` each micro-batch behind its router; run experts by `expert` or `expert_on_host`;
    then `take_sums` for each micro-batch, and `combine` adds them to the residual stream. Rows are numbered from 0 in
    the order of `add`. Slices of at most `slice_tokens` go round through `num_stagings` sets of buffers. It is for an
    engine of one GPU, the first of the machine. AssertionError where several GPUs share the model.
    """

    def __init__(
        self, engine: Engine, emit: Emitter, *, max_tokens: int, slice_tokens: int, num_stagings: int = 2
    ) -> None:
        assert not engine.rank and not engine.peers, "tokens accumulate for one GPU, the machine's first"
        self._spec, self._family, self._emit = engine.spec, engine.family, emit
        self.max_tokens, self.slice_tokens, self.num_tokens = max_tokens, slice_tokens, 0
        self._layer, self._turn, self._poisons = 0, 0, engine.machine.poisons
        device, pinned = engine.machine.tiers[DEVICE], engine.machine.tiers[PINNED]
        self._row_bytes, self._sum_bytes = self._spec.hidden_dim * self._spec.dtype_bytes, self._spec.hidden_dim * 4
        self._rows = pinned.reserve("accumulated rows", max_tokens * self._row_bytes)
        self._sums = pinned.reserve("accumulated sums", max_tokens * self._sum_bytes)
        self._stagings = [
            _Staging(
                pinned.reserve(f"expert rows to load {turn}", slice_tokens * self._row_bytes),
                device.reserve(f"expert rows {turn}", slice_tokens * self._row_bytes),
                device.reserve(f"expert results {turn}", slice_tokens * self._sum_bytes),
                pinned.reserve(f"expert results to add {turn}", slice_tokens * self._sum_bytes),
            )
            for turn in range(num_stagings)
        ]

    def begin(self, layer: int, num_tokens: int) -> Ticket:
        """Expect `num_tokens` tokens in all, and set their sums to 0; the ticket is of the latter."""
        assert num_tokens <= self.max_tokens, f"{num_tokens} tokens do not fit {self.max_tokens}"
        self._layer, self.num_tokens = layer, 0
        if self._poisons:
            for buffer in (self._rows, self._sums):
                self._emit.submit(GPU, Poison(buffer))
        return self._emit.submit(CPU, ClearSums(self._spec, self._sums, num_tokens, layer))

    def add(self, it: InFlight) -> tuple[range, list[Ticket]]:
        """Bring a micro-batch's rows, which its router has seen, to host memory.

        The outputs that all tokens get are added to the residual stream, so that the sums may take their place. Returns
        the rows' numbers, and the tickets of that sum, where the layer has such outputs, and of the copy.
        """
        n = it.batch.num_tokens
        rows = range(self.num_tokens, self.num_tokens + n)
        self.num_tokens = rows.stop
        common = self._emit.add_common(it, self._layer)
        op = OffloadRows(self._spec, it.acts.normed, self._part(self._rows, rows), n, self._layer)
        copied = self._emit.submit(D2H, op)
        return rows, [common, copied] if common else [copied]

    def expert(self, part: PlacedPart, tokens: np.ndarray, weights: np.ndarray) -> list[Ticket]:
        """Run an expert that lies on the device over rows `tokens` (int64), slice by slice; `weights` (float32) are the
        router's. Returns the tickets of the runs; once they are done, the expert's memory may be reused."""
        return [
            self._slice(part, tokens[at : at + self.slice_tokens], weights[at : at + self.slice_tokens])
            for at in range(0, len(tokens), self.slice_tokens)
        ]

    def _slice(self, part: PlacedPart, tokens: np.ndarray, weights: np.ndarray) -> Ticket:
        """Submit the ops of one slice. Gathering is urgent, because the sums of the slice before it wait for the
        device."""
        spec, emit, layer, n = self._spec, self._emit, self._layer, len(tokens)
        staging = self._stagings[self._turn % len(self._stagings)]
        self._turn += 1
        emit.submit(CPU, Gather(spec, self._rows, staging.pinned_rows, tokens, layer), urgent=True)
        emit.submit(H2D, LoadRows(spec, staging.pinned_rows, staging.rows, n, layer), urgent=True)
        ran = emit.submit(GPU, Expert(self._family, spec, part, staging.rows, staging.results, n, layer=layer))
        emit.submit(D2H, OffloadResults(spec, staging.results, staging.pinned_results, n, layer))
        emit.submit(CPU, AddWeighted(spec, staging.pinned_results, self._sums, tokens, weights, layer))
        return ran

    def expert_on_host(self, part: PlacedPart, tokens: np.ndarray, weights: np.ndarray) -> Ticket:
        """Run an expert that lies in host memory over rows `tokens`, by the CPU, in place."""
        op = Expert(
            self._family, self._spec, part, self._rows, self._sums, len(tokens),
            layer=self._layer, tokens=tokens, weights=weights, on_host=True,
        )  # fmt: skip
        return self._emit.submit(CPU, op)

    def take_sums(self, it: InFlight, rows: range) -> Ticket:
        """Bring the sums of a micro-batch, whose rows are `rows`, to its `moe_out`."""
        op = LoadExpertSums(self._spec, self._part(self._sums, rows), it.room_for_sums(), len(rows), self._layer)
        return self._emit.submit(H2D, op, urgent=True)

    def _part(self, buffer: Buffer, rows: range) -> Buffer:
        row_bytes = buffer.nbytes // self.max_tokens
        return buffer.sub(f"from row {rows.start}", rows.start * row_bytes, len(rows) * row_bytes)
