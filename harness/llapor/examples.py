"""Read recorded runs as examples to learn from and to test on: what routers got, and what they chose. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from harness.config import ConfigError, require
from harness.routing.hidden_file import HiddenFileError, read_hidden
from harness.routing.recording import HIDDEN_FOLDER
from harness.routing.trace_file import TraceHeader
from harness.study.inputs import token_numbers
from harness.study.recorded import Domain, Text, joined, read_domain, require_one_model

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Examples:
    """Examples are tokens of prompts, each with what it had in all layers with a router."""

    name: str
    header: TraceHeader
    text: Text  # each token as a request of its own
    requests: Ints  # [tokens]: which request of its recording each is of
    inputs: NDArray[np.float16]  # [tokens, layers, hidden]
    weights: NDArray[np.float32]  # [tokens, layers, k]: the router's, of `text.experts`
    prompts: frozenset[bytes]  # the token ids of every whole prompt

    def __len__(self) -> int:
        return len(self.inputs)

    def some(self, rows: Ints) -> Examples:
        """Return some of the tokens."""
        text = self.text.singles(rows)
        picked = (self.requests[rows], self.inputs[rows], self.weights[rows])
        return Examples(self.name, self.header, text, *picked, self.prompts)


def read_examples(field: str, folders: Mapping[str, str], most_tokens: int, seed: int) -> list[Examples]:
    """Read the recording in each folder. Raises ConfigError below `field`, naming the text."""
    domains: dict[str, Domain] = {}
    try:
        for name, folder in folders.items():
            domains[name] = read_domain(name, Path(folder).expanduser())
        if domains:
            require_one_model(domains)
        return [_examples(domain, most_tokens, seed) for domain in domains.values()]
    except ConfigError as error:
        raise error.below(field) from None


def _examples(domain: Domain, most_tokens: int, seed: int) -> Examples:
    told = "record it with record_routing=weights record_hidden=true"
    require(domain.folder is not None and domain.is_prompt is not None, domain.name,
            f"{domain.path}: is no run folder with its requests; {told}")  # fmt: skip
    require(domain.weights is not None, domain.name, f"{domain.path}: has no weights of the routers; {told}")
    assert domain.folder is not None and domain.is_prompt is not None and domain.weights is not None
    try:
        hidden = read_hidden(domain.folder / HIDDEN_FOLDER)
    except HiddenFileError as error:
        raise ConfigError(domain.name, f"{error}; {told}") from None
    numbers = token_numbers(domain, hidden.request_ids, hidden.positions)
    require(bool((numbers >= 0).all()), domain.name, f"{domain.path}: has gating inputs of tokens without routing")
    rows = np.flatnonzero(domain.is_prompt[numbers] & np.isin(hidden.request_ids, domain.request_ids[domain.distinct]))
    rows = np.sort(np.random.default_rng(seed).permutation(rows)[:most_tokens])
    require(len(rows) > 0, domain.name, f"{domain.path}: has gating inputs of no token of a prompt")
    at = numbers[rows]
    return Examples(
        name=domain.name,
        header=domain.header,
        text=domain.whole.singles(at),
        requests=hidden.request_ids[rows],
        inputs=hidden.inputs[rows],
        weights=domain.weights[at],
        prompts=_prompts(domain),
    )


def _prompts(domain: Domain) -> frozenset[bytes]:
    assert domain.is_prompt is not None
    words = domain.whole.words
    if words is None:
        raise ConfigError(domain.name, f"{domain.path}: says no token ids, so nobody can tell prompts apart")
    spans = zip(domain.whole.starts[:-1], domain.whole.starts[1:], strict=True)
    return frozenset(words[start:end][domain.is_prompt[start:end]].tobytes() for start, end in spans)


def require_apart(learned: Sequence[Examples], tested: Sequence[Examples]) -> None:
    """Raise ConfigError where a tested text is also learned from, or shares a prompt with one that is."""
    for test in tested:
        for data in learned:
            told = f"is among the texts to learn from ({data.name}); test on another text"
            require(test.name != data.name, f"test.{test.name}", told)
            shared = len(test.prompts & data.prompts)
            told = f"{shared} of its prompts are also in {data.name}, which is learned from"
            require(shared == 0, f"test.{test.name}", told)


def split(examples: Sequence[Examples], share: float, seed: int) -> tuple[Examples, Examples]:
    """Return what to fit and what to validate by: whole requests of each text."""
    parts: tuple[list[Examples], list[Examples]] = ([], [])
    for each in examples:
        requests = np.random.default_rng(seed).permutation(np.unique(each.requests))
        require(len(requests) >= 2, f"data.{each.name}", "has 1 request; some must be left to validate by")
        kept = requests[: max(1, round(share * len(requests)))]
        is_kept = np.isin(each.requests, kept)
        for part, rows in zip(parts, (~is_kept, is_kept), strict=True):
            part.append(each.some(np.flatnonzero(rows)))
    return together(parts[0]), together(parts[1])


def together(parts: Sequence[Examples]) -> Examples:
    """Put the examples of several texts into one."""
    return Examples(
        name=" and ".join(part.name for part in parts),
        header=parts[0].header,
        text=joined(part.text for part in parts),
        requests=np.concatenate([part.requests for part in parts]),
        inputs=np.concatenate([part.inputs for part in parts]),
        weights=np.concatenate([part.weights for part in parts]),
        prompts=frozenset[bytes]().union(*(part.prompts for part in parts)),
    )
