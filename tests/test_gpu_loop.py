"""The benchmark's loop by hand gives Hugging Face's tokens; here on the CPU, in the harness's memory."""

from __future__ import annotations

import pytest

from benchmarks.gpu_stages import hand_loop, loop
from harness.model.checkpoint import Checkpoint
from harness.model.zoo import ensure
from harness.verify.reference import reference_for
from tests.conftest import tiny_config
from tests.contract.running import engine_on, requests, shuffled

NEW_TOKENS = 4


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return Checkpoint(ensure(tiny_config()), None)


def found_and_wanted(checkpoint, seed: int, *, most_tokens: int) -> tuple[list, list]:
    prompts = [list(each.prompt_ids) for each in requests(7, vocab_size=checkpoint.spec.vocab_size, seed=seed)]
    engine = engine_on(shuffled(seed), checkpoint, [], kv_blocks=200)
    try:
        found = loop.generated(engine, prompts, NEW_TOKENS, most_tokens=most_tokens, packet_mb=0.01)
    finally:
        engine.machine.close()
    return found, [reference_for(checkpoint).generate(prompt, NEW_TOKENS) for prompt in prompts]


@pytest.mark.parametrize(("seed", "most_tokens"), [(0, 70), (1, 1000)])
def test_tokens_are_those_of_hugging_face(checkpoint, seed, most_tokens):
    """With prompts in several passes of two halves, and all in one."""
    found, wanted = found_and_wanted(checkpoint, seed, most_tokens=most_tokens)
    assert found == wanted


def test_a_buffer_that_is_filled_too_early_is_noticed(checkpoint, monkeypatch):
    """The weights of two layers on would be there before the layer has been computed."""
    original = hand_loop.HandLoop._project

    def project(self, w, hidden, half, number):
        self._fetch(self.step + 2)
        return original(self, w, hidden, half, number)

    monkeypatch.setattr(hand_loop.HandLoop, "_project", project)
    found, wanted = found_and_wanted(checkpoint, 0, most_tokens=70)
    assert found != wanted


def test_what_the_cache_has_no_room_for_is_left_out(checkpoint):
    engine = engine_on(shuffled(0), checkpoint, [], kv_blocks=6)
    try:
        run = loop.Batch(engine, [[5] * 9, [6] * 40, [7] * 4], 4, most_tokens=16, packet_mb=0.01)
        assert run.prompts == [[5] * 9, [7] * 4]
    finally:
        engine.machine.close()
