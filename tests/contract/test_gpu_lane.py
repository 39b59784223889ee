"""What ops ask of a GPU, found by running their code over tensors without data, as large as Mixtral-8x7B's: launches
whose number does not depend on how many sequences there are, no wait for the device, no temporaries beyond the plan.

The ops are those that strategies submit on the simulated machine; the kernels' calls are counted and left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
import torch

import kernels.triton as gpu
from harness.engine.ops import on_gpu, views
from harness.engine.ops.compute import AttentionOut, DecodeAttentionDevice, PrefillAttention
from harness.engine.ops.experts import Experts
from harness.engine.ops.paged import DecodeAttentionPaged
from harness.engine.ops.warm_up import WarmUp
from harness.engine.temporaries import head_workspace_bytes, workspace_bytes_per_token
from harness.machine.threads.arenas import TORCH_DTYPES, tensor_of
from harness.model import families, functional
from harness.plan.planning import make_plan
from tests.composing import composed
from tests.contract.counting import Watch, fits, tensors
from tests.contract.gpu_ops import CASES, DEVICE, LATENT, MetaContext, submitted, weight_views
from tests.contract.watching import Watched, undeclared_views

KERNELS = (
    *("grouped_experts", "causal_attention", "staged_decode_attention", "paged_decode_attention"),
    *("staged_latent_attention", "paged_latent_attention", "append_rows"),
)


def numbers(values, device):
    """As if they had come by way of pinned memory."""
    return torch.empty(values.shape, dtype=torch.from_numpy(values[:0].copy()).dtype, device=device)


class Called(list):
    """Which kernels were called, and the scratch memory that the last call for experts used."""

    scratch_bytes = 0


@pytest.fixture
def kernels_left_out(monkeypatch):
    called = Called()

    def left_out(name):
        def call(*tensors_, **options):
            assert all(t.device == DEVICE for t in tensors(tensors_)), f"{name} is given a tensor of the host"
            called.append(name)

        return call

    def choose(logits, top_k, **options):
        called.append("choose_experts")
        shape = (len(logits), top_k)
        return logits.new_empty(shape, dtype=torch.int64), logits.new_empty(shape, dtype=torch.float32)

    def foresee(logits, count, top_k, **options):
        return choose(logits, count)

    def norm(x, weight, eps):
        called.append("rms_norm")
        return x.new_empty(x.shape)

    def rotate(q, k, positions, cos, sin):
        called.append("rotate")
        return q.new_empty(q.shape), k.new_empty(k.shape)

    def experts(x, ids, weights, out, table, shape, *, num_present, scratch):
        left_out("grouped_experts")(x, ids, weights, out, table, scratch)
        called.scratch_bytes = gpu.expert_scratch_bytes(*ids.shape, len(table), num_present, shape)
        assert called.scratch_bytes <= scratch.numel(), "it would take several runs, each of which reads the weights"

    for name in KERNELS:
        monkeypatch.setattr(gpu, name, left_out(name))
    monkeypatch.setattr(gpu, "grouped_experts", experts)
    for name, call in {
        "choose_experts": choose, "foresee_experts": foresee, "rms_norm": norm, "rotate": rotate,
    }.items():  # fmt: skip
        monkeypatch.setattr(gpu, name, call)
    monkeypatch.setattr(gpu, "address_table", lambda _, experts, device: torch.empty(experts, 6, device=device))
    monkeypatch.setattr(gpu, "serves", lambda tensor, kernel: True)
    monkeypatch.setattr(on_gpu, "numbers", numbers)
    monkeypatch.setattr(views, "_weight_views", weight_views)
    return called


def launches_by_kind(ops: list, called: Called, kernels=frozenset(gpu.KERNELS)) -> dict[str, float]:
    """The most that an op of each kind launches, the head by run. Fails on whatever must not happen within a pass."""
    most = defaultdict(int)
    for op, watch in watched(ops, called):
        runs = -(-len(op.batch.sequences) // head_rows_at_once(op)) if op.kind == "head" else 1
        most[op.kind] = max(most[op.kind], (watch.launches + len(called)) / runs)
        assert not watch.from_host, f"{op} copies from pageable memory: {watch.from_host}"
        require_room(op, watch, kernels)
    return most


def watched(ops: list, called: Called) -> Iterator[tuple[Any, Watch]]:
    """Run ops, and yield each with what it asked for. Fails where one does not declare what it touches."""
    spec = ops[0].spec
    rotated = spec.latent.rope_dim if spec.latent else spec.head_dim
    for dtype in (TORCH_DTYPES[spec.dtype], torch.float32):  # DeepSeek-V2 rotates in the latter
        functional.rope_tables(spec.rope_theta, rotated, spec.max_positions, dtype, DEVICE, spec.yarn)
    memory = MetaContext(spec)
    for op in ops:
        called.clear()
        called.scratch_bytes = 0
        context = Watched(memory)
        with Watch() as watch:
            for packet in range(op.packets):
                op.run(context, packet)
        assert not undeclared_views(op, context.before), f"{op} does not declare what it touches"
        yield op, watch


def require_room(op, watch: Watch, kernels) -> None:
    limit = limit_bytes(op, kernels)
    assert watch.peak_bytes <= limit, f"{op} of {op.batch.num_tokens} tokens takes {watch.peak_bytes} B of {limit}"
    room = max(limit, op.acts.workspace.nbytes)
    assert fits(watch.events, room), f"{op}: what torch's allocator has left of {room} B is in pieces"


def head_rows_at_once(op) -> int:
    return max(1, op.acts.workspace.nbytes // head_workspace_bytes(op.spec))


def limit_bytes(op, kernels) -> int:
    """Room for temporaries: an op keeps to its own tokens' share, but for those that make the most of what is there."""
    workspace = op.acts.workspace.nbytes
    if op.kind == "experts" and "experts" in kernels:
        return workspace + SMALL_BYTES
    if op.kind == "head":
        return max(workspace, head_workspace_bytes(op.spec)) + SMALL_BYTES
    padded = any(at.reads.num_shadows for at in (op.batch.on_host, op.batch.on_device))
    return op.batch.num_tokens * workspace_bytes_per_token(op.spec, kernels, padded=padded) + SMALL_BYTES


