"""Routers are applied to recorded inputs as transformers' own are, to their own layer's and to the one before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM

from harness.model.checkpoint import Checkpoint
from harness.routing.hidden_file import HiddenHeader, HiddenWriter
from harness.routing.kinds.trace import read_trace
from harness.study import excerpt, predictability
from harness.study.gates import DISTANCES, EXTRA, judge
from harness.study.inputs import gates_of
from harness.study.recorded import read_domain
from tests.tiny_families import folder_of
from tests.unit.study.texts import text_of, write_trace

VARIANTS = ["mixtral", "deepseek_v3", "qwen3_moe"]  # with groups and a correction bias; with a dense layer within


class Choices(TorchFunctionMode):
    """Records what `topk` finds."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") == "topk":
            self.found.append(result[1])
        return result


def chosen(router: torch.nn.Module, given: torch.Tensor) -> np.ndarray:
    """Return the experts that a router of transformers chooses for inputs, in ascending order."""
    with torch.no_grad(), Choices() as choices:
        router(given)
    return choices.found[-1].sort(dim=-1).values.numpy()


@pytest.fixture(scope="module", params=VARIANTS)
def recorded(request):
    """A checkpoint, its routers in transformers, and their inputs [tokens, layers, hidden] in one text."""
    checkpoint = Checkpoint(folder_of(request.param))
    model = AutoModelForCausalLM.from_pretrained(checkpoint.folder, dtype=torch.float32)
    routers = checkpoint.family.reference_routers(checkpoint.spec, model)
    inputs: list[torch.Tensor] = []
    for router in routers:
        router.register_forward_pre_hook(lambda _, args: inputs.append(args[0].reshape(-1, args[0].shape[-1])))
    with torch.no_grad():
        model(torch.arange(5, 45)[None])
    return checkpoint, routers, torch.stack(inputs[: len(routers)], dim=1)


def test_routers_choose_and_predict_as_in_transformers(recorded):
    checkpoint, routers, inputs = recorded
    k = checkpoint.spec.experts_per_token
    found = judge(checkpoint, np.arange(100, 140), inputs.numpy())
    for place, router in enumerate(routers):
        assert np.array_equal(np.sort(found.own[:, place, :k], axis=1), chosen(router, inputs[:, place]))
        if place:
            ahead = found.ahead[:, place - 1]
            assert ahead.shape == (40, k + EXTRA)
            assert np.array_equal(np.sort(ahead[:, :k], axis=1), chosen(router, inputs[:, place - 1]))
            cosine = torch.cosine_similarity(inputs[:, place - 1], inputs[:, place], dim=-1)
            assert found.cosine[:, place - 1] == pytest.approx(cosine.numpy(), abs=1e-5)
        for at, distance in enumerate(DISTANCES):
            shares = found.named_ahead[:, at, place]
            if distance > place:
                assert np.isnan(shares).all(), "no layer lies so far before"
                continue
            pairs = zip(chosen(router, inputs[:, place - distance]), chosen(router, inputs[:, place]), strict=True)
            assert shares.tolist() == pytest.approx([len(set(one) & set(other)) / k for one, other in pairs])
    assert found.chances.sum(axis=2) == pytest.approx(k, rel=1e-3)
    assert not np.array_equal(found.own[:, 1, :k], found.ahead[:, 0, :k]), "another layer's input predicts otherwise"


def test_tokens_are_found_again(recorded):
    checkpoint, _, inputs = recorded
    found = judge(checkpoint, np.arange(100, 140), inputs.numpy())
    part, places = found.of(np.array([139, 7, 100, 120]))
    assert part.at.tolist() == [100, 120, 139] and places.tolist() == [2, 3, 0]
    assert np.array_equal(part.own, found.own[[0, 20, 39]])


