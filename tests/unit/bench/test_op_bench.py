"""The bench of ops on a virtual clock whose costs are known: what it finds must be those."""

from __future__ import annotations

from contextlib import closing, contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.bench.op_bench import OpBench
from harness.bench.shapes import Shape
from harness.engine.activations import Activations
from harness.machine.base import CPU, GPU, Work
from harness.machine.simulated import SimulatedMachine
from harness.memory.weights import WeightStream
from tests.contract.running import CAPACITIES_BYTES, engine_on

GPU_S, LINK_BYTES_S = 0.25, 1e6


class KnownCosts:
    """An op on the gpu lane takes longer the first time, and one on a link its bytes; others are free."""

    def __init__(self) -> None:
        self.seen = set()

    def seconds(self, lane, op, work) -> float:
        if lane != GPU:
            return work.link_bytes / LINK_BYTES_S
        first = op.kind not in self.seen
        self.seen.add(op.kind)
        return GPU_S * (10 if first else 1)


@pytest.fixture
def bench(tiny):
    machine = SimulatedMachine(
        capacities_bytes=CAPACITIES_BYTES, costs=KnownCosts(), host_bytes_s=1e15,
        world=SimpleNamespace(expert_counts=lambda batch, layer: None),
    )  # fmt: skip
    engine = engine_on(machine, tiny, [], kv_blocks=60)
    stream = WeightStream(machine, engine.store, depth=2, packet_bytes=10**6)
    acts = Activations(machine, engine.spec, max_tokens=200, name="acts")
    with closing(stream), closing(acts):
        stream.request_layer(0)
        yield OpBench(engine, stream, [acts])


@given(st.integers(1, 500), st.integers(1, 200))
def test_prompts_have_all_the_tokens(num_tokens, length):
    prompts = Shape.of_prompts(num_tokens, length).prompts
    assert sum(prompts) == num_tokens
    assert set(prompts[:-1]) <= {length} and 0 < prompts[-1] <= length


def test_a_batch_has_the_shape_that_was_asked_for(bench):
    shape = Shape(prompts=(7, 30), contexts=(5, 1, 40))
    batch = bench.batch(shape, bench.engine.kv.allocator)
    assert (batch.num_tokens, batch.prefill_lens) == (shape.num_tokens, shape.prompts) == (40, (7, 30))
    assert batch.on_host.read_lens.tolist() == [5, 1, 40]
    assert len({*batch.request_ids.tolist()}) == 5 and max(batch.request_ids) < 0
    assert len(set(batch.slots.tolist())) == 40, "two tokens share a place"


def test_ops_are_timed_without_the_first_ones(bench):
    it = bench.place(bench.batch(Shape(prompts=(20,))))
    bench.emit.embed(it)
    timed = bench.timed(lambda: bench.layer(it, 0), 3)
    assert timed.times_s == pytest.approx([5 * GPU_S] * 3)
    assert bench.timed(lambda: bench.layer(it, 0, attends=False), 1).shortest_s == pytest.approx(4 * GPU_S)
    ops = bench.layer(it, 0)
    assert timed.work == pytest.approx(Work(*np.sum([ticket.op.work() for ticket in ops], axis=0)))
    assert [t.op.kind for t in ops] == ["attention in", "prefill attention", "attention out", "experts", "combine"]


def test_each_round_has_company_of_its_own(bench):
    it, company = bench.place(bench.batch(Shape(prompts=(20,)))), []
    bench.emit.embed(it)

    @contextmanager
    def beside():
        company.append("begins")
        yield
        company.append("ends")

    timed = bench.timed(lambda: bench.layer(it, 0), 2, warm_ups=0, rounds=3, beside=beside)
    assert company == ["begins", "ends"] * 3
    assert len(timed.times_s) == 6
    assert timed.times_s[0] > timed.median_s == pytest.approx(timed.shortest_s) == pytest.approx(5 * GPU_S)


def test_what_is_attended_to_was_written_and_its_blocks_are_given_back(bench):
    kv = bench.engine.kv.allocator
    with bench.cached(Shape(contexts=(9, 20)), 0) as it:
        assert kv.num_used == kv.blocks_for(9) + kv.blocks_for(20)
        bench.engine.machine.drain()
        (written,) = [s.work for s in bench.engine.machine.spans if s.lane == CPU]
        assert it.batch.on_host.read_lens.tolist() == [9, 20]
        assert written.host_bytes >= 29 * bench.engine.spec.kv_bytes_per_token_layer
    assert kv.num_used == 0
