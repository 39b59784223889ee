"""Decide which experts are popular in which layer: by a Zipf law, or by shares of the load from a file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.config import ConfigError, config, require
from harness.routing.base import RoutedModel
from harness.routing.counters import Stream, derive, stream
from harness.routing.inclusion import weights_for
from harness.routing.predictors import RoutingConfig

SHARES_FORMAT, SHARES_VERSION = "moe-expert-shares", 1


@config
class PopularityConfig(RoutingConfig):
    zipf_exponent: float
    distributions: str | None
    model_seed: int

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            0 <= self.zipf_exponent <= 10, "zipf_exponent", f"must lie between 0 and 10, got {self.zipf_exponent:g}"
        )
        require(self.model_seed >= 0, "model_seed", f"must be >= 0, got {self.model_seed}")


@dataclass(frozen=True, eq=False)
class Popularity:
    """The experts of each MoE layer by rank, the most popular first, and the weight with which each rank is drawn."""

    source: str
    expert_at: NDArray[np.int64]  # [layers, ranks]
    weights: NDArray[np.float64] | None  # [layers, ranks]; None: all equal

    def of_layer(self, row: int) -> tuple[NDArray[np.int64], NDArray[np.float64] | None]:
        """Return the experts of the `row`-th MoE layer by rank, and their weights."""
        return self.expert_at[row], None if self.weights is None else self.weights[row]


def popularity(settings: PopularityConfig, model: RoutedModel) -> Popularity:
    """Return the popularity that the settings ask for. Raises ConfigError("distributions") where the file cannot be
    used for this model."""
    if settings.distributions is not None:
        return _given(Path(settings.distributions), model)
    layers, num_experts = model.moe_layers, model.num_experts
    keys = stream(settings.model_seed, Stream.POPULARITY, np.asarray(layers))
    expert_at = np.argsort(derive(keys[:, None], np.arange(num_experts)), axis=1)
    if settings.zipf_exponent == 0:
        return Popularity("all experts equally popular", expert_at, None)
    weights = np.arange(1, num_experts + 1, dtype=np.float64) ** -settings.zipf_exponent
    source = f"popularity by a Zipf law with exponent {settings.zipf_exponent:g}"
    return Popularity(source, expert_at, np.tile(weights, (len(layers), 1)))


def _given(path: Path, model: RoutedModel) -> Popularity:
    source, shares = read_shares(path, model)
    expert_at = np.argsort(-shares, axis=1, kind="stable")
    ranked = np.take_along_axis(shares, expert_at, axis=1)
    weights = np.stack([weights_for(row, model.experts_per_token) for row in ranked])
    return Popularity(f"shares of {path.name} ({source})", expert_at, weights)


def write_shares(path: Path, shares: NDArray[np.float64], source: str) -> None:
    """Write the file that `distributions` names: shares [layers, experts] of the load, or counts."""
    assert shares.ndim == 2, shares.shape
    content = {"format": SHARES_FORMAT, "version": SHARES_VERSION, "source": source, "shares": shares.tolist()}
    path.write_text(json.dumps(content) + "\n", encoding="utf-8")


def read_shares(path: Path, model: RoutedModel) -> tuple[str, NDArray[np.float64]]:
    """Return the file's source and its shares [MoE layers, experts], each row summing to 1. Raises
    ConfigError("distributions")."""
    content = _content(path)
    try:
        shares = np.asarray(content.get("shares"), dtype=np.float64)
    except (TypeError, ValueError):
        shares = np.empty(0)
    expected = (len(model.moe_layers), model.num_experts)
    _require(
        shares.shape == expected, path, f"'shares' must be numbers [layers, experts] = {list(expected)}", shares.shape
    )
    k = model.experts_per_token
    for layer, row in zip(model.moe_layers, shares, strict=True):
        where = f"'shares' of layer {layer}"
        _require(bool(np.isfinite(row).all() and (row >= 0).all()), path, f"{where} must be finite and >= 0", None)
        _require((row > 0).sum() >= k, path, f"{where}: at least {k} must be > 0", int((row > 0).sum()))
        top = row.max() / row.sum()
        limit = f"{where}: none may exceed 1/{k} of the layer, as a token chooses {k} different experts"
        _require(top <= 1 / k + 1e-9, path, limit, f"{top:.4g}")
    return str(content["source"]), shares / shares.sum(axis=1, keepdims=True)


def _content(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError("distributions", f"{path}: cannot be read: {error}") from error
    asked = f'must be an object with "format": "{SHARES_FORMAT}", "version": {SHARES_VERSION}, "source" and "shares"'
    _require(
        isinstance(content, dict)
        and (content.get("format"), content.get("version")) == (SHARES_FORMAT, SHARES_VERSION)
        and isinstance(content.get("source"), str),
        path,
        asked,
        None,
    )
    return dict(content)


def _require(condition: bool, path: Path, message: str, got: object) -> None:
    require(bool(condition), "distributions", f"{path}: {message}" + ("" if got is None else f", got {got}"))
