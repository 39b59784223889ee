"""Find the groups of layers near the input, near the output, and between them, from what was recorded. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from harness.study.correlation import followed_shares
from harness.study.recorded import Text

Group = Literal["input", "middle", "output"]
Floats = NDArray[np.float64]
_ROWS = 4096  # tokens at a time


@dataclass(frozen=True, eq=False)
class Likeness:
    """Likeness says of each layer but the first how like it is to the layer before: [layers - 1] each."""

    cosine: Floats  # of the gating inputs
    followed: Floats  # share of experts that are images of those one layer before

    @property
    def features(self) -> Floats:
        """The cosine and the share that followed, [layers - 1, 2], each with mean 0 and deviation 1 where it varies at
        all."""
        both = np.stack([self.cosine, self.followed], axis=1)
        spread = both.std(axis=0)
        return np.asarray((both - both.mean(axis=0)) / np.where(spread > 1e-9, spread, 1.0))


def likeness_of(text: Text, inputs: NDArray[np.float16]) -> Likeness:
    """Measure the likeness of successive layers; `inputs` is [tokens, layers, hidden]."""
    cosines = []
    for layer in range(1, inputs.shape[1]):
        total = 0.0
        for start in range(0, len(inputs), _ROWS):
            one, other = (inputs[start : start + _ROWS, at].astype(np.float32) for at in (layer - 1, layer))
            norms = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
            total += float(((one * other).sum(axis=1) / np.maximum(norms, 1e-12)).sum())
        cosines.append(total / len(inputs))
    return Likeness(np.array(cosines), np.array(followed_shares(text, text)["followed"]))


def find_groups(likeness: Likeness) -> list[Group]:
    """Return the group of each layer but the first.

    The layers are cut at the two places that leave the least variance of `features` within the three parts; at an
    equal variance the middle part is as long as can be. Fewer than three layers are all in the middle.
    """
    features = likeness.features
    count = len(features)
    first, last = 0, count
    if count >= 3:
        cuts = [(one, other) for one in range(1, count - 1) for other in range(one + 1, count)]
        first, last = min(cuts, key=lambda cut: (round(_variance(features, *cut), 9), cut[0] - cut[1]))
    return [_group(place, first, last) for place in range(count)]


def _group(place: int, first: int, last: int) -> Group:
    return "input" if place < first else "middle" if place < last else "output"


def _variance(features: Floats, first: int, last: int) -> float:
    parts = (features[:first], features[first:last], features[last:])
    return float(sum(((part - part.mean(axis=0)) ** 2).sum() for part in parts))
