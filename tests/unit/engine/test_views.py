"""Views of weights: made once for a place, whichever expert lies there, and before the first pass where they stay."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import pytest
import torch

from harness.engine.loop import run
from harness.engine.ops import views
from harness.machine.base import GPU, Op, Work
from harness.memory.placed import PlacedPart
from tests.contract.running import emulated, engine_on


class Look(Op):
    """Asks for an expert's weights."""

    kind = "look"

    def __init__(self, part):
        self.part = part

    def work(self):
        return Work()

    def run(self, ctx, packet):
        self.found = views.weights(ctx, self.part)


@pytest.fixture
def made(monkeypatch):
    """The parts of which views were made, in this order."""
    found, original = [], views._weight_views

    def noted(ctx, part):
        found.append(part)
        return original(ctx, part)

    monkeypatch.setattr(views, "_weight_views", noted)
    return found


def test_experts_in_the_same_place_share_their_views(tiny, made):
    with closing(emulated()) as machine:
        engine = engine_on(machine, tiny, [], kv_blocks=8, block_size=16)
        first, second = list(engine.store.experts(0).values())[:2]
        made.clear()
        assert first.layout != second.layout and first.layout.form is second.layout.form
        looks = [Look(first), Look(replace(first, layout=second.layout)), Look(second)]
        for look in looks:
            machine.wait(machine.submit(GPU, look))
        here = [look.found for look in looks]
        assert here[0] is here[1] is not here[2]
        assert [each.buffer for each in made] == [first.buffer, second.buffer]
        assert all(not torch.equal(here[0][name], here[2][name]) for name in here[0])


def test_parts_that_differ_in_what_they_hold_differ_in_their_form(tiny):
    with closing(emulated()) as machine:
        parts = engine_on(machine, tiny, [], kv_blocks=8, block_size=16).store.layers[0].values()
        layout = next(part.layout for part in parts if part.layout.expert is not None)
        moved = tuple(replace(each, offset_bytes=each.offset_bytes + 64) for each in layout.tensors)
        smaller = tuple(replace(each, dtype="bfloat16") for each in layout.tensors)
        others = [replace(layout, tensors=moved), replace(layout, tensors=smaller), replace(layout, nbytes=1 << 20)]
        assert len({layout.form, *(each.form for each in others)}) == 4
        assert replace(layout, name="another", expert=5).form is layout.form


def test_what_stays_on_the_device_is_looked_at_before_the_first_pass(tiny, made):
    class Nothing:
        passes_in_flight = 1
        scheduler = pipeline = property(lambda self: self)

        def finish(self):
            pass

        def next_pass(self):
            return None

    with closing(emulated()) as machine:
        engine = engine_on(machine, tiny, [], kv_blocks=8, block_size=16)
        engine.resident.keep("experts", [(0, part.layout.name) for part in engine.store.experts(0).values()])
        kept = [part for part in engine.resident.parts if part.layout.expert is not None]
        assert kept and not {part.buffer for part in kept} & {part.buffer for part in made}
        run(engine, Nothing(), lambda record: None)
        assert {part.buffer for part in kept} <= {part.buffer for part in made}
        count = len(made)
        for part in kept:
            machine.wait(machine.submit(GPU, Look(PlacedPart(part.layout, part.buffer, part.keys))))
        assert len(made) == count
