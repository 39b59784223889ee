"""Say of a checkpoint what `harness.training` has recorded beside it. Torch-free."""

from __future__ import annotations

from pathlib import Path

from harness.model.checkpoint_files import checkpoint_error, read_json

REPORT_FILE = "training.json"
TRAINED_HERE = "a small model trained by this harness"  # the record's entry `what`


def training_label(folder: Path) -> str | None:
    """Return a label for weights that this harness has trained, on which text and how much; None for others.
    Raises ConfigError where the record is damaged."""
    path = folder / REPORT_FILE
    if not path.exists():
        return None
    content = read_json(path)
    if content.get("what") != TRAINED_HERE:
        return None  # another program's file
    try:
        domains, tokens = ", ".join(content["domains"]), int(content["tokens_seen"])
    except (KeyError, TypeError, ValueError) as error:
        raise checkpoint_error(str(path), f"is no record of a training ({error})") from None
    if not tokens:
        return "not trained: the first weights of a training by this harness"
    return f"{TRAINED_HERE} on {tokens:,} tokens of {domains}"
