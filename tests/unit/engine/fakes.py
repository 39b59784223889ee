"""An engine without a model: real sequences, blocks and loop around a pipeline that invents tokens."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from harness.engine.batch import PassPlan, assemble
from harness.engine.engine import Engine
from harness.engine.in_flight import InFlight
from harness.engine.sequences import Sequence
from harness.engine.strategy import PassResult
from harness.machine.base import CPU, D2H
from harness.machine.shuffled import ShuffledMachine
from harness.memory.kv_cache import BlockAllocator
from harness.model.spec import ModelSpec
from harness.workload.request import Request
from tests.unit.machine.ops import FreeOp, Quick

SPEC = ModelSpec(
    name="fake", family="mixtral", num_layers=3, hidden_dim=64, num_heads=4, num_kv_heads=2, head_dim=16, num_experts=8,
    experts_per_token=2, expert_dim=96, vocab_size=384, max_positions=512, rope_theta=1e6, norm_eps=1e-5,
    dtype="float32",
)  # fmt: skip


class FakeKV:
    """A KV cache whose blocks have no memory behind them."""

    num_device_blocks = 0

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.allocator = BlockAllocator(num_blocks, block_size)
        self.released: list[int] = []

    def release(self, sequence: Sequence) -> None:
        self.released.append(sequence.request.request_id)
        self.allocator.release(sequence)


def sequences(*prompt_and_new: tuple[int, int]) -> list[Sequence]:
    return [
        Sequence(Request(request_id=i, prompt_ids=(5,) * prompt, max_new_tokens=new, text=None))
        for i, (prompt, new) in enumerate(prompt_and_new)
    ]


def engine(work: list[Sequence], *, num_blocks: int = 20, block_size: int = 4, eos: int | None = None) -> Engine:
    machine = ShuffledMachine(capacities_bytes={"device": 1 << 24, "pinned": 1 << 24}, seed=0, eager=0.0)
    kv = FakeKV(num_blocks, block_size)
    parts = {"store": SimpleNamespace(layer_bytes=1000), "resident": None}
    return Engine(machine=machine, spec=SPEC, family=None, kv=kv, sequences=work, eos_token_id=eos, **parts)  # type: ignore[arg-type]


class Touch(FreeOp):
    """Stands for an op that uses the KV blocks of a micro-batch: they must be held while it runs."""

    kind = "touch"

    def __init__(self, held: list[Sequence]) -> None:
        self.held = held

    def run(self, ctx, packet):
        assert all(s.blocks for s in self.held), "blocks were freed before the last op that touches them"


class FakePipeline:
    """A pipeline whose token of request r in pass n is r + 10 n."""

    def __init__(self, on: Engine) -> None:
        self.engine, self.passes, self.finished = on, 0, False

    def run(self, plan: PassPlan) -> PassResult:
        batch = assemble(0, plan.prefill, plan.decode, self.engine.kv.allocator)
        it, machine = InFlight(batch, acts=None), self.engine.machine  # type: ignore[arg-type]
        it.tickets.kv.append(machine.submit(CPU, Touch(plan.sequences)))
        tokens = np.asarray([s.request.request_id + 10 * self.passes for s in plan.sequences])
        it.tickets.sampled = machine.submit(D2H, Quick(tokens))
        self.passes += 1
        return PassResult([it])

    def finish(self) -> None:
        self.finished = True
