"""A micro-batch on its way through the layers, and the tickets that the loop waits for before it ends. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field

from harness.engine.activations import Activations
from harness.engine.batch import MicroBatch
from harness.machine.base import Ticket


@dataclass(eq=False, slots=True)
class PassTickets:
    """What the emitter has submitted for a micro-batch in one pass, as far as the loop must know it."""

    kv: list[Ticket] = field(default_factory=list)  # ops that touch the KV blocks of its sequences, on whichever GPU
    routing: dict[int, Ticket] = field(default_factory=dict)  # by layer, where routing is recorded
    sampled: Ticket | None = None  # its value: token ids, int64 [sequences]; None before the head was submitted


@dataclass(eq=False, slots=True)
class InFlight:
    """A micro-batch in its activation buffers for one pass. The emitter notes in `tickets` what it submits for it."""

    batch: MicroBatch
    acts: Activations
    tickets: PassTickets = field(default_factory=PassTickets)
