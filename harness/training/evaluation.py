"""Tell whether a model has learned: held-out loss beside that of simpler models, samples, and what its routers do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from harness.model.quiet import quiet_transformers
from harness.training.balancing import load_figures
from harness.training.model import WatchedRouters
from harness.training.texts import Domain

_WINDOWS_AT_ONCE = 8
_SAMPLE_PROMPT_TOKENS, _SAMPLE_TOKENS = 64, 48


def next_token_loss(model: PreTrainedModel, windows: Tensor) -> Tensor:
    """Return the mean cross-entropy of [sequences, tokens + 1], in nats a token."""
    logits = model(input_ids=windows[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())


@torch.no_grad()
def held_out_losses(model: PreTrainedModel, windows: Mapping[str, Tensor]) -> dict[str, float]:
    """Return each domain's loss on its held-out windows, in nats a token."""
    model.eval()
    found = {}
    for name, all_windows in windows.items():
        parts = all_windows.split(_WINDOWS_AT_ONCE)
        total = sum(float(next_token_loss(model, part)) * len(part) for part in parts)
        found[name] = round(total / len(all_windows), 5)
    model.train()
    return found


def unigram_loss(training: NDArray[np.int64], windows: Tensor, vocab_size: int) -> float:
    """Return the loss of a unigram model of a domain's training text, on the tokens that `next_token_loss` counts. One
    is added to each token's count."""
    counts = np.bincount(training, minlength=vocab_size) + 1.0
    log_shares = np.log(counts / counts.sum())
    return round(float(-log_shares[windows[:, 1:].numpy()].mean()), 5)


@torch.no_grad()
def routing_figures(
    model: PreTrainedModel, routers: WatchedRouters, windows: Mapping[str, Tensor]
) -> dict[str, list[dict[str, float]]]:
    """Return the load figures of each layer with experts, for held-out text of each domain and of all together."""
    model.eval()
    by_domain: dict[str, Tensor] = {}
    for name, all_windows in windows.items():
        loads = torch.zeros(len(routers.modules), routers.num_experts, dtype=torch.int64)
        for part in all_windows.split(_WINDOWS_AT_ONCE):
            model(input_ids=part[:, :-1], use_cache=False)
            loads += routers.loads()
        by_domain[name] = loads
    model.train()
    by_domain["all"] = torch.stack(list(by_domain.values())).sum(0)
    return {name: load_figures(loads) for name, loads in by_domain.items()}


def samples(
    model: PreTrainedModel, tokenizer: Tokenizer, domains: Sequence[Domain], each: int = 2
) -> list[dict[str, Any]]:
    """Return greedy continuations of the prompts of held-out documents, beside what the documents say."""
    settings = GenerationConfig(do_sample=False, max_new_tokens=_SAMPLE_TOKENS, eos_token_id=1, pad_token_id=0)
    found = []
    model.eval()
    for domain in domains:
        for document in domain.held_out[:each]:
            whole = document.text[: document.prompt_chars]
            ids = tokenizer.encode(whole).ids
            ids = [ids[0], *ids[1:][-_SAMPLE_PROMPT_TOKENS:]]
            with quiet_transformers(), torch.inference_mode():
                given = torch.tensor([ids])
                made = model.generate(  # type: ignore[operator]
                    given, attention_mask=torch.ones_like(given), generation_config=settings
                )
            continuation = tokenizer.decode(made[0, len(ids) :].tolist())
            said = document.text[document.prompt_chars :][: max(len(continuation), 80)]
            found.append(
                {"domain": domain.name, "prompt": tokenizer.decode(ids), "model": continuation, "document": said}
            )
    model.train()
    return found