SMALL_BYTES = 4096  # as torch's allocator takes at the least for a few numbers


def drawn(seed: int) -> list[str]:
    """Draw a family and the shape of its layers; queries are up to twice as wide as hidden states, as in models."""
    random = Random(seed)
    hidden, kv_heads = 128 * random.randint(8, 24), 2 ** random.randrange(4)
    most_heads = max(kv_heads, 2 * hidden // 128)
    spec = {
        "hidden_dim": hidden, "expert_dim": 128 * random.randint(4, 24), "num_experts": 2 ** random.randint(3, 5),
        "experts_per_token": random.randint(2, 8),
    }  # fmt: skip
    model = MODELS[seed % len(MODELS)]
    if model != "deepseek-v2-lite":
        spec |= {"num_kv_heads": kv_heads, "num_heads": random.randint(1, most_heads // kv_heads) * kv_heads}
    if model == "qwen2-57b-a14b":
        spec["shared_expert_dim"] = 256 * random.randint(2, 16)
    layers = LATENT[1:] if model == "deepseek-v2-lite" else []
    dtype = random.choice(("bfloat16", "float32"))
    return [f"model={model}", f"model.dtype={dtype}", *layers, *(f"model.spec.{k}={v}" for k, v in spec.items())]


MODELS = (
    *("mixtral-8x7b", "qwen3-30b-a3b", "olmoe-1b-7b", "qwen2-57b-a14b", "dbrx", "gpt-oss-120b", "deepseek-v2-lite"),
)


def rows_by_expert(op, ids, probs):
    """Give the first experts a row of every token, as no routing can more."""
    experts_per_token, count = op.spec.experts_per_token, len(op.experts)
    tokens, chosen = ids.numel() // experts_per_token, min(experts_per_token, count)
    rows = ids.reshape(-1).argsort(stable=True)[: tokens * chosen]
    return rows, probs.reshape(-1)[rows], [tokens] * chosen + [0] * (count - chosen)


@pytest.mark.parametrize("left_out", [(), ("experts",), gpu.KERNELS], ids=["triton", "experts in torch", "torch"])
@pytest.mark.parametrize("seed", range(len(MODELS)))
def test_no_less_and_hardly_more_is_reserved_than_ops_take(monkeypatch, kernels_left_out, seed, left_out):
    """Of random shapes, with kernels and without: whatever the widest op takes is at least 0.8 of what is reserved.
    Torch's attention is left out: what it takes depends on the lengths of contexts, and it takes long here."""
    kernels = frozenset(gpu.KERNELS) - set(left_out)
    monkeypatch.setattr(gpu, "serves", lambda tensor, kernel: kernel in kernels)
    monkeypatch.setattr(Experts, "_by_expert", rows_by_expert)
    ops = submitted(monkeypatch, "moelens on the gpu", 20, drawn(seed), sorted(kernels))
    if "prefill" not in kernels:
        ops = [op for op in ops if not isinstance(op, PrefillAttention | DecodeAttentionDevice)]
    shares = defaultdict(float)
    for op, watch in watched(ops, kernels_left_out):
        require_room(op, watch, kernels)
        limit = op.batch.num_tokens * workspace_bytes_per_token(op.spec, kernels)
        assert op.acts.workspace.nbytes == op.acts.max_tokens * workspace_bytes_per_token(op.spec, kernels)
        if op.kind != "head":
            shares[op.kind] = max(shares[op.kind], (kernels_left_out.scratch_bytes or watch.peak_bytes) / limit)
    assert max(shares.values()) >= 0.8, dict(shares)


@pytest.mark.parametrize("name", CASES)
def test_launches_do_not_depend_on_the_number_of_sequences(monkeypatch, kernels_left_out, name):
    few, many = (submitted(monkeypatch, name, count) for count in (3, 60))
    sizes = [max(len(op.batch.sequences) for op in ops if op.kind == "head") for ops in (few, many)]
    assert sizes[1] > 4 * sizes[0], "the second run has larger batches"
    launches = [launches_by_kind(ops, kernels_left_out) for ops in (few, many)]
    both = launches[0].keys() & launches[1].keys()  # a search may keep another share of the KV cache on the device
    assert {"attention in", "attention out", "experts", "head"} <= both
    for kind in both:
        joins = kind == "attention out" and "latents" in name  # results of prompts and of decode, if it has both
        assert 0 <= launches[1][kind] - launches[0][kind] <= joins, kind


def waits(op, ctx):
    ctx.tensor(op.acts.expert_ids, (4,), "int64").tolist()


def copies(op, ctx):
    ctx.tensor(op.acts.hidden, (4, 2), op.spec.dtype)[tensor_of(op.batch.last_rows[:1])]


def loops(op, ctx):
    for row in range(op.batch.num_tokens):
        ctx.tensor(op.acts.hidden, (op.batch.num_tokens, 2), op.spec.dtype)[row].zero_()


def allocates(op, ctx):
    wide = workspace_bytes_per_token(op.spec, frozenset(gpu.KERNELS)) // 4
    _ = [torch.empty(op.batch.num_tokens, wide, device=DEVICE), torch.empty(op.batch.num_tokens, wide, device=DEVICE)]


@pytest.mark.parametrize(
    ("plant", "error", "told"),
    [
        (waits, NotImplementedError, "no data"),  # of a tensor that has a shape only
        (copies, AssertionError, "attention out .* copies from pageable memory"),
        (loops, AssertionError, "attention out"),
        (allocates, AssertionError, "attention out .* takes [0-9]+ B"),
    ],
)
def test_what_must_not_be_is_noticed(monkeypatch, kernels_left_out, plant, error, told):
    original = AttentionOut.run

    def run(self, ctx, packet):
        original(self, ctx, packet)
        plant(self, ctx)

    monkeypatch.setattr(AttentionOut, "run", run)
    with pytest.raises(error, match=told):
        test_launches_do_not_depend_on_the_number_of_sequences(monkeypatch, kernels_left_out, "ondemand")


def test_an_access_that_is_not_declared_is_noticed(monkeypatch, kernels_left_out):
    """Block tables are read by the GPU's kernel only, which has them in device memory."""
    original = DecodeAttentionPaged.__init__

    def forgetful(self, *args):
        original(self, *args)
        self.reads = tuple(key for key in self.reads if key is not self.tables)

    monkeypatch.setattr(DecodeAttentionPaged, "__init__", forgetful)
    with pytest.raises(AssertionError, match="paged.* does not declare what it touches"):
        launches_by_kind(submitted(monkeypatch, "deepspeed_zero", 3), kernels_left_out)


def test_warming_up_takes_no_more_than_a_layer(kernels_left_out, monkeypatch):
    """It is done when only the model's ends are on the device."""
    plan = make_plan(composed("machine=simulated", "model=mixtral-8x7b", "hardware=a40", "dataset.num_requests=1"))
    engine, warmed = plan.engine, []
    monkeypatch.setattr("harness.engine.ops.warm_up.warm_up", lambda *given: warmed.append(given))
    op = WarmUp(families.family("mixtral"), engine.spec, engine.resident, 16)
    with Watch() as watch:
        op.run(MetaContext(engine.spec), 0)
    assert warmed == [(engine.spec, DEVICE, 16)]
    assert kernels_left_out.count("choose_experts") == 3, "for few rows and many"
    assert watch.peak_bytes < engine.store.layer_bytes
