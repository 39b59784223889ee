"""Define what a dataset's YAML may say: where prompts come from, how a row becomes a prompt, which lengths are
allowed."""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import Literal

from harness.config import config, require, require_name

MAX_REQUESTS = 1_000_000  # each is an object of its own, before the first pass
FILE_TYPES = (".jsonl", ".json", ".csv", ".parquet")


PLACEHOLDER = re.compile(r"\{([A-Za-z_][\w.\-]*)\}")


def placeholders(template: str) -> list[str]:
    """Return the names in braces, in order: `prompt`, or dotted column paths."""
    return PLACEHOLDER.findall(template)


@config
class LengthStatistics:
    """The published prompt lengths of a workload, in tokens with the special ones, and the shape assumed between them.

    `shape` (see `harness.workload.lengths`): `lognormal`, with `sigma`, has a long tail to the right; `max_entropy`
    assumes nothing beyond minimum, mean and maximum; `constant` gives every prompt the same length.
    `num_prompts`: how many different prompts the published list has; longer workloads repeat it, as the papers do.
    `source`: paper and table the mean and the maximum are from.
    """

    mean: float
    max: int
    source: str
    min: int = 1
    shape: Literal["lognormal", "max_entropy", "constant"] = "lognormal"
    sigma: float = 1.0
    num_prompts: int | None = None

    def __post_init__(self) -> None:
        require(self.min >= 1, "min", f"must be 1 or more, got {self.min}")
        require(self.min <= self.mean <= self.max, "mean", f"must lie in {self.min} to {self.max}, got {self.mean:g}")
        if self.shape == "constant":
            require(self.mean == self.max, "mean", f"must equal max = {self.max} for a constant length")
        require(0.05 <= self.sigma <= 5, "sigma", f"must lie in 0.05 to 5, got {self.sigma:g}")
        require(self.num_prompts is None or self.num_prompts >= 1, "num_prompts", "must be 1 or more, or null")


@config
class DatasetConfig:
    """A dataset's settings describe one workload. Prompts come from `path` if it is set, from the hub if `use_hub`,
    else they are made up.

    Made-up prompts follow `lengths` (null: they never are made up), or a rule where `synthetic` names one; both are
    labelled synthetic everywhere.
    `column` is a dotted path into a row (`turns.0`); `template` wraps its value as `{prompt}` and may name further
    columns the same way (`{choices.0}`); texts in `remove` are cut out of the value first. The first `num_shots` rows,
    each in `shot_template`, are put in front of every other row's prompt. `on_empty` says what becomes of rows without
    a prompt. A prompt longer than `max_prompt_tokens`, or than the model's positions leave beside `max_new_tokens`,
    is an error or loses its end (`on_too_long`); one shorter than `min_prompt_tokens` is left out, repeated up to the
    length, or an error (`on_too_short`). A request ends where its answer does, after so many tokens: drawn from
    `output_lengths`, or from the list of numbers in the JSON file `output_lengths_path`; null: after `max_new_tokens`.
    """

    name: str
    lengths: LengthStatistics | None
    num_requests: int
    max_new_tokens: int
    published_requests: int | None = None
    synthetic: Literal["lengths", "reasoning"] = "lengths"
    path: str | None = None
    use_hub: bool = False
    hub_id: str | None = None
    hub_config: str | None = None
    hub_file: str | None = None
    split: str = "train"
    revision: str | None = None
    column: str = "prompt"
    template: str = "{prompt}"
    remove: tuple[str, ...] = ()
    num_shots: int = 0
    shot_template: str | None = None
    on_empty: Literal["error", "skip"] = "error"
    min_prompt_tokens: int = 1
    max_prompt_tokens: int | None = None
    on_too_short: Literal["skip", "repeat", "error"] = "skip"
    on_too_long: Literal["error", "truncate"] = "error"
    output_lengths: LengthStatistics | None = None
    output_lengths_path: str | None = None

    def __post_init__(self) -> None:
        require_name(self.name)
        for field in ("num_requests", "published_requests"):
            value = getattr(self, field)
            asked = f"must be 1 or more, and at most {MAX_REQUESTS}, got {value}"
            require(value is None or 1 <= value <= MAX_REQUESTS, field, asked)
        require(self.max_new_tokens >= 1, "max_new_tokens", f"must be 1 or more, got {self.max_new_tokens}")
        told = "must be null where output_lengths_path is set: name one of the two"
        require(self.output_lengths is None or self.output_lengths_path is None, "output_lengths", told)
        self._check_source()
        self._check_recipe()
        shortest, longest = self.min_prompt_tokens, self.max_prompt_tokens
        require(shortest >= 1, "min_prompt_tokens", f"must be 1 or more, got {shortest}")
        require(
            longest is None or longest >= shortest,
            "max_prompt_tokens",
            f"must be null or at least min_prompt_tokens = {shortest}, got {longest}",
        )

    def _check_source(self) -> None:
        if self.path is not None:
            known = PurePath(self.path).suffix.lower() in FILE_TYPES
            require(known, "path", f"must name a {', '.join(FILE_TYPES)} file, got '{self.path}'")
            require(not self.use_hub, "use_hub", "must be false where path is set: name one source")
        made_up = self.path is None and not self.use_hub
        require(
            not made_up or self.lengths is not None,
            "path",
            f"must name a {', '.join(FILE_TYPES)} file: this dataset makes up no prompts",
        )
        require(not self.use_hub or self.hub_id is not None, "hub_id", "missing; use_hub=true needs it")

    def _check_recipe(self) -> None:
        require(bool(self.column.strip()), "column", "must not be empty")
        require(bool(placeholders(self.template)), "template", "must contain {prompt} or another {column}")
        require(all(self.remove), "remove", "must not contain an empty text")
        require(self.num_shots >= 0, "num_shots", f"must be 0 or more, got {self.num_shots}")
        if self.num_shots:
            given = self.shot_template is not None and bool(placeholders(self.shot_template))
            require(given, "shot_template", "must contain {prompt} or another {column} where num_shots > 0")
