"""Keep a request's state on its way through the engine: torch-free bookkeeping in program order."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import StrEnum
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np

from kernels import fields

if TYPE_CHECKING:
    from harness.workload.request import Request


class State(StrEnum):
    QUEUED = "queued"
    PREFILL = "prefill"  # scheduled in the current pass with more than its newest token
    DECODING = "decoding"
    PREEMPTED = "preempted"  # its KV blocks were taken back; waits for a new prefill of prompt + generated
    FINISHED = "finished"
    REJECTED = "rejected"


@dataclass(frozen=True, slots=True)
class Records:
    """A sequence that has this records the experts of all its tokens in all layers with a router.

    `weights` are those of the experts. `sample` says for tokens, by request and position, whether the router's input is
    recorded.
    """

    weights: bool = False
    sample: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None  # int64 [tokens] twice -> bool [tokens]


@dataclass(eq=False, slots=True)
class Life:
    """One life of a sequence's KV cache: from a prefill to preemption or the end.

    What is recorded has an entry for each pass.
    """

    first_generated: int  # index of the first token generated in this life
    routing: list[np.ndarray] = field(default_factory=list)  # int16 [tokens, layers, experts_per_token]
    weights: list[np.ndarray] = field(default_factory=list)  # float32, of the same shape
    inputs: list[np.ndarray] = field(default_factory=list)  # uint8 [sampled tokens, layers, bytes]


@dataclass(eq=False, slots=True)
class Sequence:
    """A sequence is the state of one request that is served. `num_cached` tokens have their keys and values in
    `blocks`.

    Sequences are many: what is asked of all of them in every pass reads their fields where they lie (`fields`).
    """

    request: Request
    state: State = State.QUEUED
    generated: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    num_cached: int = 0
    padding: int = 0  # tokens that its prompt is padded by: computed, kept behind all others, read, never attended to
    kv_on_device: bool = False  # where its blocks lie
    kv_rank: int = 0  # the GPU in whose memory its blocks lie, where they lie on the device
    partition: int = 0  # KV dependencies are derived by (layer, partition); constant while blocks are held
    num_preemptions: int = 0
    reject_reason: str | None = None
    records: Records | None = None
    lives: list[Life] = field(default_factory=list)
    finished_pass: int | None = None
    token_times_s: list[float] = field(default_factory=list)  # when each token was there, on the machine's clock
    prompt_len: int = field(init=False)
    # The most tokens of its own that ever lie in the KV cache: the last generated one is never fed back.
    max_tokens: int = field(init=False)
    ends_at: int = field(init=False)  # tokens in the KV cache behind which it ends, which nobody knows before

    def __post_init__(self) -> None:
        request = self.request
        self.prompt_len = len(request.prompt_ids)
        self.max_tokens = self.prompt_len + request.max_new_tokens - 1
        self.ends_at = self.prompt_len + min(request.ends_after or request.max_new_tokens, request.max_new_tokens) - 1

    @property
    def num_tokens(self) -> int:
        """The number of prompt and generated tokens: a prefill from scratch would process so many."""
        return self.prompt_len + len(self.generated)

    def pending_ids(self) -> Seq[int]:
        """Return the tokens that are not in the KV cache yet: the whole text before a prefill, the newest token in
        decode."""
        if self.num_cached >= self.prompt_len:
            return self.generated[self.num_cached - self.prompt_len :]
        return (*self.request.prompt_ids[self.num_cached :], *self.generated)

    def accept(self, token: int, eos_token_id: int | None) -> bool:
        """Append a sampled token; return True when the sequence has ended."""
        return bool(accept([self], [token], eos_token_id))


_RUNNING = {State.PREFILL, State.DECODING}


def accept(sequences: Seq[Sequence], tokens: list[int], eos_token_id: int | None) -> list[Sequence]:
    """Append a sampled token to each sequence; return those that have ended."""
    states = {*map(attrgetter("state"), sequences)}
    if not states <= _RUNNING:
        stray = next(s for s in sequences if s.state not in _RUNNING)
        raise AssertionError(f"request {stray.request.request_id} was not running")
    cached = num_tokens(sequences)
    fields.assign(sequences, "num_cached", cached.tolist())
    fields.append(sequences, "generated", tokens)
    if State.PREFILL in states:
        fields.assign(sequences, "state", [State.DECODING] * len(sequences))
    ended = cached >= fields.values(sequences, "ends_at")
    if eos_token_id is not None:
        ended |= np.asarray(tokens) == eos_token_id
    return [sequences[at] for at in np.flatnonzero(ended).tolist()]


def num_tokens(sequences: Seq[Sequence]) -> np.ndarray:
    """Return the number of prompt and generated tokens of each sequence, int64 [sequences]."""
    return fields.values(sequences, "prompt_len") + fields.lengths(sequences, "generated")


def prompt_lens(sequences: Seq[Sequence]) -> np.ndarray:
    """Return the length of each sequence's prompt, int64 [sequences]."""
    return fields.values(sequences, "prompt_len")


def max_tokens(sequences: Seq[Sequence]) -> np.ndarray:
    """Return the most tokens of each sequence that ever lie in the KV cache, int64 [sequences]."""
    return fields.values(sequences, "max_tokens")


def without_room(sequences: Seq[Sequence], block_size: int) -> list[Sequence]:
    """Return the sequences whose blocks, of `block_size` tokens, do not hold all their tokens."""
    return [sequences[at] for at in np.flatnonzero(missing_blocks(sequences, block_size) > 0).tolist()]


def missing_blocks(sequences: Seq[Sequence], block_size: int) -> np.ndarray:
    """Return how many blocks, of `block_size` tokens, each sequence lacks to hold all its tokens: int64 [sequences].
    Where it has more than that, the number is below 0."""
    return -(-num_tokens(sequences) // block_size) - fields.lengths(sequences, "blocks")
