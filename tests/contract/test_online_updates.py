"""A learned predictor goes on learning in the run: on text that is new to it, later requests are predicted better."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from harness.config import ConfigError
from harness.llapor import judging, network, online
from harness.llapor.files import write_predictors
from harness.llapor.learning import LayerData, LayerTraining, plain_loss
from harness.llapor.runtime import UPDATES, LearnFromRouting, PredictLearned, stated_shapes
from harness.llapor.settings import GroupSettings, LlaporSettings
from harness.llapor.shape import PredictorShape
from harness.machine.base import D2H, GPU
from harness.settings import load_strategy
from harness.study.prediction import Learned, ranked
from harness.workload.request import Request
from strategies.common.predictors import PredictorConfig, build_predictor
from strategies.expert_offload.placement import LayerView, Placement
from tests.composing import composed
from tests.contract.placing import placed
from tests.contract.running import CAPACITIES_BYTES, check_tokens, emulated, engine_on, run_to_end, shuffled
from tests.contract.simulating import simulated_engine
from tests.contract.test_learned_predictor import FetchInputs
from tests.contract.watching import WatchingMachine
from tests.unit.study.texts import random_text

ONE, OTHER = (3, 43), (200, 240)  # token ids of two texts that share none
LENGTH = online.BATCH  # tokens of each prompt: one batch, as the judgement cuts its text
LATER = 24  # the last requests, on which the hit rate is taken


def prompts(low: int, high: int, count: int, seed: int, *, new_tokens: int = 1) -> list[Request]:
    rng = np.random.default_rng(seed)
    return [
        Request(
            request_id=at,
            prompt_ids=tuple(rng.integers(low, high, LENGTH).tolist()),
            max_new_tokens=new_tokens,
            text=None,
        )
        for at in range(count)
    ]


@dataclass
class Noting:
    """Runs all on the GPU, and keeps what each layer chose, and what was predicted of the next one."""

    looks_ahead: int = 1
    chosen: dict[int, list[np.ndarray]] = field(default_factory=dict)
    predicted: dict[int, list[np.ndarray]] = field(default_factory=dict)

    def place(self, view: LayerView) -> Placement:
        self.chosen.setdefault(view.layer, []).append(view.ids)
        for layer, forecast in view.ahead.items():
            self.predicted.setdefault(layer, []).append(forecast.ids)
        return Placement(on_gpu=[*view.ready_first, *view.absent])

    def hit_rate(self, requests: slice) -> float:
        """Return the share of the chosen experts that were predicted, in all layers but the first."""
        hits = [
            (predicted[:, :, None] == chosen[:, None, :]).any(axis=1).mean()
            for layer, of_layer in self.predicted.items()
            for predicted, chosen in zip(of_layer[requests], self.chosen[layer][requests], strict=True)
        ]
        return float(np.mean(hits))


def run(tiny, work, machine, *, path: Path | None = None, online_steps: int = 0, batch_size: int = 1, inputs=None):
    """Run requests, and return what was noted and the engine. `inputs` collects what predictors of each layer get."""
    noting = Noting()
    engine = engine_on(machine, tiny, work, kv_blocks=200)
    predictor = {"predictor": "learned" if path else "gate", "path": path and str(path), "online_steps": online_steps}

    def build(on):
        strategy = placed(on, noting, batch_size=batch_size, **predictor)
        if inputs is not None:
            request = strategy.pipeline.predictor.request

            def asked(emit, it, layer, *, distance=1):
                found = request(emit, it, layer, distance=distance)
                if found is not None:
                    op = FetchInputs(on.spec, it.batch, it.acts, layer)
                    inputs.setdefault(layer + distance, []).append(on.machine.wait(on.machine.submit(D2H, op)))
                return found

            strategy.pipeline.predictor.request = asked
        return strategy

    run_to_end(engine, build)
    return noting, engine


def examples(noting: Noting, inputs) -> dict[int, LayerData]:
    """Return what predictors of each layer would learn from."""
    found = {}
    for layer, of_layer in inputs.items():
        normed, ids, shares = (torch.from_numpy(np.concatenate(each)) for each in zip(*of_layer, strict=True))
        chosen = torch.from_numpy(np.concatenate(noting.chosen[layer]))
        found[layer] = LayerData(normed, ids, shares, online.targets(chosen, 8))
    return found


GROUP = GroupSettings(pca_dims=32, width=48, learning_rate=1e-2, weight_decay=0.01)
SETTINGS = LlaporSettings(out="unused", data=("unused",), ends=GROUP, middle=GROUP, epochs=10, batch_tokens=128)


@pytest.fixture(scope="module")
def learned(tiny, tmp_path_factory) -> tuple[Path, dict[int, LayerTraining]]:
    """Predictors that have learned from tokens of one half of the vocabulary; that of layer 2 is deep."""
    inputs: dict = {}
    noting, _ = run(tiny, prompts(*ONE, 60, seed=1), shuffled(0), inputs=inputs)
    path, spec, trained = tmp_path_factory.mktemp("learned"), tiny.spec, {}
    for layer, data in examples(noting, inputs).items():
        trained[layer] = LayerTraining(SETTINGS, "middle" if layer == 2 else "input", data, seed=layer)
        trained[layer].run(data, data, lambda row: None)
    model = {"layers": list(spec.moe_layers), "experts": spec.num_experts, "k": spec.experts_per_token}
    description = {
        "source": "one half of the vocabulary", "texts": {"held_out": {"name": "the same half"}},
        "model": {**model, "hidden": spec.hidden_dim},
        "predictors": [{"layer": layer, "shape": vars(each.shape)} for layer, each in trained.items()],
        "settings": {"ends": vars(GROUP), "middle": vars(GROUP)},
    }  # fmt: skip
    text = random_text(0, layers=len(spec.moe_layers), num_experts=spec.num_experts, lengths=(30, 30))
    networks = {layer: {name: w.numpy() for name, w in each.weights.items()} for layer, each in trained.items()}
    write_predictors(path, description, networks, Learned(text))
    return path, trained


@pytest.fixture(scope="module")
def other() -> list[Request]:
    """Prompts of the other half of the vocabulary."""
    return prompts(*OTHER, 80, seed=2)


@pytest.mark.slow
def test_later_requests_of_another_text_are_predicted_better_as_the_judgement_says(tiny, learned, other):
    path, trained = learned
    inputs: dict = {}
    as_learned, _ = run(tiny, other, shuffled(0), path=path, inputs=inputs)
    going_on, engine = run(tiny, other, shuffled(3), path=path, online_steps=4)
    later, first = slice(-LATER, None), slice(0, 3)
    before, after = as_learned.hit_rate(later), going_on.hit_rate(later)
    assert after > before + 0.05, (before, after)
    assert going_on.hit_rate(first) == pytest.approx(as_learned.hit_rate(first), abs=0.03), "nothing was learned yet"
    for layer, data in examples(as_learned, inputs).items():
        judged = ranked(judging.online_chances(trained[layer], data, 4), tiny.spec.experts_per_token)
        run_said = np.concatenate(going_on.predicted[layer])
        assert (judged == run_said).mean() > 0.995, f"layer {layer}: a run is what is judged"
    report = check_tokens(tiny, engine.sequences)
    assert report.ok and report.checked == len(other), report.first_mismatch


def test_what_is_learned_is_the_same_on_every_machine(tiny, learned):
    """Samples gather over passes of four sequences, whose layers have other batches than 32; nothing undeclared is
    touched."""
    path, work = learned[0], prompts(*OTHER, 4, seed=3, new_tokens=20)
    machines = [WatchingMachine(capacities_bytes=CAPACITIES_BYTES, seed=0), shuffled(1), emulated()]
    noted = [run(tiny, work, each, path=path, online_steps=3, batch_size=4)[0] for each in machines]
    still = run(tiny, work, shuffled(0), path=path, batch_size=4)[0]
    assert LearnFromRouting in machines[0].seen
    for layer, of_layer in noted[0].predicted.items():
        for other in noted[1:]:
            assert all(map(np.array_equal, of_layer, other.predicted[layer])), f"layer {layer}"
        before, after = (np.concatenate(each.predicted[layer]) for each in (still, noted[0]))
        assert not np.array_equal(before, after), "and something was learned"


def test_a_profile_run_is_not_learned_from(tiny, learned):
    work, submitted = prompts(*OTHER, 2, seed=4), []
    engine = engine_on(shuffled(0), tiny, work, kv_blocks=200)
    submit = engine.machine.submit

    def noted(lane, op, **how):
        submitted.append(op)
        return submit(lane, op, **how)

    def build(on):
        config = composed("strategy=prescope")["strategy"] | {
            "predictor": "learned", "predictor_path": str(learned[0]), "online_steps": 1, "profile_tokens": 96,
            "packet_mb": 0.004, "batch_size": 1,
        }  # fmt: skip
        strategy = load_strategy(config).build(on)
        assert "online_steps=1" in strategy.plan["predictions"]
        assert any(isinstance(op, PredictLearned) for op in submitted), "the profile run has predictions"
        assert not any(isinstance(op, LearnFromRouting) for op in submitted)
        return strategy

    engine.machine.submit = noted
    run_to_end(engine, build)
    ops = [op for op in submitted if isinstance(op, LearnFromRouting)]
    assert len(ops) == len(work) * (tiny.spec.num_layers - 1) and all(op.kept.is_full for op in ops)


def test_learning_takes_time_on_the_gpu_lane_and_device_memory():
    """Where times are modelled, predictors of published dimensions are taught at their cost, and foresee no more."""
    still, _ = simulated_engine("qwen3-30b-a3b", 4, hit_rate=0.5, max_new_tokens=9)
    engine, _ = simulated_engine("qwen3-30b-a3b", 4, hit_rate=0.5, max_new_tokens=9)
    noted = [Noting(), Noting()]
    run_to_end(still, partial(placed, placer=noted[0], predictor="learned", packet_mb=1.0))
    run_to_end(engine, partial(placed, placer=noted[1], predictor="learned", online_steps=2, packet_mb=1.0))
    assert noted[0].hit_rate(slice(None)) == noted[1].hit_rate(slice(None))
    spans = [s for s in engine.machine.spans if s.kind == LearnFromRouting.kind]
    assert {s.lane for s in spans} == {GPU} and not [s for s in still.machine.spans if s.kind == LearnFromRouting.kind]
    shapes, k = stated_shapes(engine.spec), engine.spec.experts_per_token
    for layer, shape in shapes.items():
        mine = [s for s in spans if s.layer == layer]
        sizes = online.learned_sizes(shape)
        assert set(shape.tensors()) - set(sizes) == {"pca", "pca_offset", "calibration"}
        tokens = sum(len(each) for each in noted[1].chosen[layer])
        steps = [s for s in mine if s.work.flops]
        assert len(steps) == tokens // online.BATCH > 0, "of short passes every token is learned from"
        products = sum(np.prod(size) for size in sizes.values() if len(size) == 2)
        for span in steps:
            assert span.work.flops == 2 * 6 * products * online.BATCH
            assert span.work.device_bytes > 2 * 40 * online.num_learned(shape)
    samples = online.BATCH * sum(20 * k + 4 * shape.pca_dims for shape in shapes.values())
    moments = sum(8 * online.num_learned(shape) for shape in shapes.values())
    assert engine.machine.tiers["device"].holders()[UPDATES] == samples + moments
    assert UPDATES not in still.machine.tiers["device"].holders()


def test_a_step_is_that_of_adamw_on_calibrated_chances():
    shape, generator = PredictorShape(10, 6, 4, 8, is_deep=True), torch.Generator().manual_seed(0)
    w = network.initial(shape, 0) | {"calibration": torch.tensor([1.5, -0.4])}
    reduced, routed = torch.randn(32, 4, generator=generator), torch.rand(32, 12, generator=generator)
    target = (torch.rand(32, 6, generator=generator) < 0.3).float()
    expected = {name: each.clone().requires_grad_() for name, each in w.items() if name != "calibration"}
    torch_own = torch.optim.AdamW(expected.values(), 3e-2, (0.9, 0.95), weight_decay=0.2)
    moments = torch.full((2, online.num_learned(shape)), float("nan"))
    for number in range(3):
        torch_own.zero_grad()
        plain_loss(1.5 * network.logits(expected, reduced, routed) - 0.4, target).backward()
        torch_own.step()
        online.step(w, moments, number, reduced, routed, target, online.Pace(3e-2, 0.2))
    for name, each in expected.items():
        assert w[name] == pytest.approx(each.detach(), abs=1e-5), name


def test_only_predictors_that_learn_go_on(tiny):
    engine = engine_on(shuffled(0), tiny, prompts(*ONE, 1, seed=0), kv_blocks=40)
    for kind, steps in (("gate", 1), ("learned", -1)):
        with pytest.raises(ConfigError, match=r"strategy.online_steps: must be 0 or more, and 0 without"):
            build_predictor(PredictorConfig(predictor=kind, online_steps=steps), engine)
