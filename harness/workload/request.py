"""Define what an engine is asked to do: requests with their prompts as token ids, and where the prompts came from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request asks for so many tokens after one prompt.

    `ends_after` generated tokens the request ends, as if its end of sequence came there: only then does a scheduler or
    planner learn of it. Until then it counts with `max_new_tokens`. None: it has no end of its own.

    `text` is what `prompt_ids` say, for people: decoded again where the ids were cut or repeated to fit a length, None
    where the ids never were text.
    """

    request_id: int
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    text: str | None
    ends_after: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A workload has all requests of a run in the order of their arrival, with ids 0 to n - 1. `source`, shown with
    every result, begins "real:" or "synthetic:"."""

    name: str
    requests: tuple[Request, ...]
    source: str
    is_synthetic: bool

    def __post_init__(self) -> None:
        assert self.requests, "a workload has at least one request"
        assert all(request.prompt_ids for request in self.requests), "every prompt has at least one token"
        assert [request.request_id for request in self.requests] == list(range(len(self.requests)))
        assert self.source.startswith("synthetic:" if self.is_synthetic else "real:"), self.source

    @property
    def total_prompt_tokens(self) -> int:
        return sum(len(request.prompt_ids) for request in self.requests)

    @property
    def mean_prompt_tokens(self) -> float:
        return self.total_prompt_tokens / len(self.requests)

    @property
    def max_prompt_tokens(self) -> int:
        return max(len(request.prompt_ids) for request in self.requests)
