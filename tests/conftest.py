"""Shared by all tests: no network, one thread a test, the tiny checkpoint, the real prompts where they are."""

from __future__ import annotations

import gc
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["WANDB_MODE"] = "offline"

import pytest
import yaml

from tests import quick
from tests.kernels.eventually import unhurried_examples

unhurried_examples()

ROOT = Path(__file__).resolve().parents[1]
SHARED_DATA = ROOT.parent / "shared" / "data"


NUM_WORKERS = 3  # on two cores: one in four of their seconds is waited; `-n 8` is more, `-n 0` none


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the number
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Let three processes share whole folders of tests, unless the command line says how many. Of these leave out the
    slow ones, unless it says which; a test or file that is named runs."""
    if not config.option.markexpr and _has_folders_only(config):
        config.option.markexpr = "not slow"
    told = getattr(config.option, "numprocesses", 0)  # None: the line says nothing; 0: pytest-xdist is not installed
    if told is None and not hasattr(config, "workerinput") and _worth_workers(config):
        config.option.numprocesses = NUM_WORKERS
        if config.option.dist == "no":
            config.option.dist = "worksteal"  # neighbours stay together, so that a module's fixtures are made once


def _worth_workers(config: pytest.Config) -> bool:
    """Return whether whole folders of tests are to run, and nobody wants to see or stop them on the way.

    A worker takes seconds to start. Benchmarks lie in another folder: they have the computer to themselves.
    """
    option = config.option
    return (
        _has_folders_only(config)
        and not option.keyword
        and option.markexpr in ("", "quick", "slow", "not slow")
        and not (option.usepdb or option.trace or option.capture == "no")
    )


def _has_folders_only(config: pytest.Config) -> bool:
    folders = [config.invocation_params.dir / argument for argument in config.args]
    return all(folder.is_dir() and folder.resolve().is_relative_to(ROOT / "tests") for folder in folders)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave files without quick tests unread where only those are to run: to import all takes half a minute."""
    only_quick = config.option.markexpr == "quick" and collection_path.suffix == ".py"
    return True if only_quick and not quick.is_quick(collection_path) else None


def pytest_sessionstart(session: pytest.Session) -> None:
    if missing := missing_for(session.config.option.markexpr, find_spec("kernels._native") is not None):
        pytest.exit(missing, returncode=pytest.ExitCode.USAGE_ERROR)


def missing_for(markers: str, has_extension: bool) -> str | None:
    """Say in one line what tests on a GPU lack, which would else be told by an error in each of them."""
    if has_extension or markers != "cuda":
        return None
    return "the C++ extension is not built for this Python: run `python setup.py -q build_ext --inplace` first"


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    quick.mark(items)


def pytest_collection_finish() -> None:
    """Leave what is loaded by now, modules and tests, out of each later search for garbage.

    Search less often, too.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("needs"):
        package, extra = mark.args[0], mark.kwargs["extra"]
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed (extra `{extra}`)")


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Use one thread: several pytest processes and lanes share two cores."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def own_turns() -> Iterator[None]:
    """Give these tests turns of their own: their runs wait for no run of another program on this computer, nor the
    other way round."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOE_HARNESS_LOCKS", folder)
        yield


@pytest.fixture
def naps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Record how long this thread wanted to sleep, each time, without sleeping: this shows who tries again after a
    while."""
    found: list[float] = []
    sleep, mine = time.sleep, threading.current_thread()

    def nap(seconds: float) -> None:
        if threading.current_thread() is mine:
            found.append(seconds)
        else:
            sleep(seconds)

    monkeypatch.setattr(time, "sleep", nap)
    return found


@pytest.fixture(scope="session")
def mt_bench() -> Path:
    """Return the real MT-Bench questions; tests that need them skip where they are not."""
    path = SHARED_DATA / "mt_bench_questions.jsonl"
    if not path.exists():
        pytest.skip(f"{path} is not here")
    return path


@pytest.fixture(scope="session")
def tiny():
    return tiny_checkpoint()


def tiny_checkpoint():
    """Make the float32 checkpoint of conf/model/mixtral-tiny.yaml."""
    from harness.model.checkpoint import Checkpoint
    from harness.model.zoo import ensure

    config = tiny_config()
    return Checkpoint(ensure(config), config.dtype)


def tiny_config():
    from harness.config import parse
    from harness.model.config import ModelConfig

    return parse(ModelConfig, yaml.safe_load((ROOT / "conf/model/mixtral-tiny.yaml").read_text()))
