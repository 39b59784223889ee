"""From rows to prompt texts: paths, templates, removed texts, empty values."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.config import ConfigError
from harness.workload import DatasetConfig, LengthStatistics
from harness.workload.config import placeholders
from harness.workload.recipe import prompt_text

Make = Callable[..., DatasetConfig]


@pytest.mark.parametrize(
    ("recipe", "row", "expected"),
    [
        ({}, {"prompt": "hello"}, "hello"),
        ({"column": "turns.0"}, {"turns": ["first", "second"]}, "first"),
        ({"column": "turns.1.content"}, {"turns": [{}, {"content": "deep"}]}, "deep"),
        ({"column": "q", "template": "C: {c}\nQ: {prompt}"}, {"q": "why", "c": "facts"}, "C: facts\nQ: why"),
        ({"column": "q", "template": "{prompt} {o.0}/{o.1}"}, {"q": "pick", "o": ["a", 7]}, "pick a/7"),
        ({"remove": ["<image>"]}, {"prompt": "<image>\nWhat is it?"}, "What is it?"),
        ({"template": "{prompt} {not a column} {}"}, {"prompt": "x"}, "x {not a column} {}"),
        ({"template": "{prompt}{hint}"}, {"prompt": "x", "hint": None}, "x"),
        ({}, {"prompt": " \n"}, None),
        ({}, {"prompt": None}, None),
        ({"column": "turns.2"}, {"turns": ["only"]}, None),
        ({"column": "turns.0"}, {"turns": []}, None),
        ({"column": "turns.0"}, {"turns": None}, None),
        ({"remove": ["<image>"]}, {"prompt": "<image>"}, None),
    ],
)
def test_prompt_of_a_row(dataset: Make, recipe: dict[str, Any], row: dict[str, Any], expected: str | None) -> None:
    assert prompt_text(dataset(**recipe), row, "here") == expected


@pytest.mark.parametrize(
    ("recipe", "row", "error"),
    [
        ({"column": "promt"}, {"prompt": "", "i": 1}, "column: f row 2 has no column 'promt'; available columns: pro"),
        ({"column": "a.b"}, {"a": {"c": 1}}, "column: f row 2 has no column 'b' in 'a'; available columns: c"),
        ({"template": "{prompt}{c}"}, {"prompt": "x"}, "template: f row 2 has no column 'c'; available columns: prom"),
        ({"column": "t"}, {"t": ["x"]}, "column: f row 2: 't' is a list, not text; name a part of it: 't.0'"),
        ({"column": "t"}, {"t": True}, "column: f row 2: 't' is a bool"),
        ({"column": "t.x"}, {"t": ["x"]}, "column: f row 2: 't.x' asks for 'x' of a list"),
        ({"column": "t.0"}, {"t": "x"}, "column: f row 2: 't.0' asks for '0' of a str"),
    ],
)  # fmt: skip
def test_rows_that_do_not_fit_the_recipe(
    dataset: Make, recipe: dict[str, Any], row: dict[str, Any], error: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        prompt_text(dataset(**recipe), row, "f row 2")
    assert str(raised.value).startswith(error)


@given(value=st.text("{}prompt other\\é", min_size=1).filter(str.strip), other=st.text("{}prompt"))
def test_values_are_inserted_as_they_are(value: str, other: str) -> None:
    """Also where they hold braces, which must not be taken for placeholders."""
    lengths = LengthStatistics(mean=1, max=1, source="none")
    config = DatasetConfig(
        name="t", lengths=lengths, num_requests=1, max_new_tokens=1, template="<{other}|{prompt}>", remove=()
    )
    for prompt in (value, value + "{other}"):
        assert prompt_text(config, {"prompt": prompt, "other": other}, "") == f"<{other}|{prompt.strip()}>"


def test_placeholders_are_found_in_order() -> None:
    assert placeholders("{a.0} {prompt} {} {1} {b c} {x-y}") == ["a.0", "prompt", "x-y"]
