"""Read recorded routing, one domain of text at a time, and part it into requests to learn from and requests to test."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.config import ConfigError
from harness.record.files import RecordError
from harness.record.store import read_run
from harness.routing.kinds.trace import Recorded, read_trace
from harness.routing.trace_file import TraceFileError, TraceHeader

TRACES = ("routing.jsonl.gz", "routing.jsonl")  # in a run folder
_FOLDERS = re.compile(r"(?<!\S)/\S*/")  # of the machine that recorded
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Text:
    """A text holds the tokens of some requests one after another, with the experts that each went to.

    `words` are the token ids, None where nobody recorded them. `numbers` are the tokens' places in the whole domain.
    """

    num_experts: int
    starts: Ints  # [requests + 1]
    experts: NDArray[np.int16]  # [tokens, layers, k]
    numbers: Ints  # [tokens]
    words: Ints | None = None  # [tokens]

    @property
    def num_tokens(self) -> int:
        return len(self.experts)

    @property
    def num_layers(self) -> int:
        return int(self.experts.shape[1])

    @property
    def k(self) -> int:
        return int(self.experts.shape[2])

    @cached_property
    def offsets(self) -> Ints:
        """The place of each token [tokens] within its request, from 0."""
        return np.arange(self.num_tokens) - np.repeat(self.starts[:-1], np.diff(self.starts))

    def chosen(self, layer: int) -> Bools:
        """Return which experts [tokens, experts] work on each token in a layer, counted from the first with a
        router."""
        found = np.zeros((self.num_tokens, self.num_experts), dtype=np.bool_)
        np.put_along_axis(found, self.experts[:, layer].astype(np.int64), True, axis=1)
        return found

    def requests(self, which: Ints) -> Text:
        """Return the text of some requests, by their places in this one."""
        lengths = np.diff(self.starts)[which]
        rows = [np.arange(self.starts[at], self.starts[at + 1]) for at in which]
        kept = np.concatenate(rows) if rows else np.empty(0, dtype=np.int64)
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        words = None if self.words is None else self.words[kept]
        return Text(self.num_experts, starts, self.experts[kept], self.numbers[kept], words)

    def only(self, kept: Bools) -> Text:
        """Return some of the tokens [tokens], with their requests, each of which has some."""
        lengths = np.add.reduceat(kept, self.starts[:-1], dtype=np.int64)
        words = None if self.words is None else self.words[kept]
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        return Text(self.num_experts, starts, self.experts[kept], self.numbers[kept], words)

    def singles(self, places: Ints) -> Text:
        """Return single tokens, by their places in this text, each as a request of its own."""
        words = None if self.words is None else self.words[places]
        return Text(self.num_experts, np.arange(len(places) + 1), self.experts[places], self.numbers[places], words)

    def first(self, num_tokens: int) -> Text:
        """Return the requests from the first on that have at most this many tokens together, and one at the least."""
        count = max(1, int(np.searchsorted(self.starts, num_tokens, side="right")) - 1)
        return self.requests(np.arange(min(count, len(self.starts) - 1)))


@dataclass(frozen=True, eq=False)
class Domain:
    """A domain is what was recorded with one kind of text. Of its `distinct` requests every second one is learned from,
    the others test.

    `whole` has all tokens that were recorded; `text`, which is studied, has the prompts alone where it is known which
    tokens they are. Small models soon repeat themselves, so what they generate is easier to predict than text.
    """

    name: str
    path: Path
    header: TraceHeader
    whole: Text
    folder: Path | None  # of the run, if it was one
    is_prompt: Bools | None  # [tokens of `whole`], None where nobody knows
    request_ids: Ints  # [requests]
    first_positions: Ints  # [requests]
    weights: NDArray[np.float32] | None  # [tokens of `whole`, layers, k]: the router's, None if not recorded

    @property
    def favourite_weight(self) -> list[float] | None:
        """The share of the first expert in a token's weights, mean over tokens [layers]."""
        if self.weights is None:
            return None
        shares = self.weights[:, :, 0] / np.maximum(self.weights.sum(axis=2), 1e-12)
        found: list[float] = shares.mean(axis=0, dtype=np.float64).tolist()
        return found

    @cached_property
    def text(self) -> Text:
        return self.whole if self.is_prompt is None else self.whole.only(self.is_prompt)

    @cached_property
    def distinct(self) -> Ints:
        """The places of the requests whose prompt no earlier one has; of all where nobody recorded token ids. A text
        that is too short for a run is repeated there."""
        if self.is_prompt is None or self.whole.words is None:
            return np.arange(len(self.request_ids))
        spans = zip(self.whole.starts[:-1], self.whole.starts[1:], strict=True)
        prompts = [self.whole.words[start:end][self.is_prompt[start:end]].tobytes() for start, end in spans]
        first = {prompt: at for at, prompt in reversed(list(enumerate(prompts)))}
        return np.asarray(sorted(first.values()), dtype=np.int64)

    @cached_property
    def train(self) -> Text:
        return self.text.requests(self.distinct[0::2])

    @cached_property
    def test(self) -> Text:
        return self.text.requests(self.distinct[1::2])


