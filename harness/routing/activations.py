"""Read from a file how often experts are chosen, before a run: recorded routing, or shares of the load."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from harness.config import ConfigError
from harness.routing.base import RoutedModel
from harness.routing.kinds import trace
from harness.routing.popularity import SHARES_FORMAT, read_shares
from harness.routing.statistics import load_statistics


def read_activations(path: Path, model: RoutedModel) -> tuple[str, NDArray[np.float64]]:
    """Return where the numbers are from, and the share of each expert in its layer's choices [MoE layers, experts].

    The file is a recorded trace (`record_routing=true`) or one that `popularity.write_shares` wrote. Raises ConfigError
    naming the field of either's kind of routing.
    """
    if _is_shares(path):
        return read_shares(path, model)
    routing = read_routing(path, model)
    found = load_statistics(routing, model.moe_layers, routing.tokens(), num_experts=model.num_experts)
    return routing.source, found.shares


def read_routing(path: Path, model: RoutedModel) -> trace.TraceRouting:
    """Return the routing of a recorded trace. Raises ConfigError naming the field of that kind of routing."""
    routing = trace.build(trace.Config(path=str(path)), model, seed=0)
    assert isinstance(routing, trace.TraceRouting)
    return routing


def _is_shares(path: Path) -> bool:
    """Tell whether the file has shares. What is no JSON object as a whole is taken for a trace."""
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError("path", f"{path}: cannot be read: {error}") from error
    except ValueError:  # lines of JSON, or compressed
        return False
    return isinstance(content, dict) and content.get("format") == SHARES_FORMAT
