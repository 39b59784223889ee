"""The vocabulary in which pipelines are written: one method a step of the papers' figures, each submitting its ops."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from harness.engine.activations import Activations
from harness.engine.batch import MicroBatch
from harness.engine.engine import Engine
from harness.engine.ops import compute, data, host
from harness.machine.base import CPU, D2H, GPU, H2D, Op, Ticket
from harness.memory.ops import Poison
from harness.memory.tiers import Buffer
from harness.memory.weights import PlacedPart, WeightStream


@dataclass(eq=False, slots=True)
class InFlight:
    """A micro-batch in its activation buffers."""

    batch: MicroBatch
    acts: Activations


class Emitter:
    """Submits the ops of one step for one micro-batch; nothing here waits.

    `serial=True` makes every op follow the one before it, on whatever lane: execution without any overlap.
    """

    def __init__(self, engine: Engine, *, serial: bool = False) -> None:
        self._engine = engine
        self._spec, self._family, self._cache = engine.spec, engine.family, engine.kv
        self._serial = serial
        self._last: Ticket | None = None

    def submit(self, lane, op: Op, *, urgent: bool = False) -> Ticket:  # type: ignore[no-untyped-def]
        after = (self._last,) if self._serial and self._last is not None else ()
        self._last = self._engine.machine.submit(lane, op, after=after, urgent=urgent)
        return self._last

    def load(self, stream: WeightStream, index: int, part_name: str) -> None:
        """Request a part of a stream in this emitter's order."""
        after = (self._last,) if self._serial and self._last is not None else ()
        self._last = stream.request(index, part_name, after=after)

    def embed(self, it: InFlight) -> None:
        """Token ids to the device, then their embeddings."""
        self._poison(it)
        self.submit(H2D, data.UploadTokens(self._spec, it.batch, it.acts), urgent=True)
        part = self._engine.resident.embedding
        self.submit(GPU, compute.Embed(self._family, self._spec, it.batch, it.acts, part))

    def attention_in(self, it: InFlight, layer: int, part: PlacedPart) -> Ticket:
        """Norm, QKV, rotary embedding."""
        return self.submit(GPU, compute.AttentionIn(self._family, self._spec, it.batch, it.acts, part, layer))

    def prefill_attention(self, it: InFlight, layer: int) -> Ticket | None:
        """Nothing where no sequence prefills."""
        if not it.batch.prefill:
            return None
        return self.submit(GPU, compute.PrefillAttention(self._family, self._spec, it.batch, it.acts, layer))

    def offload_qkv(self, it: InFlight, layer: int) -> None:
        self.submit(D2H, data.OffloadQkv(self._spec, it.batch, it.acts, layer))

    def append_kv(self, it: InFlight, layer: int) -> None:
        ticket = self.submit(CPU, host.AppendKv(self._spec, it.batch, it.acts, layer, self._cache))
        it.batch.kv_tickets.append(ticket)

    def decode_attention(self, it: InFlight, layer: int) -> None:
        """Attention over the host cache, and its result back to the device."""
        if not it.batch.decode:
            return
        op = host.DecodeAttention(self._spec, it.batch, it.acts, layer, self._cache)
        it.batch.kv_tickets.append(self.submit(CPU, op))
        self.submit(H2D, data.LoadAttention(self._spec, it.batch, it.acts, layer), urgent=True)

    def decode_attention_on_device(self, it: InFlight, layer: int, staging: Seq[Buffer]) -> None:
        """Decode attention on the gpu lane: KV comes over the link into alternating staging buffers."""
        for turn, rows in enumerate(self._rows_that_fit(it.batch, min(b.nbytes for b in staging))):
            buffer = staging[turn % len(staging)]
            load = data.LoadKv(self._spec, it.batch, it.acts, layer, self._cache, rows, buffer)
            it.batch.kv_tickets.append(self.submit(H2D, load, urgent=True))
            attend = compute.DecodeAttentionDevice(self._family, self._spec, it.batch, it.acts, layer, rows, buffer)
            self.submit(GPU, attend)

    def attention_out(self, it: InFlight, layer: int, part: PlacedPart) -> Ticket:
        """O projection, norm and router."""
        ticket = self.submit(GPU, compute.AttentionOut(self._family, self._spec, it.batch, it.acts, part, layer))
        if it.batch.records_routing:
            it.batch.routing_tickets[layer] = self.fetch_routing(it, layer)
        return ticket

    def fetch_routing(self, it: InFlight, layer: int) -> Ticket:
        return self.submit(D2H, data.FetchRouting(self._spec, it.batch, it.acts, layer), urgent=True)

    def experts(self, it: InFlight, layer: int, parts: dict[int, PlacedPart]) -> Ticket:
        """The given experts (by number) over the tokens routed to them."""
        op = compute.Experts(self._family, self._spec, it.batch, it.acts, tuple(parts.values()), tuple(parts), layer)
        return self.submit(GPU, op)

    def combine(self, it: InFlight, layer: int, extra: tuple[Buffer, ...] = ()) -> Ticket:
        """Experts' sums into the residual stream."""
        sums = (it.acts.moe_out, *extra)
        return self.submit(GPU, compute.Combine(self._family, self._spec, it.batch, it.acts, layer, sums))

    def head(self, it: InFlight) -> Ticket:
        """Final norm, head, greedy choice; the ticket's value is the sampled ids, one a sequence."""
        part = self._engine.resident.head
        self.submit(GPU, compute.Head(self._family, self._spec, it.batch, it.acts, part))
        return self.submit(D2H, data.FetchSampled(self._spec, it.batch, it.acts), urgent=True)

    def _rows_that_fit(self, batch: MicroBatch, nbytes: int) -> list[range]:
        """Cut the decode rows into runs whose KV of one layer fits a staging buffer."""
        limit = nbytes // self._spec.kv_bytes_per_token_layer
        runs, start, total = [], 0, 0
        for row, length in enumerate(batch.context_lens.tolist()):
            assert length <= limit, f"a context of {length} tokens does not fit the KV staging buffer of {limit}"
            if total + length > limit:
                runs.append(range(start, row))
                start, total = row, 0
            total += length
        return [*runs, range(start, len(batch.decode))] if batch.decode else []

    def _poison(self, it: InFlight) -> None:
        """Tests: nothing of the previous pass may be read."""
        if self._engine.machine.poisons:
            for buffer in it.acts.all_buffers():
                keys = (buffer,)
                if buffer is it.acts.attention:
                    keys = ((buffer, "prefill"), (buffer, "decode"))  # type: ignore[assignment]
                self.submit(GPU, Poison(buffer, keys))
