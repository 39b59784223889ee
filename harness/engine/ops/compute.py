"""Run layer math of the model's family on the gpu lane, over activation buffers."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import arange

from harness.engine.activations import Activations, head_workspace_bytes
from harness.engine.batch import MicroBatch
from harness.engine.ops import on_gpu
from harness.engine.ops.data import MicroBatchOp, device_rows
from harness.engine.ops.views import attend_each, attention_weights, keep, rows, weights
from harness.machine.base import Context, Work
from harness.memory.placed import PlacedPart
from harness.memory.tiers import Buffer
from harness.model.spec import ModelSpec


class ComputeOp(MicroBatchOp):
    """A gpu op that uses the weights of one or more placed parts."""

    def __init__(
        self,
        family: Any,
        spec: ModelSpec,
        batch: MicroBatch,
        acts: Activations,
        parts: tuple[PlacedPart, ...] = (),
        layer: int | None = None,
    ) -> None:
        super().__init__(spec, batch, acts, layer)
        self.family, self.parts = family, parts
        self.weight_keys = tuple(key for part in parts for key in part.keys)

    def weight_bytes(self) -> int:
        return sum(part.layout.nbytes for part in self.parts)


class Embed(ComputeOp):
    """Looks up the embeddings of token ids, and writes them to `hidden`."""

    kind: ClassVar[str] = "embed"

    def __init__(self, family: Any, spec: ModelSpec, batch: MicroBatch, acts: Activations, part: PlacedPart) -> None:
        super().__init__(family, spec, batch, acts, (part,))
        self.reads, self.writes = (acts.tokens, *self.weight_keys), (acts.hidden,)

    def work(self) -> Work:
        return Work(device_bytes=2 * self.batch.num_tokens * self.spec.hidden_dim * self.spec.dtype_bytes)

    def cost_features(self) -> tuple[float, ...]:
        return (float(self.batch.num_tokens),)

    def run(self, ctx: Context, packet: int) -> None:
        n = self.batch.num_tokens
        ids = device_rows(ctx, self.batch, self.acts)[0]
        hidden = rows(ctx, self.acts.hidden, n, self.spec.hidden_dim, self.spec.dtype)
        hidden.copy_(self.family.embed(self.spec, weights(ctx, self.parts[0]), ids))


class AttentionIn(ComputeOp):
    """Computes input norm, QKV projection and rotary embedding (the dense half of MoE-Lens's GA, CGOPipe's PreAttn)."""

    kind: ClassVar[str] = "attention in"

    def __init__(
        self, family: Any, spec: ModelSpec, batch: MicroBatch, acts: Activations, part: PlacedPart, layer: int
    ) -> None:
        super().__init__(family, spec, batch, acts, (part,), layer)
        self.reads = (acts.tokens, acts.hidden, *self.weight_keys)
        self.writes = tuple(dict.fromkeys((acts.q, acts.k, acts.v, *acts.new_kv(spec))))

    def work(self) -> Work:
        out_dim = self.spec.q_dim + 2 * self.spec.kv_dim
        flops = 2 * self.batch.num_tokens * self.spec.attention_in_params
        moved = self.batch.num_tokens * (self.spec.hidden_dim + out_dim) * self.spec.dtype_bytes
        return Work(flops=flops, device_bytes=self.weight_bytes() + moved)

    def cost_features(self) -> tuple[float, ...]:
        return (float(self.batch.num_tokens),)

    def run(self, ctx: Context, packet: int) -> None:
        self.require_keys_and_values()
        spec, n = self.spec, self.batch.num_tokens
        positions = device_rows(ctx, self.batch, self.acts)[1]
        hidden = rows(ctx, self.acts.hidden, n, spec.hidden_dim, spec.dtype)
        q, k, v = self.family.attention_in(spec, weights(ctx, self.parts[0]), hidden, positions, self.layer)
        ctx.tensor(self.acts.q, (n, spec.num_heads, spec.head_dim), spec.dtype).copy_(q)
        ctx.tensor(self.acts.k, (n, spec.num_kv_heads, spec.head_dim), spec.dtype).copy_(k)
        ctx.tensor(self.acts.v, (n, spec.num_kv_heads, spec.head_dim), spec.dtype).copy_(v)


class PrefillAttention(ComputeOp):
    """Computes causal attention among the tokens of each prefilling sequence. `AttentionOverCache` explains `part`."""

    kind: ClassVar[str] = "prefill attention"

    def __init__(
        self,
        family: Any,
        spec: ModelSpec,
        batch: MicroBatch,
        acts: Activations,
        layer: int,
        part: PlacedPart | None,
    ) -> None:
        super().__init__(family, spec, batch, acts, (part,) if part else (), layer)
        self.part = part
        self.reads = (acts.tokens, acts.q, acts.k, acts.v, *self.weight_keys)
        self.writes = ((acts.attention, "prefill"),)

    def work(self) -> Work:
        assert self.layer is not None
        spec, lens = self.spec, self.batch.prefill_lens
        seen = [(n, spec.seen_tokens(self.layer, n)) for n in lens]
        pairs = sum((n - window / 2) * window for n, window in seen)  # up to a window, each token sees one more
        moved = self.batch.num_prefill_tokens * (spec.q_dim + 2 * spec.kv_dim + spec.o_dim) * spec.dtype_bytes
        return Work(flops=pairs * spec.prefill_pair_flops, device_bytes=moved)

    def cost_features(self) -> tuple[float, ...]:
        lens = self.batch.prefill_lens
        return (float(len(lens)), float(sum(lens)), float(sum(n * n for n in lens)))

    def run(self, ctx: Context, packet: int) -> None:
        self.require_keys_and_values()
        spec, n, first = self.spec, self.batch.num_tokens, self.batch.num_prefill_tokens
        q = ctx.tensor(self.acts.q, (n, spec.num_heads, spec.head_dim), spec.dtype)[:first]
        k = ctx.tensor(self.acts.k, (n, spec.num_kv_heads, spec.head_dim), spec.dtype)[:first]
        v = ctx.tensor(self.acts.v, (n, spec.num_kv_heads, spec.head_dim), spec.dtype)[:first]
        out, w = rows(ctx, self.acts.attention, n, spec.q_dim, spec.dtype), attention_weights(ctx, self.part)
        if on_gpu.attends(spec, q):
            positions = device_rows(ctx, self.batch, self.acts)[1, :first]
            options = self.family.attention_options(spec, w, self.layer)
            return on_gpu.prefill_attention(options, q, k, v, positions, out[:first])
        out[:first].copy_(self.family.prefill_attention(spec, w, q, k, v, self.batch.prefill_lens, self.layer))


class DecodeAttentionDevice(ComputeOp):
    """Computes decode attention on the device, over keys and values that LoadKv staged there and those of the newest
    tokens."""

    kind: ClassVar[str] = "decode attention (device)"

    def __init__(
        self,
        family: Any,
        spec: ModelSpec,
        batch: MicroBatch,
        acts: Activations,
        layer: int,
        rows: range,
        staging: Buffer,
        part: PlacedPart | None,
    ) -> None:
        super().__init__(family, spec, batch, acts, (part,) if part else (), layer)
        self.rows, self.staging, self.there, self.part = rows, staging, batch.on_host, part
        self.reads = (acts.tokens, acts.q, *acts.new_kv(spec), staging, *self.weight_keys)
        self.writes = ((acts.attention, "decode"), staging)

    def work(self) -> Work:
        tokens = self._num_read
        flops = tokens * self.spec.decode_pair_flops
        return Work(flops=flops, device_bytes=tokens * self.spec.kv_bytes_per_token_layer)

    @property
    def _num_read(self) -> int:
        return int(self.there.read_lens[self.rows.start : self.rows.stop].sum())

    def cost_features(self) -> tuple[float, ...]:
        return (float(len(self.rows)), float(self._num_read))

    def run(self, ctx: Context, packet: int) -> None:
        self.require_keys_and_values()
        spec, n, first = self.spec, self.batch.num_tokens, self.batch.num_prefill_tokens
        q = ctx.tensor(self.acts.q, (n, spec.num_heads, spec.head_dim), spec.dtype)
        k = ctx.tensor(self.acts.k, (n, spec.num_kv_heads, spec.head_dim), spec.dtype)
        v = ctx.tensor(self.acts.v, (n, spec.num_kv_heads, spec.head_dim), spec.dtype)
        staging = ctx.tensor(self.staging, (2 * self._num_read * spec.kv_dim,), spec.dtype)
        mine = slice(first + self.rows.start, first + self.rows.stop)
        positions = device_rows(ctx, self.batch, self.acts)[1, mine]
        _add_newest(staging, positions, k[mine], v[mine])
        out = rows(ctx, self.acts.attention, n, spec.q_dim, spec.dtype)[mine]
        reads = self.there.reads.among(self.rows.start, self.rows.stop)
        if reads.num_shadows and on_gpu.attends(spec, q):
            positions = on_gpu.numbers(reads.positions, q.device)

        w, layer = attention_weights(ctx, self.part), self.layer

        def attend(q: Any, out: Any) -> None:
            if on_gpu.attends(spec, q):
                options = self.family.attention_options(spec, w, layer)
                return on_gpu.decode_attention(options, q, staging, positions, out, num_kv_heads=spec.num_kv_heads)
            lens = reads.lens.tolist()
            for at, (keys, values) in enumerate(self._staged(staging, lens)):
                out[at] = self.family.decode_attention(spec, w, q[at], keys, values, lens[at], layer).reshape(-1)

        attend_each(reads, q[mine], out, attend)

    def _staged(self, staging: Any, lens: list[int]) -> list[tuple[Any, Any]]:
        """Return keys and values of contexts that lie one after another, each [kv_heads, context, head_dim]."""
        spec, at, found = self.spec, 0, []
        for length in lens:
            shape, size = (spec.num_kv_heads, length, spec.head_dim), length * spec.kv_dim
            found.append((staging[at : at + size].view(shape), staging[at + size : at + 2 * size].view(shape)))
            at += 2 * size
        return found


def _add_newest(staging: Any, positions: Any, k: Any, v: Any) -> None:
    """Write the newest tokens' keys and values into their places in what `LoadKv` staged. The few launches are the same
    however many sequences there are. positions [seqs], k and v [seqs, kv_heads, head_dim]."""
    num_heads, head_dim = k.shape[1:]
    lens = (positions + 1)[:, None]
    begins = 2 * num_heads * (lens.cumsum(0) - lens)  # where each sequence's keys begin, in rows of head_dim
    keys_at = begins + lens * arange(num_heads, device=k.device) + positions[:, None]
    staged = staging.view(-1, head_dim)
    for new, at in ((k, keys_at), (v, keys_at + num_heads * lens)):
        staged.index_copy_(0, at.view(-1), new.reshape(-1, head_dim))


class AttentionOut(ComputeOp):
    """Computes what comes before the experts: output projection, residual, post-attention norm and router. Shared
    experts, or the MLP of a dense layer, are part of it."""

    kind: ClassVar[str] = "attention out"

    def __init__(
        self, family: Any, spec: ModelSpec, batch: MicroBatch, acts: Activations, part: PlacedPart, layer: int
    ) -> None:
        super().__init__(family, spec, batch, acts, (part,), layer)
        self.reads = (*acts.attention_keys, acts.hidden, *self.weight_keys)
        self.writes = (acts.hidden, acts.normed, acts.expert_ids, acts.expert_weights, acts.moe_out)

    def work(self) -> Work:
        assert self.layer is not None
        spec, n = self.spec, self.batch.num_tokens
        flops = 2 * n * (spec.attention_out_params + spec.common_mlp_params(self.layer))
        moved = n * (spec.o_dim + 3 * spec.hidden_dim) * spec.dtype_bytes
        return Work(flops=flops, device_bytes=self.weight_bytes() + moved)

    def cost_features(self) -> tuple[float, ...]:
        return (float(self.batch.num_tokens),)

    def run(self, ctx: Context, packet: int) -> None:
        spec, acts, n = self.spec, self.acts, self.batch.num_tokens
        hidden = rows(ctx, acts.hidden, n, spec.hidden_dim, spec.dtype)
        attention = rows(ctx, acts.attention, n, spec.q_dim, spec.dtype)
        w = weights(ctx, self.parts[0])
        projected = self.family.output_projection(spec, w, attention, self.layer)
        keep(ctx, self, self.family.after_attention(spec, w, projected, hidden, self.layer))


class Combine(ComputeOp):
    """Adds the sums of the experts to the residual stream."""

    kind: ClassVar[str] = "combine"

    def __init__(
        self, family: Any, spec: ModelSpec, batch: MicroBatch, acts: Activations, layer: int, sums: tuple[Buffer, ...]
    ) -> None:
        super().__init__(family, spec, batch, acts, (), layer)
        self.sums = sums
        self.reads, self.writes = (acts.hidden, *sums), (acts.hidden,)

    def work(self) -> Work:
        # For each sum a kernel of its own reads it, and reads and writes the hidden states.
        values = self.batch.num_tokens * self.spec.hidden_dim * len(self.sums)
        return Work(device_bytes=values * (2 * self.spec.dtype_bytes + 4))

    def cost_features(self) -> tuple[float, ...]:
        return (float(self.batch.num_tokens),)

    def run(self, ctx: Context, packet: int) -> None:
        n = self.batch.num_tokens
        hidden = rows(ctx, self.acts.hidden, n, self.spec.hidden_dim, self.spec.dtype)
        for buffer in self.sums:
            hidden.add_(rows(ctx, buffer, n, self.spec.hidden_dim, "float32").to(hidden.dtype))


class Head(ComputeOp):
    """Computes final norm and language-model head on each sequence's last row, and samples greedily. It takes several
    runs where the logits of all sequences do not fit the workspace."""

    kind: ClassVar[str] = "head"

    def __init__(self, family: Any, spec: ModelSpec, batch: MicroBatch, acts: Activations, part: PlacedPart) -> None:
        super().__init__(family, spec, batch, acts, (part,))
        self.reads, self.writes = (acts.tokens, acts.hidden, *self.weight_keys), (acts.sampled,)

    def work(self) -> Work:
        flops = 2 * len(self.batch.sequences) * self.spec.hidden_dim * self.spec.vocab_size
        return Work(flops=flops, device_bytes=self.weight_bytes())

    def cost_features(self) -> tuple[float, ...]:
        return (float(len(self.batch.sequences)),)

    def run(self, ctx: Context, packet: int) -> None:
        spec, n = self.spec, self.batch.num_tokens
        hidden = rows(ctx, self.acts.hidden, n, spec.hidden_dim, spec.dtype)
        num_sequences = len(self.batch.sequences)
        last_rows = device_rows(ctx, self.batch, self.acts)[3, :num_sequences]
        sampled = ctx.tensor(self.acts.sampled, (num_sequences,), "int64")
        at_once = max(1, self.acts.workspace.nbytes // head_workspace_bytes(spec))
        for run in (slice(first, first + at_once) for first in range(0, num_sequences, at_once)):
            logits = self.family.head(spec, weights(ctx, self.parts[0]), hidden.index_select(0, last_rows[run]))
            sampled[run].copy_(logits.argmax(dim=-1))
