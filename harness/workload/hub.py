"""Read rows of a dataset on the Hugging Face hub, through the `datasets` library; without a network, no long wait."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from harness.config import ConfigError
from harness.workload.config import DatasetConfig
from harness.workload.recipe import Row

ANSWER_WITHIN_S = 4.0


def hub_rows(config: DatasetConfig) -> tuple[Iterator[tuple[str, Row]], str]:
    """Return (where, row) pairs and a label that names repository, split and commit.

    Asks the hub for the commit first: without a network that fails within `ANSWER_WITHIN_S`, where `load_dataset`
    would retry for many seconds. With HF_HUB_OFFLINE set, nothing is asked and only the local cache is used.
    """
    hub_id = config.hub_id
    assert hub_id is not None
    try:
        from datasets import load_dataset
        from huggingface_hub import HfApi, constants
    except ImportError as error:
        raise ConfigError("use_hub", "needs the datasets library: pip install datasets") from error

    revision = config.revision
    if not constants.HF_HUB_OFFLINE:
        ask = partial(HfApi().dataset_info, hub_id, revision=revision, timeout=ANSWER_WITHIN_S)
        revision = _answer(hub_id, ask).sha
    try:
        rows = load_dataset(
            hub_id,
            name=config.hub_config,
            data_files=config.hub_file,
            split=config.split,
            revision=revision,
        )
    except Exception as error:  # its errors have no common base; whatever it is, the user gets one line and the cause
        offline = " (HF_HUB_OFFLINE is set: only the local cache is used)" if constants.HF_HUB_OFFLINE else ""
        raise ConfigError("hub_id", f"cannot load '{hub_id}'{offline}: {_first_line(error)}") from error
    label = f"{hub_id}, split {config.split}, revision {revision or 'main, from the local cache'}"
    numbered = ((f"{hub_id} row {number}", row) for number, row in enumerate(rows, start=1))
    return numbered, label


def _answer(hub_id: str, ask: Callable[[], Any]) -> Any:
    """Return `ask()`, given up after `ANSWER_WITHIN_S`: in a thread, because no client times out a name server's
    silence."""
    answer: list[Any] = []
    failure: list[Exception] = []

    def run() -> None:
        try:
            answer.append(ask())
        except Exception as error:  # handed to the caller's thread, below
            failure.append(error)

    thread = threading.Thread(target=run, name="hub-probe", daemon=True)
    thread.start()
    thread.join(ANSWER_WITHIN_S)
    if answer:
        return answer[0]
    reason = _first_line(failure[0]) if failure else f"no answer within {ANSWER_WITHIN_S:g} s"
    raise ConfigError(
        "use_hub",
        f"the hub does not give '{hub_id}': {reason}; set path to a local file, use_hub=false for synthetic "
        "prompts, or HF_HUB_OFFLINE=1 for a copy in the local cache",
    ) from (failure[0] if failure else None)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
