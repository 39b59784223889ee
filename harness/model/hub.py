"""Find the local checkpoint folder of the model that the user names."""

from __future__ import annotations

import re
from pathlib import Path

from harness.config import ConfigError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
WANTED_FILES = ["*.safetensors", "*.json", "tokenizer*"]
UNWANTED_FILES = ["consolidated*", "*/*"]  # Mistral's own second copy of the weights; other formats in subfolders
PROBE_TIMEOUT_S = 5.0


def resolve_model(path_or_id: str) -> Path:
    """Return a local folder, or the folder of a hub id, whose safetensors, JSON and tokenizer files are downloaded or
    already cached.

    Raises `ConfigError` in one line, without waiting through the hub client's retries when there is no network.
    """
    folder = Path(path_or_id).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ConfigError("model.path", f"{path_or_id}: is a file; a checkpoint folder or a hub id is needed")
    if not HUB_ID.fullmatch(path_or_id):
        raise ConfigError("model.path", f"{path_or_id}: no such folder, and no hub id of the form owner/name")
    return _snapshot(path_or_id)


def _snapshot(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    unreachable = _why_unreachable()
    try:
        path = snapshot_download(
            hub_id,
            allow_patterns=WANTED_FILES,
            ignore_patterns=UNWANTED_FILES,
            local_files_only=unreachable is not None,
        )
    except LocalEntryNotFoundError:
        reason = unreachable or "the connection broke"
        raise ConfigError("model.path", f"{hub_id}: no such folder, not in the hub's cache, and {reason}") from None
    except HfHubHTTPError as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError("model.path", f"{hub_id}: the hub refused it ({reason})") from None
    return Path(path)


def _why_unreachable() -> str | None:
    """Return why the hub does not answer one short request, or None; the client's retries take half a minute without a
    network."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return "the hub is switched off (HF_HUB_OFFLINE)"
    try:
        get_session().head(constants.ENDPOINT, timeout=PROBE_TIMEOUT_S)
    except Exception as error:  # the client's transport differs between versions; any failure means no answer
        return f"the hub at {constants.ENDPOINT} did not answer ({type(error).__name__})"
    return None
