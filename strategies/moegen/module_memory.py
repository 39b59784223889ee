"""Note the device memory that a layer's modules take at their peak while they are profiled.

Of each kind of op that is the buffers that it reads and writes, which were reserved, and its temporaries: those that
the device tells, and those that plans count.
"""

from __future__ import annotations

from math import ceil
from typing import Any

from harness.engine.ops.compute import Head
from harness.engine.ops.experts import Expert
from harness.engine.temporaries import dense_workspace_bytes, expert_workspace_bytes
from harness.machine.base import GPU, Lane, Machine, Op
from harness.memory.tiers import DEVICE, Buffer
from harness.model.spec import ModelSpec
from strategies.moegen.memory import Temporaries

_EXPERT, _HEAD = Expert.kind, Head.kind


class ModuleMemory:
    """Notes what ops took for the largest micro-batch in which they ran, by kind."""

    def __init__(self, machine: Machine, spec: ModelSpec) -> None:
        self._machine = machine
        self._counted = {_EXPERT: expert_workspace_bytes(spec, machine.gpu_kernels)}
        self._counted_of_others = dense_workspace_bytes(spec, machine.gpu_kernels)
        self._noted: dict[str, tuple[int, int, int | None]] = {}  # rows, bytes of buffers and of temporaries
        machine.peak_temporaries_bytes()  # what was before does not count

    def note(self, lane: Lane, op: Op, num_rows: int) -> None:
        """Take note of an op over so many rows, which alone has run since the last one."""
        temporaries_bytes = self._machine.peak_temporaries_bytes()
        if lane == GPU:
            keys = {key[0] if isinstance(key, tuple) else key for key in (*op.reads, *op.writes)}
            buffers_bytes = sum(key.nbytes for key in keys if isinstance(key, Buffer) and key.tier == DEVICE)
            found = (num_rows, buffers_bytes, temporaries_bytes)
            self._noted[op.kind] = max(
                self._noted.get(op.kind, found), found, key=lambda of: (of[0], of[2] or 0, of[1])
            )

    @property
    def temporaries(self) -> Temporaries:
        """The temporaries of a row that the device told."""
        rows = {kind: ceil(found / rows) for kind, (rows, _, found) in self._noted.items() if found is not None}
        others = [nbytes for kind, nbytes in rows.items() if kind not in (_EXPERT, _HEAD)]
        return Temporaries(of_experts=rows.get(_EXPERT, 0), of_others=max(others, default=0))

    def as_record(self) -> dict[str, Any]:
        """Return the bytes by kind of op; `temporaries_bytes` are null where no device tells them. The head has no
        counted ones: it takes the room that there is."""
        return {
            kind: {
                "rows": rows,
                "buffers_bytes": buffers_bytes,
                "temporaries_bytes": temporaries_bytes,
                "counted_temporaries_bytes": None
                if kind == _HEAD
                else rows * self._counted.get(kind, self._counted_of_others),
            }
            for kind, (rows, buffers_bytes, temporaries_bytes) in sorted(self._noted.items())
        }
