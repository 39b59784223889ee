"""A damaged run folder costs its row and is told with the reason; the other runs have their table all the same."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from run_folders import configuration, store

from harness.record.compare import main

BOMB = "\n".join(
    [f"a0: &a0 [{', '.join(['x'] * 9)}]", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 10))]
)


def half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def enormous(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(2**40)  # a hole: it takes no place on the disk


def with_value(name: str, value: object):
    """The JSON file with one value exchanged, by its dotted name."""

    def change(path: Path) -> None:
        content = place = json.loads(path.read_text())
        *parents, key = name.split(".")
        for parent in parents:
            place = place[parent]
        place[key] = value
        path.write_text(json.dumps(content))

    return change


def text(content: str):
    return lambda path: path.write_text(content)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


FILES = ("status.json", "config.yaml", "meta.json", "summary.json")
KINDS = {
    "absent": Path.unlink,
    "empty": text(""),
    "half": half,
    "list": text("[1, 2]"),
    "string": text('"text"'),
    "null": text("null"),
    "bytes": lambda path: path.write_bytes(b"\xff\xfe\x00"),
    "enormous": enormous,
    "nested": text("[" * 100_000),
    "pipe": pipe,
}
DAMAGE = [(file, kind) for file in FILES for kind in KINDS] + [
    *(("summary.json", f"throughput_tok_s={value}") for value in ('"12"', "NaN", "1e999", "-1")),
    *(("summary.json", f"utilization.gpu={value}") for value in ('"12"', "NaN", "1e999", "-1", "null")),
    *(("summary.json", f"{name}=null") for name in ("label", "utilization", "verify", "data_source")),
    ("summary.json", 'label="guessed"'),
    ("summary.json", 'verify.checked="4"'),
    ("summary.json", 'latency={"ttft_s": {"p50": 1}}'),
    ("status.json", 'status="fine"'),
    ("status.json", "status=null"),
    ("meta.json", "code_version=3"),
    ("meta.json", "environment=null"),
]  # fmt: skip
YAML = [
    ("bomb", BOMB),
    ("unnamed", "strategy: {name: 3}"),
    ("object", "a: !!python/object/apply:os.getpid []"),
    ("flat", "strategy: x"),
]


@pytest.fixture
def folder(tmp_path):
    """The run that is damaged, beside one that is whole."""
    store(tmp_path, 10.0)
    return store(tmp_path, 20.0, configuration("flexgen"))


def check(folder: Path, file: str, capsys) -> None:
    assert main([str(folder.parents[1]), "--format", "json"]) == 0
    captured = capsys.readouterr()
    told = json.loads(captured.out)
    assert [row["strategy"] for row in told["rows"]] == ["moelens"] and not captured.err
    (left_out,) = told["left_out"]
    assert left_out["run"] == folder.name and left_out["status"] == "damaged"
    assert left_out["cause"].startswith(f"{file}: ") and "\n" not in left_out["cause"]
    assert main([str(folder)]) == 2
    assert f"damaged  {folder.name}: {file}: " in capsys.readouterr().err


@pytest.mark.parametrize(("file", "kind"), DAMAGE, ids=lambda name: str(name)[:40])
def test_damage_costs_the_row_alone(folder, file, kind, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    name, _, value = kind.partition("=")
    change = KINDS[kind] if kind in KINDS else with_value(name, json.loads(value))
    change(folder / file)
    check(folder, file, capsys)


@pytest.mark.parametrize("content", [content for _, content in YAML], ids=[name for name, _ in YAML])
def test_a_configuration_that_is_none_costs_the_row_alone(folder, content, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    (folder / "config.yaml").write_text(content)
    check(folder, "config.yaml", capsys)


def test_a_running_status_without_its_process_is_damaged(folder, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    for pid in ("x", None):
        status = json.loads((folder / "status.json").read_text())
        (folder / "status.json").write_text(json.dumps({**status, "status": "running", "pid": pid}))
        check(folder, "status.json", capsys)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def test_whatever_a_file_says_the_other_run_has_its_row(folder, capsys):
    """Any value for any name in it."""
    originals = {name: (folder / name).read_text() for name in FILES if name.endswith(".json")}

    @settings(max_examples=15, deadline=None)
    @given(data=st.data())
    def changed(data):
        name = data.draw(st.sampled_from(sorted(originals)))
        content = json.loads(originals[name])
        content[data.draw(st.sampled_from(sorted(content)))] = data.draw(JSON)
        (folder / name).write_text(json.dumps(content))
        assert main([str(folder.parents[1])]) == 0
        assert "moelens" in capsys.readouterr().out
        (folder / name).write_text(originals[name])

    changed()


def test_nothing_in_a_folder_reaches_the_terminal_as_more_than_text(tmp_path, capsys):
    evil = "\x1b[31mred\x1b[0m\r[bold]|"
    store(tmp_path, 10.0, configuration(dataset="a", strategy__note=1))
    path = store(tmp_path, 10.0, configuration(dataset="b", strategy__note=2))
    with_value("data_source", evil)(path / "summary.json")
    with_value("disturbed", evil)(path / "summary.json")
    (path / "config.yaml").write_text((path / "config.yaml").read_text().replace("note: 2", r'note: "\e[31m[bold]\a"'))
    with_value("error", evil + "\ud800")(store(tmp_path, None, status="failed") / "status.json")
    path.rename(path.with_name("run-\x1b[32m"))
    for output in ("table", "csv", "markdown", "json"):
        assert main([str(tmp_path), "--format", output]) == 0
        out = capsys.readouterr().out
        out.encode()  # a lone surrogate cannot be
        assert "\x1b" not in out and "\a" not in out and "\r" not in out and "[bold]" in out
