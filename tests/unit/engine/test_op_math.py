"""What gpu ops compute beyond the family's own math: sums over experts, and heads of many sequences."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from harness.engine.activations import Activations, head_workspace_bytes
from harness.engine.batch import assemble
from harness.engine.ops.compute import Experts, Head
from harness.engine.ops.views import weights
from harness.machine.arenas import tensor_of
from harness.machine.base import GPU
from harness.machine.host_context import HostContext
from harness.memory.weights import PlacedPart
from harness.model import families
from tests.unit.engine.fakes import SPEC, engine, sequences

MIXTRAL = families.family("mixtral")


def micro_batch(on, spec, *prompts: int, max_tokens: int):
    """Of prefilling sequences with prompts of these lengths, and its buffers."""
    work = sequences(*((prompt, 1) for prompt in prompts))
    for sequence in work:
        on.kv.allocator.grow(sequence, sequence.num_tokens)
    acts = Activations(on.machine, spec, max_tokens=max_tokens, name="batch")
    return assemble(0, work, [], on.kv.allocator), acts


def context_of(on) -> HostContext:
    return HostContext(GPU, on.machine._arenas)


def test_experts_of_a_bfloat16_model_are_weighted_and_summed_in_float32():
    """Rounded once, to the dtype in which an expert gives its result; 2 of 8 experts a token."""
    spec, on = replace(SPEC, dtype="bfloat16"), engine([])
    batch, acts = micro_batch(on, spec, 9, 4, max_tokens=16)
    context, n = context_of(on), batch.num_tokens
    generator = torch.Generator().manual_seed(0)
    parts = []
    for layout in (part for part in MIXTRAL.layer_parts(spec, 0) if part.name.startswith("expert.")):
        buffer = on.machine.tiers["device"].reserve(layout.name, layout.nbytes)
        parts.append(PlacedPart(layout, buffer, (buffer,)))
        for matrix in weights(context, parts[-1]).values():
            matrix.copy_(0.3 * torch.randn(matrix.shape, generator=generator))
    x = context.tensor(acts.normed, (n, spec.hidden_dim), "bfloat16")
    x.copy_(torch.randn(x.shape, generator=generator))
    ids = torch.stack([torch.randperm(spec.num_experts, generator=generator)[:2] for _ in range(n)])
    probs = torch.rand((n, 2), generator=generator).softmax(dim=1)
    context.tensor(acts.expert_ids, (n, 2), "int64").copy_(ids)
    context.tensor(acts.expert_weights, (n, 2), "float32").copy_(probs)
    out = context.tensor(acts.moe_out, (n, spec.hidden_dim), "float32").zero_()
    Experts(MIXTRAL, spec, batch, acts, tuple(parts), tuple(range(spec.num_experts)), 0).run(context, 0)

    expected = torch.zeros(out.shape, dtype=torch.float64)
    for expert, part in enumerate(parts):
        rows, choice = (ids == expert).nonzero(as_tuple=True)
        if len(rows):
            found = MIXTRAL.expert(spec, weights(context, part), x[rows])
            assert found.dtype is torch.bfloat16
            expected.index_add_(0, rows, found.double() * probs[rows, choice].double()[:, None])
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6 * expected.abs().max().item())


@pytest.mark.parametrize("vocab_size", [1500, 2500, 30_000])
def test_heads_together_fit_the_workspace(vocab_size):
    """As many as fit at once, or one where none does; each sequence's token comes from its own last row."""
    spec, on = replace(SPEC, vocab_size=vocab_size), engine([])
    batch, acts = micro_batch(on, spec, 3, 1, 4, 2, 5, 1, 1, max_tokens=20)
    context, runs = context_of(on), []

    def head(_spec, _weights, rows):
        runs.append(len(rows))
        return torch.nn.functional.one_hot(rows[:, 0].long(), vocab_size).float()

    context.tensor(acts.tokens, batch.rows.shape, "int64").copy_(tensor_of(batch.rows))
    hidden = context.tensor(acts.hidden, (batch.num_tokens, spec.hidden_dim), "float32")
    hidden.copy_(torch.arange(batch.num_tokens)[:, None].expand_as(hidden))
    layout = MIXTRAL.head_part(spec)
    part = PlacedPart(layout, on.machine.tiers["device"].reserve("head", layout.nbytes), ())
    Head(SimpleNamespace(head=head), spec, batch, acts, part).run(context, 0)

    sampled = context.tensor(acts.sampled, (7,), "int64").tolist()
    assert sampled == [2, 3, 7, 9, 14, 15, 16], "the last rows of 3, 1, 4, 2, 5, 1 and 1 tokens"
    assert sum(runs) == 7
    room_bytes, one_bytes = acts.workspace.nbytes, head_workspace_bytes(spec)
    assert max(runs) == 1 or max(runs) * one_bytes <= room_bytes
    assert max(runs) == 7 or (max(runs) + 1) * one_bytes > room_bytes
