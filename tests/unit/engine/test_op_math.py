"""What gpu ops compute beyond the family's own math: sums over experts, and heads of many sequences."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from harness.engine.activations import Activations
from harness.engine.batch import assemble
from harness.engine.ops.compute import Head
from harness.engine.ops.experts import Expert, Experts
from harness.engine.ops.views import weights
from harness.engine.temporaries import head_workspace_bytes
from harness.machine.base import CPU, GPU
from harness.machine.threads.arenas import tensor_of
from harness.machine.threads.context import HostContext
from harness.memory.placed import PlacedPart
from harness.model import families
from kernels import reference
from tests.unit.engine.fakes import SPEC, engine, sequences

MIXTRAL = families.family("mixtral")


def micro_batch(on, spec, *prompts: int, max_tokens: int, host_experts: bool = False):
    """Of prefilling sequences with prompts of these lengths, and its buffers."""
    work = sequences(*((prompt, 1) for prompt in prompts))
    for sequence in work:
        on.kv.allocator.grow(sequence, sequence.num_tokens)
    acts = Activations(on.machine, spec, max_tokens=max_tokens, name="batch", host_experts=host_experts)
    return assemble(0, work, [], on.kv.allocator), acts


def context_of(on, lane=GPU) -> HostContext:
    return HostContext(lane, on.machine._arenas)


def placed_experts(on, spec, context, tier: str) -> tuple[PlacedPart, ...]:
    """The experts of a layer, with random weights, the same at each call."""
    generator, parts = torch.Generator().manual_seed(0), []
    for layout in (part for part in MIXTRAL.layer_parts(spec, 0) if part.expert is not None):
        buffer = on.machine.tiers[tier].reserve(layout.name, layout.nbytes)
        parts.append(PlacedPart(layout, buffer, (buffer,)))
        for matrix in weights(context, parts[-1]).values():
            matrix.copy_(0.3 * torch.randn(matrix.shape, generator=generator))
    return tuple(parts)


def random_routes(spec, n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows [n, hidden], and the experts of each with their weights, [n, k]."""
    generator, k = torch.Generator().manual_seed(1), spec.experts_per_token
    x = torch.randn((n, spec.hidden_dim), generator=generator).to(torch.bfloat16)
    ids = torch.stack([torch.randperm(spec.num_experts, generator=generator)[:k] for _ in range(n)])
    return x, ids, torch.rand((n, k), generator=generator).softmax(dim=1)


def exact_sums(spec, context, parts, x, ids, probs, experts) -> torch.Tensor:
    """float64 [n, hidden], of these experts."""
    expected = torch.zeros(x.shape, dtype=torch.float64)
    for expert in experts:
        rows, choice = (ids == expert).nonzero(as_tuple=True)
        if len(rows):
            found = exact_results(spec, context, parts[expert], x[rows])
            expected.index_add_(0, rows, found * probs[rows, choice].double()[:, None])
    return expected


def exact_results(spec, context, part, x) -> torch.Tensor:
    """float64 [n, hidden], of one expert: the kernel of CPUs rounds nothing to bfloat16."""
    m = MIXTRAL.expert_matrices(spec, weights(context, part))
    return reference.expert_ffn(x, m.gate, m.up, m.down)


@pytest.fixture(autouse=True)
def kernel_for_any_number_of_tokens(monkeypatch):
    monkeypatch.setenv("KERNELS_GEMM_TOKENS", "never")


def close_to(found: torch.Tensor, expected: torch.Tensor, rtol: float = 2e-5) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=rtol, atol=0.1 * rtol * expected.abs().max().item())


