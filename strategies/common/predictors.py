"""Choose what tells a strategy, before a router is asked, which experts it will choose.

A strategy's Config inherits `PredictorConfig`, and `build_predictor` makes what it names. On the simulated machine gate
and learned predictors cost what they would, and say what the configuration states or a trace recorded
(docs/routing.md). Statistics are those of the routing that the strategy has seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from harness.config import ConfigError, config, require
from harness.engine.emitter import Emitter
from harness.engine.engine import Engine
from harness.engine.in_flight import InFlight
from harness.llapor.files import PredictorFolder
from harness.machine.base import Ticket

Kind = Literal["gate", "statistics", "token", "learned", "stated", "none"]


@config
class PredictorConfig:
    """A strategy with these settings predicts experts, one way or another.

    `predictor_path` is a folder that `python -m harness.llapor` wrote. `token` needs one, and so does `learned` on
    machines that run the model; a simulation without one has those of the published dimensions, in float32 with their
    PCA. With `online_steps`, `learned` goes on learning from what routers choose in the run: so many steps behind each
    32 tokens of a layer.
    """

    predictor: Kind = "gate"
    predictor_path: str | None = None
    online_steps: int = 0


@dataclass(frozen=True, eq=False)
class Prediction:
    """A prediction is known at once, or once its ticket is done.

    `result` then returns experts and the probability that the router will choose each: int64 and float32 [tokens,
    predicted], a token's likeliest first. A prediction may name fewer experts than asked for, or none.
    """

    engine: Engine
    ticket: Ticket | None = None
    known: tuple[np.ndarray, np.ndarray] | None = None

    def result(self) -> tuple[np.ndarray, np.ndarray]:
        """Wait for the prediction and return it."""
        if self.known is not None:
            return self.known
        assert self.ticket is not None, "a prediction is known or has a ticket"
        ids, chances = self.engine.machine.wait(self.ticket)
        return ids, chances

    def expected_tokens(self) -> np.ndarray:
        """Return how many tokens each expert will probably get, float64 [num_experts]."""
        ids, chances = self.result()
        return np.bincount(ids.ravel(), weights=chances.ravel(), minlength=self.engine.spec.num_experts)


class Predictor(Protocol):
    """A predictor is asked for a later layer's experts and told what routers have chosen.

    `num_predicted` is the room that `Activations` and `tokens_that_fit` must have for its predictions. A predictor
    takes its device memory when it is made, so make it before `tokens_that_fit`.
    """

    num_predicted: int

    @property
    def source(self) -> str:
        """The origin of the predictions, for the strategy's plan."""

    def request(self, emit: Emitter, it: InFlight, layer: int, *, distance: int = 1) -> Prediction | None:
        """Submit what predicts the experts of `layer` + `distance`, and return the prediction.

        Ask between `attention_out` of `layer` and that of the next one. None where that layer has no router, or the
        predictor cannot tell so far ahead.
        """

    def observe(self, emit: Emitter, it: InFlight, layer: int, expert_ids: np.ndarray) -> None:
        """Take note of what the router of `layer` has chosen, behind its experts: int64 [tokens, experts_per_token], of
        all micro-batches that go through the layer together. `it` is the first one of them."""


def build_predictor(settings: PredictorConfig, engine: Engine) -> Predictor | None:
    """Make the predictor; None for `none`. Raises ConfigError, and MemoryCapacityError where it does not fit."""
    kind, simulated = settings.predictor, engine.machine.world is not None
    told = f"must be 0 or more, and 0 without predictor=learned, got {settings.online_steps}"
    online = settings.online_steps
    require(online >= 0 and (kind == "learned" or not online), "strategy.online_steps", told)
    told = "stated needs machine=simulated with routing.hit_rates or a trace that has predictions"
    is_stated = simulated and engine.machine.world.predicts
    require(is_stated or kind != "stated", "strategy.predictor", f"{told}; other machines have the other kinds")
    told = f"must be null with predictor={kind}, which reads no folder"
    require(kind in ("token", "learned") or settings.predictor_path is None, "strategy.predictor_path", told)
    told = "token needs a machine that runs the model: simulated tokens have no ids; take stated"
    require(kind != "token" or not simulated, "strategy.predictor", told)
    match kind:
        case "gate":
            return GatePredictor(engine)
        case "statistics":
            return StatisticsPredictor(engine)
        case "stated":
            return StatedPredictor(engine)
        case "token" | "learned":
            folder = _folder(settings, engine, needed=not simulated)
            if kind == "learned":
                return LearnedPredictor(engine, folder, online_steps=online)
            assert folder is not None
            return TokenPredictor(engine, folder)
    return None


