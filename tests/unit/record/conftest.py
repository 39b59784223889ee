"""The comparison as a command, for the tests of what it says."""

import json

import pytest

from harness.record import compare


@pytest.fixture
def told(capsys, monkeypatch, tmp_path):
    """Return what `python -m harness.record.compare tmp_path ...` prints; defaults of no YAML are known."""
    monkeypatch.setattr(compare, "yaml_defaults", lambda group, choice: {})

    def run(*arguments, folder=tmp_path, columns=200, code=0):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert compare.main([str(folder), *arguments]) == code
        return capsys.readouterr()

    return run


@pytest.fixture
def rows(told):
    """Return the rows of the JSON that `told` prints."""
    return lambda *arguments: json.loads(told("--format", "json", *arguments).out)["rows"]
