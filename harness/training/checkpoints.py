"""Save how far a training has come, so that it goes on bit by bit as if it had never been interrupted."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from harness.config import ConfigError, load_json
from harness.training.settings import FREE, TrainingSettings

STATE_FILE = "training_state.safetensors"


@dataclass
class Position:
    """A training has come so far: steps done, seconds spent, and the number of steps once it is settled."""

    step: int = 0
    seconds: float = 0.0
    num_steps: int | None = None


def identity(settings: TrainingSettings, texts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what must be equal for one training to go on with another one's state."""
    kept = {key: value for key, value in asdict(settings).items() if key not in FREE | {"text", "held_out"}}
    threads = torch.get_num_threads()  # by which sums are divided, and so rounded
    loaded: dict[str, Any] = json.loads(json.dumps({**kept, "threads": threads, "texts": texts}))
    return loaded


def save_state(folder: Path, tensors: dict[str, Tensor], position: Position, same: dict[str, Any]) -> None:
    """Write the state in one file, which a kill at any moment leaves whole: the earlier one, or this one."""
    target, partial = folder / STATE_FILE, folder / f"{STATE_FILE}.partial"
    told = {"position": json.dumps(asdict(position)), "identity": json.dumps(same)}
    try:
        save_file(tensors, partial, metadata=told)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    os.replace(partial, target)


def load_state(folder: Path, same: dict[str, Any]) -> tuple[dict[str, Tensor], Position] | None:
    """Return what was saved last; None where nothing was. Raises ConfigError where another training left it."""
    path = folder / STATE_FILE
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            told = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    except (SafetensorError, OSError) as error:
        raise ConfigError("resume", f"{path} is not readable ({error}); begin anew in another folder") from None
    earlier = load_json(told["identity"])
    for key in sorted({*same, *earlier}):
        if same.get(key) != earlier.get(key):
            field = "text" if key == "texts" else key
            raise ConfigError(field, f"must be as in the training that {path} continues; or choose another out")
    return tensors, Position(**load_json(told["position"]))