def _folder(settings: PredictorConfig, engine: Engine, *, needed: bool) -> PredictorFolder | None:
    if settings.predictor_path is None:
        told = f"missing; {settings.predictor} predictors need a folder that python -m harness.llapor wrote"
        require(not needed, "strategy.predictor_path", told)
        return None
    try:
        return PredictorFolder.read(Path(settings.predictor_path).expanduser(), engine.spec, engine.spec.hidden_dim)
    except ConfigError as error:
        raise error.below("strategy") from None


def has_router(engine: Engine, layer: int) -> bool:
    """Tell whether a layer is there and has a router."""
    return layer < engine.spec.num_layers and not engine.spec.is_dense(layer)


def _told(source: str, engine: Engine) -> str:
    """Return the origin of predictions that are computed. A simulation has their cost alone, and other predictions."""
    world = engine.machine.world
    return source if world is None else f"{source} (the cost alone); {world.prediction_source}"


class GatePredictor:
    """Applies a later layer's router to this layer's gating input. All routers stay on the device."""

    def __init__(self, engine: Engine) -> None:
        spec = engine.spec
        self._engine = engine
        self.source = _told("the later layer's router on this layer's gating input", engine)
        self.num_predicted = spec.experts_per_token
        for each in engine.ranks:
            each.resident.keep("routers", [(layer, "attention_out") for layer in spec.moe_layers])

    def request(self, emit: Emitter, it: InFlight, layer: int, *, distance: int = 1) -> Prediction | None:
        if self._engine.spec.is_dense(layer) or not has_router(self._engine, layer + distance):
            return None
        routers = [each.resident.part(layer + distance, "attention_out") for each in self._engine.ranks]
        return Prediction(self._engine, emit.predict(it, layer, routers, distance=distance))

    def observe(self, emit: Emitter, it: InFlight, layer: int, expert_ids: np.ndarray) -> None:
        """Ignore what was chosen: the router is as it is."""


class StatisticsPredictor:
    """Names for every token the experts that were most popular in a layer until now, and costs nothing."""

    source = "the popularity of experts until then, also in a profile run"
    num_predicted = 0

    def __init__(self, engine: Engine) -> None:
        spec = engine.spec
        self._engine, self._count = engine, spec.experts_per_token
        self._chosen = np.zeros((spec.num_layers, spec.num_experts), dtype=np.int64)
        self._tokens = np.zeros(spec.num_layers, dtype=np.int64)

    def request(self, emit: Emitter, it: InFlight, layer: int, *, distance: int = 1) -> Prediction | None:
        target = layer + distance
        if not has_router(self._engine, target):
            return None
        chances = self._chosen[target] / max(1, self._tokens[target])
        count = self._count if self._tokens[target] else 0
        ids = np.argsort(-chances, kind="stable")[:count]
        shape = (it.batch.num_tokens, count)
        likely = np.broadcast_to(chances[ids].astype(np.float32), shape)
        return Prediction(self._engine, known=(np.broadcast_to(ids, shape), likely))

    def observe(self, emit: Emitter, it: InFlight, layer: int, expert_ids: np.ndarray) -> None:
        """Count the choices."""
        self._chosen[layer] += np.bincount(expert_ids.ravel(), minlength=self._engine.spec.num_experts)
        self._tokens[layer] += len(expert_ids)


