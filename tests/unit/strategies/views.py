"""Make what a placer is shown, from tokens by expert."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from strategies.expert_offload.placement import LayerView


def view_of(tokens: Mapping[int, int], *, there: Collection[int] = (), layer: int = 0, **more) -> LayerView:
    """Return a layer of 8 experts or more, where each token chooses one expert."""
    ids = np.repeat(list(tokens), list(tokens.values()))[:, None]
    return LayerView(
        layer=layer,
        num_layers=4,
        num_experts=max(8, *(expert + 1 for expert in tokens)),
        is_prefill=False,
        ids=ids.astype(np.int64),
        weights=np.ones(ids.shape, dtype=np.float32),
        there=dict.fromkeys(there, True),
        **more,
    )
