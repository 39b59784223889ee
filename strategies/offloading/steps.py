"""The steps of MoE-Lightning's Figure 6, which schedules are written in, by layer i and micro-batch j, both from 0."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq

from harness.engine.activations import Activations
from harness.engine.emitter import Emitter, InFlight
from harness.machine.base import Ticket
from harness.memory.paged_weights import PagedWeights
from harness.memory.placed import PlacedPart
from harness.memory.tiers import Buffer


class Steps:
    """The steps of one pass, each with a method that submits its ops and does not wait: a schedule is an order of
    calls.

    Micro-batches leave a layer in ascending order. `i` may be the number of layers where weights are meant: that is
    layer 0 of the next pass, and at that pass's start its pages have all been requested. In addition to its buffers
    each micro-batch has the place in pinned memory where its hidden states wait between layers, None where they stay on
    the device. `first_index` is the pass's layer 0 in the stream of weights; `kv_staging` are two device buffers for
    cached keys and values, none where the CPU attends. With `cpu_experts` the CPU has the experts, and a micro-batch
    takes their sums when it enters the next layer, so that the GPU has other micro-batches in the meantime.

    Where the GPUs are stages of a pipeline, this is a pass through one of them: `i` counts its `layers` from 0, and
    `following` are the micro-batches' buffers in the next stage, none after the last. Hidden states that wait in pinned
    memory between layers are handed on there.

    A schedule with `begin_turn` and `begin_work` lets copies into pinned memory and the GPU's work take turns
    (`in_turn.py`; one GPU, or each stage by itself). `kv_relays` are then two pinned buffers, through which keys and
    values go to the device.
    """

    def __init__(
        self,
        emit: Emitter,
        weights: Seq[PagedWeights],
        micro_batches: Seq[tuple[InFlight, Buffer | None]],
        *,
        first_index: int,
        layers: range,
        kv_staging: Seq[list[Buffer]] = (),
        cpu_experts: bool = False,
        following: Seq[Activations] = (),
        kv_relays: Seq[Buffer] = (),
    ) -> None:
        self._emit, self._weights = emit, weights
        self._its = [it for it, _ in micro_batches]
        self._kept = [kept for _, kept in micro_batches]
        self._first_index, self._kv_staging = first_index, kv_staging
        self._layers, self._following = layers, following
        self.num_layers, self.num_micro_batches = len(layers), len(micro_batches)
        self._cpu_experts = cpu_experts
        self._at_experts: dict[int, int] = {}  # micro-batches whose layer the CPU has not given back yet
        self._kv_relays = kv_relays
        self._copied: list[Ticket] = []  # this turn's copies into pinned memory

    def ahead(self, i: int, j: int, by: int) -> tuple[int, int] | None:
        """Return (i, j + by), running into the next layer; None past the last one.

        The step ahead is at most one whole layer: a micro-batch cannot enter a layer before it has left the one below.
        """
        at = i * self.num_micro_batches + j + min(by, self.num_micro_batches)
        return divmod(at, self.num_micro_batches) if at < self.num_layers * self.num_micro_batches else None

    def begin(self) -> None:
        """Bring token ids and positions to the device, and before the first pass the weights of its first layer."""
        for weights in self._weights:
            weights.load(self._first_index, weights.num_pages - 1)
        for it in self._its:
            self._emit.upload_tokens(it)

    # -- turns ----------------------------------------------------------------------------------------------------

    def begin_turn(self) -> None:
        """Begin a turn: its copies into pinned memory follow the work of the turn before."""
        self._emit.behind, self._copied = self._emit.tail, []

    def begin_work(self) -> None:
        """Go on to the turn's work, which follows its copies."""
        self._emit.behind = tuple(self._copied)

    # -- weights --------------------------------------------------------------------------------------------------

    def w_ctopin(self, i: int, j: int) -> None:
        """Copy micro-batch j's share of layer i from pageable to pinned memory.

        This is one page where there are as many pages as micro-batches.
        """
        for weights in self._weights:
            self._copied += weights.stage(self._first_index + i, self._last_page(j), after=self._emit.behind)

    def w_pintog(self, i: int, j: int) -> None:
        """Copy micro-batch j's share of layer i from pinned memory to the device."""
        for weights in self._weights:
            weights.load(self._first_index + i, self._last_page(j))

    def _last_page(self, j: int) -> int:
        """Return the last page of the first j + 1 shares; -1 where none is complete.

        A single page, which is all of a layer, comes with the last micro-batch. It comes earlier where a micro-batch is
        to enter the layer before that (`PagedWeights.part`).
        """
        return (j + 1) * self._weights[0].num_pages // self.num_micro_batches - 1

    def _part(self, i: int, name: str) -> list[PlacedPart]:
        return [weights.part(self._first_index + i, name) for weights in self._weights]

    # -- computation ----------------------------------------------------------------------------------------------

    def pre_attn(self, i: int, j: int) -> None:
        """Compute norm and QKV, and before layer 0 the embedding."""
        it, kept, layer = self._its[j], self._kept[j], self._layers[i]
        self._take_sums(j)
        if layer == 0:
            self._emit.look_up(it)
        elif kept is not None:
            self._emit.load_hidden(it, layer, kept)
        self._emit.attention_in(it, layer, self._part(i, "attention_in"))

    def post_attn(self, i: int, j: int) -> None:
        """Compute output projection, router and experts, and after the last layer the head."""
        it, kept, index, layer = self._its[j], self._kept[j], self._first_index + i, self._layers[i]
        self._emit.attention_out(it, layer, self._part(i, "attention_out"))
        if self._cpu_experts and self._emit.experts_on_host(it, layer):
            assert kept is None, "its hidden states stay on the device until the sums are there"
            self._at_experts[j] = i
        else:
            self._emit.experts(it, layer, [weights.experts(index) for weights in self._weights])
            self._leave(i, j)
        if j == self.num_micro_batches - 1:
            for weights in self._weights:
                weights.release(index)

    def end(self) -> None:
        """Finish, after the schedule, what the CPU still has of the last layer."""
        for j in sorted(self._at_experts):
            self._take_sums(j)

    def _take_sums(self, j: int) -> None:
        if (i := self._at_experts.pop(j, None)) is not None:
            self._emit.load_expert_sums(self._its[j], self._layers[i])
            self._leave(i, j)

    def _leave(self, i: int, j: int) -> None:
        it, kept, layer = self._its[j], self._kept[j], self._layers[i]
        self._emit.combine(it, layer)
        is_last = i == self.num_layers - 1
        if is_last and not self._following:
            self._emit.head(it)
        elif kept is not None:
            self._emit.offload_hidden(it, layer, kept)
        elif is_last:
            self._emit.send_hidden(it, layer, self._following[j])

    def prefill_attn(self, i: int, j: int) -> None:
        self._emit.prefill_attention(self._its[j], self._layers[i])

    # -- attention on the CPU -------------------------------------------------------------------------------------

    def offload_qkv(self, i: int, j: int) -> None:
        self._emit.offload_qkv(self._its[j], self._layers[i])

    def cpu_attn(self, i: int, j: int) -> None:
        """Append the new keys and values to the cache, and attend over it.

        The CPU attends for sequences whose cache is in host memory, the GPU for those whose cache is in device memory.
        """
        self._emit.append_kv(self._its[j], self._layers[i])
        self._emit.attend_in_place(self._its[j], self._layers[i])
        self._emit.attend_on_host(self._its[j], self._layers[i])

    def load_h(self, i: int, j: int) -> None:
        """Bring attention's results to the device."""
        self._emit.load_attention(self._its[j], self._layers[i])

    # -- attention on the GPU -------------------------------------------------------------------------------------

    def load_kv(self, i: int, j: int) -> None:
        """Bring a micro-batch's keys and values from host memory into the buffer that the one before it does not
        use."""
        if not (rows := self._rows(j)):
            return
        it, layer, to = self._its[j], self._layers[i], self._staging(i, j)
        if self._kv_relays:
            through = self._kv_relays[self._turn(i, j) % len(self._kv_relays)]
            self._copied.append(self._emit.relay_kv(it, layer, rows, to, through=through))
        else:
            self._emit.load_kv(it, layer, rows, to)

    def gpu_attn(self, i: int, j: int) -> None:
        """Attend over what was loaded, and over what is in device memory."""
        self._emit.attend_in_place(self._its[j], self._layers[i])
        if rows := self._rows(j):
            self._emit.attend_on_device(self._its[j], self._layers[i], rows, self._staging(i, j))

    def offload_kv(self, i: int, j: int) -> None:
        """Append new keys and values to the cache."""
        self._emit.offload_qkv(self._its[j], self._layers[i], queries=False)
        self._emit.append_kv(self._its[j], self._layers[i])

    def _rows(self, j: int) -> range:
        """Return the rows of sequences with a cache in host memory."""
        return range(self._its[j].batch.on_host.num_decode)

    def _staging(self, i: int, j: int) -> list[Buffer]:
        return self._kv_staging[self._turn(i, j) % len(self._kv_staging)]

    def _turn(self, i: int, j: int) -> int:
        return i * self.num_micro_batches + j


# Yields where other GPUs, which have other passes, may go on: the host's lanes serve all in order of submission.
Schedule = Callable[[Steps], Iterator[None]]


def zigzag(steps: Steps) -> Iterator[None]:
    """Submit a prefill on the gpu lane, all micro-batches through a layer before any enters the next (MoE-Lightning
    §4)."""
    for i in range(steps.num_layers):
        for j in range(steps.num_micro_batches):
            steps.pre_attn(i, j)
            steps.w_pintog(i + 1, j)
            steps.prefill_attn(i, j)
            steps.offload_kv(i, j)
            steps.post_attn(i, j)
            yield
