"""Make folders as recorded runs leave them, of a made-up model whose layers follow from one another."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from harness.routing.hidden_file import HiddenHeader, HiddenWriter
from harness.routing.recording import HIDDEN_FOLDER
from harness.routing.trace_file import TraceHeader, TraceRow, TraceWriter

LAYERS, FIRST, EXPERTS, K, HIDDEN, WORDS = 4, 1, 6, 2, 12, 20
LENGTH = 40  # tokens of each prompt


def drawn(rng: np.random.Generator, prompt: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return gating inputs [tokens, layers, hidden], and experts and weights [tokens, layers, k]. A layer's input is
    that of the layer before with what the favourite expert adds; routers are fixed."""
    fixed = np.random.default_rng(99)
    words = fixed.normal(size=(WORDS, HIDDEN))
    routers = fixed.normal(size=(LAYERS, EXPERTS, HIDDEN))
    adds = fixed.normal(size=(LAYERS, EXPERTS, HIDDEN))
    state, inputs, experts, weights = words[prompt] + rng.normal(size=(len(prompt), HIDDEN)), [], [], []
    for layer in range(LAYERS):
        scores = np.exp(state @ routers[layer].T / 2)
        chosen = np.argsort(-scores, axis=1)[:, :K]
        share = np.take_along_axis(scores, chosen, axis=1)
        inputs.append(state)
        experts.append(chosen)
        weights.append(share / share.sum(axis=1, keepdims=True))
        state = state + adds[layer][chosen[:, 0]]
    return np.stack(inputs, 1), np.stack(experts, 1), np.stack(weights, 1)


def write_run(folder: Path, seed: int, *, requests: int = 10, weights: bool = True) -> Path:
    """Write the recording of so many prompts, each with one generated token that was not recorded."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    form = {"model": "made-up", "source": "a test", "layers": LAYERS, "experts": EXPERTS, "k": K, "first_layer": FIRST}
    trace = TraceWriter(folder / "routing.jsonl.gz", TraceHeader(**form, weights=weights))
    count = requests * LENGTH
    hidden = HiddenWriter(
        folder / HIDDEN_FOLDER, HiddenHeader(**form, hidden=HIDDEN, num_sampled=count, num_tokens=count, seed=0)
    )
    rows = []
    for request in range(requests):
        prompt = rng.integers(0, WORDS, size=LENGTH)
        inputs, experts, shares = drawn(rng, prompt)
        trace.write(TraceRow(request, 0, experts.astype(np.int16), weights=shares if weights else None))
        hidden.add(request, np.arange(LENGTH), inputs.astype(np.float32), experts.astype(np.int16))
        row = {"request_id": request, "prompt_tokens": LENGTH, "prompt_ids": prompt.tolist(), "generated_ids": [1]}
        rows.append(json.dumps(row))
    trace.close()
    hidden.close()
    (folder / "requests.jsonl").write_text("\n".join(rows) + "\n")
    (folder / "status.json").write_text('{"status": "ok"}')
    return folder
