"""Make the requests of a run from a dataset's configuration, a tokenizer and a seed."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from pathlib import Path

from harness.config import ConfigError, load_json, require
from harness.workload.config import DatasetConfig
from harness.workload.fit import LengthLimits, Prompt
from harness.workload.lengths import drawn_lengths
from harness.workload.real import real_candidates
from harness.workload.request import Request, Workload
from harness.workload.streams import Stream, generator
from harness.workload.synthetic import synthetic_candidates
from harness.workload.tokens import Candidate, Tokenizer

GIVE_UP_AFTER = 10_000  # candidates in a row that are all too short: what is asked for is practically never drawn


def build_workload(
    config: DatasetConfig,
    tokenizer: Tokenizer | None,
    *,
    vocab_size: int,
    max_positions: int,
    seed: int,
    field: str = "dataset",
) -> Workload:
    """Build the workload that `config` describes; a longer one (`num_requests`) begins with the shorter one of the same
    seed.

    Real prompts keep their order and repeat when they run out. `tokenizer` may be None for synthetic prompts, whose
    ids are then uniform over the vocabulary. Bad input raises one `ConfigError`, its field below `field`.
    """
    require(seed >= 0, "seed", f"must be 0 or more, got {seed}")
    is_synthetic = config.path is None and not config.use_hub
    try:
        limits = LengthLimits.of(config, max_positions)
        if is_synthetic:
            candidates, source = synthetic_candidates(config, tokenizer, limits, vocab_size, seed)
        else:
            candidates, source = real_candidates(config, tokenizer, limits)
        prompts = _fitting(candidates, config, limits, source)
        ends, told = _ends(config, seed)
    except ConfigError as error:
        raise error.below(field) from error.__cause__
    if not is_synthetic and len(prompts) < config.num_requests:
        source += f", {len(prompts)} different, repeated to {config.num_requests}"
    largest = max(max(prompt.ids) for prompt in prompts)
    require(largest < vocab_size, "model", f"its tokenizer gives id {largest}, its vocabulary has {vocab_size} entries")
    return Workload(
        name=config.name,
        requests=_requests(prompts, config, tokenizer, ends),
        source=f"{'synthetic' if is_synthetic else 'real'}: {source}{limits.notes()}{told}",
        is_synthetic=is_synthetic,
    )


def _fitting(candidates: Iterator[Candidate], config: DatasetConfig, limits: LengthLimits, source: str) -> list[Prompt]:
    """Return the first `num_requests` candidates that have, or get, an allowed length; fewer where the candidates
    end."""
    prompts: list[Prompt] = []
    num_left_out = 0
    for candidate in candidates:
        prompt = limits.apply(candidate)
        if prompt is not None:
            prompts.append(prompt)
        num_left_out = 0 if prompt is not None else num_left_out + 1
        if len(prompts) == config.num_requests or num_left_out == GIVE_UP_AFTER:
            break
    if not prompts:
        origin = "path" if config.path else "hub_id" if config.use_hub else "lengths"
        raise ConfigError("min_prompt_tokens" if num_left_out else origin, f"{source}: no prompt{limits.notes()}")
    return prompts


def _ends(config: DatasetConfig, seed: int) -> tuple[Iterator[int | None], str]:
    """Return after how many tokens each request ends, and where that is from, for labels. Raises ConfigError."""
    if config.output_lengths is not None:
        statistics = config.output_lengths
        told = f"; ends drawn from mean {statistics.mean:g}, max {statistics.max} ({statistics.source})"
        return drawn_lengths(statistics, seed, Stream.OUTPUTS), told
    if config.output_lengths_path is None:
        return repeat(None), ""
    path = Path(config.output_lengths_path).expanduser()
    try:
        found = load_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError("output_lengths_path", f"{path}: cannot be read: {error}") from None
    valid = isinstance(found, list) and found and all(type(each) is int and each >= 1 for each in found)
    require(bool(valid), "output_lengths_path", f"{path}: must be a list of whole numbers, each 1 or more")
    drawn = generator(seed, Stream.OUTPUTS).choice(found, size=config.num_requests)
    return iter(drawn.tolist()), f"; ends by lot from the {len(found)} of {path.name}"


def _requests(
    prompts: list[Prompt], config: DatasetConfig, tokenizer: Tokenizer | None, ends: Iterator[int | None]
) -> tuple[Request, ...]:
    def text_of(prompt: Prompt) -> str | None:
        if prompt.text is not None or tokenizer is None:
            return prompt.text
        text: str = tokenizer.decode(list(prompt.ids), skip_special_tokens=True)
        return text

    texts = [text_of(prompt) for prompt in prompts]
    return tuple(
        Request(
            request_id=number,
            prompt_ids=prompts[number % len(prompts)].ids,
            max_new_tokens=config.max_new_tokens,
            text=texts[number % len(prompts)],
            ends_after=ends_after,
        )
        for number, ends_after in zip(range(config.num_requests), ends, strict=False)
    )
