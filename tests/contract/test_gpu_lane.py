"""What ops ask of a GPU, found by running their code over tensors without data, as large as Mixtral-8x7B's: launches
whose number does not depend on how many sequences there are, no wait for the device, no temporaries beyond the plan.

The ops are those that strategies submit on the simulated machine; the kernels' calls are counted and left out.
"""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import kernels.triton as gpu
from harness.engine.activations import head_workspace_bytes, workspace_bytes_per_token
from harness.engine.ops import on_gpu, views
from harness.engine.ops.compute import AttentionOut
from harness.engine.ops.paged import DecodeAttentionPaged
from harness.engine.ops.warm_up import WarmUp
from harness.machine.threads.arenas import TORCH_DTYPES, tensor_of
from harness.model import families, functional
from harness.plan.planning import make_plan
from tests.composing import composed
from tests.contract.gpu_ops import CASES, DEVICE, MetaContext, submitted, weight_views
from tests.contract.watching import Watched, undeclared_views

KERNELS = (
    *("grouped_experts", "causal_attention", "staged_decode_attention", "paged_decode_attention"),
    *("staged_latent_attention", "paged_latent_attention"),
)
NO_LAUNCH = torch.ops.aten.empty, torch.ops.aten.new_empty, torch.ops.aten.empty_like


class Watch(TorchDispatchMode):
    """Counts what would be launched on the device, and the memory that its results hold at worst."""

    def __init__(self) -> None:
        super().__init__()
        self.launches = self.peak_bytes = 0
        self.from_host: list[str] = []
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        given, results = tensors(args), tensors(found)
        if results and results[0].device == DEVICE and not func.is_view:
            self.launches += func.overloadpacket not in NO_LAUNCH
            if any(t.device != DEVICE and t.dim() for t in given):
                self.from_host.append(str(func))
            known = {t.untyped_storage()._cdata for t in given}
            for storage in (t.untyped_storage() for t in results):
                if storage._cdata not in known:
                    self._live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._live = {key: entry for key, entry in self._live.items() if not entry[0].expired()}
        self.peak_bytes = max(self.peak_bytes, sum(nbytes for _, nbytes in self._live.values()))
        return found


def numbers(values, device):
    """As if they had come by way of pinned memory."""
    return torch.empty(values.shape, dtype=torch.from_numpy(values[:0].copy()).dtype, device=device)


def tensors(values) -> list[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        return [values]
    return [t for value in values for t in tensors(value)] if isinstance(values, tuple | list) else []


@pytest.fixture
def kernels_left_out(monkeypatch):
    """Which kernels were called."""
    called = []

    def left_out(name):
        def call(*tensors_, **options):
            assert all(t.device == DEVICE for t in tensors(tensors_)), f"{name} is given a tensor of the host"
            called.append(name)

        return call

    def choose(logits, top_k, **options):
        called.append("choose_experts")
        shape = (len(logits), top_k)
        return logits.new_empty(shape, dtype=torch.int64), logits.new_empty(shape, dtype=torch.float32)

    for name in KERNELS:
        monkeypatch.setattr(gpu, name, left_out(name))
    monkeypatch.setattr(gpu, "choose_experts", choose)
    monkeypatch.setattr(gpu, "address_table", lambda *_: torch.empty(1, device=DEVICE))
    monkeypatch.setattr(gpu, "serves", lambda tensor, kernel: True)
    monkeypatch.setattr(on_gpu, "numbers", numbers)
    monkeypatch.setattr(views, "_weight_views", weight_views)
    return called


def launches_by_kind(ops: list, called: list[str]) -> dict[str, float]:
    """The most that an op of each kind launches, the head by run. Fails on whatever must not happen within a pass."""
    spec = ops[0].spec
    rotated = spec.latent.rope_dim if spec.latent else spec.head_dim
    for dtype in (TORCH_DTYPES[spec.dtype], torch.float32):  # DeepSeek-V2 rotates in the latter
        functional.rope_tables(spec.rope_theta, rotated, spec.max_positions, dtype, DEVICE, spec.yarn)
    memory, most = MetaContext(spec), defaultdict(int)
    for op in ops:
        called.clear()
        context = Watched(memory)
        with Watch() as watch:
            for packet in range(op.packets):
                op.run(context, packet)
        runs = -(-len(op.batch.sequences) // head_rows_at_once(op)) if op.kind == "head" else 1
        most[op.kind] = max(most[op.kind], (watch.launches + len(called)) / runs)
        assert not undeclared_views(op, context.before), f"{op} does not declare what it touches"
        assert not watch.from_host, f"{op} copies from pageable memory: {watch.from_host}"
        assert watch.peak_bytes <= limit_bytes(op), f"{op} of {op.batch.num_tokens} tokens takes {watch.peak_bytes} B"
    return most


def head_rows_at_once(op) -> int:
    return max(1, op.acts.workspace.nbytes // head_workspace_bytes(op.spec))


def limit_bytes(op) -> int:
    """Room for temporaries: an op keeps to its own tokens' share, but for those that make the most of what is there."""
    workspace = op.acts.workspace.nbytes
    if op.kind == "experts":
        return workspace + SMALL_BYTES
    if op.kind == "head":
        return max(workspace, head_workspace_bytes(op.spec)) + SMALL_BYTES
    return op.batch.num_tokens * workspace_bytes_per_token(op.spec) + SMALL_BYTES


SMALL_BYTES = 4096  # as torch's allocator takes at the least for a few numbers


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
    wide = workspace_bytes_per_token(op.spec) // 4
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
    assert kernels_left_out == ["choose_experts"]
    assert watch.peak_bytes < engine.store.layer_bytes
