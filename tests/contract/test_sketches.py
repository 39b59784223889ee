"""Module-based batching and event-driven expert placement run exactly on the same core as VSLPipe."""

from __future__ import annotations

import pytest

from tests.contract.running import CAPACITIES_BYTES, check_tokens, emulated, engine_on, requests, run_to_end, shuffled
from tests.contract.sketches import expert_placement, module_batching
from tests.fake_device import cuda_machine


@pytest.mark.parametrize("sketch", [module_batching, expert_placement], ids=lambda m: m.__name__.rsplit(".", 1)[-1])
@pytest.mark.parametrize(
    "make",
    [lambda: shuffled(0), lambda: shuffled(1), lambda: shuffled(2), emulated, lambda: cuda_machine(CAPACITIES_BYTES)],
    ids=["shuffled-0", "shuffled-1", "shuffled-2", "emulated", "cuda"],
)
def test_sketch_gives_the_same_tokens(tiny, sketch, make):
    machine = make()
    work = requests(8, vocab_size=tiny.spec.vocab_size)
    engine = engine_on(machine, tiny, work, kv_blocks=40)
    run_to_end(engine, sketch.build)
    report = check_tokens(tiny, engine.sequences)
    assert report.checked == len(work)
    assert report.ok, report.first_mismatch


def test_placement_uses_every_way_to_run_an_expert(tiny):
    """On a slow link some wrong guesses are still queued when the gate's answer comes: those are cancelled."""
    built = []

    def build(engine):
        built.append(expert_placement.build(engine))
        return built[0]

    work = requests(8, vocab_size=tiny.spec.vocab_size)
    run_to_end(engine_on(emulated(h2d_gb_s=0.01), tiny, work, kv_blocks=40), build)
    counts = built[0].pipeline.counts
    assert all(counts[way] > 0 for way in ("resident", "prefetched", "on demand", "cpu", "cancelled")), counts
