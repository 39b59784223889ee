"""Define what a workload needs of a tokenizer, and turn texts into token ids chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple, Protocol

CHUNK = 32  # texts tokenized together: the Rust tokenizers work on several at once, and few are read beyond need


class Tokenizer(Protocol):
    """The part of `transformers.PreTrainedTokenizerFast` used here."""

    bos_token_id: int | None

    def __call__(self, text: Any, *, add_special_tokens: bool, verbose: bool) -> Mapping[str, Any]: ...

    def decode(self, token_ids: Any, *, skip_special_tokens: bool) -> Any: ...


class Candidate(NamedTuple):
    """A prompt before its length is looked at. `where` names it in errors; `text` is None where ids came first."""

    where: str
    ids: list[int]
    text: str | None


def tokenized(texts: Iterable[tuple[str, str]], tokenizer: Tokenizer) -> Iterator[Candidate]:
    """Yield candidates from (where, text) pairs, with the special tokens this tokenizer adds to a prompt."""
    remaining = iter(texts)
    while chunk := list(islice(remaining, CHUNK)):
        encoded = tokenizer([text for _, text in chunk], add_special_tokens=True, verbose=False)["input_ids"]
        for (where, text), ids in zip(chunk, encoded, strict=True):
            yield Candidate(where, ids, text)
