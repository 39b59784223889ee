"""Hold a micro-batch on its way through the layers, with the tickets that the loop waits for. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from harness.engine.activations import Activations
from harness.engine.batch import MicroBatch
from harness.machine.base import Ticket
from harness.memory.tiers import Buffer


@dataclass(eq=False, slots=True)
class PassTickets:
    """The emitter notes here the tickets of a micro-batch in one pass that the loop must know."""

    kv: list[Ticket] = field(default_factory=list)  # ops that touch the KV blocks of its sequences, on whichever GPU
    routing: dict[int, Ticket] = field(default_factory=dict)  # by layer, where routing is recorded
    sampled: Ticket | None = None  # its value: token ids, int64 [sequences]; None before the head was submitted


@dataclass(eq=False, slots=True)
class InFlight:
    """A micro-batch in its activation buffers for one pass. The emitter notes in `tickets` what it submits for it.

    `gpu` is the number of the GPU whose buffers these are, among those of the emitter. Where several GPUs have a
    micro-batch, `gpus` has an entry for each of them, and this one, made of the first, stands for all in the emitter's
    steps. `owes_sums` says whether `moe_out` holds something that is not yet in the residual stream.
    """

    batch: MicroBatch
    acts: Activations
    tickets: PassTickets = field(default_factory=PassTickets)
    gpu: int = 0
    gpus: tuple[InFlight, ...] = ()
    owes_sums: bool = True

    @classmethod
    def shared(cls, batch: MicroBatch, acts: Seq[Activations], tickets: PassTickets | None = None) -> InFlight:
        """Return a micro-batch that all GPUs share, each with its part of every layer and with its own buffers."""
        tickets = tickets or PassTickets()
        return cls.together([cls(batch, each, tickets, gpu) for gpu, each in enumerate(acts)])

    @classmethod
    def together(cls, gpus: Seq[InFlight]) -> InFlight:
        """Return an object that stands for several GPUs, each of which has whole layers and a micro-batch of its
        own."""
        first = gpus[0]
        return first if len(gpus) == 1 else cls(first.batch, first.acts, first.tickets, first.gpu, tuple(gpus))

    def room_for_sums(self) -> Buffer:
        """Return `moe_out`, to be overwritten by sums of the host. The residual stream must already have what it
        holds."""
        assert not self.owes_sums, "`moe_out` holds sums that nobody has combined: the host's need another buffer"
        self.owes_sums = True
        return self.acts.moe_out

    @property
    def is_shared(self) -> bool:
        """True if several GPUs have the same micro-batch, so that their partial results have to be added up."""
        return bool(self.gpus) and self.gpus[1].batch is self.batch
