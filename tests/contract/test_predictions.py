"""Experts are predicted by the router of a later layer: the same as by hand, and paid for where nothing is computed."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from harness.bench.op_bench import OpBench
from harness.bench.shapes import Shape
from harness.engine.activations import Activations
from harness.engine.emitter import Emitter, InFlight
from harness.engine.engine import Engine
from harness.engine.ops.data import MicroBatchOp
from harness.machine.base import D2H, GPU, H2D, Work
from harness.model.dimensions import Router
from harness.model.functional import choose_experts, foresee_experts
from strategies.expert_offload import pipeline
from tests.conftest import ROOT
from tests.contract.placing import placed
from tests.contract.running import CAPACITIES_BYTES, check_tokens, emulated, engine_on, requests, run_to_end, shuffled
from tests.contract.simulating import link_bytes, simulated_engine
from tests.contract.toy_family import PlainToy, make_toy
from tests.fake_device import cuda_machine

DOCUMENT = ROOT / "docs/experts.md"


class FetchNormed(MicroBatchOp):
    """Fetches the input of a layer's experts."""

    kind = "fetch normed"

    def __init__(self, *given) -> None:
        super().__init__(*given)
        self.reads = (self.acts.normed,)

    def work(self) -> Work:
        return Work()

    def run(self, ctx, packet):
        return ctx.host_value(ctx.tensor(self.acts.normed, (self.batch.num_tokens, self.spec.hidden_dim), "float32"))

    def imagine(self, world):
        return None


@pytest.fixture
def predicted(monkeypatch) -> list[tuple[int, np.ndarray, tuple[np.ndarray, np.ndarray]]]:
    """Every prediction: of which layer, from which input, and what was predicted."""
    found, predict = [], Emitter.predict

    def noted(emit, it, layer, router, *, distance=1):
        ticket = predict(emit, it, layer, router, distance=distance)
        machine, spec = emit._engine.machine, emit._engine.spec
        normed = machine.submit(D2H, FetchNormed(spec, it.batch, it.acts, layer))
        found.append((layer + distance, machine.wait(normed), machine.wait(ticket)))
        return ticket

    monkeypatch.setattr(Emitter, "predict", noted)
    return found


def run(machine, checkpoint, count: int = 6) -> Engine:
    work = requests(count, vocab_size=checkpoint.spec.vocab_size, longest=20, max_new_tokens=4)
    engine = engine_on(machine, checkpoint, work, kv_blocks=40)
    run_to_end(engine, placed)
    return engine


