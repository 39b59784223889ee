"""Run module-based batching (§4.2): attention in micro-batches, then each expert once over the tokens of them all."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from harness.engine.accumulated import AccumulatedBatch, AccumulatedMemory, AccumulatedOnDevice, Staging
from harness.engine.batch import PassPlan, assemble
from harness.engine.emitter import Emitter
from harness.engine.engine import Engine
from harness.engine.in_flight import InFlight
from harness.engine.strategy import PassResult
from harness.machine.base import Ticket
from harness.memory.expert_slots import ExpertSlots
from harness.memory.tiers import DEVICE, PINNED, Buffer
from harness.memory.weights import WeightStream
from strategies.common.workload_shape import WorkloadShape
from strategies.moegen.buffers import PhaseBuffers
from strategies.moegen.expert_stream import ExpertStream, NoReplacement
from strategies.moegen.memory import NONE_MEASURED, NUM_STAGINGS, Temporaries, phases
from strategies.moegen.policy import PhasePolicy, Policy
from strategies.moegen.residents import resident_dense, resident_experts

_IN, _OUT = "attention_in", "attention_out"


@dataclass(eq=False, slots=True)
class _MicroBatch:
    """A micro-batch in a pass: its rows and its ticket of the routing are those of the layer that it is in."""

    it: InFlight
    on_cpu: bool  # who attends in decode
    runs: list[range]  # rows whose keys and values come over the link together
    kept: Buffer | None  # where its hidden states wait in pinned memory; None: they stay on the device
    rows: range | None = None  # of the accumulated batch; None behind a layer without experts
    route: Ticket | None = None


class _Phase:
    """Holds what a phase works with: its batches, its buffers, and the place where its tokens accumulate."""

    def __init__(self, engine: Engine, emit: Emitter, policy: PhasePolicy, buffers: PhaseBuffers) -> None:
        self.policy, self.buffers, sizes = policy, buffers, buffers.sizes
        self.tokens: AccumulatedBatch | AccumulatedOnDevice
        if policy.on_device:
            rows, sums = buffers["normed"], buffers["moe_out"]
            self.tokens = AccumulatedOnDevice(engine, emit, rows=rows, sums=sums, slice_tokens=sizes.slice_rows)
            return
        names = ("rows to load", "expert rows", "expert results", "results to add")
        stagings = [Staging(*(buffers[f"{name}/{turn}"] for name in names)) for turn in range(NUM_STAGINGS)]
        self.tokens = AccumulatedBatch(engine, emit, AccumulatedMemory(buffers["rows"], buffers["sums"], stagings))


class ModuleBatching:
    """Runs passes of prefill and of decode by a policy; the scheduler cuts them into micro-batches.

    In a layer all micro-batches go through attention, and their tokens accumulate. Then the routing is known, and the
    experts that have tokens run one after another, each in slices of b_e tokens. Decode begins with the micro-batches
    for which the CPU attends, so that it does while the GPU attends for the others, whose keys and values come over the
    link one micro-batch ahead. Experts are brought in the order of their use across layers and passes whenever a slot
    is free. Where a pass has so few tokens that they reach less than half of a layer's experts, these are brought when
    the router has chosen them.
    """

    def __init__(
        self, engine: Engine, policy: Policy, shape: WorkloadShape, *, packet_bytes: int,
        temporaries: Temporaries = NONE_MEASURED,
    ) -> None:  # fmt: skip
        machine, spec = engine.machine, engine.spec
        self._engine, self._policy, self._emit = engine, policy, Emitter(engine)
        resident_dense(engine, policy.dense_slots)
        streamed = resident_experts(engine, policy.resident_experts)
        self._dense = WeightStream(
            machine, engine.store, depth=min(policy.dense_slots, spec.num_layers), packet_bytes=packet_bytes,
            name="dense slots", experts=False, resident=engine.resident,
        )  # fmt: skip
        slots = None
        if streamed:
            slots = ExpertSlots(
                machine, engine.store, num_slots=min(policy.expert_slots, streamed), packet_bytes=packet_bytes,
                replacement=NoReplacement(),
            )  # fmt: skip
        self._experts = ExpertStream(engine.store, engine.resident, slots)
        self._prefill, self._decode = self._reserve(shape, temporaries)
        self._index = 0  # of the layer in an endless stream of layers
        self._staging: list[Buffer] = []
        self._to_load: deque[tuple[_MicroBatch, range]] = deque()  # keys and values of the layer
        self._loaded: deque[tuple[range, Buffer]] = deque()  # those that were requested, with where they go
        self._num_loads = 0

    def _reserve(self, shape: WorkloadShape, temporaries: Temporaries) -> tuple[_Phase, _Phase]:
        """Reserve what both phases need at the same place: their buffers are never in use together."""
        machine, spec, sizes = self._engine.machine, self._engine.spec, phases(self._policy, shape)
        tiers, kernels = machine.tiers, machine.gpu_kernels
        device = tiers[DEVICE].reserve("intermediate states", max(each.device_bytes(spec) for each in sizes))
        pinned = tiers[PINNED].reserve("rows of micro-batches", max(each.pinned_bytes(spec) for each in sizes))
        workspace_bytes = max(each.workspace_bytes(spec, temporaries, kernels) for each in sizes)
        workspace = tiers[DEVICE].reserve("temporaries", workspace_bytes, backed=False)

        def phase(name: str, policy: PhasePolicy) -> _Phase:
            its = sizes[0] if policy is self._policy.prefill else sizes[1]
            buffers = PhaseBuffers(spec, its, device=device, pinned=pinned, workspace=workspace, name=name)
            return _Phase(self._engine, self._emit, policy, buffers)

        return phase("prefill", self._policy.prefill), phase("decode", self._policy.decode)

    def run(self, plan: PassPlan) -> PassResult:
        assert plan.micro_batches is not None, "the scheduler cuts the pass into micro-batches"
        assert not (plan.prefill and plan.decode), "prefill and decode come in passes of their own"
        phase = self._prefill if plan.prefill else self._decode
        batch = self._assemble(plan, phase)
        num_tokens = sum(each.it.batch.num_tokens for each in batch)
        if not self._index:
            for index in range(self._dense.depth):
                self._dense.request_layer(index)
        self._experts.look_ahead(self._policy.prefetch and self._reaches_most(num_tokens))
        for each in batch:
            self._emit.poison(each.it)
        if phase.policy.on_device:
            for each in batch:
                self._emit.upload_tokens(each.it)
        attend = self._attend_in_prompts if plan.prefill else self._attend_over_cache
        self._load_first(phase, [each for each in batch if each.runs], 0)
        for layer in range(self._engine.spec.num_layers):
            if self._engine.store.experts(layer):
                phase.tokens.begin(layer)
            attend(phase, batch, layer)
            if self._engine.store.experts(layer):
                self._run_experts(phase, batch, layer)
            self._index += 1
        for each in batch:
            self._enter(phase, each, self._engine.spec.num_layers)
            self._emit.head(each.it)
        return PassResult([each.it for each in batch])

    def finish(self) -> None:
        self._dense.cancel_all()
        self._experts.cancel_all()

    def _assemble(self, plan: PassPlan, phase: _Phase) -> list[_MicroBatch]:
        """Lay out the micro-batches in rows one after another."""
        found, first_row = [], 0
        num_cpu = phase.policy.num_on_cpu(len(plan.decode))
        for number, group in enumerate(plan.micro_batches or ()):
            prefill, decode = (group, []) if plan.prefill else ([], group)
            if plan.assembled is not None:
                made = plan.assembled[number]
            else:
                made = assemble(number, prefill, decode, self._engine.kv.allocator)
            on_cpu, num_cpu = len(decode) > 0 and num_cpu >= len(decode), num_cpu - len(decode)
            acts = phase.buffers.micro_batch(number, first_row, made.num_tokens, on_cpu=on_cpu)
            runs: list[range] = []
            if decode and not on_cpu:
                staged_bytes = min(staging.nbytes for staging in phase.buffers.kv_staging)
                runs = self._emit.rows_that_fit(made.on_host.read_lens, staged_bytes)
            found.append(_MicroBatch(InFlight(made, acts), on_cpu, runs, acts.kept_hidden))
            first_row += made.num_tokens
        return found

    def _reaches_most(self, num_tokens: int) -> bool:
        """Tell whether so many tokens are expected to reach at least half of a layer's experts."""
        spec = self._engine.spec
        share = spec.experts_per_token / max(spec.num_experts, 1)
        return 1 - (1 - share) ** num_tokens >= 0.5

    # -- attention ------------------------------------------------------------------------------------------------

    def _attend_in_prompts(self, phase: _Phase, batch: Seq[_MicroBatch], layer: int) -> None:
        for each in batch:
            self._enter(phase, each, layer)
            self._project(each, layer, is_last=each is batch[-1])
            self._emit.prefill_attention(each.it, layer)
            self._emit.offload_qkv(each.it, layer, queries=False)
            self._emit.append_kv(each.it, layer)
            self._leave(phase, each, layer, is_last=each is batch[-1])

    def _attend_over_cache(self, phase: _Phase, batch: Seq[_MicroBatch], layer: int) -> None:
        emit = self._emit
        on_cpu, on_gpu = [each for each in batch if each.on_cpu], [each for each in batch if not each.on_cpu]
        for each in on_cpu:
            self._enter(phase, each, layer)
            self._project(each, layer, is_last=each is batch[-1])
            emit.offload_qkv(each.it, layer)
            emit.append_kv(each.it, layer)
            emit.attend_on_host(each.it, layer)
            if each.kept is not None:
                emit.offload_hidden(each.it, layer, each.kept)
        for each in on_gpu:
            self._enter(phase, each, layer)
            self._project(each, layer, is_last=each is batch[-1])
            emit.offload_qkv(each.it, layer, queries=False)
            emit.append_kv(each.it, layer)
            for _ in each.runs:
                rows, staging = self._loaded.popleft()
                emit.attend_on_device(each.it, layer, rows, staging)
                self._load_next(layer)
            self._leave(phase, each, layer, is_last=each is on_gpu[-1] and not on_cpu)
        for each in on_cpu:
            if each.kept is not None:
                emit.load_hidden(each.it, layer, each.kept, urgent=True)
            emit.load_attention(each.it, layer)
            self._leave(phase, each, layer, is_last=each is on_cpu[-1])
        self._load_first(phase, on_gpu, layer + 1)

    def _project(self, each: _MicroBatch, layer: int, *, is_last: bool) -> None:
        """Compute norm and QKV; behind the last micro-batch the weights' place goes to the next layer."""
        self._emit.attention_in(each.it, layer, self._dense.part(self._index, _IN))
        if is_last:
            self._dense.advance(self._index, _IN)

    def _enter(self, phase: _Phase, each: _MicroBatch, layer: int) -> None:
        """Bring a micro-batch's hidden states into a layer: the embeddings, or what the layer below has left. Behind
        the last layer they are those of the head."""
        emit, it = self._emit, each.it
        if each.kept is not None:
            emit.upload_tokens(it)
        if layer == 0:
            emit.look_up(it)
            return
        if each.kept is not None:
            emit.load_hidden(it, layer, each.kept, urgent=True)
        if each.rows is not None:
            phase.tokens.take_sums(it, each.rows)
            emit.combine(it, layer - 1)

    def _leave(self, phase: _Phase, each: _MicroBatch, layer: int, *, is_last: bool) -> None:
        """Compute what comes behind attention, and add the rows to the accumulated batch; in a layer without experts,
        to the residual stream."""
        emit, it = self._emit, each.it
        emit.attention_out(it, layer, self._dense.part(self._index, _OUT))
        if is_last:
            self._dense.advance(self._index, _OUT)
        each.rows = each.route = None
        if self._engine.store.experts(layer):
            each.rows, _ = phase.tokens.add(it)
            each.route = emit.route(it, layer)
        else:
            emit.combine(it, layer)
        if each.kept is not None:
            emit.offload_hidden(it, layer, each.kept)

    # -- keys and values over the link ----------------------------------------------------------------------------

    def _load_first(self, phase: _Phase, on_gpu: Seq[_MicroBatch], layer: int) -> None:
        """Load keys and values of a layer's first micro-batches into the staging buffers; each frees one for the
        next."""
        self._staging = phase.buffers.kv_staging
        if layer < self._engine.spec.num_layers:
            self._to_load = deque((each, rows) for each in on_gpu for rows in each.runs)
            for _ in self._staging:
                self._load_next(layer)

    def _load_next(self, layer: int) -> None:
        if self._to_load:
            each, rows = self._to_load.popleft()
            staging = self._staging[self._num_loads % len(self._staging)]
            self._num_loads += 1
            self._emit.load_kv(each.it, layer, rows, staging)
            self._loaded.append((rows, staging))

    # -- experts --------------------------------------------------------------------------------------------------

    def _run_experts(self, phase: _Phase, batch: Seq[_MicroBatch], layer: int) -> None:
        """Run each expert that has tokens over all of them."""
        phase.tokens.begin_experts()
        counts, rows, weights = self._rows_by_expert(batch)
        ends = np.cumsum(counts)
        with_tokens = np.flatnonzero(counts).tolist()
        self._experts.begin(self._index, with_tokens)
        for expert in with_tokens:
            mine = slice(ends[expert - 1] if expert else 0, ends[expert])
            phase.tokens.expert(self._experts.take(expert), rows[mine], weights[mine])
            self._experts.done(expert)

    def _rows_by_expert(self, batch: Seq[_MicroBatch]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Wait for the router's choices; return how many rows each expert has, and, expert by expert, their numbers and
        weights. Where no tensors exist nobody asks for these two: they are 0."""
        routed = []
        for each in batch:
            assert each.route is not None and each.rows is not None, "the layer has experts"
            routed.append((each.rows, *self._engine.machine.wait(each.route)))
        spec = self._engine.spec
        ids = np.concatenate([chosen.reshape(-1) for _, chosen, _ in routed])
        counts = np.bincount(ids, minlength=spec.num_experts)
        if self._engine.machine.world is not None:
            return counts, np.broadcast_to(np.int64(0), len(ids)), np.broadcast_to(np.float32(0), len(ids))
        numbers = np.concatenate([np.arange(rows.start, rows.stop) for rows, _, _ in routed])
        weights = np.concatenate([of_rows.reshape(-1) for _, _, of_rows in routed])
        narrow = np.uint8 if spec.num_experts <= 1 << 8 else np.uint16  # a radix sort takes a turn for each byte
        order = np.argsort(ids.astype(narrow), kind="stable")  # by expert
        return counts, np.repeat(numbers, spec.experts_per_token)[order], weights[order]
