"""Whatever a user gets wrong is one line that names the field, below the prefix the caller gives."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.config import ConfigError
from harness.workload import DatasetConfig, build_workload

Make = Callable[..., DatasetConfig]


@pytest.mark.parametrize(
    ("overrides", "field", "message"),
    [
        ({"name": " "}, "name", "must be a name"),
        ({"num_requests": 0}, "num_requests", "must be 1 or more, and at most 1000000, got 0"),
        ({"max_new_tokens": 0}, "max_new_tokens", "must be 1 or more, got 0"),
        ({"max_new_tokens": "32"}, "max_new_tokens", "must be a valid integer, got '32'"),
        ({"path": "data.txt"}, "path", "must name a .jsonl, .json, .csv, .parquet file, got 'data.txt'"),
        ({"path": "a.jsonl", "use_hub": True, "hub_id": "a/b"}, "use_hub", "name one source"),
        ({"use_hub": True}, "hub_id", "use_hub=true needs it"),
        ({"column": ""}, "column", "must not be empty"),
        ({"template": "no place for it"}, "template", "must contain {prompt}"),
        ({"remove": [""]}, "remove", "must not contain an empty text"),
        ({"num_shots": -1}, "num_shots", "must be 0 or more"),
        ({"num_shots": 1}, "shot_template", "must contain {prompt}"),
        ({"min_prompt_tokens": 0}, "min_prompt_tokens", "must be 1 or more"),
        ({"min_prompt_tokens": 9, "max_prompt_tokens": 8}, "max_prompt_tokens", "min_prompt_tokens = 9, got 8"),
        ({"output_lengths_path": "a.json", "output_lengths": {"mean": 2, "max": 3, "source": "t"}}, "output_lengths",
         "must be null where output_lengths_path is set"),
        ({"on_too_long": "cut"}, "on_too_long", "must be 'error' or 'truncate', got 'cut'"),
        ({"on_too_short": "pad"}, "on_too_short", "must be 'skip', 'repeat' or 'error'"),
        ({"synthetic": "noise"}, "synthetic", "must be 'lengths' or 'reasoning'"),
        ({"colum": "x"}, "colum", "did you mean 'column'?"),
        ({"lengths.mean": 61}, "lengths.mean", "must lie in 1 to 60, got 61"),
        ({"lengths.min": 0}, "lengths.min", "must be 1 or more, got 0"),
        ({"lengths.min": 21}, "lengths.mean", "must lie in 21 to 60, got 20"),
        ({"lengths.shape": "constant"}, "lengths.mean", "must equal max = 60"),
        ({"lengths.sigma": 0.0}, "lengths.sigma", "must lie in 0.05 to 5"),
        ({"lengths.num_prompts": 0}, "lengths.num_prompts", "must be 1 or more"),
    ],
)  # fmt: skip
def test_impossible_values(dataset: Make, overrides: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        dataset(**overrides)
    assert raised.value.field == f"dataset.{field}"
    assert message in str(raised.value) and "\n" not in str(raised.value)


SKIP = {"on_empty": "skip"}
ROWS = [{"prompt": "the " * 40, "id": 7}, {"prompt": "short", "id": 8}, {"prompt": "", "id": 9}]


@pytest.mark.parametrize(
    ("overrides", "field", "message"),
    [
        ({"max_new_tokens": 64}, "max_new_tokens", "must leave room for a prompt in the model's 64 positions, got 64"),
        ({"min_prompt_tokens": 61}, "min_prompt_tokens", "must be 60 or less (64 positions of the model - max_new"),
        ({"max_new_tokens": 50, **SKIP}, "max_prompt_tokens", "rows.jsonl line 1 has 41 tokens, 14 are allowed (64"),
        ({"max_prompt_tokens": 12, **SKIP}, "max_prompt_tokens", "12 are allowed (max_prompt_tokens); on_too_long"),
        ({"column": "promt"}, "column", "line 1 has no column 'promt'; available columns: prompt, id"),
        ({"template": "{prompt} {tile}"}, "template", "no column 'tile'; available columns: prompt, id"),
        ({}, "column", "rows.jsonl line 3: 'prompt' is empty; on_empty=skip leaves such rows out"),
        ({"min_prompt_tokens": 59, **SKIP}, "min_prompt_tokens", "2 prompts left out below 59 tokens"),
        ({"min_prompt_tokens": 59, "on_too_short": "error", **SKIP}, "min_prompt_tokens", "tokens, 59 are needed"),
        ({"num_shots": 2, "shot_template": "{prompt}", **SKIP}, "path", "no prompt; 1 prompt left out, empty"),
    ],
)  # fmt: skip
def test_prompts_that_do_not_fit(
    dataset: Make, tokenizer: Any, tmp_path: Path, overrides: dict[str, Any], field: str, message: str
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)), encoding="utf-8")
    config = dataset(path=str(path), **overrides)
    with pytest.raises(ConfigError) as raised:
        build_workload(config, tokenizer, vocab_size=2048, max_positions=64, seed=0, field="outer.dataset")
    assert raised.value.field == f"outer.dataset.{field}", raised.value
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_statistics_that_pass_the_positions(dataset: Make, tokenizer: Any) -> None:
    """Named before anything is drawn, so that it does not depend on the seed; cutting helps."""
    with pytest.raises(ConfigError, match=r"^dataset\.lengths\.max: the longest .* has 60 tokens, 59 are allowed"):
        build_workload(dataset(num_requests=1), tokenizer, vocab_size=2048, max_positions=63, seed=0)
    cut = build_workload(dataset(on_too_long="truncate"), tokenizer, vocab_size=2048, max_positions=24, seed=0)
    assert cut.max_prompt_tokens == 20 and "cut to 20 tokens" in cut.source


def test_statistics_that_never_reach_the_minimum(dataset: Make, tokenizer: Any) -> None:
    config = dataset(min_prompt_tokens=61)
    with pytest.raises(ConfigError, match=r"^dataset\.min_prompt_tokens: .*no prompt; \d+ prompts left out below 61"):
        build_workload(config, tokenizer, vocab_size=2048, max_positions=512, seed=0)


def test_what_the_dataset_cannot_help(dataset: Make, tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match=r"^dataset\.path: real prompts need a tokenizer"):
        build_workload(dataset(path="a.jsonl"), None, vocab_size=2048, max_positions=64, seed=0)
    with pytest.raises(ConfigError, match=r"^seed: must be 0 or more, got -1$"):
        build_workload(dataset(), tokenizer, vocab_size=2048, max_positions=64, seed=-1)
    with pytest.raises(ConfigError, match=r"^model: its tokenizer gives id \d+, its vocabulary has 50 entries$"):
        build_workload(dataset(), tokenizer, vocab_size=50, max_positions=64, seed=0)
