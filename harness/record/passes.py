"""Record what happened in one pass of the engine's loop."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class PassRecord:
    """A record says when one pass ran, and what went through it. Times are seconds on the machine's clock; passes may
    overlap where a pipeline runs ahead.

    `num_prefill_tokens` counts every token that was prefilled, recomputation after a preemption included;
    `num_padding_tokens` those that stand for the padding of prompts, in no other count; `generated_tokens` counts
    sampled tokens. `num_finished` counts the sequences that ended in this pass, and `num_waiting` those still queued at
    its end.
    """

    index: int
    start_s: float
    end_s: float
    num_prefill_tokens: int = 0
    num_padding_tokens: int = 0
    num_decode_tokens: int = 0
    num_sequences: int = 0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    num_preemptions: int = 0
    num_waiting: int = 0
    num_finished: int = 0
    mode: str = "normal"
    generated_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        return self.num_prefill_tokens + self.num_decode_tokens
