"""A simulated run of a recorded trace routes every token as the run that recorded it."""

from __future__ import annotations

import numpy as np
import pytest

from harness.engine.ops.experts import Experts
from harness.machine.base import LaneKind
from harness.machine.simulated import SimulatedMachine
from harness.machine.virtual.costs import LaneCost, Roofline
from harness.machine.virtual.world import World
from harness.model.planned import PlannedModel
from harness.routing.build import build_routing
from harness.routing.recording import FILE_NAME, last_recorded, recording
from tests.contract.running import (
    CAPACITIES_BYTES,
    emulated,
    engine_on,
    requests,
    run_to_end,
    shuffled,
    strategy_of,
)
from tests.contract.test_strategies import YAMLS
from tests.tiny_families import VOCAB_SIZE, tiny_family

VARIANTS = {"mixtral": (0, 1, 2), "qwen3_moe": (0, 2), "deepseek_v2-lite": (1, 2)}  # their layers with a router
STRATEGIES = {
    "moelens": {"n_real": 60},
    "moelightning": {},
    "flexgen": {"policy": {"batch_size": 3, "micro_batch_size": 2}},
    "deepspeed_zero": {"batch_size": 3},
}
RATES = LaneCost(overhead_s=1e-6, flops_s=1e12, device_bytes_s=1e11, host_bytes_s=1e10, link_bytes_s=1e9)


@pytest.fixture
def charged(monkeypatch):
    """Note the rows of each op of experts whose routing is asked for, and the tokens that each expert then gets."""
    found = []
    original = Experts.foresee

    def foresee(self, world):
        original(self, world)
        found.append((self.layer, self.batch.request_ids, self.batch.positions, self.experts, self.counts))

    monkeypatch.setattr(Experts, "foresee", foresee)
    return found


def check(real, simulated, charged, folder):
    """Run the same requests on a machine with tensors, then without; `real` and `simulated` make engine and values."""
    engine, values = real
    run_to_end(engine, lambda e: strategy_of(e, values))
    spec = engine.spec
    with recording(folder, spec, "a test", routing=True, sample=None) as record:
        for sequence in engine.sequences:
            record(sequence)
    recorded = {s.request.request_id: last_recorded(s, "routing") for s in engine.sequences}
    charged.clear()
    routing = build_routing({"name": "trace", "path": str(folder / FILE_NAME)}, spec, 0)
    again, values = simulated(World(routing, spec.num_experts))
    passes = run_to_end(again, lambda e: strategy_of(e, values))
    for sequence in again.sequences:
        replayed, expected = last_recorded(sequence, "routing"), recorded[sequence.request.request_id]
        assert replayed is not None and expected is not None and len(expected) == sequence.num_tokens - 1
        assert (replayed == expected).all()
    of_the_run = [each for each in charged if each[1].min() >= 0]  # the others were measured by the planner
    assert {layer for layer, *_ in of_the_run} == set(spec.moe_layers)
    for layer, request_ids, positions, experts, counts in of_the_run:
        column = spec.moe_layers.index(layer)
        tokens = zip(request_ids.tolist(), positions.tolist(), strict=True)
        chosen = np.array([recorded[request][position, column] for request, position in tokens])
        assert counts == np.bincount(chosen.ravel(), minlength=spec.num_experts)[list(experts)].tolist()
    return passes


def pair(machine, checkpoint, work, values, *, kv_blocks=60):
    """An engine with tensors, and what makes one without for the same requests."""

    def simulated(world):
        costs = Roofline(lanes=dict.fromkeys(LaneKind, RATES))
        without = SimulatedMachine(capacities_bytes=CAPACITIES_BYTES, costs=costs, host_bytes_s=1e10, world=world)
        return engine_on(without, PlannedModel(checkpoint.spec), work, kv_blocks=kv_blocks, values=values), values

    return (engine_on(machine, checkpoint, work, kv_blocks=kv_blocks, values=values), values), simulated


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_recorded_run_is_simulated_token_by_token(tmp_path, charged, variant, strategy):
    checkpoint = tiny_family(variant)
    assert checkpoint.spec.moe_layers == VARIANTS[variant]
    work = requests(6, vocab_size=VOCAB_SIZE, longest=30, max_new_tokens=5, seed=7)
    values = YAMLS[strategy] | STRATEGIES[strategy]
    check(*pair(shuffled(1), checkpoint, work, values), charged, tmp_path)


def test_an_emulated_run_is_simulated_token_by_token(tmp_path, charged):
    checkpoint = tiny_family("qwen3_moe")
    work = requests(6, vocab_size=VOCAB_SIZE, longest=30, max_new_tokens=5, seed=7)
    check(*pair(emulated(), checkpoint, work, YAMLS["moelightning"]), charged, tmp_path)


def test_preempted_requests_are_simulated_token_by_token(tmp_path, charged, tiny):
    work = requests(12, vocab_size=tiny.spec.vocab_size, longest=30, max_new_tokens=30)
    both = pair(shuffled(3), tiny, work, YAMLS["moelens"] | {"n_real": 200}, kv_blocks=24)
    assert sum(p.num_preemptions for p in check(*both, charged, tmp_path)) > 0
