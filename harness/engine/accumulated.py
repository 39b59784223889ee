"""A batch whose tokens accumulate in host memory, so that an expert sees the tokens of many micro-batches at once.

MoE-Gen calls this module-based batching: attention runs in small micro-batches, and an expert, which is fetched once,
runs over all of its tokens in slices of its own size.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from harness.machine.base import CPU, D2H, GPU, H2D, Machine, Ticket
from harness.memory.placed import PlacedPart
from harness.memory.tiers import DEVICE, PINNED, Buffer
from harness.memory.transfers import Poison, poison_lane
from harness.model.spec import ModelSpec


@dataclass(frozen=True, slots=True, eq=False)
class Staging:
    """A slice of an expert's tokens is staged here on its way to the device and back. Rows [slice, hidden] in the
    model's dtype and results in float32 are pinned and on the device."""

    pinned_rows: Buffer
    rows: Buffer
    results: Buffer
    pinned_results: Buffer


@dataclass(frozen=True, eq=False)
class AccumulatedMemory:
    """The memory of an accumulated batch: pinned rows [tokens, hidden] in the model's dtype with their sums in float32,
    and one staging or more."""

    rows: Buffer
    sums: Buffer
    stagings: Sequence[Staging]

    @classmethod
    def reserve(
        cls, machine: Machine, spec: ModelSpec, *, max_tokens: int, slice_tokens: int, num_stagings: int = 2
    ) -> AccumulatedMemory:
        """Reserve memory for `max_tokens` tokens and for slices of `slice_tokens`."""
        device, pinned = machine.tiers[DEVICE], machine.tiers[PINNED]
        row_bytes, sum_bytes = spec.hidden_dim * spec.dtype_bytes, spec.hidden_dim * 4
        return cls(
            pinned.reserve("accumulated rows", max_tokens * row_bytes),
            pinned.reserve("accumulated sums", max_tokens * sum_bytes),
            [
                Staging(
                    pinned.reserve(f"expert rows to load {turn}", slice_tokens * row_bytes),
                    device.reserve(f"expert rows {turn}", slice_tokens * row_bytes),
                    device.reserve(f"expert results {turn}", slice_tokens * sum_bytes),
                    pinned.reserve(f"expert results to add {turn}", slice_tokens * sum_bytes),
                )
                for turn in range(num_stagings)
            ],
        )


class AccumulatedBatch:
    """Collects the normed hidden states of many tokens in pinned memory, and their experts' sums.

    In a layer, `begin`, then `add` each micro-batch behind its router; then `begin_experts`, and run them by `expert`;
    then `take_sums` for each micro-batch, and `combine` adds them to the residual stream. Rows are numbered from 0 in
    the order of `add`. Slices of an expert's tokens go round through the stagings. It is for an engine of one GPU, the
    first of the machine. AssertionError where several GPUs share the model.
    """

    def __init__(self, engine: Engine, emit: Emitter, memory: AccumulatedMemory) -> None:
        _require_one_gpu(engine)
        self._spec, self._family, self._emit = engine.spec, engine.family, emit
        self._row_bytes, self._sum_bytes = self._spec.hidden_dim * self._spec.dtype_bytes, self._spec.hidden_dim * 4
        self._rows, self._sums, self._stagings = memory.rows, memory.sums, memory.stagings
        self.max_tokens, self.num_tokens = memory.rows.nbytes // self._row_bytes, 0
        self.slice_tokens = memory.stagings[0].rows.nbytes // self._row_bytes
        self._layer, self._turn, self._poisons = 0, 0, engine.machine.poisons

    def begin(self, layer: int) -> None:
        """Begin a layer: its rows take the place of those of the layer before."""
        self._layer, self.num_tokens = layer, 0
        if self._poisons:
            self._emit.submit(poison_lane(self._rows, GPU), Poison(self._rows))

    def begin_experts(self) -> Ticket:
        """Set the sums of all rows to 0, once nobody will take those of the layer before; returns the op's ticket."""
        if self._poisons:
            self._emit.submit(poison_lane(self._sums, GPU), Poison(self._sums))
        return self._emit.submit(CPU, ClearSums(self._spec, self._sums, self.num_tokens, self._layer))

    def add(self, it: InFlight) -> tuple[range, list[Ticket]]:
        """Bring a micro-batch's rows, which its router has seen, to host memory.

        The outputs that all tokens get are added to the residual stream, so that the sums may take their place. Returns
        the rows' numbers, and the tickets of that sum, where the layer has such outputs, and of the copy.
        """
        n = it.batch.num_tokens
        rows = range(self.num_tokens, self.num_tokens + n)
        assert rows.stop <= self.max_tokens, f"{rows.stop} tokens do not fit {self.max_tokens}"
        self.num_tokens = rows.stop
        common = self._emit.add_common(it, self._layer)
        part = _rows_of(self._rows, rows, self._row_bytes)
        op = OffloadRows(self._spec, it.acts.normed, part, n, self._layer)
        copied = self._emit.submit(D2H, op)
        return rows, [common, copied] if common else [copied]

    def expert(self, part: PlacedPart, tokens: np.ndarray, weights: np.ndarray) -> list[Ticket]:
        """Run an expert that lies on the device over rows `tokens` (int64), slice by slice; `weights` (float32) are the
        router's. Where no tensors exist, only their number counts. Returns the tickets of the runs; once they are done,
        the expert's memory may be reused."""
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

    def take_sums(self, it: InFlight, rows: range) -> Ticket:
        """Bring the sums of a micro-batch, whose rows are `rows`, to its `moe_out`."""
        source = _rows_of(self._sums, rows, self._sum_bytes)
        op = LoadExpertSums(self._spec, source, it.room_for_sums(), len(rows), self._layer)
        return self._emit.submit(H2D, op, urgent=True)


