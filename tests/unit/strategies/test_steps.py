"""The order in which micro-batches may be worked on ahead."""

from __future__ import annotations

from itertools import product

import pytest

from strategies.offloading.steps import Steps


def steps_of(num_layers: int, num_micro_batches: int) -> Steps:
    return Steps(None, None, [(None, None)] * num_micro_batches, first_index=0, layers=range(num_layers))  # type: ignore[arg-type]


@pytest.mark.parametrize("num_micro_batches", [1, 2, 3, 5])
def test_two_ahead_is_never_beyond_what_the_micro_batch_has_left(num_micro_batches):
    """Written down anew: the micro-batches go through the layers in order, and the one that is two places ahead enters
    a layer. With a single one that is the next layer, since it cannot skip one."""
    num_layers = 4
    steps = steps_of(num_layers, num_micro_batches)
    order = list(product(range(num_layers), range(num_micro_batches)))
    entered = set(order[:2]) if num_micro_batches > 1 else {order[0]}  # the prologue
    for place, at in enumerate(order):
        ahead = steps.ahead(*at, 2)
        wanted = order[place + 1 :][:1] if num_micro_batches == 1 else order[place + 2 :][:1]
        assert [ahead] == (wanted or [None])
        if ahead is not None:
            layer, micro_batch = ahead
            assert layer == 0 or (layer - 1, micro_batch) in order[: place + 1], "it has not left the layer below"
            entered.add(ahead)
    assert entered == set(order), "each enters each layer"
