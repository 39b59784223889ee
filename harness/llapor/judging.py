"""Judge predictors on text that they did not learn from, in the terms of PreScope's Table 3 and Fig. 16.

Beside them stand popularity, the token's id, this layer's experts, and the next layer's router.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from harness.llapor import network, online
from harness.llapor.examples import Examples
from harness.llapor.learning import LayerData, LayerTraining
from harness.study.gates import EXTRA, Gates, judge
from harness.study.predictability import BATCH, GATE, judged, of_routers, within_true_top
from harness.study.prediction import PREDICTORS, Learned, ranked

if TYPE_CHECKING:
    from harness.model.checkpoint import Checkpoint

Floats = NDArray[np.float64]
LLAPOR, ONLINE = "llapor", "llapor_online"
BASELINES = ("popularity", "word", "layer_before")
BATCH_SIZES = (1, 4, 16, 64)  # tokens, for which P_hit is recorded
_DRAWS = 512  # batches of each size
_TIMED = 50  # calls


def routers_on(checkpoint: Checkpoint | None, examples: Examples) -> Gates | None:
    """Ask the checkpoint's routers about the examples' gating inputs; None without a checkpoint."""
    return None if checkpoint is None else judge(checkpoint, np.arange(len(examples)), examples.inputs)


def all_judged(
    trained: Mapping[int, LayerTraining], learned: Learned, test: Examples, gates: Gates | None, online_steps: int
) -> dict[str, Any]:
    """Judge every way of predicting on one text. `trained` is by the place of the layer, from 1 on."""
    text, places = test.text, range(1, test.text.num_layers)
    scores: dict[str, list[Floats]] = {
        name: [PREDICTORS[name](learned, text, place) for place in places] for name in BASELINES
    }
    scores[LLAPOR] = [chances_of(trained[place], LayerData.of(test, place)) for place in places]
    if online_steps:
        scores[ONLINE] = [online_chances(trained[place], LayerData.of(test, place), online_steps) for place in places]
    found: dict[str, Any] = {name: judged(text, of_layers) for name, of_layers in scores.items()}
    if gates is not None:
        for name, of_layers in scores.items():
            found[name]["within_true_top"] = within_true_top(gates, [ranked(each, text.k) for each in of_layers])
        ahead = list(gates.ahead.swapaxes(0, 1))
        found[GATE] = judged(text, list(gates.chances.swapaxes(0, 1)), ahead) | of_routers(text, gates)
    return found


@torch.no_grad()
def chances_of(training: LayerTraining, data: LayerData) -> Floats:
    """Return the probability [tokens, experts] that each expert is chosen, as the predictor is now."""
    return network.chances(training.weights, training.logits(data)).numpy().astype(np.float64)


def online_chances(training: LayerTraining, data: LayerData, steps: int) -> Floats:
    """Return the same where the predictor goes on learning as in a run: each batch of the text is first predicted, and
    then learned from. The predictor itself is left as it was."""
    w = {name: each.clone() for name, each in training.weights.items()}
    moments = torch.empty(2, online.num_learned(training.shape))
    pace, found, number = online.Pace.of(training.settings.group(training.group)), [], 0
    for at in torch.arange(len(data)).split(online.BATCH):
        batch = data.rows(at)
        features = network.features(w, batch.normed, batch.ids, batch.weights)
        found.append(network.chances(w, network.logits(w, *features)).numpy().astype(np.float64))
        for _ in range(steps):
            online.step(w, moments, number, *features, batch.target, pace)
            number += 1
    return np.concatenate(found)


def hits_by_rank(scores: Floats, text_experts: NDArray[np.int16]) -> tuple[list[float], list[float]]:
    """Return how often the expert predicted at each rank is chosen, and how often that of each true rank is named.

    Both are k numbers. `text_experts` is [tokens, k], the router's favourite first.
    """
    k = text_experts.shape[1]
    same = ranked(scores, k)[:, :, None] == text_experts[:, None, :]  # [tokens, predicted, true]
    return same.any(axis=2).mean(axis=0).tolist(), same.any(axis=1).mean(axis=0).tolist()


def batch_hits_by_rank(scores: Floats, text_experts: NDArray[np.int16]) -> dict[int, list[float]]:
    """Return how often the expert of each rank gets tokens of a batch: [experts] by the number of its tokens.

    Batches are drawn from the text. As in a run, k experts are predicted for each token, and an expert's rank is by the
    sum of its chances among those.
    """
    k, rng = text_experts.shape[1], np.random.default_rng(0)
    predicted = np.zeros_like(scores)
    named = ranked(scores, k)
    np.put_along_axis(predicted, named, np.take_along_axis(scores, named, axis=1), axis=1)
    chosen = np.zeros(scores.shape, dtype=bool)
    np.put_along_axis(chosen, text_experts.astype(np.int64), True, axis=1)
    found = {}
    for size in BATCH_SIZES:
        rows = rng.integers(len(scores), size=(_DRAWS, size))
        order = np.argsort(-predicted[rows].sum(axis=1), axis=1, kind="stable")
        hits = np.take_along_axis(chosen[rows].any(axis=1), order, axis=1)
        found[size] = np.round(hits.mean(axis=0), 5).tolist()
    return found


def seconds_per_batch(training: LayerTraining, data: LayerData) -> float:
    """Return the median time in which this computer predicts a batch of 32 tokens."""
    batch, w, times = data.rows(torch.arange(min(BATCH, len(data)))), training.weights, []
    k = batch.ids.shape[1]
    with torch.no_grad():
        for _ in range(_TIMED):
            began_s = time.perf_counter()
            network.foresee(w, batch.normed, batch.ids, batch.weights, k)
            times.append(time.perf_counter() - began_s)
    return float(np.median(times))


def mean_of_layers(judgement: Mapping[str, Any], key: str) -> float:
    """Return the mean over layers of one measure."""
    return float(np.mean(judgement[key]))


def told(judgements: Mapping[str, Any], k: int) -> Sequence[str]:
    """Return a line for each way of predicting, for the terminal."""
    lines = []
    for name, found in judgements.items():
        named = np.asarray(found["true_that_are_predicted"])[:, k - 1]
        line = f"{name}: names {named.mean():.1%} of the {k} experts ({named.min():.1%} to {named.max():.1%})"
        if "within_true_top" in found:
            line += f", {mean_of_layers(found, 'within_true_top'):.1%} of the predicted within the true {k + EXTRA}"
        lines.append(f"{line}; hot Top4 in Top6 {mean_of_layers(found, 'hot_4'):.1%}")
    return lines
