"""Views of weights: made once for a place, whichever expert lies there, and before the first pass where they stay."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from math import prod
from types import SimpleNamespace

import pytest
import torch

from harness.engine.loop import look_at_weights
from harness.engine.ops import views
from harness.machine.base import GPU, Op, Work
from harness.memory.placed import PlacedPart
from harness.model.layout import PartLayout, TensorLayout
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


def test_what_stays_on_the_device_needs_no_views_in_a_pass(tiny, made):
    with closing(emulated()) as machine:
        engine = engine_on(machine, tiny, [], kv_blocks=8, block_size=16)
        engine.resident.keep("experts", [(0, part.layout.name) for part in engine.store.experts(0).values()])
        kept = [part for part in engine.resident.parts if part.layout.expert is not None]
        assert kept and not {part.buffer for part in kept} & {part.buffer for part in made}
        look_at_weights(engine)
        assert {part.buffer for part in kept} <= {part.buffer for part in made}
        count = len(made)
        for part in kept:
            machine.wait(machine.submit(GPU, Look(PlacedPart(part.layout, part.buffer, part.keys))))
        assert len(made) == count


def test_experts_with_biases_in_the_same_place_have_their_own():
    """The kernels keep float32 copies of biases in 16 bits, which do not change with the place's bytes."""
    spec = SimpleNamespace(expert_bias=True)
    one, other = (_part(f"expert.{number}") for number in range(2))
    place, family = torch.arange(8, dtype=torch.bfloat16), _Biased()
    memo: dict[object, object] = {}
    ctx = SimpleNamespace(memo=lambda buffer: memo, tensor=lambda buffer, shape, dtype: _typed(place, dtype, shape))
    first = views.expert_weights(ctx, family, spec, one).biases[2].clone()
    place += 10
    again = views.expert_weights(ctx, family, spec, other).biases[2]
    assert torch.equal(again, first + 10)
    spec.expert_bias = False
    assert views.expert_weights(ctx, family, spec, one) is views.expert_weights(ctx, family, spec, other)


def _part(name):
    tensors = (TensorLayout("down", (4, 1), (f"{name}.down",), 0, 8, "bfloat16"),
               TensorLayout("down_bias", (4,), (f"{name}.bias",), 8, 8, "bfloat16"))  # fmt: skip
    return PlacedPart(PartLayout(name, tensors, 16), "place", ("place",))


def _typed(place, dtype, shape):
    return place.view(getattr(torch, dtype))[: prod(shape)].view(shape)


class _Biased:
    def expert_matrices(self, spec, w):
        gate = torch.ones(1, 4, dtype=torch.bfloat16)
        plain = SimpleNamespace(name="silu", alpha=1.0, limit=0.0)
        bias = w["down_bias"]
        return SimpleNamespace(gate=gate, up=gate, down=w["down"], gate_bias=bias[:1], up_bias=bias[:1], down_bias=bias,
                               activation=plain)  # fmt: skip
