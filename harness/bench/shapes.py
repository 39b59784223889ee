"""Make sequences of chosen lengths with random tokens, which stand for a workload's. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from harness.engine.sequences import Sequence, State
from harness.workload.request import Request


@dataclass(frozen=True)
class Shape:
    """`prompts`: lengths that are prefilled; `contexts`: lengths of contexts that decode one token each."""

    prompts: tuple[int, ...] = ()
    contexts: tuple[int, ...] = ()

    @classmethod
    def of_prompts(cls, num_tokens: int, length: int) -> Shape:
        """Return prompts of `length` tokens, the last one of what is left of `num_tokens`."""
        whole, rest = divmod(num_tokens, length)
        return cls(prompts=(length,) * whole + (rest,) * (rest > 0))

    @property
    def num_tokens(self) -> int:
        """Count the tokens that go through the model."""
        return sum(self.prompts) + len(self.contexts)

    def sequences(self, vocab_size: int, rng: np.random.Generator) -> tuple[list[Sequence], list[Sequence]]:
        """Make sequences that prefill and sequences that decode, whose tokens but the newest count as cached; none
        has a block yet. Their requests have negative numbers, which no workload's have."""
        prefill = [_sequence(-1 - n, _ids(length, vocab_size, rng)) for n, length in enumerate(self.prompts)]
        decode = [
            _decoding(-1 - n, _ids(length, vocab_size, rng))
            for n, length in enumerate(self.contexts, start=len(prefill))
        ]
        return prefill, decode

    def __str__(self) -> str:
        return f"{sum(self.prompts)} prefill tokens, {len(self.contexts)} decoding"


def _ids(length: int, vocab_size: int, rng: np.random.Generator) -> list[int]:
    ids: list[int] = rng.integers(0, vocab_size, length).tolist()
    return ids


def _sequence(request_id: int, ids: Iterable[int]) -> Sequence:
    request = Request(request_id=request_id, prompt_ids=tuple(ids), max_new_tokens=2, text=None)
    return Sequence(request, state=State.PREFILL)


def _decoding(request_id: int, ids: list[int]) -> Sequence:
    sequence = _sequence(request_id, ids[:-1])
    sequence.state, sequence.generated, sequence.num_cached = State.DECODING, ids[-1:], len(ids) - 1
    return sequence
