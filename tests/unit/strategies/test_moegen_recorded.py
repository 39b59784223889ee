"""A search for a policy records dozens of passes; what recording them has made does not pile up."""

from __future__ import annotations

import gc
import weakref

from strategies.moegen import recorded
from strategies.moegen.planner import Deployment, complete_by_memory
from strategies.moegen.policy import GivenPolicy
from tests.unit.strategies.test_moegen_search import SMALL, engine_of, record_of


def test_a_recorded_pass_is_gone_with_its_graph(monkeypatch):
    """Without a search for cycles, which engine and machine are in."""
    made, machine = [], recorded.RecordingMachine

    def noted(**arguments):
        made.append(weakref.ref(found := machine(**arguments)))
        return found

    engine = engine_of("model.spec.num_layers=3")
    deployment = Deployment.of(engine)
    policy = complete_by_memory(GivenPolicy(**SMALL), deployment)
    recorded._store.cache_clear()  # it has a machine of its own, which stays
    record_of(engine, deployment, policy, True)
    monkeypatch.setattr(recorded, "RecordingMachine", noted)
    gc.collect()
    gc.disable()
    try:
        found = record_of(engine, deployment, policy, True)
        assert len(found.graph) > 20 and len(made) == 1
        del found
        assert made[0]() is None
    finally:
        gc.enable()


def test_plans_of_one_batch_share_its_sequences():
    """Each has the partitions of its own micro-batches all the same."""
    batch = recorded.Batch(num_sequences=6, tokens=20, decodes=True)
    halves, thirds = (recorded._plan(batch, size, 0, 16) for size in (3, 2))
    assert halves.decode == thirds.decode and len(halves.decode) == 6
    assert [each.partitions for each in halves.assembled] == [(0,), (1,)]
    assert [each.partitions for each in thirds.assembled] == [(0,), (1,), (2,)]
    blocks = [block for sequence in halves.decode for block in sequence.blocks]
    assert blocks == list(range(12)), "21 tokens each, in blocks of 16"