def read_domain(name: str, path: Path) -> Domain:
    """Read a domain from a run folder or a trace. Raises ConfigError naming the domain."""
    trace, folder = _trace_of(name, path)
    try:
        recorded = read_trace(trace)
        lines = {} if folder is None else {row["request_id"]: row for row in read_run(folder).requests}
    except (TraceFileError, RecordError) as error:
        raise ConfigError(name, str(error)) from None
    words, is_prompt = _words(recorded, lines)
    text = Text(recorded.header.experts, recorded.starts, recorded.experts, np.arange(len(recorded.experts)), words)
    ids, firsts = recorded.request_ids, recorded.first_positions
    header = replace(recorded.header, source=_FOLDERS.sub("", recorded.header.source))
    domain = Domain(name, path, header, text, folder, is_prompt, ids, firsts, recorded.weights)
    if len(domain.distinct) < 2:
        told = "needs 2 requests or more with different prompts, some to learn from and others to test"
        raise ConfigError(name, f"{trace}: {told}")
    return domain


def require_one_model(domains: Mapping[str, Domain]) -> None:
    """Check that all domains were recorded from models of the same form. Raises ConfigError naming the first that was
    not."""
    (first, one), *others = domains.items()
    for name, domain in others:
        for field in ("model", "layers", "first_layer", "experts", "k"):
            ours, theirs = getattr(one.header, field), getattr(domain.header, field)
            if ours != theirs:
                raise ConfigError(name, f"{domain.path}: '{field}' must be {ours} as in {first}, got {theirs}")


def _trace_of(name: str, path: Path) -> tuple[Path, Path | None]:
    """Return the trace, and the run folder that it lies in."""
    if not path.is_dir():
        return path, path.parent if path.name in TRACES and (path.parent / "status.json").is_file() else None
    found = [path / trace for trace in TRACES if (path / trace).is_file()]
    if not found:
        raise ConfigError(name, f"{path}: has no {' or '.join(TRACES)}; record it with record_routing=true")
    return found[0], path if (path / "status.json").is_file() else None


def _words(recorded: Recorded, lines: Mapping[int, Mapping[str, Any]]) -> tuple[Ints | None, Bools | None]:
    """Return each token's id, and whether it belongs to the prompt. None where a request does not tell."""
    words: list[Ints] = []
    is_prompt = []
    lengths = np.diff(recorded.starts)
    for request, first, length in zip(recorded.request_ids, recorded.first_positions, lengths, strict=True):
        if (line := lines.get(int(request))) is None:
            return None, None
        positions = np.arange(first, first + length)
        is_prompt.append(positions < line["prompt_tokens"])
        ids = [] if line.get("prompt_ids") is None else [*line["prompt_ids"], *line["generated_ids"]]
        if len(ids) >= first + length:
            words.append(np.asarray(ids, dtype=np.int64)[positions])
    return np.concatenate(words) if len(words) == len(lengths) else None, np.concatenate(is_prompt)


def joined(texts: Iterable[Text]) -> Text:
    """Put texts one after another. Token numbers count on, so they no longer name tokens of one domain."""
    parts = list(texts)
    lengths = np.concatenate([np.diff(part.starts) for part in parts])
    words = [part.words for part in parts if part.words is not None]
    return Text(
        num_experts=parts[0].num_experts,
        starts=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        experts=np.concatenate([part.experts for part in parts]),
        numbers=np.arange(int(lengths.sum())),
        words=np.concatenate(words) if len(words) == len(parts) else None,
    )
