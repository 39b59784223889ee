"""Divide a cache of experts among layers: more for the first ones, where prediction is weakest (Fate). Torch-free."""

from __future__ import annotations

from collections.abc import Sequence


def cache_sizes(num_places: int, layers: Sequence[int], num_experts: int, *, shallow: int) -> dict[int, int]:
    """Return the places of each of the `layers` with experts.

    All experts of the first `shallow` layers have a place, as far as each other layer keeps one; the others share the
    rest evenly, the first ones having one more where it does not come out even. There is a place for each layer.
    """
    count = len(layers)
    assert num_places >= count >= 1, f"{num_places} places for {count} layers"
    sizes = dict.fromkeys(layers, 1)
    left = min(num_places, count * num_experts) - count
    for layer in layers[:shallow]:
        sizes[layer] += min(left, num_experts - 1)
        left -= sizes[layer] - 1
    others = layers[shallow:]
    for place, layer in enumerate(others):
        sizes[layer] += left // len(others) + (place < left % len(others))
    return sizes
