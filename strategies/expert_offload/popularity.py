"""Learn which experts are hot before a run, from a file or by a run over other prompts than the workload's."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from harness.bench.shapes import Shape
from harness.config import ConfigError
from harness.engine.batch import PassPlan
from harness.engine.engine import Engine
from harness.memory.expert_slots import Key
from harness.model.spec import ModelSpec
from harness.routing.activations import read_activations
from strategies.expert_offload.pipeline import ExpertPipeline
from strategies.expert_offload.placement import LayerView, Placement


@dataclass(eq=False, kw_only=True)
class Popularity:
    """The load of experts by MoE layer, and where it was seen."""

    source: str
    layers: tuple[int, ...]
    shares: NDArray[np.float64]  # [layers, experts], of the layer's choices

    def hottest(self) -> list[Key]:
        """Return all experts of all layers, the most used first."""
        num_experts = self.shares.shape[1]
        order = np.argsort(-self.shares.ravel(), kind="stable")
        return [(self.layers[at // num_experts], at % num_experts) for at in order.tolist()]


def read_popularity(path: str, spec: ModelSpec) -> Popularity:
    """Return the popularity that a file states. Raises ConfigError("strategy.popularity")."""
    try:
        source, shares = read_activations(Path(path), spec)
    except ConfigError as error:
        raise ConfigError("strategy.popularity", error.message) from None
    return Popularity(source=f"{path}: {source}", layers=spec.moe_layers, shares=shares)


@dataclass(frozen=True, eq=False, kw_only=True)
class ProfileRun:
    """A profile run, of other prompts than the workload's, has `views`, layer by layer and pass by pass.

    `num_shared` of its requests had the routing of a request of the workload."""

    views: list[LayerView]
    num_requests: int
    num_tokens: int
    num_shared: int

    @property
    def source(self) -> str:
        """Say what was run, for labels."""
        told = f"profile run of {self.num_tokens} tokens of random prompts"
        if not self.num_shared:
            return told
        return (
            f"{told}; the trace has no other requests, so {self.num_shared} of {self.num_requests} were the run's own"
        )

    def popularity(self, spec: ModelSpec) -> Popularity:
        """Return the popularity that was seen."""
        at = {layer: row for row, layer in enumerate(spec.moe_layers)}
        counts = np.zeros((len(at), spec.num_experts))
        for view in self.views:
            counts[at[view.layer]] += view.tokens
        shares = counts / counts.sum(axis=1, keepdims=True)
        return Popularity(source=self.source, layers=spec.moe_layers, shares=shares)


@dataclass(eq=False)
class _Watching:
    """Runs every expert on the GPU, and keeps what it is shown."""

    looks_ahead: int
    views: list[LayerView] = field(default_factory=list)

    def place(self, view: LayerView) -> Placement:
        self.views.append(view)
        return Placement(on_gpu=[*view.ready_first, *view.absent])


def profile(pipeline: ExpertPipeline, *, num_tokens: int, max_tokens: int) -> ProfileRun:
    """Run `num_tokens` tokens of random prompts, at most `max_tokens` at a time, and return what was seen. Their
    requests have negative numbers, and their keys and values take blocks of the cache meanwhile."""
    engine, watching = pipeline.engine, _Watching(looks_ahead=2 if pipeline.predictor else 0)
    pipeline.placer, blocks = watching, engine.kv.allocator
    length = max(1, min(_mean_prompt(engine), max_tokens, blocks.num_free * blocks.block_size))
    prompts, _ = Shape.of_prompts(num_tokens, length).sequences(engine.spec.vocab_size, np.random.default_rng(0))
    at_once = max(1, min(max_tokens // length, blocks.num_free // blocks.blocks_for(length)))
    for start in range(0, len(prompts), at_once):
        group = prompts[start : start + at_once]
        for sequence in group:
            blocks.grow(sequence, sequence.prompt_len)
        pipeline.run(PassPlan(prefill=group, decode=[], mode="prefill"))
        engine.machine.drain()
        for sequence in group:
            engine.kv.release(sequence)
    pipeline.residency.forget()
    world = engine.machine.world
    asked, own = (np.array([s.request.request_id for s in each]) for each in (prompts, engine.sequences))
    return ProfileRun(
        views=watching.views,
        num_requests=len(prompts),
        num_tokens=sum(sequence.prompt_len for sequence in prompts),
        num_shared=world.num_shared(asked, own) if world is not None and len(own) else 0,
    )


def _mean_prompt(engine: Engine) -> int:
    lengths = [sequence.prompt_len for sequence in engine.sequences]
    return round(sum(lengths) / len(lengths)) if lengths else 1
