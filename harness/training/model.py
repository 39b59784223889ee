"""Build a model to train with transformers' own code, and watch its routers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from harness.config import ConfigError
from harness.model import families
from harness.model.quiet import quiet_transformers
from harness.model.recipe import RandomRecipe
from harness.model.spec import ModelSpec
from harness.model.zoo import config_entries
from harness.training.balancing import router_shares
from harness.training.experts import PACKED, packed_experts

_INIT_STD = 0.02  # of all matrices where the recipe leaves it open, as in GPT-2 and most models since


def model_to_train(recipe: RandomRecipe, seed: int) -> tuple[PreTrainedModel, ModelSpec]:
    """Make the recipe's model as transformers initialises it, with random weights by `seed`."""
    ALL_EXPERTS_FUNCTIONS.register(PACKED, packed_experts)
    entries = {**config_entries(recipe), "initializer_range": recipe.init_std or _INIT_STD}
    spec = families.layout(recipe.family).spec_from_config(entries, "trained", recipe.dtype)
    torch.manual_seed(seed)
    with quiet_transformers():
        model: Any = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**entries), dtype=getattr(torch, recipe.dtype), attn_implementation="eager"
        )  # on CPUs torch's fused attention goes back more slowly than plain products, by a fifth of a step
    model.config._experts_implementation = PACKED if _can_be_packed(model) else "eager"
    _require_runs(model, recipe.family)
    for module in model.modules():
        if isinstance(bias := getattr(module, "e_score_correction_bias", None), Tensor):
            module.e_score_correction_bias = bias.float()  # moved by small steps, and stored so by DeepSeek
    return model, spec


def _require_runs(model: nn.Module, family: str) -> None:
    """Raise ConfigError where transformers fails on two tokens: it needs some entries that other engines do not."""
    try:
        with torch.no_grad():
            model(input_ids=torch.zeros(1, 2, dtype=torch.int64))
    except (RuntimeError, TypeError, ValueError) as error:
        told = f"transformers cannot run such a model of family {family} ({error})"
        raise ConfigError("training.recipe", told) from error


def _can_be_packed(model: nn.Module) -> bool:
    """Return whether all experts are as `packed_experts` computes them: without biases, not transposed, the matrices of
    gate and up one behind the other."""
    experts: list[Any] = [module for module in model.modules() if hasattr(module, "is_concatenated")]
    return all(each.is_concatenated and not each.is_transposed and not each.has_bias for each in experts)


class WatchedRouters:
    """The routers of a model, whose latest logits and choices are kept after each forward pass."""

    def __init__(self, model: nn.Module, spec: ModelSpec) -> None:
        self._scoring = spec.router.scoring
        self.modules = families.family(spec.family).reference_routers(spec, model)
        self.top_k, self.num_experts = spec.experts_per_token, spec.num_experts
        self.logits: list[Tensor] = [torch.empty(0)] * len(self.modules)  # by layer, [tokens, experts]
        self.expert_ids: list[Tensor] = [torch.empty(0)] * len(self.modules)  # by layer, int64 [tokens, k]
        for index, router in enumerate(self.modules):
            inner = getattr(router, "router", router)  # of a whole block in one family
            inner.register_forward_hook(self._keep(index))

    def _keep(self, index: int) -> Any:
        def keep(module: nn.Module, args: Any, output: Any) -> None:
            logits = output[0] if isinstance(output, tuple) else output
            self.logits[index] = logits.reshape(-1, self.num_experts)
            ids = output[2] if isinstance(output, tuple) else logits.topk(self.top_k, dim=-1).indices
            self.expert_ids[index] = ids.reshape(-1, self.top_k)

        return keep

    def loads(self) -> Tensor:
        """Count the latest pass's tokens of each expert: int64 [layers, experts]."""
        return torch.stack([torch.bincount(ids.flatten(), minlength=self.num_experts) for ids in self.expert_ids])

    def choice_entropy(self) -> Tensor:
        """Return how undecided the latest pass's routers were, by layer, float32 in 0 to 1: a token's mean entropy.
        The entropy is that of the scores of all experts, made to sum to 1."""
        found = []
        for logits in self.logits:
            shares = router_shares(logits.detach(), self._scoring)
            found.append(-torch.special.xlogy(shares, shares).sum(-1).mean())
        return torch.stack(found) / torch.log(torch.tensor(float(self.num_experts)))