def test_experts_of_a_bfloat16_model_are_weighted_and_summed_in_float32():
    """Nothing is rounded on the way, on the gpu lane of a machine without GPU too; 2 of 8 experts a token."""
    spec, on = replace(SPEC, dtype="bfloat16"), engine([])
    batch, acts = micro_batch(on, spec, 9, 4, max_tokens=16)
    context, n = context_of(on), batch.num_tokens
    parts = placed_experts(on, spec, context, "device")
    x, ids, probs = random_routes(spec, n)
    context.tensor(acts.normed, (n, spec.hidden_dim), "bfloat16").copy_(x)
    context.tensor(acts.expert_ids, (n, 2), "int64").copy_(ids)
    context.tensor(acts.expert_weights, (n, 2), "float32").copy_(probs)
    out = context.tensor(acts.moe_out, (n, spec.hidden_dim), "float32").zero_()
    Experts(MIXTRAL, spec, batch, acts, parts, tuple(range(spec.num_experts)), 0).run(context, 0)
    close_to(out, exact_sums(spec, context, parts, x, ids, probs, range(spec.num_experts)))


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("groups", [[[0, 1, 2, 3, 4, 5, 6, 7]], [[5], [0, 7], [2]]])
def test_experts_add_to_what_others_have_found(on_host, groups):
    """Any subset, one expert or several an op, on either lane; the first op of a target that is not empty clears it."""
    spec, on = replace(SPEC, dtype="bfloat16"), engine([])
    batch, acts = micro_batch(on, spec, 9, 4, max_tokens=16, host_experts=True)
    context, n = context_of(on, CPU if on_host else GPU), batch.num_tokens
    parts = placed_experts(on, spec, context, "pinned" if on_host else "device")
    x, ids, probs = random_routes(spec, n)
    side = "host_" if on_host else ""
    of = {name: getattr(acts, side + name) for name in ("normed", "expert_ids", "expert_weights", "moe_out")}
    context.tensor(of["normed"], x.shape, "bfloat16").copy_(x)
    context.tensor(of["expert_ids"], ids.shape, "int64").copy_(ids)
    context.tensor(of["expert_weights"], ids.shape, "float32").copy_(probs)
    out = context.tensor(of["moe_out"], x.shape, "float32").fill_(3.0)
    for clears in (False, True):
        for at, group in enumerate(groups):
            placed = tuple(parts[expert] for expert in group)
            clears_now = clears and not at
            op = Experts(MIXTRAL, spec, batch, acts, placed, tuple(group), 0, on_host=on_host, clears=clears_now)
            op.run(context, 0)
            counts = [int((ids == expert).sum()) for expert in group]
            assert op.counts == counts and op.work().flops == 2 * sum(counts) * spec.expert_params
            assert op.cost_features() == (pytest.approx(sum(counts) * spec.num_experts / 2 / len(group)),)
        expected = exact_sums(spec, context, parts, x, ids, probs, [e for group in groups for e in group])
        close_to(out, expected + (0 if clears else 3))


@pytest.mark.parametrize("on_host", [False, True])
def test_an_expert_runs_over_the_rows_it_is_given(on_host):
    """All of them in their order, or chosen ones, weighted and added to the same rows of a larger target."""
    spec, on = replace(SPEC, dtype="bfloat16"), engine([])
    context = context_of(on, CPU if on_host else GPU)
    tier = on.machine.tiers["pinned" if on_host else "device"]
    part = placed_experts(on, spec, context, tier.name)[3]
    source, target = tier.reserve("rows", 20 * spec.hidden_dim * 2), tier.reserve("sums", 20 * spec.hidden_dim * 4)
    x = context.tensor(source, (20, spec.hidden_dim), "bfloat16").copy_(random_routes(spec, 20)[0])
    out = context.tensor(target, (20, spec.hidden_dim), "float32").fill_(2.0)
    alone = exact_results(spec, context, part, x)

    Expert(MIXTRAL, spec, part, source, target, 7, on_host=on_host).run(context, 0)
    close_to(out[:7], alone[:7])
    assert (out[7:] == 2).all()

    out.fill_(2.0)
    tokens, probs = np.array([19, 4, 11]), np.array([0.5, 0.25, 1.0], dtype=np.float32)
    Expert(MIXTRAL, spec, part, source, target, 3, tokens=tokens, weights=probs, on_host=on_host).run(context, 0)
    expected = torch.full(out.shape, 2.0, dtype=torch.float64)
    expected[tokens] += alone[tokens] * torch.from_numpy(probs)[:, None]
    close_to(out, expected)


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
