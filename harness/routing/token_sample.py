"""Sample the tokens of a workload: which ones does not depend on how they are batched or in which order they run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from harness.routing.counters import Keys, Stream, stream


@dataclass(frozen=True)
class TokenSample:
    """A token is sampled if its number, a hash of (seed, request, position), lies below a limit."""

    seed: int
    below: int  # 2^64: every token is sampled
    num_sampled: int  # of the workload
    num_tokens: int  # of the workload

    @property
    def share(self) -> float:
        return self.num_sampled / self.num_tokens

    def __call__(self, request_ids: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Tell for each token whether it is sampled. Both arguments and the result are [tokens]."""
        if self.below == 2**64:
            return np.ones(len(positions), dtype=bool)
        sampled: NDArray[np.bool_] = _numbers(self.seed, request_ids, positions) < np.uint64(self.below)
        return sampled


def sample_tokens(num_positions: Mapping[int, int], count: int, seed: int) -> TokenSample:
    """Sample `count` tokens, or all where there are no more, of a workload of at least one token. `num_positions` says
    how many positions each request has, by its id."""
    request_ids = np.repeat(np.array(list(num_positions), dtype=np.int64), list(num_positions.values()))
    positions = np.concatenate([np.arange(number) for number in num_positions.values()])
    total = len(positions)
    if count >= total:
        return TokenSample(seed, 2**64, total, total)
    numbers = _numbers(seed, request_ids, positions)
    limit = np.partition(numbers, count)[count]
    return TokenSample(seed, int(limit), int((numbers < limit).sum()), total)


def _numbers(seed: int, request_ids: NDArray[np.int64], positions: NDArray[np.int64]) -> Keys:
    return stream(seed, Stream.RECORDING, request_ids, positions)
