"""Apply a checkpoint's routers to recorded gating inputs: each layer's own, and one layer ahead as predictors do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from harness.model.checkpoint_files import checkpoint_error
from harness.routing.trace_file import TraceHeader

if TYPE_CHECKING:
    import torch

    from harness.model.checkpoint import Checkpoint

EXTRA = 2  # experts beyond k that are ranked: PreScope counts a prediction as right within the true top-(k + 2)
DISTANCES = (1, 2, 3)  # layers that a router is asked ahead
_ROWS = 4096  # tokens at a time
Router = Callable[["torch.Tensor", int], tuple["torch.Tensor", "torch.Tensor"]]


@dataclass(frozen=True, eq=False)
class Gates:
    """Gates have what routers say about some tokens: `at` are the tokens' places in their domain.

    `ahead` and `chances` of index l are about layer l + 1, by its own router from the input of layer l's experts.
    """

    at: NDArray[np.int64]  # [tokens], ascending
    own: NDArray[np.int16]  # [tokens, layers, k + 2]: the experts that each layer's router ranks first
    ahead: NDArray[np.int16]  # [tokens, layers - 1, k + 2]
    chances: NDArray[np.float32]  # [tokens, layers - 1, experts]: probability that the router chooses each
    cosine: NDArray[np.float32]  # [tokens, layers - 1]: of a layer's gating input and the next one's
    # [tokens, distances, layers]: share of a layer's k experts that its router names so many layers before, else NaN
    named_ahead: NDArray[np.float32]

    def of(self, numbers: NDArray[np.int64]) -> tuple[Gates, NDArray[np.int64]]:
        """Return what is known of some tokens of the domain, and which of them (their places in `numbers`) these
        are."""
        places = {int(number): place for place, number in enumerate(numbers)}
        kept = np.flatnonzero(np.isin(self.at, numbers))
        names = ("at", "own", "ahead", "chances", "cosine", "named_ahead")
        part = replace(self, **{name: getattr(self, name)[kept] for name in names})
        return part, np.array([places[int(number)] for number in part.at], dtype=np.int64)


def checkpoint_of(folder: Path, header: TraceHeader, hidden_dim: int) -> Checkpoint:
    """Open the checkpoint whose routers got what was recorded. Raises ConfigError where its form is another one."""
    from harness.model.checkpoint import Checkpoint

    checkpoint = Checkpoint(folder)
    spec = checkpoint.spec
    own = {
        "routers": len(spec.moe_layers), "experts": spec.num_experts, "k": spec.experts_per_token,
        "hidden": spec.hidden_dim,
    }  # fmt: skip
    recorded = {"routers": header.layers, "experts": header.experts, "k": header.k, "hidden": hidden_dim}
    if own != recorded:
        raise checkpoint_error(str(folder), f"is a model with {own}, the recording is of one with {recorded}")
    return checkpoint


def judge(checkpoint: Checkpoint, at: NDArray[np.int64], hidden: NDArray[Any]) -> Gates:
    """Ask the routers of a checkpoint about gating inputs [tokens, layers with a router, hidden]."""
    import torch

    spec = checkpoint.spec
    layers, k = spec.moe_layers, spec.experts_per_token
    count = k + EXTRA
    foresee = _routers(checkpoint)
    gates = _empty(at, len(layers), count, spec.num_experts)
    with torch.no_grad():
        for start in range(0, len(at), _ROWS):
            rows = slice(start, start + _ROWS)
            inputs = torch.from_numpy(np.ascontiguousarray(hidden[rows])).to(getattr(torch, spec.dtype))
            for place in range(len(layers)):
                gates.own[rows, place] = foresee(inputs[:, place], place)[0][:, :count]
                if place:
                    ids, chances = foresee(inputs[:, place - 1], place)
                    gates.ahead[rows, place - 1] = ids[:, :count]
                    np.put_along_axis(gates.chances[rows, place - 1], ids.numpy(), chances.numpy(), axis=1)
                    pair = (inputs[:, place - 1].float(), inputs[:, place].float())
                    gates.cosine[rows, place - 1] = torch.cosine_similarity(*pair, dim=-1)
                true = gates.own[rows, place, :k, None]
                for at_distance, distance in enumerate(DISTANCES):
                    if distance <= place:
                        named = foresee(inputs[:, place - distance], place)[0][:, None, :k].numpy()
                        gates.named_ahead[rows, at_distance, place] = (true == named).any(axis=2).mean(axis=1)
    return gates


def _routers(checkpoint: Checkpoint) -> Router:
    """Return a function that ranks all experts of a layer for inputs [tokens, hidden] as the family's own choice does.

    It gives the experts, the best first, and how likely each is."""
    import torch

    from harness.model.checkpoint import part_views

    spec, family, weights = checkpoint.spec, checkpoint.family, []
    parts = {(layer, part.name): part for layer, part in checkpoint.parts()}
    for layer in spec.moe_layers:
        part = parts[layer, "attention_out"]
        region = torch.empty(part.nbytes, dtype=torch.uint8)
        checkpoint.read_part(layer, part, region)
        weights.append(part_views(part, region))

    def foresee(inputs: torch.Tensor, place: int) -> tuple[torch.Tensor, torch.Tensor]:
        layer, w = spec.moe_layers[place], weights[place]
        logits = family.router_logits(spec, w, inputs, layer)
        return family.foresee(spec, w, logits, spec.num_experts, layer)

    return foresee


def _empty(at: NDArray[np.int64], layers: int, count: int, experts: int) -> Gates:
    n = len(at)
    return Gates(
        at=at,
        own=np.empty((n, layers, count), dtype=np.int16),
        ahead=np.empty((n, layers - 1, count), dtype=np.int16),
        chances=np.zeros((n, layers - 1, experts), dtype=np.float32),
        cosine=np.empty((n, layers - 1), dtype=np.float32),
        named_ahead=np.full((n, len(DISTANCES), layers), np.nan, dtype=np.float32),
    )
