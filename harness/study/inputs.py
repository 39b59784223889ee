"""Read the domains of a command line, with what a checkpoint's routers say about their gating inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from harness.config import ConfigError
from harness.routing.hidden_file import HiddenFileError, read_hidden
from harness.routing.recording import HIDDEN_FOLDER
from harness.study.gates import Gates, checkpoint_of, judge
from harness.study.recorded import Domain, read_domain, require_one_model


def gates_of(domain: Domain, checkpoint: Path) -> Gates | None:
    """Return what the checkpoint's routers say about the domain's recorded gating inputs; None where there are none.
    Raises ConfigError naming the domain where they are of other tokens, or of another model than the checkpoint."""
    folder = None if domain.folder is None else domain.folder / HIDDEN_FOLDER
    if folder is None or not folder.is_dir():
        return None
    try:
        hidden = read_hidden(folder)
    except HiddenFileError as error:
        raise ConfigError(domain.name, str(error)) from None
    numbers = token_numbers(domain, hidden.request_ids, hidden.positions)
    if (numbers < 0).any():
        raise ConfigError(domain.name, f"{folder}: has gating inputs of tokens whose routing was not recorded")
    order = np.argsort(numbers)
    opened = checkpoint_of(checkpoint, domain.header, hidden.inputs.shape[2])
    return judge(opened, numbers[order], hidden.inputs[order])


def token_numbers(domain: Domain, requests: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the number in the domain's whole text of each token [tokens]; -1 where it has none."""
    ids, starts = domain.request_ids, domain.whole.starts
    which = np.minimum(np.searchsorted(ids, requests), len(ids) - 1)
    offsets = positions - domain.first_positions[which]
    known = (ids[which] == requests) & (offsets >= 0) & (offsets < np.diff(starts)[which])
    return np.where(known, starts[which] + offsets, -1)


def domains_of(words: Sequence[str]) -> dict[str, Domain]:
    """Read the domains that the command line names. Raises ConfigError."""
    found: dict[str, Domain] = {}
    for word in words:
        name, given, path = word.partition("=")
        if not (name and given and path):
            raise ConfigError("DOMAIN=PATH", f"must name a domain and its run folder or trace, got {word}")
        if name in found:
            raise ConfigError(name, "named twice; give each domain another name")
        found[name] = read_domain(name, Path(path))
    require_one_model(found)
    return found


def judged(domains: Mapping[str, Domain], checkpoint: Path | None) -> dict[str, Gates]:
    """Ask the checkpoint's routers about each domain's gating inputs, where they were recorded.

    Raises ConfigError where no domain has them."""
    if checkpoint is None:
        return {}
    found = {name: gates for name, domain in domains.items() if (gates := gates_of(domain, checkpoint)) is not None}
    if not found:
        raise ConfigError("--checkpoint", "no domain has gating inputs; record them with record_hidden=true")
    return found