def run_folder(folder: Path, recorded, *, only: slice = slice(None)) -> Path:
    """Make the folder of a run with two requests of 30 and 10 tokens, of which the last two each were generated."""
    checkpoint, routers, inputs = recorded
    spec = checkpoint.spec
    ids = np.stack([chosen(router, inputs[:, at]) for at, router in enumerate(routers)], axis=1)
    request, position = np.repeat([3, 5], [30, 10]), np.concatenate([np.arange(30), np.arange(10)])
    folder.mkdir()
    (folder / "status.json").write_text(json.dumps({"status": "ok"}))
    lines = [
        {"request_id": 3, "prompt_tokens": 28, "prompt_ids": list(range(28)), "generated_ids": [1, 2, 3]},
        {"request_id": 5, "prompt_tokens": 8, "prompt_ids": list(range(50, 58)), "generated_ids": [1, 2, 3]},
    ]
    (folder / "requests.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    sizes = {"layers": spec.num_moe_layers, "experts": spec.num_experts, "k": spec.experts_per_token}
    first = spec.moe_layers[0]
    write_trace(
        folder / "routing.jsonl", text_of([ids[:30], ids[30:]], spec.num_experts), first_layer=first, ids=(3, 5)
    )
    header = HiddenHeader(
        model="tested",
        source="a test",
        hidden=spec.hidden_dim,
        num_sampled=40,
        num_tokens=40,
        seed=0,
        first_layer=first,
        **sizes,
    )
    writer = HiddenWriter(folder / "hidden", header)
    for number in np.arange(40)[only][::-1]:  # in another order than the tokens'
        at = slice(number, number + 1)
        writer.add(int(request[number]), position[at], inputs[at].numpy(), ids[at].astype(np.int16))
    writer.close()
    return folder


def test_a_domain_has_the_routers_of_its_own_tokens(recorded, tmp_path):
    """Prompts alone are studied; inputs find their tokens whatever order they lie in."""
    run = run_folder(tmp_path / "run", recorded)
    domain = read_domain("plays", run)
    assert domain.text.num_tokens == 36 and domain.whole.num_tokens == 40
    assert domain.text.words.tolist() == [*range(28), *range(50, 58)]
    gates = gates_of(domain, recorded[0].folder)
    found = predictability.within(domain, predictability.usable({"plays": domain}), gates)
    of_gate = found[predictability.GATE]
    assert of_gate["num_tokens"] == domain.test.num_tokens == 8
    assert of_gate["recorded_again"] > 0.97, "float16 rounds a choice now and then"
    router, inputs, k = recorded[1][1], recorded[2][30:38], recorded[0].spec.experts_per_token
    pairs = zip(chosen(router, inputs[:, 0]), chosen(router, inputs[:, 1]), strict=True)
    named = np.mean([len(set(one) & set(other)) / k for one, other in pairs])
    assert of_gate["true_that_are_predicted"][0, k - 1] == pytest.approx(named, abs=0.04)
    assert of_gate["named_ahead"]["1"] == pytest.approx(of_gate["true_that_are_predicted"][:, k - 1], abs=0.04)
    assert {int(d): len(shares) for d, shares in of_gate["named_ahead"].items()} == {
        distance: len(recorded[1]) - distance for distance in DISTANCES if distance < len(recorded[1])
    }
    assert np.min(of_gate["within_true_top"]) >= np.min(of_gate["true_that_are_predicted"][:, k - 1])
    assert set(found["popularity"]) >= {"within_true_top", "hot_4"}


def test_an_excerpt_has_what_the_next_router_predicts(recorded, tmp_path, capsys):
    run, folder = run_folder(tmp_path / "run", recorded), str(recorded[0].folder)
    words = ["--out", str(tmp_path / "small.jsonl.gz"), "--checkpoint", folder, f"plays={run}"]
    assert excerpt.main(words) == 0
    found, domain = read_trace(tmp_path / "small.jsonl.gz"), read_domain("plays", run)
    gates, k = gates_of(domain, recorded[0].folder), recorded[0].spec.experts_per_token
    kept = domain.text.numbers
    assert np.array_equal(found.predicted, gates.ahead[kept][:, :, :k])
    likely = np.take_along_axis(gates.chances[kept], found.predicted.astype(np.int64), axis=2)
    assert found.confidence == pytest.approx(likely, abs=0.0051)
    part = run_folder(tmp_path / "part", recorded, only=slice(0, 20))
    assert excerpt.main(["--out", str(tmp_path / "other"), "--checkpoint", folder, f"plays={part}"]) == 2
    assert "has gating inputs of 20 of 36 tokens" in capsys.readouterr().err
