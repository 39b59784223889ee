"""Pipelines are written in this vocabulary: one method for each step of the papers' figures, which submits the step's
ops."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from typing import Literal

import numpy as np

from harness.engine.activations import ATTENDED_BY, Activations
from harness.engine.gpus import collectives as collective
from harness.engine.gpus.fan_out import FanOut, on_each_gpu, on_one_gpu
from harness.engine.in_flight import InFlight
from harness.engine.ops import compute, data, expert_rows, host, paged, predictions
from harness.engine.ops.experts import Experts
from harness.machine.base import CPU, D2H, GPU, H2D, PIN, Lane, Op, Ticket
from harness.memory.kv_cache import KVCache
from harness.memory.placed import PlacedPart
from harness.memory.tiers import Buffer
from harness.memory.transfers import AllGather, Poison, poison_lane
from harness.memory.weights import WeightStream

__all__ = ["Emitter", "InFlight"]


class Emitter(FanOut):
    """Submits the ops of one step for one micro-batch; nothing here waits.

    A step returns the ticket of its op, or None where the micro-batch gives it nothing to do; a step of several ops
    returns the list of their tickets. `head` and `predict` submit two ops and return one ticket, that of the fetch,
    which has the value. The tickets that the loop waits for before the pass ends are noted in `InFlight.tickets`.

    A step is written for one GPU and its share of the model. `on_each_gpu` makes it a step of all GPUs of the engine
    that have the micro-batch; it then returns the first GPU's tickets. Where each GPU has its own part or buffer, a
    step takes a single one, or a list with one for each GPU. GPUs that share a micro-batch add up partial results.

    `serial=True` makes every op follow the one before it, on whatever lane: execution without any overlap. `fifo=True`
    lets nothing overtake: no op is urgent.
    """

    def load(self, stream: WeightStream | list[WeightStream], index: int, part_name: str) -> Ticket:
        """Request a part of a stream, or of one stream for each GPU, in this emitter's order."""

        def request(emit: Emitter) -> Ticket:
            ticket = emit._mine(stream).request(index, part_name, after=emit._after)
            emit.tail = (ticket,)
            return ticket

        return self._each(range(len(stream)) if isinstance(stream, list) else [0], request)[0]

    def gather(self, parts: list[PlacedPart], layer: int) -> list[Ticket]:
        """Make a part whole on all GPUs, each of which has brought its share (`WeightStream.num_shares`). The gpu lanes
        do this, so it waits for the slowest link and nothing is computed meanwhile."""
        buffers, nbytes = [part.buffer for part in parts], parts[0].layout.nbytes

        def member(emit: Emitter) -> Ticket:
            return emit.submit(GPU, AllGather(buffers, emit._gpu, nbytes=nbytes, layer=layer))

        return self._each(range(len(parts)), member)

    @on_each_gpu
    def embed(self, it: InFlight) -> list[Ticket]:
        """Upload token ids to the device, then look up their embeddings."""
        self.poison(it)
        return [self.upload_tokens(it), self.look_up(it)]

    @on_each_gpu
    def upload_tokens(self, it: InFlight) -> Ticket:
        return self.submit(H2D, data.UploadTokens(self._spec, it.batch, it.acts), urgent=True)

    @on_each_gpu
    def look_up(self, it: InFlight) -> Ticket:
        """Look up the embeddings of uploaded tokens."""
        part = self._engine.resident.embedding
        return self.submit(GPU, compute.Embed(self._family, self._spec, it.batch, it.acts, part))

    @on_each_gpu
    def attention_in(self, it: InFlight, layer: int, part: PlacedPart | list[PlacedPart]) -> Ticket:
        """Compute norm, QKV projection and rotary embedding."""
        op = compute.AttentionIn(self._family, self._spec, it.batch, it.acts, self._mine(part), layer)
        return self.submit(GPU, op)

    @on_each_gpu
    def prefill_attention(self, it: InFlight, layer: int) -> Ticket | None:
        """Compute the attention of the prompts' tokens among themselves."""
        if not it.batch.prefill:
            return None
        part = self._engine.resident.attention[layer]
        return self.submit(GPU, compute.PrefillAttention(self._family, self._spec, it.batch, it.acts, layer, part))

    @on_each_gpu
    def offload_qkv(self, it: InFlight, layer: int, *, queries: bool = True) -> Ticket | None:
        """Copy to the host what it needs of tokens whose KV cache lies there."""
        if not it.batch.on_host.num_tokens:
            return None
        return self.submit(D2H, data.OffloadQkv(self._spec, it.batch, it.acts, layer, queries=queries))

    @on_one_gpu
    def offload_hidden(self, it: InFlight, layer: int, to: Buffer) -> Ticket:
        """Copy hidden states to pinned memory, where they wait."""
        return self.submit(D2H, data.OffloadHidden(self._spec, it.batch, it.acts, layer, to))

    @on_each_gpu
    def send_hidden(self, it: InFlight, layer: int, to: Activations) -> Ticket:
        """Send hidden states to the GPU that computes the next layer."""
        return self.submit(GPU, collective.SendHidden(self._spec, it.batch, it.acts, layer, to))

    @on_each_gpu
    def load_hidden(self, it: InFlight, layer: int, source: Buffer, *, urgent: bool = False) -> Ticket:
        return self.submit(H2D, data.LoadHidden(self._spec, it.batch, it.acts, layer, source), urgent=urgent)

    @on_each_gpu
    def append_kv(self, it: InFlight, layer: int) -> list[Ticket]:
        """Append new keys and values to the cache, on the side where each sequence has it."""
        tickets = []
        if it.batch.on_device.num_tokens:
            on_device = paged.AppendKvOnDevice(self._spec, it.batch, it.acts, layer, self._device_cache)
            tickets.append(self._on_kv(it, GPU, on_device))
        if it.batch.on_host.num_tokens:
            on_host = host.AppendKv(self._spec, it.batch, it.acts, layer, self._host_cache)
            tickets.append(self._on_kv(it, CPU, on_host))
        return tickets

    @on_each_gpu
    def decode_attention(self, it: InFlight, layer: int) -> list[Ticket]:
        """Attend over the cache, on the side where each sequence has it, and bring the host's results back to the
        device."""
        steps = (self.attend_in_place, self.attend_on_host, self.load_attention)
        return [ticket for step in steps if (ticket := step(it, layer)) is not None]

    @on_each_gpu
    def attend_in_place(self, it: InFlight, layer: int) -> Ticket | None:
        """Attend, in device memory, over the cache of sequences that have it there."""
        if not it.batch.on_device.num_decode:
            return None
        cache, part = self._device_cache, self._engine.resident.attention[layer]
        op = paged.DecodeAttentionPaged(self._family, self._spec, it.batch, it.acts, layer, cache, part)
        return self._on_kv(it, GPU, op)

    @on_each_gpu
    def attend_on_host(self, it: InFlight, layer: int) -> Ticket | None:
        """Attend, by the CPU, over the cache of sequences that have it in host memory."""
        if not it.batch.on_host.num_decode:
            return None
        cache, part = self._host_cache, self._engine.store.attention[layer]
        op = host.DecodeAttention(self._family, self._spec, it.batch, it.acts, layer, cache, part)
        return self._on_kv(it, CPU, op)

    @on_each_gpu
    def load_attention(self, it: InFlight, layer: int) -> Ticket | None:
        """Load the results of `attend_on_host` to the device."""
        if not it.batch.on_host.num_decode:
            return None
        return self.submit(H2D, data.LoadAttention(self._spec, it.batch, it.acts, layer), urgent=True)

    def _on_kv(self, it: InFlight, lane: Lane, op: Op, *, urgent: bool = False) -> Ticket:
        """Submit an op that touches the KV blocks of the micro-batch's sequences."""
        ticket = self.submit(lane, op, urgent=urgent)
        it.tickets.kv.append(ticket)
        return ticket

    @property
    def _device_cache(self) -> KVCache:
        cache = self._engine.kv.device
        assert cache is not None, "blocks in device memory without a cache there"
        return cache

    @property
    def _host_cache(self) -> KVCache:
        cache = self._engine.kv.host
        assert cache is not None, "blocks in host memory without a cache there"
        return cache

    @on_each_gpu
    def decode_attention_on_device(self, it: InFlight, layer: int, staging: Seq[Buffer]) -> list[Ticket]:
        """Attend on the gpu lane over the host cache: KV comes over the link into alternating staging buffers."""
        tickets = []
        for turn, rows in enumerate(self.rows_that_fit(it.batch.on_host.read_lens, min(b.nbytes for b in staging))):
            buffer = staging[turn % len(staging)]
            tickets += [self.load_kv(it, layer, rows, buffer), self.attend_on_device(it, layer, rows, buffer)]
        return tickets

    @on_each_gpu
    def load_kv(self, it: InFlight, layer: int, rows: range, to: Buffer | list[Buffer]) -> Ticket:
        """Load the cached keys and values of some decoding sequences (rows of `on_host`) over the link into a device
        buffer."""
        load = data.LoadKv(self._spec, it.batch, it.acts, layer, self._host_cache, rows, self._mine(to))
        return self._on_kv(it, H2D, load, urgent=True)

    @on_each_gpu
    def relay_kv(
        self, it: InFlight, layer: int, rows: range, to: Buffer | list[Buffer], *, through: Buffer | list[Buffer]
    ) -> Ticket:
        """Load keys and values as from pageable memory: a staging copy brings them to a pinned buffer, the link to a
        device buffer. Returns the ticket of the staging copy."""
        given = (self._spec, it.batch, it.acts, layer, self._host_cache, rows)
        staged = self._on_kv(it, PIN, data.StageKv(*given, self._mine(through)))
        self.submit(H2D, data.LoadStagedKv(*given, self._mine(to), source=self._mine(through)), urgent=True)
        return staged

    @on_each_gpu
    def attend_on_device(self, it: InFlight, layer: int, rows: range, staged: Buffer | list[Buffer]) -> Ticket:
        """Attend on the device over the tokens that `load_kv` staged and the newest tokens."""
        buffer, part = self._mine(staged), self._engine.resident.attention[layer]
        op = compute.DecodeAttentionDevice(self._family, self._spec, it.batch, it.acts, layer, rows, buffer, part)
        return self.submit(GPU, op)

    def attention_out(self, it: InFlight, layer: int, part: PlacedPart | list[PlacedPart]) -> Ticket:
        """Compute output projection, norm and router, and bring to the host what is recorded of the router."""
        if not it.is_shared:
            return self._attention_out(it, layer, part)
        self._output_projection(it, layer, part)
        self._all_reduce(it, layer, "normed")
        ticket = self._after_attention(it, layer, part)
        self._record_routing(it, layer)
        return ticket

    @on_each_gpu
    def _attention_out(self, it: InFlight, layer: int, part: PlacedPart | list[PlacedPart]) -> Ticket:
        op = compute.AttentionOut(self._family, self._spec, it.batch, it.acts, self._mine(part), layer)
        ticket = self.submit(GPU, op)
        it.owes_sums = True
        self._record_routing(it, layer)
        return ticket

    @on_each_gpu
    def _output_projection(self, it: InFlight, layer: int, part: PlacedPart | list[PlacedPart]) -> Ticket:
        op = collective.OutputProjection(self._family, self._spec, it.batch, it.acts, self._mine(part), layer)
        return self.submit(GPU, op)

    @on_each_gpu
    def _after_attention(self, it: InFlight, layer: int, part: PlacedPart | list[PlacedPart]) -> Ticket:
        op = collective.AfterAttention(self._family, self._spec, it.batch, it.acts, self._mine(part), layer)
        it.owes_sums = True
        return self.submit(GPU, op)

    def _all_reduce(self, it: InFlight, layer: int, to: Literal["normed", "hidden"]) -> Ticket:
        """Submit all members of a collective in one call, so that they are in the same order on all lanes."""
        partials = [each.acts for each in it.gpus]

        def member(emit: Emitter) -> Ticket:
            acts = partials[emit._gpu]
            op = collective.AllReduce(emit._spec, it.batch, acts, layer, partials=partials, to=to)
            return emit.submit(GPU, op)

        return self._each(range(len(partials)), member)[0]

    def _record_routing(self, it: InFlight, layer: int) -> None:
        if it.batch.records_routing and not self._spec.is_dense(layer):
            it.tickets.routing[layer] = self.fetch_routing(it, layer)

    @on_one_gpu
    def fetch_routing(self, it: InFlight, layer: int) -> Ticket:
        """Bring to the host what the router did with the micro-batch, as far as it is recorded."""
        return self.submit(D2H, data.FetchRouting(self._spec, it.batch, it.acts, layer), urgent=True)

    @on_one_gpu
    def route(self, it: InFlight, layer: int) -> Ticket:
        """Bring the router's choices to the host: experts and their weights, each [tokens, experts_per_token]."""
        return self.submit(D2H, data.FetchRoute(self._spec, it.batch, it.acts, layer), urgent=True)

    @on_one_gpu
    def predict(
        self,
        it: InFlight,
        layer: int,
        router: PlacedPart | list[PlacedPart],
        *,
        distance: int = 1,
        by: Callable[..., Op] = predictions.PredictExperts,
    ) -> Ticket:
        """Bring predicted experts of layer `layer` + `distance` to the host, with the probability that the router will
        choose each: int64 and float32 [tokens, predicted].

        That layer's router, whose weights are in the part `router`, gets the input of the experts of `layer`. So this
        comes between `attention_out` of `layer` and that of the next one. `Activations.num_predicted` says how many
        experts of each token are predicted. An op that takes the same arguments may predict in another way, `by` which
        `router` then is the part that it uses.
        """
        assert it.acts.num_predicted, "the activations were made without room for predictions"
        part = self._mine(router)
        self.submit(GPU, by(self._family, self._spec, it.batch, it.acts, part, layer, distance))
        return self.submit(
            D2H, predictions.FetchPrediction(self._spec, it.batch, it.acts, layer, distance), urgent=True
        )

    @on_each_gpu
    def experts(
        self,
        it: InFlight,
        layer: int,
        parts: dict[int, PlacedPart] | list[dict[int, PlacedPart]],
    ) -> Ticket | None:
        """Run the given experts (by number) over the tokens routed to them; submits nothing in a layer without experts.

        Once a strategy has seen the routing (`route`), the simulated machine charges for exactly these experts' tokens
        and bytes.
        """
        parts = self._mine(parts)
        if not parts:
            return None
        it.owes_sums = True
        op = Experts(self._family, self._spec, it.batch, it.acts, tuple(parts.values()), tuple(parts), layer)
        return self.submit(GPU, op)

    def experts_on_host(self, it: InFlight, layer: int, experts: Iterable[int] | None = None) -> list[Ticket]:
        """Run some experts (by number; None: all of the layer) on the cpu lane, in one op, after their input has come
        from the device. Their sums begin at 0, so call it once for each layer. Nothing is submitted where there are no
        experts.

        `load_expert_sums` brings their results back; where these are all experts of the layer, `moe_out` is free for
        the results. Returns the tickets in the order of submission: of `add_common`, of the copy of the input, and of
        the experts.
        """
        whole = experts is None and not self._spec.is_dense(layer)
        common = self.add_common(it, layer) if whole else None
        return [*([common] if common else []), *self._experts_on_host(it, layer, experts)]

    def add_common(self, it: InFlight, layer: int) -> Ticket | None:
        """Add the outputs that all tokens get, in a layer that has such, to the residual stream. `moe_out` is then free
        for sums of the host, and no expert of the layer may run on the device."""
        common = self.combine(it, layer) if self._spec.has_common_mlp(layer) else None
        for each in it.gpus or (it,):
            each.owes_sums = False
        return common

    @on_each_gpu
    def _experts_on_host(self, it: InFlight, layer: int, experts: Iterable[int] | None) -> list[Ticket]:
        parts = self._engine.store.experts(layer)
        numbers = sorted(parts if experts is None else experts)
        if not numbers:
            return []
        copied = self.submit(D2H, expert_rows.OffloadExpertInput(self._spec, it.batch, it.acts, layer))
        chosen = tuple(parts[number] for number in numbers)
        op = Experts(
            *(self._family, self._spec, it.batch, it.acts, chosen, tuple(numbers), layer), on_host=True, clears=True
        )
        return [copied, self.submit(CPU, op)]

    @on_each_gpu
    def load_expert_sums(
        self, it: InFlight, layer: int, to: Buffer | list[Buffer | None] | None = None, *, urgent: bool = False
    ) -> Ticket:
        """Bring the results of experts on the host to the device. They go into `to`, which `combine` then takes as
        `extra`. Without `to` they go into `moe_out`, which is free where all experts of the layer ran on the host."""
        n, source, target = it.batch.num_tokens, it.acts.host_moe_out, self._mine(to) or it.room_for_sums()
        op = expert_rows.LoadExpertSums(self._spec, source, target, n, layer, it.batch.index)
        return self.submit(H2D, op, urgent=urgent)

    def combine(self, it: InFlight, layer: int, extra: tuple[Buffer, ...] = ()) -> Ticket:
        """Add the experts' sums to the residual stream; there is no `extra` where several GPUs share the
        micro-batch."""
        for each in it.gpus or (it,):
            each.owes_sums = False
        if it.is_shared:
            assert not extra, "only the GPUs' own sums are added"
            return self._all_reduce(it, layer, "hidden")
        return self._combine(it, layer, extra)

    @on_each_gpu
    def _combine(self, it: InFlight, layer: int, extra: tuple[Buffer, ...]) -> Ticket:
        sums = (it.acts.moe_out, *extra)
        return self.submit(GPU, compute.Combine(self._family, self._spec, it.batch, it.acts, layer, sums))

    @on_one_gpu
    def head(self, it: InFlight) -> Ticket:
        """Compute final norm, head and greedy choice; the ticket's value is the sampled ids, one for each sequence."""
        part = self._engine.resident.head
        self.submit(GPU, compute.Head(self._family, self._spec, it.batch, it.acts, part))
        it.tickets.sampled = self.submit(D2H, data.FetchSampled(self._spec, it.batch, it.acts), urgent=True)
        return it.tickets.sampled

    def rows_that_fit(self, read_lens: np.ndarray, nbytes: int) -> list[range]:
        """Cut the decode rows with their KV on the host into runs; each run's KV of one layer fits a staging buffer."""
        limit = nbytes // self._spec.kv_bytes_per_token_layer
        runs, start, total = [], 0, 0
        for row, length in enumerate(read_lens.tolist()):
            assert length <= limit, f"a context of {length} tokens does not fit the KV staging buffer of {limit}"
            if total + length > limit:
                runs.append(range(start, row))
                start, total = row, 0
            total += length
        return [*runs, range(start, len(read_lens))] if len(read_lens) else []

    @on_each_gpu
    def poison(self, it: InFlight) -> list[Ticket]:
        """Mark the micro-batch's activation buffers as poisoned in tests: no op may read what they held before. On
        other machines nothing is submitted."""
        poisoned = [buffer for buffer in it.acts.all_buffers() if buffer.backed] if self._engine.machine.poisons else []
        # `who` writes a share of the rows of attention results, which has a key of its own
        ops = [Poison(buffer, (buffer, *((buffer, who) for who in ATTENDED_BY))) for buffer in poisoned]
        return [self.submit(poison_lane(op.buffer, GPU), op) for op in ops]