class AccumulatedOnDevice:
    """Collects the tokens of many micro-batches as `AccumulatedBatch` does, where device memory has room for all.

    The micro-batches' `normed` and `moe_out` are parts of the buffers `rows` and `sums`, and rows are numbered by their
    place in them. So experts add to `moe_out` where it lies, and no row moves.
    """

    def __init__(self, engine: Engine, emit: Emitter, *, rows: Buffer, sums: Buffer, slice_tokens: int) -> None:
        _require_one_gpu(engine)
        self._spec, self._family, self._emit = engine.spec, engine.family, emit
        self._rows, self._sums, self.slice_tokens, self._layer = rows, sums, slice_tokens, 0

    def begin(self, layer: int) -> None:
        self._layer = layer

    def begin_experts(self) -> None:
        """Do nothing: the router has set each row's sum to what all tokens get."""

    def add(self, it: InFlight) -> tuple[range, list[Ticket]]:
        """Return the numbers of a micro-batch's rows, as `AccumulatedBatch.add` does; nothing is submitted."""
        row_bytes = self._spec.hidden_dim * self._spec.dtype_bytes
        first = (it.acts.normed.offset_bytes - self._rows.offset_bytes) // row_bytes
        return range(first, first + it.batch.num_tokens), []

    def expert(self, part: PlacedPart, tokens: np.ndarray, weights: np.ndarray) -> list[Ticket]:
        """Run an expert over rows `tokens`, slice by slice, and return the tickets as `AccumulatedBatch.expert`
        does."""
        return [
            self._slice(part, tokens[at : at + self.slice_tokens], weights[at : at + self.slice_tokens])
            for at in range(0, len(tokens), self.slice_tokens)
        ]

    def _slice(self, part: PlacedPart, tokens: np.ndarray, weights: np.ndarray) -> Ticket:
        op = Expert(
            self._family, self._spec, part, self._rows, self._sums, len(tokens),
            layer=self._layer, tokens=tokens, weights=weights,
        )  # fmt: skip
        return self._emit.submit(GPU, op)

    def take_sums(self, it: InFlight, rows: range) -> None:
        """Do nothing: the sums of a micro-batch are in its `moe_out`."""


def _require_one_gpu(engine: Engine) -> None:
    assert not engine.rank and not engine.peers, "tokens accumulate for one GPU, the machine's first"


def _rows_of(buffer: Buffer, rows: range, row_bytes: int) -> Buffer:
    return buffer.sub(f"from row {rows.start}", rows.start * row_bytes, len(rows) * row_bytes)
