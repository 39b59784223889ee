"""Tests what ops of measured chains have beside them, and where they find their weights."""

from __future__ import annotations

from collections import defaultdict
from contextlib import closing
from itertools import pairwise

import pytest

from harness.bench.shapes import Shape
from harness.calibration.op_costs import OpCosts
from harness.calibration.probes import ContextRoom, LayerProbes
from harness.calibration.table import ALONE, AT_REST, BESIDE_LINK, IN_CACHE, weight_keys
from harness.machine.base import CPU, D2H, GPU
from tests.contract.running import emulated, engine_on
from tests.unit.calibration.measured import LINK_BYTES_S


def test_a_busy_link_is_all_that_gpu_ops_have_beside_them(tiny):
    """The cpu and d2h lane only bring new keys and values to the cache, from where the link stages them for the gpu's
    attention, and fetch the last tokens. What these lanes cost gpu ops is measured apart."""
    with closing(emulated()) as machine:
        engine = engine_on(machine, tiny, [], kv_blocks=400, block_size=16)
        probes = LayerProbes(engine, room=ContextRoom(), max_tokens=64, packet_bytes=100_000)
        costs = OpCosts(engine, probes, link_bytes_s=LINK_BYTES_S, undisturbed=None, max_tokens=64, max_context=6000)
        machine.drain()
        machine.spans.clear()
        counting = costs._overlapped(Shape(contexts=(20,) * 4))
        probes.close()
        beside = {(span.lane, span.kind) for span in machine.spans if span.lane in (CPU, D2H)}
    assert {"attention in", "attention out", "experts"} <= {ticket.op.kind for ticket in counting if ticket.lane == GPU}
    assert beside <= {(D2H, "offload qkv"), (CPU, "append kv"), (D2H, "fetch tokens"), (CPU, "poison")}


def test_no_expert_counts_beside_which_ops_are_still_submitted(tiny):
    """Half of the single experts find their rows, the others are given them: as many of either count, of two layers."""
    with closing(emulated()) as machine:
        engine = engine_on(machine, tiny, [], kv_blocks=400, block_size=16)
        probes = LayerProbes(engine, room=ContextRoom(), max_tokens=64, packet_bytes=100_000)
        costs = OpCosts(engine, probes, link_bytes_s=LINK_BYTES_S, undisturbed=None, max_tokens=64, max_context=6000)
        keys = [ticket.op.cost_key for ticket in costs._overlapped(Shape(contexts=(20,) * 4)) if ticket.lane == GPU]
        probes.close()
    assert keys.count("experts x1") == keys.count("experts x1, given rows") == 2 * 2 * tiny.spec.num_experts // 2


@pytest.mark.parametrize("company", [ALONE, BESIDE_LINK])
def test_nobody_has_read_weights_at_rest_since_they_came(company, tiny):
    """Single experts read a whole layer, of which those of one op are some: a large cache would still hold these."""
    with closing(emulated()) as machine:
        engine = engine_on(machine, tiny, [], kv_blocks=400, block_size=16)
        probes = LayerProbes(engine, room=ContextRoom(), max_tokens=64, packet_bytes=100_000)
        costs = OpCosts(engine, probes, link_bytes_s=LINK_BYTES_S, undisturbed=None, max_tokens=64, max_context=6000)
        tickets = costs._came_before(Shape(contexts=(20,) * 4), company)
        probes.close()
        came = [(span.end_s, "came") for span in machine.spans if span.kind == "weights" and span.layer == probes.layer]
    uses = defaultdict(list)
    for place, ran in tickets.items():
        experts = [ticket for ticket in ran if ticket.op.kind == "experts"]
        assert {ticket.op.joined > 1 for ticket in experts} == {False, True}
        others = [ticket.op.kind for ticket in ran if not weight_keys(ticket.op)]
        assert len(others) == len(set(others)) and bool(others) == (place == AT_REST), "once, and before all else"
        for ticket in experts:
            for key in ticket.op.weight_keys:
                uses[key].append((ticket.started_s, place))
    assert set(tickets) == {AT_REST, IN_CACHE} and len(uses) == engine.spec.num_experts
    for used in uses.values():
        before = set(pairwise(place for _, place in sorted(used + came)))
        assert ("came", AT_REST) in before and (AT_REST, IN_CACHE) in before
        assert not before & {(AT_REST, AT_REST), (IN_CACHE, AT_REST), ("came", IN_CACHE)}
