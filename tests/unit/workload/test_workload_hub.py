"""The hub: rows and label when it answers, one clear line at once when it does not."""

import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from harness.config import ConfigError
from harness.workload import DatasetConfig, build_workload, hub
from tests.kernels.eventually import GIVE_UP_S

Make = Callable[..., DatasetConfig]


@pytest.fixture
def fake_hub(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stands for both libraries; records what is asked of them."""
    fake = SimpleNamespace(offline=False, asked=[], loaded=[], rows=[{"turns": ["hello"]}, {"turns": ["there"]}])

    def dataset_info(repository: str, **options: Any) -> SimpleNamespace:
        fake.asked.append((repository, options["revision"]))
        return fake.answer()

    def load_dataset(repository: str, **options: Any) -> list[dict[str, Any]]:
        fake.loaded.append((repository, options))
        if isinstance(fake.rows, Exception):
            raise fake.rows
        return fake.rows

    fake.answer = lambda: SimpleNamespace(sha="c0ffee")
    constants = SimpleNamespace(HF_HUB_OFFLINE=False)
    fake.constants = constants
    api = SimpleNamespace(HfApi=lambda: SimpleNamespace(dataset_info=dataset_info), constants=constants)
    monkeypatch.setitem(sys.modules, "huggingface_hub", api)
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    monkeypatch.setattr(hub, "ANSWER_WITHIN_S", GIVE_UP_S)
    return fake


def config(dataset: Make, **overrides: Any) -> DatasetConfig:
    return dataset(use_hub=True, hub_id="who/what", column="turns.0", num_requests=3, **overrides)


def test_rows_and_commit(dataset: Make, tokenizer: Any, fake_hub: SimpleNamespace) -> None:
    asked = config(dataset, hub_config="all", hub_file="x.json", split="test", revision="v1")
    workload = build_workload(asked, tokenizer, vocab_size=2048, max_positions=64, seed=0)
    assert [request.text for request in workload.requests] == ["hello", "there", "hello"]
    assert workload.source == "real: who/what, split test, revision c0ffee, 2 different, repeated to 3"
    assert fake_hub.asked == [("who/what", "v1")]
    options = {"name": "all", "data_files": "x.json", "split": "test", "revision": "c0ffee"}
    assert fake_hub.loaded == [("who/what", options)]  # and nothing like trust_remote_code


def test_no_network_is_one_line_at_once(dataset: Make, tokenizer: Any, fake_hub: SimpleNamespace) -> None:
    def unreachable() -> None:
        raise RuntimeError("name or service not known\nand a long trace")

    fake_hub.answer = unreachable
    with pytest.raises(ConfigError) as raised:
        build_workload(config(dataset), tokenizer, vocab_size=2048, max_positions=64, seed=0)
    assert raised.value.field == "dataset.use_hub"
    assert "'who/what': name or service not known; set path to a local file" in str(raised.value)
    assert "\n" not in str(raised.value) and not fake_hub.loaded
    assert isinstance(raised.value.__cause__, RuntimeError)


def test_a_silent_network_is_not_waited_for(
    dataset: Make, fake_hub: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "ANSWER_WITHIN_S", 0.05)
    speak = threading.Event()
    fake_hub.answer = speak.wait
    with pytest.raises(ConfigError, match=r"^use_hub: .* no answer within 0\.05 s"):
        hub.hub_rows(config(dataset))  # whoever waits for the answer does so for ever
    speak.set()


def test_offline_asks_only_the_cache(dataset: Make, fake_hub: SimpleNamespace) -> None:
    fake_hub.constants.HF_HUB_OFFLINE = True
    rows, label = hub.hub_rows(config(dataset))
    assert [row["turns"][0] for _, row in rows] == ["hello", "there"] and label.endswith("from the local cache")
    assert not fake_hub.asked
    fake_hub.rows = ConnectionError("Couldn't reach it")
    with pytest.raises(
        ConfigError, match=r"^hub_id: cannot load 'who/what' \(HF_HUB_OFFLINE is set: .*Couldn't reach it$"
    ):
        hub.hub_rows(config(dataset))


def test_real_library_offline(dataset: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Any, naps: list) -> None:
    """With the true `datasets`: nothing in the cache and no network end in one line, and nothing is tried again."""
    datasets = pytest.importorskip("datasets")
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    with pytest.raises(ConfigError, match=r"^hub_id: cannot load 'who/what' \(HF_HUB_OFFLINE is set"):
        hub.hub_rows(config(dataset))
    assert not naps
