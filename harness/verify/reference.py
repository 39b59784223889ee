"""The Hugging Face model behind verification, in float32: free-running generation, and replay of recorded routing.

The reference is transformers' own code throughout: model, router and generation. It gets the tensors that the run has
read, from the files that the run has open, and those entries of config.json that the run has read, nothing else of the
checkpoint: what is changed or deleted under the run, and what would choose another implementation, does not reach it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from harness.model.checkpoint import Checkpoint
from harness.model.checkpoint_files import checkpoint_error
from harness.model.quiet import quiet_transformers
from harness.model.spec import ModelSpec
from harness.verify.generations import Generations

# Eager attention holds [heads, length, length] scores: beyond this many positions the fused kernel takes its place.
EAGER_ATTENTION_POSITIONS = 2048


class NotFiniteError(ArithmeticError):
    """The reference computed logits by which nothing can be verified: NaN, infinity, or all the same."""


class RouterScores(NamedTuple):
    """The scores that the reference's routers went by, float32, by layer with a router and by position."""

    choice: Tensor  # [layers, positions, experts], by whose order a router chooses
    measure: Tensor  # [layers, positions, experts], by whose size rounding is judged: the scores without a bias
    group_shortfall: Tensor  # [layers, positions], how far the worst recorded group lies below the last of the best


class Replay(NamedTuple):
    """One teacher-forced pass over one sequence."""

    logits: Tensor  # float32 [asked positions, vocab]
    routers: RouterScores


_loaded: dict[tuple[Any, ...], Reference] = {}  # the last one


def reference_for(checkpoint: Checkpoint) -> Reference:
    """Return the reference of a checkpoint; the last one stays loaded."""
    key = _key(checkpoint)
    if key not in _loaded:
        _loaded.clear()  # before the next one takes its memory
        _loaded[key] = Reference(checkpoint)
    return _loaded[key]


def is_loaded(checkpoint: Checkpoint) -> bool:
    """Tell whether the memory of a checkpoint's reference is taken already."""
    return _key(checkpoint) in _loaded


def _key(checkpoint: Checkpoint) -> tuple[Any, ...]:
    return checkpoint.folder.resolve(), checkpoint.version(), checkpoint.spec.dtype


class Reference:
    """A checkpoint in transformers. Raises `NotFiniteError` where its logits are not finite."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.spec = checkpoint.spec
        self._model = _load_float32(checkpoint)
        self._model.register_forward_hook(_require_finite)
        self._family = checkpoint.family
        self._choices: list[_RecordedChoice] = []  # by layer with a router, while a replay runs
        self._routers = checkpoint.family.reference_routers(self.spec, self._model)
        assert len(self._routers) == self.spec.num_moe_layers, "one router a layer that has experts"
        for index, router in enumerate(self._routers):
            router.forward = self._replaying(index, router.forward)
        self._generations = Generations(checkpoint.version())

    def _replaying(self, index: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def route(*args: Any, **kwargs: Any) -> Any:
            with self._choices[index] if self._choices else nullcontext():
                return forward(*args, **kwargs)

        return route

    def generate(self, prompt_ids: Sequence[int], num_tokens: int) -> list[int]:
        """Generate greedily: the first `num_tokens` tokens, an end token among them or not."""
        known = self._generations.get(prompt_ids)
        if known is None or len(known) < num_tokens:
            known = self._generate(prompt_ids, num_tokens)
            self._generations.put(prompt_ids, known)
        return known[:num_tokens]

    @torch.inference_mode()
    def _generate(self, prompt_ids: Sequence[int], num_tokens: int) -> list[int]:
        from transformers import GenerationConfig

        self._choose_attention(len(prompt_ids) + num_tokens)
        input_ids = torch.tensor([list(prompt_ids)])
        settings = GenerationConfig(do_sample=False, max_new_tokens=num_tokens, eos_token_id=None, pad_token_id=0)
        with quiet_transformers():
            output = self._model.generate(  # type: ignore[operator]
                input_ids, attention_mask=torch.ones_like(input_ids), generation_config=settings
            )
        return output[0, len(prompt_ids) :].tolist()

    @torch.inference_mode()
    def replay(self, token_ids: Sequence[int], routing: Tensor, first_logit: int) -> Replay:
        """Replay `token_ids`, teacher-forced, with the expert ids `routing` int64 [positions, layers with a router, k]
        in place of the model's own choice. Logits are those at positions `first_logit` and later."""
        self._choose_attention(len(token_ids))
        self._choices = [_RecordedChoice(self.spec, ids) for ids in routing.unbind(1)]
        try:
            kept = len(token_ids) - first_logit
            output = self._model(torch.tensor([list(token_ids)]), use_cache=False, logits_to_keep=kept)
            return Replay(output.logits[0], self._router_scores())
        finally:
            self._choices = []

    def _router_scores(self) -> RouterScores:
        choices, measures = zip(
            *(
                self._family.reference_scores(self.spec, router, found.choice)
                for router, found in zip(self._routers, self._choices, strict=True)
            ),
            strict=True,
        )
        shortfalls = [found.group_shortfall for found in self._choices]
        return RouterScores(torch.stack(choices), torch.stack(measures), torch.stack(shortfalls))

    def _choose_attention(self, num_positions: int) -> None:
        wanted = "eager" if num_positions <= EAGER_ATTENTION_POSITIONS else "sdpa"
        if self._model.config._attn_implementation != wanted:  # type: ignore[union-attr]
            self._model.set_attn_implementation(wanted)  # type: ignore[operator]


