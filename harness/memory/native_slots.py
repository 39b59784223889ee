"""Bring experts as a framework does that is asked tensor by tensor: from pageable memory, staged, one op for each."""

from __future__ import annotations

from harness.machine.base import PIN, Machine
from harness.memory.expert_slots import ExpertSlots, Replacement, expert_slot_bytes
from harness.memory.placed import PlacedPart
from harness.memory.tiers import PINNED, Buffer
from harness.memory.transfers import CopyPage, StagePage
from harness.memory.weights import WeightStore
from harness.model.layout import PartLayout


class NativeExpertSlots(ExpertSlots):
    """Brings experts from pageable memory to slots. Each of an expert's tensors is first copied to a pinned
    buffer, by the pin lane, and then to the device, in one packet. What is on its way is never taken back."""

    withdrawable = False

    def __init__(
        self, machine: Machine, store: WeightStore, *, staging: Buffer, num_slots: int, replacement: Replacement,
        name: str = "expert slots",
    ) -> None:  # fmt: skip
        nbytes = expert_slot_bytes(store)
        assert staging.nbytes >= nbytes, "an expert is staged as a whole"
        super().__init__(machine, store, num_slots=num_slots, packet_bytes=nbytes, replacement=replacement, name=name)
        self._machine, self._staging = machine, staging
        self._cuts: dict[tuple[Buffer, int, int], Buffer] = {}

    def _bring(self, key: tuple[int, int], source: PlacedPart, target: Buffer, *, urgent: bool) -> None:
        for start, size in _tensors(source.layout):
            stored, staged, there = (self._cut(b, start, size) for b in (source.buffer, self._staging, target))
            layer = key[0]
            self._places.bring(key, PIN, StagePage(stored, staged, nbytes=size, layer=layer, packet_bytes=size))
            copy = CopyPage(staged, there, nbytes=size, layer=layer, packet_bytes=size)
            self._places.bring(key, self._h2d, copy, urgent=urgent)

    def _cut(self, buffer: Buffer, start: int, size: int) -> Buffer:
        """Return the place of a tensor, the same buffer every time. Machines compare the bytes of a new one with those
        of all that are in use."""
        if (cut := self._cuts.get((buffer, start, size))) is None:
            cut = self._cuts[buffer, start, size] = buffer.sub(f"tensor at {start}", start, size)
        return cut


def _tensors(layout: PartLayout) -> list[tuple[int, int]]:
    """Return where each tensor begins, and its bytes. Where only an expert's size is planned, it is gate, up and down,
    equally large."""
    if layout.tensors:
        return [(tensor.offset_bytes, tensor.nbytes) for tensor in layout.tensors]
    third = -(-layout.nbytes // 3)
    return [(start, min(third, layout.nbytes - start)) for start in range(0, layout.nbytes, third)]


def staging_buffer(machine: Machine, store: WeightStore) -> Buffer:
    """Reserve the pinned memory through which experts go, one at a time."""
    return machine.tiers[PINNED].reserve("staging of experts", expert_slot_bytes(store))
