"""The Hugging Face model behind verification, in float32: free-running generation, and replay of recorded routing."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from harness.model.cache import cache_folder
from harness.model.checkpoint import Checkpoint
from harness.model.quiet import quiet_transformers

# Eager attention holds [heads, length, length] scores: beyond this many positions the fused kernel takes its place.
EAGER_ATTENTION_POSITIONS = 2048


class Replay(NamedTuple):
    """One teacher-forced pass over one sequence."""

    logits: Tensor  # float32 [asked positions, vocab]
    router_probs: Tensor  # float32 [layers, positions, experts]


@lru_cache(maxsize=2)
def _loaded(folder: Path, version: str, dtype: str) -> Reference:
    return Reference(Checkpoint(folder, dtype), version)


def reference_for(checkpoint: Checkpoint) -> Reference:
    """The reference of a checkpoint; the last two stay loaded."""
    return _loaded(checkpoint.folder.resolve(), checkpoint.version(), checkpoint.spec.dtype)


class Reference:
    def __init__(self, checkpoint: Checkpoint, version: str) -> None:
        self.spec, self._family = checkpoint.spec, checkpoint.family
        self._model = _load_float32(checkpoint)
        self._probs: list[Tensor | None] = [None] * self.spec.num_layers
        self._routing: Tensor | None = None  # [layers, positions, k] while a replay runs
        routers = self._family.reference_routers(self._model)
        assert len(routers) == self.spec.num_layers, "one router a layer"
        for layer, router in enumerate(routers):
            router.register_forward_hook(self._router_hook(layer))
        self._cache = _GenerationCache(version)

    def _router_hook(self, layer: int) -> Any:
        def hook(router: nn.Module, args: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> Any:
            logits, weights, _ = output
            probs = self._family.router_probs(self.spec, logits)
            self._probs[layer] = probs
            if self._routing is None:
                return None
            expert_ids = self._routing[layer]
            return logits, self._family.route(self.spec, probs, expert_ids).to(weights.dtype), expert_ids

        return hook

    def generate(self, prompt_ids: Sequence[int], num_tokens: int, *, eos: bool) -> list[int]:
        """Greedy `generate`: up to `num_tokens` tokens, ending early after the end token if `eos`."""
        known = self._cache.get(prompt_ids, eos)
        eos_id = self.spec.eos_token_id if eos else None
        if known is None or (len(known) < num_tokens and not (eos_id is not None and known[-1:] == [eos_id])):
            known = self._generate(prompt_ids, num_tokens, eos_id)
            self._cache.put(prompt_ids, eos, known)
        return known[:num_tokens]

    @torch.inference_mode()
    def _generate(self, prompt_ids: Sequence[int], num_tokens: int, eos_id: int | None) -> list[int]:
        from transformers import GenerationConfig

        self._choose_attention(len(prompt_ids) + num_tokens)
        input_ids = torch.tensor([list(prompt_ids)])
        settings = GenerationConfig(do_sample=False, max_new_tokens=num_tokens, eos_token_id=eos_id, pad_token_id=0)
        with quiet_transformers():
            output = self._model.generate(  # type: ignore[operator]
                input_ids, attention_mask=torch.ones_like(input_ids), generation_config=settings
            )
        return output[0, len(prompt_ids) :].tolist()

    @torch.inference_mode()
    def replay(self, token_ids: Sequence[int], routing: Tensor, first_logit: int) -> Replay:
        """Teacher-forced over `token_ids`, with the expert ids `routing` int64 [positions, layers, k] in place of the
        model's own choice. Logits are those at positions `first_logit` and later."""
        self._choose_attention(len(token_ids))
        self._routing = routing.transpose(0, 1).contiguous()
        try:
            kept = len(token_ids) - first_logit
            output = self._model(torch.tensor([list(token_ids)]), use_cache=False, logits_to_keep=kept)
        finally:
            self._routing = None
        return Replay(output.logits[0].float(), torch.stack([probs for probs in self._probs if probs is not None]))

    def _choose_attention(self, num_positions: int) -> None:
        wanted = "eager" if num_positions <= EAGER_ATTENTION_POSITIONS else "sdpa"
        if self._model.config._attn_implementation != wanted:  # type: ignore[union-attr]
            self._model.set_attn_implementation(wanted)  # type: ignore[operator]


def _load_float32(checkpoint: Checkpoint) -> nn.Module:
    from transformers import AutoModelForCausalLM, GenerationConfig

    with quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(
            checkpoint.folder,
            dtype=torch.float32,
            attn_implementation="eager",
            experts_implementation="eager",
            trust_remote_code=False,
            local_files_only=True,
        )
    model.generation_config = GenerationConfig()  # the checkpoint's own would fill in a temperature or an end token
    if checkpoint.spec.dtype == "bfloat16" and checkpoint.stored_dtypes() != {"bfloat16"}:
        for parameter in model.parameters():  # the run used rounded weights, so the reference does too
            parameter.data = parameter.data.bfloat16().float()
    return model.eval()


class _GenerationCache:
    """Reference generations on disk, one JSON file a prompt. A damaged file counts as absent, and one that cannot be
    written is generated anew next time: a cache that is full or read-only costs no run."""

    def __init__(self, version: str) -> None:
        import transformers

        versions = f"transformers-{transformers.__version__}-torch-{torch.__version__}".replace("+", "-")
        self._folder = cache_folder() / "references" / version / versions

    def _path(self, prompt_ids: Sequence[int], eos: bool) -> Path:
        digest = hashlib.sha256(json.dumps(list(prompt_ids)).encode()).hexdigest()[:24]
        return self._folder / f"{digest}{'-eos' if eos else ''}.json"

    def get(self, prompt_ids: Sequence[int], eos: bool) -> list[int] | None:
        try:
            content = json.loads(self._path(prompt_ids, eos).read_text())
            return content["generated_ids"] if content["prompt_ids"] == list(prompt_ids) else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def put(self, prompt_ids: Sequence[int], eos: bool, generated_ids: list[int]) -> None:
        path = self._path(prompt_ids, eos)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps({"prompt_ids": list(prompt_ids), "generated_ids": generated_ids}))
            temporary.replace(path)
        except OSError:
            with suppress(OSError):
                temporary.unlink()
