"""Turn documents into token ids, and choose the windows of each step's batch.

What a batch holds is a function of the seed and the step alone, so that an interrupted training goes on with the same
batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from harness.config import ConfigError
from harness.model.zoo import EOS, train_tokenizer
from harness.training.texts import Document, Domain

_TOKENIZER_CHARS = 6_000_000  # of the training text, evenly of all domains: enough for thousands of tokens


@dataclass(frozen=True)
class TokenStreams:
    """A domain's text as token ids, int64 [tokens]: documents one after another, each between BOS and EOS."""

    name: str
    training: NDArray[np.int64]
    held_out: NDArray[np.int64]


def tokenizer_for(domains: Sequence[Domain], vocab_size: int) -> Tokenizer:
    """Train a tokenizer on the domains' training text."""
    most, texts = _TOKENIZER_CHARS // len(domains), []
    for domain in domains:
        so_far = 0
        for document in domain.training:
            texts.append(document.text)
            if (so_far := so_far + len(document.text)) > most:
                break
    try:
        return train_tokenizer(vocab_size, texts)
    except ConfigError as error:
        raise ConfigError("training.recipe.vocab_size", error.message) from None


def token_streams(domains: Sequence[Domain], tokenizer: Tokenizer, sequence_tokens: int) -> list[TokenStreams]:
    """Encode all domains. Raises ConfigError for one that has too little text for a window."""
    streams = []
    for domain in domains:
        training, held_out = (_stream(documents, tokenizer) for documents in (domain.training, domain.held_out))
        for stream, what in ((training, "to train on"), (held_out, "to hold out")):
            if len(stream) < sequence_tokens + 1:
                needed = f"one of sequence_tokens + 1 = {sequence_tokens + 1} is needed"
                raise ConfigError("text", f"'{domain.name}' has only {len(stream)} tokens {what}; {needed}")
        streams.append(TokenStreams(domain.name, training, held_out))
    return streams


def _stream(documents: Sequence[Document], tokenizer: Tokenizer) -> NDArray[np.int64]:
    end = tokenizer.token_to_id(EOS)
    assert end is not None
    ids: list[int] = []
    for encoded in tokenizer.encode_batch([document.text for document in documents]):
        ids += encoded.ids
        ids.append(end)
    return np.array(ids, dtype=np.int64)


def domain_shares(streams: Sequence[TokenStreams], evenness: float) -> NDArray[np.float64]:
    """Return each domain's share of the windows: by its tokens with evenness 0, the same for all with 1."""
    weights = np.array([len(stream.training) for stream in streams], dtype=np.float64) ** (1 - evenness)
    shares: NDArray[np.float64] = weights / weights.sum()
    return shares


def batch(
    streams: Sequence[TokenStreams],
    shares: NDArray[np.float64],
    num: int,
    sequence_tokens: int,
    *,
    seed: int,
    step: int,
) -> Tensor:
    """Draw the windows of a step, int64 [num, sequence_tokens + 1]: inputs and, one further on, what they predict."""
    random = np.random.default_rng([seed, step])
    windows = []
    for domain in random.choice(len(streams), size=num, p=shares):
        ids = streams[domain].training
        start = random.integers(0, len(ids) - sequence_tokens)
        windows.append(ids[start : start + sequence_tokens + 1])
    return torch.from_numpy(np.stack(windows))


def held_out_windows(stream: TokenStreams, most: int, sequence_tokens: int) -> Tensor:
    """Return windows spread evenly over held-out text, int64 [<= most, sequence_tokens + 1], none of which overlap."""
    length = sequence_tokens + 1
    count = min(most, len(stream.held_out) // length)
    starts = np.linspace(0, len(stream.held_out) - length, count).astype(np.int64)
    return torch.from_numpy(stream.held_out[starts[:, None] + np.arange(length)])