class TokenPredictor:
    """Names the experts that tokens of the same id chose in the text that was learned from, and costs nothing.

    An id that was never seen goes by popularity.
    """

    num_predicted = 0

    def __init__(self, engine: Engine, folder: PredictorFolder) -> None:
        self._engine, self.source = engine, f"by token id, {folder.source}"
        self._ids, self._rates, self._popularity = folder.table()
        self._places = {layer: place for place, layer in enumerate(engine.spec.moe_layers)}

    def request(self, emit: Emitter, it: InFlight, layer: int, *, distance: int = 1) -> Prediction | None:
        if not has_router(self._engine, layer + distance):
            return None
        place, tokens = self._places[layer + distance], it.batch.token_ids
        rows = np.minimum(np.searchsorted(self._ids, tokens), len(self._ids) - 1)
        known = (self._ids[rows] == tokens)[:, None]
        chances = np.where(known, self._rates[rows, place].astype(np.float32), self._popularity[place])
        ids = np.argsort(-chances, axis=1, kind="stable")[:, : self._engine.spec.experts_per_token]
        return Prediction(self._engine, known=(ids, np.take_along_axis(chances, ids, axis=1)))

    def observe(self, emit: Emitter, it: InFlight, layer: int, expert_ids: np.ndarray) -> None:
        """Ignore what was chosen: the table is as it was learned."""


class LearnedPredictor:
    """Applies LLaPor (PreScope §4.2) to this layer's gating input and routing, on the device, one layer ahead.

    With `online_steps` it goes on learning in the run, which takes time on the gpu lane and device memory.
    """

    def __init__(self, engine: Engine, folder: PredictorFolder | None, *, online_steps: int = 0) -> None:
        from harness.llapor.runtime import OnlineUpdates, PredictLearned, paces_of, place_predictors

        self._engine, self._op = engine, PredictLearned
        self._parts = place_predictors(engine, folder)
        self._updates: OnlineUpdates | None = None
        self.num_predicted = engine.spec.experts_per_token
        told = "predictors of the published dimensions in float32, not learned" if folder is None else folder.source
        if online_steps:
            own = {layer: parts[0] for layer, parts in self._parts.items()}
            self._updates = OnlineUpdates(engine, own, paces_of(own, folder), online_steps)
            told += f"; goes on learning in the run, online_steps={online_steps}"
        self.source = _told(told, engine)
        # What it says in the run is judged by its own validation, and in a simulation by what is stated.
        self.judged_by = folder if engine.machine.world is None else None

    def request(self, emit: Emitter, it: InFlight, layer: int, *, distance: int = 1) -> Prediction | None:
        target = layer + distance
        parts = self._parts.get(target)
        if distance != 1 or parts is None or self._engine.spec.is_dense(layer):
            return None
        kept = self._updates.keep(target, it.batch) if self._updates else None
        return Prediction(self._engine, emit.predict(it, layer, parts, by=partial(self._op, kept=kept)))

    def observe(self, emit: Emitter, it: InFlight, layer: int, expert_ids: np.ndarray) -> None:
        """Submit what is learned from it, where that was asked for."""
        if self._updates is not None:
            self._updates.learn(emit, it, layer)


class StatedPredictor:
    """Says what the simulated world predicts, and costs nothing: an upper bound of what any predictor like it gives."""

    num_predicted = 0

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def source(self) -> str:
        return str(self._engine.machine.world.prediction_source)

    def request(self, emit: Emitter, it: InFlight, layer: int, *, distance: int = 1) -> Prediction | None:
        if not has_router(self._engine, layer + distance):
            return None
        ids, chances = self._engine.machine.world.predicted(it.batch, layer + distance, distance)
        return Prediction(self._engine, known=(ids, chances.astype(np.float32)))

    def observe(self, emit: Emitter, it: InFlight, layer: int, expert_ids: np.ndarray) -> None:
        """Ignore what was chosen: the rates are stated."""