def by_hand(checkpoint, layer: int, normed: np.ndarray) -> tuple[list[list[int]], np.ndarray]:
    """The best two experts of each token and how likely all are, expert by expert in float64."""
    w, prefix = checkpoint.tensors(), f"model.layers.{layer}."
    logits = torch.from_numpy(normed).double() @ w[prefix + "block_sparse_moe.gate.weight"].double().T
    is_toy = checkpoint.spec.family == "toy"
    exps = logits.exp()
    scores = exps / (1 + exps) if is_toy else exps / exps.sum(-1, keepdim=True)
    choice = scores + w[prefix + "correction_bias"].double() if is_toy else scores
    shares = (12 * (choice - choice.amax(-1, keepdim=True)) / choice.std(-1, correction=0, keepdim=True)).exp()
    shares = shares if is_toy else choice
    best, likely = [], []
    for token, share in zip(choice.tolist(), shares.tolist(), strict=True):
        groups = sorted(range(4), key=lambda pair: -(token[2 * pair] + token[2 * pair + 1]))[: 2 if is_toy else 4]
        best.append(sorted((e for e in range(8) if e // 2 in groups), key=lambda e: -token[e])[:2])
        likely.append(two_of([share[e] if e // 2 in groups else 0.0 for e in range(8)]))
    return best, np.array(likely)


def two_of(shares: list[float]) -> list[float]:
    """Multiply the shares by what makes them sum to 2 where none may exceed 1: the factor is found by halving."""
    low, high = 0.0, 1e9
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(min(1.0, middle * share) for share in shares) < 2 else (low, middle)
    return [min(1.0, low * share) for share in shares]


def agree(checkpoint, found) -> bool:
    right = True
    for layer, normed, (ids, scores) in found:
        best, expected = by_hand(checkpoint, layer, normed)
        assert ids.dtype == np.int64 and scores.dtype == np.float32 and ids.shape == scores.shape == (len(normed), 2)
        right &= [sorted(row) for row in ids.tolist()] == [sorted(row) for row in best]
        right &= bool(np.allclose(np.take_along_axis(expected, ids, axis=1), scores, atol=1e-5))
    return right


MACHINES = {
    "shuffled-0": partial(shuffled, 0),
    "shuffled-1": partial(shuffled, 1),
    "emulated": emulated,
    "cuda": partial(cuda_machine, CAPACITIES_BYTES),
}


@pytest.mark.parametrize("make", MACHINES.values(), ids=MACHINES)
def test_predictions_are_those_of_the_later_layers_router(tiny, predicted, make):
    engine = run(make(), tiny)
    report = check_tokens(tiny, engine.sequences)
    assert report.ok and report.checked == 6, report.first_mismatch
    assert {layer for layer, _, _ in predicted} == set(range(1, tiny.spec.num_layers))
    assert agree(tiny, predicted)
    account = engine.machine.tiers["device"].holders()
    most_tokens = 4 * max(len(sequence.request.prompt_ids) for sequence in engine.sequences)
    assert account["activations 0 predicted ids"] == most_tokens * 2 * 8
    assert account["activations 0 predicted chances"] == most_tokens * 2 * 4


def test_a_correction_bias_and_groups_count_in_predictions(tiny, predicted, tmp_path, monkeypatch):
    toy = make_toy(tiny, tmp_path / "toy", monkeypatch)
    engine = run(shuffled(1), toy, count=3)
    plain = PlainToy(toy)
    for sequence in engine.sequences:
        request = sequence.request
        assert sequence.generated == plain.generate(request.prompt_ids, request.max_new_tokens)
    assert {layer for layer, _, _ in predicted} == {3}, "one layer is dense, and nothing precedes the first"
    assert agree(toy, predicted)


@pytest.mark.parametrize("name", ["tiny", "toy"])
def test_all_experts_chances_sum_to_the_number_that_is_chosen(tiny, predicted, tmp_path, monkeypatch, name):
    """The toy's router has groups, a sigmoid and a bias."""
    checkpoint = make_toy(tiny, tmp_path / "toy", monkeypatch) if name == "toy" else tiny
    wide = lambda *given, **how: Activations(*given, **how | {"num_predicted": 8})  # noqa: E731
    monkeypatch.setattr(pipeline, "Activations", wide)
    run(shuffled(0), checkpoint, count=3)
    assert predicted
    for layer, normed, (ids, likely) in predicted:
        assert np.sort(ids, axis=1).tolist() == [list(range(8))] * len(normed)
        assert likely.sum(axis=1) == pytest.approx(2, abs=1e-5) and likely.max() <= 1
        assert np.take_along_axis(by_hand(checkpoint, layer, normed)[1], ids, axis=1) == pytest.approx(likely, abs=1e-5)
        assert expected_tokens(ids, likely, 8).sum() == pytest.approx(2 * len(normed), rel=1e-5)


def test_an_oracles_chances_sum_to_the_number_that_is_chosen(predicted):
    engine, _ = simulated_engine("qwen3-30b-a3b", 2, hit_rate=1.0)
    run_to_end(engine, partial(placed, packet_mb=1.0))
    assert predicted
    for _, _, (ids, likely) in predicted:
        assert expected_tokens(ids, likely, 128).sum() == pytest.approx(8 * len(ids))


def expected_tokens(ids: np.ndarray, likely: np.ndarray, num_experts: int) -> np.ndarray:
    """The formula of docs/experts.md."""
    assert "`np.bincount(ids.ravel(), weights=likely.ravel(), minlength=num_experts)`" in DOCUMENT.read_text()
    return np.bincount(ids.ravel(), weights=likely.ravel(), minlength=num_experts)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("spread", [0.0, 1.0, 300.0])
def test_chances_of_hundreds_of_experts_sum_to_the_number_that_is_chosen(scoring, spread):
    """A softmax of such a spread leaves nothing to most of them."""
    logits = spread * torch.randn(50, 160, generator=torch.Generator().manual_seed(1))
    _, likely = foresee_experts(logits, 160, 6, Router(scoring=scoring))
    assert likely.sum(dim=1).numpy() == pytest.approx(6, abs=1e-4) and likely.min() >= 0 and likely.max() <= 1
    assert (likely.diff(dim=1) <= 0).all(), "the best come first"
    assert (foresee_experts(logits, 3, 6, Router(scoring=scoring))[1] == likely[:, :3]).all()


@pytest.mark.parametrize("bias", [None, 0.3 * torch.randn(64, generator=torch.Generator().manual_seed(7))])
def test_chances_under_sigmoid_scores_and_a_bias_add_up_to_the_experts_that_are_hot(bias):
    """The estimate differs from the router's logits by noise. The sums over a batch's tokens name its hot experts, and
    come near to the numbers of tokens that these get."""
    noise, router, found = torch.Generator().manual_seed(3), Router(scoring="sigmoid"), []
    for _ in range(20):
        logits = torch.randn(32, 64, generator=noise) + torch.randn(64, generator=noise)
        true = np.bincount(choose_experts(logits, 6, router, bias)[0].ravel().numpy(), minlength=64)
        estimate = logits + 0.3 * torch.randn(32, 64, generator=noise)
        ids, likely = foresee_experts(estimate, 64, 6, router, bias)
        expected = expected_tokens(ids.numpy(), likely.numpy(), 64)
        hot, hottest = np.argsort(-expected)[:4], np.argsort(-true, kind="stable")[:6]
        found.append((np.isin(hot, hottest).mean(), expected[hot].sum() / true[hot].sum()))
    share, tokens = np.mean(found, axis=0)
    assert share > 0.85 and tokens == pytest.approx(1.0, abs=0.1)


def test_a_router_of_another_layer_is_caught(tiny, predicted, monkeypatch):
    noted = Emitter.predict

    def of_this_layer(emit, it, layer, router, *, distance=1):
        return noted(emit, it, layer, emit._engine.resident.part(layer, "attention_out"), distance=distance)

    monkeypatch.setattr(Emitter, "predict", of_this_layer)
    engine = run(shuffled(0), tiny)
    assert check_tokens(tiny, engine.sequences).ok, "a wrong guess costs time and no token"
    assert not agree(tiny, predicted)


def test_only_layers_with_a_router_ahead_are_predicted(tiny):
    engine = engine_on(shuffled(0), tiny, requests(1, vocab_size=tiny.spec.vocab_size), kv_blocks=40)
    last, part = tiny.spec.num_layers - 1, engine.store.layers[0]["attention_out"]
    pipeline = placed(engine).pipeline
    it = InFlight(OpBench(engine, None).batch(Shape(prompts=(3,))), pipeline.acts[0])
    for layer, distance in ((last, 1), (0, 0), (0, last + 1)):
        with pytest.raises(AssertionError, match="no router ahead"):
            Emitter(engine).predict(it, layer, part, distance=distance)
    it.acts.num_predicted = 0
    with pytest.raises(AssertionError, match="without room for predictions"):
        Emitter(engine).predict(it, 0, part)


def test_predictions_cost_time_where_nothing_is_computed():
    """The router's matrix and the tokens' rows are read, and what the world predicts comes over the link. Nobody
    transfers the routers again, which stay on the device."""
    engine, _ = simulated_engine("qwen3-30b-a3b", 2, hit_rate=0.5)
    run_to_end(engine, partial(placed, packet_mb=1.0))
    spec, spans = engine.spec, list(engine.machine.spans)
    computed = [s for s in spans if s.kind == "predict experts"]
    passes = sum(s.kind == "head" for s in spans)
    assert len(computed) == passes * (spec.num_layers - 1) and {s.lane for s in computed} == {GPU}
    tokens = [s.work.flops / (2 * spec.hidden_dim * spec.num_experts) for s in computed]
    for span, n in zip(computed, tokens, strict=True):
        matrix, row = spec.hidden_dim * spec.num_experts * 2, spec.hidden_dim * 2 + 12 * spec.experts_per_token
        assert span.work.device_bytes == pytest.approx(matrix + n * row) and span.end_s > span.start_s
    fetched = link_bytes(engine, "fetch prediction", D2H)
    assert fetched == pytest.approx([12 * n * spec.experts_per_token for n in tokens])
    routers = {engine.store.layers[layer]["attention_out"].layout.nbytes for layer in range(spec.num_layers)}
    assert not routers & {round(nbytes) for nbytes in link_bytes(engine, "weights", H2D)}
