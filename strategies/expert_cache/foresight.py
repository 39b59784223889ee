"""Know beforehand which experts a run will use: its requests' recorded routing, scheduled as the run will be."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path

import numpy as np

from harness.config import ConfigError
from harness.engine.sequences import Sequence
from harness.memory.expert_slots import Key
from harness.memory.kv_cache import BlockAllocator
from harness.routing.activations import read_routing
from strategies.expert_offload.deployment import Deployment
from strategies.expert_offload.placement import LayerView, Placement, Placer

Step = tuple[Key, ...]


def recorded_steps(path: str, deployment: Deployment) -> list[Step]:
    """Return the experts of each layer of each pass, in the order in which the run will use them.

    A copy of the scheduler goes through the requests without a model: one ends with its last position in the trace.
    Raises ConfigError("strategy.recorded") where the trace cannot be read for this model.
    """
    engine = deployment.engine
    try:
        routing = read_routing(Path(path), engine.spec)
    except ConfigError as error:
        raise ConfigError("strategy.recorded", error.message) from None
    requests, positions = routing.tokens()
    lengths = {int(request): int(positions[requests == request].max()) + 1 for request in np.unique(requests)}
    given = engine.kv.allocator
    blocks = BlockAllocator(given.num_blocks, given.block_size)
    scheduler = deployment.scheduler([Sequence(sequence.request) for sequence in engine.sequences], blocks)
    steps: list[Step] = []
    while (plan := scheduler.next_pass()) is not None:
        tokens = _tokens(plan.sequences)
        for layer in engine.spec.moe_layers:
            chosen = np.unique(routing.experts(*tokens, layer))
            steps.append(tuple((layer, int(expert)) for expert in chosen))
        ended = []
        for sequence in plan.sequences:
            done = sequence.accept(0, None)  # which token, nothing depends on
            if done or sequence.num_cached >= lengths.get(sequence.request.request_id, 0):
                ended.append(sequence)
                blocks.release(sequence)
        scheduler.retire(plan, ended)
    return steps


def _tokens(sequences: Seq[Sequence]) -> tuple[np.ndarray, np.ndarray]:
    """Return the requests and positions, each [tokens], of what a pass takes through the model."""
    counts = [sequence.num_tokens - sequence.num_cached for sequence in sequences]
    requests = np.repeat([sequence.request.request_id for sequence in sequences], counts)
    positions = [np.arange(sequence.num_cached, sequence.num_tokens) for sequence in sequences]
    return requests, np.concatenate(positions)


class AsRecorded:
    """Asks another placer, and checks that the run does what was recorded of it."""

    def __init__(self, placer: Placer, steps: Seq[Step]) -> None:
        self._placer, self.steps, self._number = placer, steps, 0

    @property
    def looks_ahead(self) -> int:
        return self._placer.looks_ahead

    def place(self, view: LayerView) -> Placement:
        actual = tuple((view.layer, expert) for expert in view.active)
        if self._number >= len(self.steps) or self.steps[self._number] != actual:
            told = f"the routing of step {self._number} (layer {view.layer}) is not what was recorded"
            raise ConfigError("strategy.recorded", f"{told}; record a run of the same requests, model and routing")
        self._number += 1
        return self._placer.place(view)
