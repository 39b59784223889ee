"""MoE-Lens's profiler and planner on a virtual clock whose costs are known exactly: what they find must be those."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from harness.config import parse
from harness.engine.engine import Engine
from harness.machine.base import GPU, H2D
from harness.machine.simulated import SimulatedMachine
from harness.model.planned import PlannedLayout, PlannedModel
from strategies.moelens.config import Config
from strategies.moelens.planner import plan_policy
from strategies.moelens.prediction import predict
from strategies.moelens.profiler import PipelineProfiler, Profile, line_through
from tests.conftest import ROOT
from tests.contract.running import CAPACITIES_BYTES, engine_on, requests

PER_TOKEN_S, PER_HALF_S, LINK_BYTES_S = 2e-5, 1e-3, 1e8


class KnownCosts:
    """Experts cost a line in the tokens of a half, transfers their bytes; everything else is free."""

    def __init__(self, per_token_s: float = PER_TOKEN_S, per_half_s: float = PER_HALF_S) -> None:
        self.per_token_s, self.per_half_s = per_token_s, per_half_s

    def seconds(self, lane, op, work) -> float:
        if lane == GPU and op.kind == "experts":
            return self.per_token_s * op.batch.num_tokens + self.per_half_s
        return work.link_bytes / LINK_BYTES_S if lane == H2D else 0.0


def engine(tiny, costs: KnownCosts | None = None, *, device_bytes: int | None = None, count: int = 40) -> Engine:
    capacities = CAPACITIES_BYTES | {"device": device_bytes or CAPACITIES_BYTES["device"]}
    machine = SimulatedMachine(
        capacities_bytes=capacities,
        costs=costs or KnownCosts(),
        host_bytes_s=1e15,
        world=SimpleNamespace(expert_counts=lambda batch, layer: None),
    )
    work = requests(count, vocab_size=tiny.spec.vocab_size, max_new_tokens=8)
    return engine_on(machine, tiny, work, kv_blocks=60)


def settings(**changes) -> Config:
    values = yaml.safe_load((ROOT / "conf/strategy/moelens.yaml").read_text()) | changes
    values.pop("package")
    return parse(Config, values)


def test_the_line_and_the_transfer_are_found(tiny):
    on = engine(tiny)
    held_bytes = on.machine.tiers["device"].used_bytes
    profiler = PipelineProfiler(on, prompt_tokens=20, max_tokens=2000, packet_bytes=100_000, repeats=2)
    profile = profiler.measure()
    profiler.close()
    assert profile.seconds_per_token == pytest.approx(PER_TOKEN_S)
    assert profile.fixed_s == pytest.approx(2 * PER_HALF_S)
    layer_s = on.store.layer_bytes / LINK_BYTES_S
    assert profile.layer_transfer_s == pytest.approx(layer_s)
    assert profile.n_real == pytest.approx((layer_s - 2 * PER_HALF_S) / PER_TOKEN_S)
    assert len({tokens for tokens, _ in profile.samples}) > 2
    assert on.machine.tiers["device"].used_bytes == held_bytes


@pytest.mark.parametrize("dense_layers", [(0,), (3,), (0, 3), (0, 2), (1, 3)])
def test_the_line_and_the_transfer_are_those_of_layers_with_experts(tiny, dense_layers):
    """Wherever the dense layers lie."""
    spec = replace(tiny.spec, dense_layers=dense_layers, dense_dim=32)
    on = engine(PlannedModel(spec))
    profiler = PipelineProfiler(on, prompt_tokens=20, max_tokens=2000, packet_bytes=100_000, repeats=2)
    profile = profiler.measure()
    profiler.close()
    layer_s = sum(part.nbytes for part in PlannedLayout.layer_parts(spec, spec.moe_layers[0])) / LINK_BYTES_S
    assert profile.n_real == pytest.approx((layer_s - 2 * PER_HALF_S) / PER_TOKEN_S)


def test_a_gpu_slower_than_the_link_at_any_count_still_gets_a_plan(tiny):
    policy = plan_policy(settings(), engine(tiny, KnownCosts(per_half_s=10.0)))
    assert policy.n_real >= 1


def test_n_real_is_cut_to_what_the_device_holds_and_the_prediction_says_so(tiny):
    on = engine(tiny, KnownCosts(per_token_s=1e-9, per_half_s=0.0), device_bytes=2_500_000, count=200)
    policy = plan_policy(settings(), on)
    assert policy.n_real == policy.max_pass_tokens < policy.n_real_measured
    prediction = predict(settings(), policy, on)
    assert prediction is not None
    assert ("device memory" in prediction.model) == ("Eq. 13" in prediction.model)


def test_buffers_hold_a_pass_that_exceeds_n_real_by_one_prompt(tiny):
    on = engine(tiny)
    longest = max(s.max_tokens for s in on.sequences)
    assert plan_policy(settings(n_real=77), on).max_pass_tokens == 77 + longest
    assert plan_policy(settings(n_real=10), on).max_pass_tokens == 40 + longest, "all 40 sequences may decode at once"


def test_a_given_n_real_is_kept(tiny):
    policy = plan_policy(settings(n_real=77), engine(tiny))
    assert (policy.n_real, policy.n_real_measured) != (policy.n_real_measured, 77)
    assert policy.n_real == 77


@pytest.mark.parametrize(
    "ablation", [{"overlap_prefill_decode": False}, {"pipeline": "sequential"}, {"attention": "gpu"}]
)
def test_ablations_are_not_predicted(tiny, ablation):
    on = engine(tiny)
    assert predict(settings(), plan_policy(settings(), on), on) is not None
    assert predict(settings(**ablation), plan_policy(settings(**ablation), on), on) is None


@given(
    slope=st.floats(1e-7, 1e-3),
    fixed_s=st.floats(0, 1),
    counts=st.lists(st.integers(1, 5000), min_size=2, max_size=6, unique=True),
)
def test_a_line_is_recovered(slope, fixed_s, counts):
    found = line_through([(n, slope * n + fixed_s) for n in counts])
    assert found == pytest.approx((slope, fixed_s), rel=1e-3, abs=1e-6 + 1e-9 * fixed_s)


def test_points_without_a_rising_line_go_through_the_origin():
    assert line_through([(100, 2.0)]) == (0.02, 0.0)
    assert line_through([(100, 3.0), (300, 1.0)]) == (0.01, 0.0)


def test_a_gpu_that_is_never_saturated_has_no_rate_of_saturation():
    """Its ops alone take longer than the transfer: tokens beside such a rate would be a negative share."""
    slow = Profile(seconds_per_token=1e-3, fixed_s=0.3, layer_transfer_s=0.2, samples=())
    assert slow.n_real < 0 and slow.gpu_tok_s(4) is None
    fast = Profile(seconds_per_token=1e-3, fixed_s=0.1, layer_transfer_s=0.2, samples=())
    assert fast.gpu_tok_s(4) == pytest.approx(100 / (4 * 0.2))
