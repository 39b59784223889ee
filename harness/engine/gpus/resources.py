"""Make a pipeline's memory on each GPU of an engine: lists by rank, from which an emitter's step picks."""

from __future__ import annotations

from harness.engine.activations import Activations
from harness.engine.engine import Engine
from harness.memory.paged_weights import PagedWeights


def paged_weights(
    engine: Engine,
    *,
    num_pages: int,
    packet_bytes: int,
    resident_share: float = 0.0,
    layers: range | None = None,
    experts: bool = True,
) -> list[PagedWeights]:
    """Return each GPU's pages, which come over its own link; GPUs take turns at the host's staging copies."""
    return [
        PagedWeights(
            each.machine,
            each.store,
            each.resident,
            num_pages=num_pages,
            packet_bytes=packet_bytes,
            resident_share=resident_share,
            rank=each.rank,
            layers=layers,
            experts=experts,
            prefix="" if experts else "dense ",
        )
        for each in engine.ranks
    ]


def activations(engine: Engine, *, max_tokens: int, name: str, host_experts: bool = False) -> list[Activations]:
    """Return each GPU's activation buffers, without the host's buffers where no part of the KV cache lies in host
    memory."""
    return [
        Activations(
            each.machine,
            each.spec,
            max_tokens=max_tokens,
            name=name,
            host=engine.kv.host is not None,
            host_experts=host_experts,
            rank=each.rank,
            device_blocks=each.kv.num_device_blocks,
        )
        for each in engine.ranks
    ]
