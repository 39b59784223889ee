"""Predict which experts are hot in the next layer, by what tokens of a profile run chose in both. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from strategies.expert_offload.placement import LayerView


class Correlation:
    """Knows, for each layer, the probability of each expert of the next one, given an expert of this one."""

    def __init__(self, views: Sequence[LayerView]) -> None:
        """Count over what a profile run was shown, layer by layer and pass by pass."""
        self._tables: dict[int, NDArray[np.float64]] = {}  # by layer, [experts, experts of the next layer]
        for here, following in pairwise(views):
            if following.layer != here.layer + 1:
                continue  # another pass, or a layer without experts
            table = self._tables.setdefault(here.layer, np.zeros((here.num_experts, here.num_experts)))
            np.add.at(table, (here.ids[:, :, None], following.ids[:, None, :]), 1.0)
        for table in self._tables.values():
            table /= np.maximum(table.sum(axis=1, keepdims=True), 1.0)

    def hottest(self, view: LayerView, count: int) -> list[int]:
        """Return the experts of the next layer that are expected to get the most tokens. There are none where the
        profile run tells nothing of that layer."""
        if (table := self._tables.get(view.layer)) is None:
            return []
        expected = view.tokens @ table
        order = np.argsort(-expected, kind="stable")[:count]
        return [int(expert) for expert in order if expected[expert] > 0]
