"""File formats give the same rows; what is wrong with a file is named with its place, in one line."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.config import ConfigError
from harness.workload import DatasetConfig, build_workload
from harness.workload.files import file_rows

ROWS = [
    {"prompt": 'one, "quoted"\nline', "n": "1"},
    {"prompt": "zwei ünïcode 🙂", "n": "2"},
    {"prompt": "three", "n": "3"},
]


def written(folder: Path, suffix: str) -> Path:
    path = folder / f"rows{suffix}"
    if suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n\n" for row in ROWS), encoding="utf-8")
    elif suffix == ".json":
        path.write_text(json.dumps(ROWS, indent=1), encoding="utf-8")
    elif suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8-sig") as stream:
            writer = csv.DictWriter(stream, ["prompt", "n"])
            writer.writeheader()
            writer.writerows(ROWS)
    else:
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(arrow.Table.from_pylist(ROWS), path)
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
def test_every_format_gives_the_same_rows(tmp_path: Path, suffix: str) -> None:
    rows = list(file_rows(str(written(tmp_path, suffix))))
    assert [row for _, row in rows] == ROWS
    assert all(where.startswith(f"rows{suffix} ") for where, _ in rows)


def test_jsonl_places_are_line_numbers(tmp_path: Path) -> None:
    places = [where for where, _ in file_rows(str(written(tmp_path, ".jsonl")))]
    assert places == ["rows.jsonl line 1", "rows.jsonl line 3", "rows.jsonl line 5"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"", "a.jsonl is empty; it needs at least one row"),
        ("a.jsonl", b"\n  \n", "a.jsonl is empty"),
        ("a.json", b"", "a.json is empty"),
        ("a.json", b"[]", "a.json is empty"),
        ("a.csv", b"prompt,n\n", "a.csv is empty"),
        ("a.jsonl", b'{"prompt": "x"}\n\n{"prompt": \n', "a.jsonl line 3 is not valid JSON: Expecting value"),
        ("a.jsonl", b'{"prompt": "x"}\n["x"]\n', "a.jsonl line 2 holds a JSON list, not an object"),
        ("a.json", b'[{"prompt": "x"},\n oops]', "a.json line 2 is not valid JSON"),
        ("a.json", b'{"prompt": "x"}', "a.json holds a JSON dict, not a list of rows"),
        ("a.json", b'["x"]', "a.json row 1 holds a JSON str"),
        ("a.csv", b'prompt\n"open', "a.csv line 2 is not valid CSV"),
        ("a.jsonl", b'{"prompt": "\xff"}', "a.jsonl is not UTF-8 text"),
        ("a.parquet", b"no parquet", "a.parquet is not a readable parquet file"),
    ],
)
def test_bad_files(
    tmp_path: Path, dataset: Callable[..., DatasetConfig], tokenizer: Any, name: str, content: bytes, message: str
) -> None:
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ConfigError) as raised:
        build_workload(dataset(path=str(path)), tokenizer, vocab_size=2048, max_positions=512, seed=0)
    assert raised.value.field == "dataset.path"
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_missing_file_and_folder(tmp_path: Path) -> None:
    missing, folder = tmp_path / "none.jsonl", tmp_path / "folder.jsonl"
    folder.mkdir()
    with pytest.raises(ConfigError, match=r"^path: no such file: '.*none\.jsonl'$"):
        next(file_rows(str(missing)))
    with pytest.raises(ConfigError, match=r"^path: '.*folder\.jsonl' is a folder; name a file in it$"):
        next(file_rows(str(folder)))
