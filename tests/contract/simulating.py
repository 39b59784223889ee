"""An engine on a simulated machine with room for all, and what its spans say that was moved."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from harness.machine.base import GPU, LaneKind
from harness.machine.simulated import SimulatedMachine
from harness.machine.virtual.costs import LaneCost, Roofline
from harness.machine.virtual.world import World
from harness.model.planned import planned_model
from harness.routing.kinds.uniform import UniformRouting
from harness.routing.predictors import StatedPredictor, StatedRates
from harness.settings import parse_settings
from tests.composing import composed
from tests.contract.running import engine_on, requests

RATES = LaneCost(overhead_s=1e-5, flops_s=1e12, device_bytes_s=1e11, host_bytes_s=2e10, link_bytes_s=1e10)


def simulated_engine(model_name: str, num_requests: int, *, hit_rate: float | None = None, **lengths: int):
    """Make an engine on a simulated machine with room for all. Its routing is drawn evenly, and foreseen at a rate."""
    model = planned_model(parse_settings(composed(f"model={model_name}", "model.spec.num_layers=8")).model)
    capacities = dict.fromkeys(("device", "pinned", "host"), 10**12)
    costs = Roofline(lanes=dict.fromkeys(LaneKind, RATES))
    machine = SimulatedMachine(capacities_bytes=capacities, costs=costs, host_bytes_s=1e11)
    routing = UniformRouting(model.spec.num_experts, model.spec.experts_per_token, seed=3)
    predictor = None
    if hit_rate is not None:
        predictor = StatedPredictor(routing, StatedRates.alike(((hit_rate,),), model.spec), model.spec, seed=3)
    machine.world = World(routing, model.spec.num_experts, predictor)
    work = requests(num_requests, vocab_size=100, **{"longest": 12, "max_new_tokens": 3, **lengths})
    return engine_on(machine, model, work, kv_blocks=200), routing


def expert_bytes(engine, lane) -> list[float]:
    """Return what each op of experts moves of the lane's memory, in bytes; none of them reads a part of an expert. An
    op of the host may have several."""
    spans = [s for s in engine.machine.spans if s.kind == "experts" and s.lane == lane]
    found = [s.work.device_bytes if lane == GPU else s.work.host_bytes for s in spans]
    assert min(found, default=10**12) > engine.store.experts(0)[0].layout.nbytes
    return found


def tokens_of(engine, moved: Sequence[float], num_experts: int) -> float:
    """Return the tokens of so many experts, which moved these bytes in all."""
    spec, size = engine.spec, engine.store.experts(0)[0].layout.nbytes
    of_a_token = (2 * spec.hidden_dim + 3 * spec.expert_dim) * spec.dtype_bytes
    return (sum(moved) - num_experts * size) / of_a_token


def link_bytes(engine, kind: str, lane) -> list[float]:
    """Return the bytes of each op of a kind on a lane, whatever packets it came in."""
    moved: dict[int, float] = {}
    for span in engine.machine.spans:
        if span.kind == kind and span.lane == lane:
            moved[span.ticket] = moved.get(span.ticket, 0.0) + span.work.link_bytes
    return list(moved.values())


def tokens_by_expert(engine, routing) -> list[np.ndarray]:
    """Return int64 [num_experts] for each pass and layer, from the routing alone."""
    by_pass: dict[int, list[tuple[int, int]]] = {}
    for sequence in engine.sequences:
        at, prompt = sequence.request.request_id, len(sequence.request.prompt_ids)
        for number, first in enumerate(range(sequence.request.max_new_tokens)):
            positions = range(prompt) if not number else [prompt + first - 1]
            by_pass.setdefault(number, []).extend((at, position) for position in positions)
    return [
        np.bincount(
            routing.experts(*np.array(rows, dtype=np.int64).T, layer).ravel(), minlength=engine.spec.num_experts
        )
        for rows in by_pass.values()
        for layer in range(engine.spec.num_layers)
    ]
