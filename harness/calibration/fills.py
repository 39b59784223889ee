"""Fill memory, before it is measured, with numbers on which no measurement depends."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from harness.engine.activations import Activations
from harness.engine.ops import views
from harness.machine.base import Context, Op, Work
from harness.memory.kv_cache import KVCache
from harness.model.spec import ModelSpec

_RUN = 1_000_003  # random numbers, a prime: no two blocks of a cache begin at the same place of the run


class Fill(Op):
    """Fills one layer of a cache with random numbers. Attention's results then differ from token to token, and
    with them the experts that the router chooses; over memory as it happens to be, all tokens may choose the same."""

    kind: ClassVar[str] = "fill"

    def __init__(self, cache: KVCache, layer: int) -> None:
        self.cache, self.layer = cache, layer
        self.writes = cache.layers[layer]

    def work(self) -> Work:
        """Return no work: this is set-up, which no cost model times."""
        return Work()

    def run(self, ctx: Context, packet: int) -> None:
        assert self.layer is not None
        for piece in self.cache.views(ctx, self.layer):
            _fill(piece.view(-1))


class FillRoutes(Op):
    """Gives each token of a micro-batch the next experts in turn: no probe depends on what ran a router last."""

    kind: ClassVar[str] = "fill routes"

    def __init__(self, spec: ModelSpec, acts: Activations) -> None:
        self.spec, self.acts = spec, acts
        self.writes = (acts.expert_ids, acts.expert_weights)

    def work(self) -> Work:
        """Return no work: this is set-up, which no cost model times."""
        return Work()

    def run(self, ctx: Context, packet: int) -> None:
        each, experts = self.spec.experts_per_token, self.spec.num_experts
        ids = views.rows(ctx, self.acts.expert_ids, self.acts.max_tokens, each, "int64")
        ids.view(-1).copy_(torch.arange(ids.numel()) % experts)
        views.rows(ctx, self.acts.expert_weights, self.acts.max_tokens, each, "float32").fill_(1 / each)


def _fill(numbers: Any) -> None:
    """Fill a tensor with one run of random numbers, again and again. A thread draws 0.2 billion a second, so that a
    large cache of different ones would take it a minute."""
    filled = min(_RUN, len(numbers))
    numbers[:filled].normal_()
    while filled < len(numbers):
        more = min(filled, len(numbers) - filled)
        numbers[filled : filled + more].copy_(numbers[:more])
        filled += more
