"""A predictor whose hit rates are stated, so that it computes nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.config import ConfigError, config, load_json, require
from harness.routing.base import RoutedModel, Routing
from harness.routing.counters import Keys, Stream, derive, fractions, stream
from harness.routing.remembered import remembered
from kernels.routing import draw

RATES_FORMAT, RATES_VERSION = "moe-hit-rates", 1
Floats = NDArray[np.float64]


@config
class RoutingConfig:
    """Every kind of routing has these settings, of which at most one states a predictor.

    Row d - 1 of `hit_rates` is for predictions made d layers ahead. It holds the probability that a token's expert is
    foreseen, one for each rank that the router gives experts, or one for all ranks. `hit_rates_path` names a file that
    has such rows for each layer (docs/routing.md).
    """

    hit_rates: tuple[tuple[float, ...], ...] | None = None
    hit_rates_path: str | None = None

    def __post_init__(self) -> None:
        for row in self.hit_rates or ():
            valid = bool(row) and all(0 <= rate <= 1 for rate in row)
            require(valid, "hit_rates", f"each row must have probabilities between 0 and 1, got {list(row)}")
        both = self.hit_rates is not None and self.hit_rates_path is not None
        require(not both, "hit_rates_path", "must be null where hit_rates are stated: give one of the two")


@dataclass(frozen=True, eq=False)
class StatedRates:
    """The probability that an expert is foreseen, by (layers ahead, layer) and then by its rank [k]."""

    rates: Mapping[tuple[int, int], Floats]
    source: str

    @classmethod
    def alike(cls, hit_rates: Sequence[Sequence[float]], model: RoutedModel) -> StatedRates:
        """Return rates that are the same in all layers. Raises ConfigError("hit_rates")."""
        k = model.experts_per_token
        for row in hit_rates:
            require(len(row) in (1, k), "hit_rates", f"each row must have 1 rate or {k}, got {len(row)}")
        rates = {
            (distance, layer): np.broadcast_to(np.asarray(row, dtype=np.float64), (k,))
            for distance, row in enumerate(hit_rates, start=1)
            for layer in model.moe_layers
            if layer >= distance
        }
        told = "; ".join(" ".join(f"{rate:g}" for rate in row) for row in hit_rates)
        return cls(rates, f"stated: hit rates by rank, one layer ahead and more: {told}")

    @classmethod
    def read(cls, path: Path, model: RoutedModel) -> StatedRates:
        """Return the rates of a file, by layer. A model with another number of layers with a router takes, for each,
        those at the same relative depth. Raises ConfigError("hit_rates_path")."""
        content = _content(path)
        by_distance, layers, k = content["rates"], model.moe_layers, model.experts_per_token
        rates = {}
        for distance, rows in enumerate(by_distance, start=1):
            for place, layer in enumerate(layers):
                row = rows[round(place * (len(rows) - 1) / max(1, len(layers) - 1))]
                if row is not None and layer >= distance:
                    found = np.asarray(row, dtype=np.float64)
                    told = f"{path}: must have rates of {k} ranks for this model, got {len(found)}"
                    require(len(found) == k, "hit_rates_path", told)
                    rates[distance, layer] = found
        count = len(by_distance[0])
        mapped = "" if count == len(layers) else f"; its {count} layers stand for {len(layers)} at the same depth"
        return cls(rates, f"{content['source']} (hit rates by layer and rank of {path.name}{mapped})")


def write_rates(path: Path, rates: Sequence[Sequence[Sequence[float] | None]], source: str) -> None:
    """Write the file that `hit_rates_path` names: `rates` by layers ahead, layer with a router, and rank; None where
    nothing is predicted. `source` says what was measured or stated, and where."""
    content = {"format": RATES_FORMAT, "version": RATES_VERSION, "source": source, "rates": rates}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _content(path: Path) -> dict[str, Any]:
    try:
        content = load_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError("hit_rates_path", f"{path}: cannot be read: {error}") from None
    found: dict[str, Any] = content if isinstance(content, dict) else {}
    known = (found.get("format"), found.get("version")) == (RATES_FORMAT, RATES_VERSION)
    told = f'must have "format": "{RATES_FORMAT}", "version": {RATES_VERSION}, "source" and "rates"'
    require(known and isinstance(found.get("source"), str), "hit_rates_path", f"{path}: {told}")
    rates = found.get("rates")
    valid = isinstance(rates, list) and bool(rates) and all(_are_rows(rows) for rows in rates)
    told = "'rates' must be probabilities by layers ahead, layer and rank, with null for a layer without"
    require(valid, "hit_rates_path", f"{path}: {told}")
    return found


def _are_rows(rows: Any) -> bool:
    def is_rate(rate: Any) -> bool:
        return isinstance(rate, int | float) and not isinstance(rate, bool) and 0 <= rate <= 1

    def is_row(row: Any) -> bool:
        return row is None or (isinstance(row, list) and bool(row) and all(map(is_rate, row)))

    return isinstance(rows, list) and bool(rows) and all(map(is_row, rows))


class StatedPredictor:
    """Names as many experts as a token has; of these the router chooses as many as `stated` says.

    An expert of rank r is named with the probability stated for r, independently of all others. Where it is not, an
    expert that the router does not choose is named in its place, each equally likely. The place's probability is also
    the confidence, so the confidence tells nothing about the token. A rate of 1 for all ranks is an oracle.
    """

    def __init__(self, routing: Routing, stated: StatedRates, model: RoutedModel, seed: int) -> None:
        k, self._num_experts = model.experts_per_token, model.num_experts
        told = f"needs {2 * k} experts or more where {k} are chosen and all may be missed, got {self._num_experts}"
        require(2 * k <= self._num_experts, "hit_rates", told)
        self._routing, self._rates, self._k, self._seed = routing, stated.rates, k, seed
        self.source = stated.source

    def experts(
        self,
        request_ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        layer: int,
        distance: int = 1,
        chosen: Callable[[], NDArray[np.int64]] | None = None,
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        rates = self._rates.get((distance, layer))
        if rates is None:
            return no_experts(len(request_ids))
        right = chosen() if chosen else self._routing.experts(request_ids, positions, layer)  # [tokens, k]

        def drawn() -> NDArray[np.int64]:
            return self._named(
                right, rates, stream(self._seed, Stream.PREDICTION, request_ids, positions, layer, distance)
            )

        named = remembered(
            drawn, "stated", self._seed, self._num_experts, rates, right, request_ids, positions, layer, distance
        )
        return named, np.tile(rates, (len(right), 1))

    def _named(self, right: NDArray[np.int64], rates: Floats, keys: Keys) -> NDArray[np.int64]:
        """Return the experts that are named for each token [tokens, k], by the token's key, where the router chooses
        those that are `right`."""
        k = self._k
        is_hit = fractions(derive(keys[:, None], np.arange(k))) < rates
        wrong = draw(derive(keys, k), self._num_experts - k, k)  # as numbers of those that are not right
        for expert in np.sort(right, axis=1).T:
            wrong += wrong >= expert[:, None]
        return np.where(is_hit, right, wrong)


def no_experts(num_tokens: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return no predicted experts for each token, and their confidence: both [tokens, 0]."""
    return np.empty((num_tokens, 0), dtype=np.int64), np.empty((num_tokens, 0))
