"""Keep the experts' load in balance: by an auxiliary loss, or by moving the biases of the choice.

The auxiliary loss is Switch's (arXiv 2101.03961, eqs. 4 to 6) as Mixtral has it for several experts a token, in each
layer by itself. Moving biases is DeepSeek-V3's way without such a loss (arXiv 2412.19437, section 2.1.2).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def router_shares(logits: Tensor, scoring: str) -> Tensor:
    """Return a router's scores of all experts, float32 [tokens, experts], each token's made to sum to 1."""
    scores = logits.float().sigmoid() if scoring == "sigmoid" else logits.float().softmax(dim=-1)
    return scores / scores.sum(dim=-1, keepdim=True)


def auxiliary_loss(logits: Sequence[Tensor], expert_ids: Sequence[Tensor], scoring: str) -> Tensor:
    """Return the mean over layers of E times the sum over experts of load share times mean probability.

    It is k where the load is even; `scoring` is how the router makes probabilities of logits."""
    losses = []
    for layer_logits, ids in zip(logits, expert_ids, strict=True):
        num_tokens, num_experts = layer_logits.shape
        probabilities = router_shares(layer_logits, scoring)
        load = torch.bincount(ids.flatten(), minlength=num_experts) / num_tokens
        losses.append(num_experts * (load * probabilities.mean(dim=0)).sum())
    return torch.stack(losses).mean()


def move_biases(routers: Sequence[nn.Module], loads: Tensor, rate: float) -> None:
    """Raise the bias of each expert that had less than its layer's mean load, and lower that of each that had more, by
    `rate`. `loads` is [layers, experts]."""
    errors = loads.float().mean(dim=1, keepdim=True) - loads
    for router, error in zip(routers, errors, strict=True):
        bias = router.e_score_correction_bias
        assert isinstance(bias, Tensor)
        bias += rate * error.sign().to(bias.dtype)


def load_figures(loads: Tensor) -> list[dict[str, float]]:
    """Return figures of each layer's load. The busiest and the idlest expert's are over the mean; the entropy is over
    that of an even load."""
    figures = []
    for counts in loads.double():
        shares = counts / counts.sum()
        entropy = -torch.special.xlogy(shares, shares).sum() / torch.log(torch.tensor(float(len(shares))))
        mean = counts.mean()
        figures.append(
            {
                "max_over_mean": round(float(counts.max() / mean), 4),
                "min_over_mean": round(float(counts.min() / mean), 4),
                "load_entropy": round(float(entropy), 4),
            }
        )
    return figures
