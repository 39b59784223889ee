import pytest
from huggingface_hub import constants

from harness.config import ConfigError
from harness.model.hub import resolve_model

CLOSED_PORT = "http://127.0.0.1:9"  # nothing listens on the discard port


def message(name: str) -> str:
    with pytest.raises(ConfigError) as raised:
        resolve_model(name)
    assert raised.value.field == "model.path" and "\n" not in str(raised.value)
    return raised.value.message


def test_local_folders_come_first(tiny, monkeypatch):
    assert resolve_model(str(tiny.folder)) == tiny.folder
    monkeypatch.setenv("HOME", str(tiny.folder.parent))
    assert resolve_model(f"~/{tiny.folder.name}") == tiny.folder


def test_neither_folder_nor_hub_id(tiny):
    assert message("/no/such/folder") == "/no/such/folder: no such folder, and no hub id of the form owner/name"
    assert "no such folder" in message("./weights/here")
    assert "is a file" in message(str(tiny.folder / "config.json"))


def test_switched_off_hub_answers_at_once(monkeypatch, naps):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    text = message("someone/some-model")
    assert "someone/some-model: no such folder, not in the hub's cache, and the hub is switched off" in text
    assert not naps


def test_unreachable_hub_answers_at_once(monkeypatch, naps):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", CLOSED_PORT)
    text = message("someone/some-model")
    assert f"not in the hub's cache, and the hub at {CLOSED_PORT} did not answer" in text
    assert not naps


def test_a_cached_snapshot_needs_no_network(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repo = tmp_path / "models--someone--some-model"
    snapshot = repo / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0" * 40)
    assert resolve_model("someone/some-model") == snapshot
