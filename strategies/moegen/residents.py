"""Keep parts of the model on the device for the whole run (S_Params)."""

from __future__ import annotations

from harness.engine.engine import Engine


def resident_experts(engine: Engine, number: int) -> int:
    """Keep so many experts on the device, spread evenly over the order in which experts run, so that the link gains
    time everywhere. Returns how many are left to stream."""
    layers = range(engine.spec.num_layers)
    experts = [(layer, part.layout.name) for layer in layers for part in engine.store.experts(layer).values()]
    number = min(number, len(experts))
    if number:
        chosen = [experts[(2 * at + 1) * len(experts) // (2 * number)] for at in range(number)]
        engine.resident.keep("resident experts", chosen)
    return len(experts) - number


def resident_dense(engine: Engine, dense_slots: int) -> None:
    """Keep what layers have beside experts on the device if there is a slot for each layer."""
    layers = range(engine.spec.num_layers)
    if dense_slots >= len(layers):
        parts = [(layer, name) for layer in layers for name in engine.store.dense(layer)]
        engine.resident.keep("resident parts without experts", parts)
