"""Choose how many batches go through a layer together: as few as keep the link from deciding (Klotski). Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LayerTimes:
    """Says what a layer of a decode pass takes under even routing, where a share of the experts is on the device."""

    num_experts: int
    experts_per_token: int
    batch_size: int
    resident_share: float
    io_s: float
    attention_s: float  # of one batch
    gpu_s: Callable[[float], float]  # of an expert over so many tokens

    def active(self, num_batches: int) -> float:
        """Return how many experts are expected to get tokens."""
        missed = (1 - self.experts_per_token / self.num_experts) ** (num_batches * self.batch_size)
        return self.num_experts * (1 - missed)

    def computes_s(self, num_batches: int) -> float:
        """Return the seconds of the GPU: attention for each batch, then each active expert over all of its tokens."""
        active = self.active(num_batches)
        tokens = num_batches * self.batch_size * self.experts_per_token / active
        return num_batches * self.attention_s + active * self.gpu_s(tokens)

    def loads_s(self, num_batches: int) -> float:
        """Return the seconds of the link: each active expert that is not on the device, once for all batches."""
        return self.active(num_batches) * (1 - self.resident_share) * self.io_s


def num_batches(times: LayerTimes, most: int) -> int:
    """Return the least number of batches for which computing takes as long as loading, or the `most` that memory
    holds."""
    enough = (number for number in range(1, most) if times.computes_s(number) >= times.loads_s(number))
    return next(enough, most)
