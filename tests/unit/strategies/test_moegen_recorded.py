"""A search for a policy records dozens of passes of few layers; what recording them has made does not pile up."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from dataclasses import replace

import pytest

from strategies.moegen import recorded
from strategies.moegen.pass_time import pass_time
from strategies.moegen.planner import Deployment, complete_by_memory
from strategies.moegen.policy import GivenPolicy
from strategies.moegen.recorded import few_layers, record
from strategies.moegen.search import Search
from strategies.moegen.times import _with_experts
from tests.unit.strategies.test_moegen_search import SMALL, engine_of, pipeline_of, prepared, record_of

DENSE_IN_FRONT = ("+model.spec.dense_layers=[0,1,2]", "+model.spec.dense_dim=4096")


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


@pytest.mark.parametrize(("share", "overrides"), [(0.0, ()), (0.5, ()), (0.5, DENSE_IN_FRONT)])
def test_few_layers_tell_the_time_of_all(share, overrides):
    given = GivenPolicy(**SMALL | {"cpu_attention": share}, resident_experts=16 if not overrides else 10)
    engine, search, start, profile = prepared(given, *overrides)
    for batch in (search.prefill_batch(4), search.decode_batch(40)):
        few = search.times.of(start, batch)
        recorded = record(engine, engine.spec, start, search.deployment.shape, batch, pipeline_of)
        whole = pass_time(recorded, profile.costs.seconds, engine.spec)
        assert few.seconds == pytest.approx(whole.seconds, rel=0.03)


@pytest.mark.parametrize("overrides", [(), DENSE_IN_FRONT])
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_experts_behind_those_that_count_may_be_left_out(share, overrides):
    """A pass of the same few layers, in all of which experts run, takes as long, with more ops."""
    given = GivenPolicy(**SMALL | {"cpu_attention": share}, resident_experts=0)
    engine, search, start, profile = prepared(given, *overrides)
    for batch in (search.prefill_batch(4), search.decode_batch(40)):
        passes = []
        few = few_layers(engine.spec, start.dense_slots, batch.num_sequences * batch.tokens_each)
        for layers in (None, few.moe_layers[:-1]):
            args = (engine, few, start, search.deployment.shape, batch, pipeline_of)
            passes.append(record(*args, experts_in=layers))
        num_ops = [Counter(op.layer for op in each.graph.ops if op and op.kind == "experts") for each in passes]
        assert num_ops[0][few.num_layers - 1] > 0 == num_ops[1][few.num_layers - 1]
        whole, fewer = (pass_time(each, profile.costs.seconds, engine.spec) for each in passes)
        assert (fewer.moe_layer_s, fewer.dense_layer_s) == (whole.moe_layer_s, whole.dense_layer_s)
        assert search.times.of(start, batch).seconds == fewer.seconds == pytest.approx(whole.seconds, rel=1e-3)


@pytest.mark.parametrize("overrides", [(), ("hardware.cpu_gb_s=3",), DENSE_IN_FRONT])
def test_policies_that_are_passed_over_are_no_better(overrides, monkeypatch):
    """With more experts on the device a pass takes longer now and then: by 4 % where the CPU is much too slow."""
    _, search, start, _ = prepared(None, *overrides)
    found = search.around(start)
    passed_over = {policy: seconds for policy, seconds in search._known.items() if isinstance(seconds, float)}
    assert passed_over
    for policy, seconds in passed_over.items():
        told_s = search.candidate(policy).request_s
        assert found.best.request_s < seconds <= told_s * 1.05 and found.best.request_s < told_s
    monkeypatch.setattr(Search, "_sooner_s", lambda self, policy: 0.0)
    _, thorough, _, _ = prepared(None, *overrides)
    every = thorough.around(start)
    assert (every.best.policy, every.best.request_s) == (found.best.policy, found.best.request_s)
    assert every.num_recorded > found.num_recorded and every.num_considered == found.num_considered


def test_a_layer_behind_the_last_one_with_experts_has_their_transfer_before_it():
    spec = replace(engine_of().spec, num_layers=4, dense_layers=(3,), dense_dim=4096)
    assert _with_experts(spec) == spec.moe_layers == (0, 1, 2)
    assert _with_experts(replace(spec, num_layers=3, dense_layers=())) == (0, 1)
    assert _with_experts(replace(spec, num_layers=2, dense_layers=())) == (0, 1)


def test_runners_up_are_those_whose_time_is_known():
    """Where each layer has the same number of experts on the device, one recorded pass tells it of every policy."""
    _, search, start, _ = prepared(GivenPolicy(resident_experts=0))
    found = search.around(start)
    others = [policy for policy, known in search._known.items() if known is not None and policy != found.best.policy]
    known_s = sorted(search.candidate(policy).request_s for policy in others)
    assert [other.request_s for other in found.runners_up] == known_s[:5]
    assert search.times.num_recorded == found.num_recorded
