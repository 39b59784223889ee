"""Placements of single experts give Hugging Face's tokens wherever experts run and however wrong predictions are."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from harness.engine.batch import PassPlan
from harness.engine.sequences import Sequence
from harness.memory.replacement import LeastRecentlyUsed
from strategies.common.predictors import GatePredictor
from strategies.expert_offload.deployment import Deployment, PlacementConfig
from strategies.expert_offload.placement import LayerView, Placement
from strategies.expert_offload.policies import AbsentOnCpu, OnDemandOnly
from tests.contract.running import check_tokens, emulated, engine_on, requests, run_to_end, shuffled


class Slots(PlacementConfig):
    """A config with slots for prefetches."""

    def num_slots(self, spec) -> tuple[int, int]:
        return 2, 4


class Cache(PlacementConfig):
    """A config whose prefetches share the slots of experts on demand, which are a cache."""

    def num_slots(self, spec) -> tuple[int, int]:
        return 5, 0


@dataclass
class Random:
    """Places by lot, and prefetches experts by lot: most guesses are wrong."""

    looks_ahead: int = 1
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def place(self, view: LayerView) -> Placement:
        on_cpu = [e for e in view.active if self.rng.random() < 0.4]
        on_gpu = [e for e in view.active if e not in on_cpu]
        self.rng.shuffle(on_gpu)
        later = [layer for layer in range(view.layer + 1, min(view.layer + 3, view.num_layers))]
        guesses = [(layer, int(self.rng.integers(view.num_experts))) for layer in later for _ in range(3)]
        return Placement(on_gpu=on_gpu, on_cpu=on_cpu, prefetch=guesses)


def built(engine, placer, *, slots=Slots, micro_batches=1):
    config = slots(batch_size=4, max_pass_tokens=64, packet_mb=0.004, profile_tokens=24)
    deployment = Deployment.of(
        config,
        engine,
        predictor=GatePredictor(engine),
        num_micro_batches=micro_batches,
        replacement=LeastRecentlyUsed(),
    )
    deployment.fill_table()
    strategy = deployment.strategy(placer)
    if micro_batches > 1:
        strategy.scheduler = InTwo(strategy.scheduler)
    return strategy


class InTwo:
    """Lets the sequences of a pass go through each layer in two micro-batches."""

    def __init__(self, scheduler) -> None:
        self._scheduler = scheduler

    @property
    def num_waiting(self) -> int:
        return self._scheduler.num_waiting

    def next_pass(self) -> PassPlan | None:
        plan = self._scheduler.next_pass()
        if plan is not None:
            cut: list[list[Sequence]] = [plan.sequences[::2], plan.sequences[1::2]]
            plan.micro_batches = [part for part in cut if part]
        return plan

    def retire(self, plan, ended) -> None:
        self._scheduler.retire(plan, ended)


CASES = {
    "on demand, shuffled": (lambda: shuffled(0), OnDemandOnly, Slots, 1),
    "CPU, shuffled": (lambda: shuffled(1), AbsentOnCpu, Slots, 1),
    "by lot, shuffled": (lambda: shuffled(2), Random, Slots, 2),
    "by lot in a cache, shuffled": (lambda: shuffled(3), Random, Cache, 1),
    "by lot, emulated": (lambda: emulated(h2d_gb_s=0.01), Random, Slots, 1),
}


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_exact(tiny, case):
    machine, placer, slots, micro_batches = CASES[case]
    work = requests(5, vocab_size=tiny.spec.vocab_size, longest=40, max_new_tokens=4)
    engine = engine_on(machine(), tiny, work, kv_blocks=40)
    run_to_end(engine, lambda e: built(e, placer(), slots=slots, micro_batches=micro_batches))
    report = check_tokens(tiny, engine.sequences)
    assert report.checked == len(work)
    assert report.ok, report.first_mismatch