class _RecordedChoice(TorchFunctionMode):
    """Runs a router of transformers as it is, but for the one thing that a replay prescribes: which experts `topk`
    chooses, and of which groups. The weights of these experts are then what the router itself makes of its scores."""

    def __init__(self, spec: ModelSpec, expert_ids: Tensor) -> None:
        super().__init__()
        self._spec, self._expert_ids = spec, expert_ids  # int64 [positions, k]
        self.choice = torch.empty(0)  # [positions, experts]
        self.group_shortfall = torch.zeros(len(expert_ids))

    def __torch_function__(
        self, func: Any, types: Iterable[Any], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func not in (torch.topk, Tensor.topk):
            return func(*args, **(kwargs or {}))
        scores, spec = args[0], self._spec
        is_of_one_group = scores.shape[-1] == 1 < spec.num_experts
        if scores.dim() != 2 or is_of_one_group:  # nothing to prescribe: experts within their groups, the only group
            return func(*args, **(kwargs or {}))
        if spec.router.num_groups > 1 and scores.shape[-1] == spec.router.num_groups:
            ids = self._groups(scores)
        else:
            assert scores.shape[-1] == spec.num_experts and not self.choice.numel(), "a router chooses experts once"
            self.choice, ids = scores.clone(), self._expert_ids
        return torch.return_types.topk((scores.gather(-1, ids), ids))

    def _groups(self, scores: Tensor) -> Tensor:
        """Return the groups [positions, chosen] of the recorded experts, and the best others where these are fewer."""
        router = self._spec.router
        groups = self._expert_ids // (self._spec.num_experts // router.num_groups)
        last = scores.topk(router.groups_per_token).values[..., -1]
        self.group_shortfall = (last - scores.gather(-1, groups).amin(dim=-1)).clamp(min=0)
        return scores.scatter(-1, groups, float("inf")).topk(router.groups_per_token).indices


def _require_finite(model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    std = output.logits.std(dim=-1)  # NaN of NaN and of infinity; gaps are told in units of it
    if not ((std > 0) & std.isfinite()).all():
        raise NotFiniteError("reference logits are not finite, or all alike")


def reference_config(checkpoint: Checkpoint) -> Any:
    """Return transformers' configuration of the entries of config.json that the run goes by; its defaults are its own.
    Raises `ConfigError` where transformers refuses one: told before a run, not at its end."""
    from transformers import AutoConfig

    try:
        with quiet_transformers():
            entries = deepcopy(checkpoint.family.reference_entries(checkpoint.spec, checkpoint.entries_read))
            entries.pop("quantization_config", None)  # it is given widened weights
            return AutoConfig.for_model(**entries)  # it writes into what it is given
    except Exception as error:  # each version has its own kinds
        reason = " ".join(str(error).split())
        message = f"transformers refuses it ({reason}); correct it, or choose verify=off"
        raise checkpoint_error(str(checkpoint.folder / "config.json"), message) from error


def _load_float32(checkpoint: Checkpoint) -> nn.Module:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, GenerationConfig

    config = reference_config(checkpoint)
    with quiet_transformers():
        model: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].from_pretrained(  # type: ignore[attr-defined]
            None,
            config=config,
            state_dict=checkpoint.tensors(),
            dtype=torch.float32,
            attn_implementation="eager",
            experts_implementation="eager",
        )
    model.generation_config = GenerationConfig()  # transformers fills one in from the configuration
    dtype = getattr(torch, checkpoint.spec.dtype)  # the run rounded its weights to it, so the reference does too
    for parameter in model.parameters():
        # A copy in any case: float32 weights are still views of the mapped files.
        parameter.data = parameter.data.clone() if dtype == torch.float32 else parameter.data.to(dtype).float()
    loaded: nn.Module = model.eval()
    return loaded
