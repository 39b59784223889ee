"""Run layer math of the model's family on the gpu lane, over activation buffers."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, ClassVar

from torch import arange

from harness.engine.activations import Activations
from harness.engine.batch import MicroBatch
from harness.engine.ops import on_gpu
from harness.engine.ops.alike import once_a_batch
from harness.engine.ops.attention_rows import (
    attended,
    cached_queries,
    cached_results,
    keep_latents,
    keys_and_values,
    num_expanded,
    prompt_results,
    prompt_rows,
    row_features,
    value_up_flops,
)
from harness.engine.ops.data import MicroBatchOp, device_rows
from harness.engine.ops.host import staged_attention
from harness.engine.ops.views import attend_each, attention_weights, keep, rows, weights
from harness.engine.temporaries import head_workspace_bytes
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
        self.weight_keys: tuple[Hashable, ...]
        if len(parts) == 1 and len(parts[0].keys) == 1:
            self.weight_keys = parts[0].keys
        else:
            self.weight_keys = tuple(dict.fromkeys([key for part in parts for key in part.keys]))

    def weight_bytes(self) -> int:
        return sum([part.layout.nbytes for part in self.parts])


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
        prompts = acts.prompt_kv(spec) if num_expanded(spec, batch) or spec.latent is None else ()
        self.writes = tuple(dict.fromkeys((acts.q, *prompts, *acts.new_kv(spec))))

    @once_a_batch(lambda op: op.weight_bytes())
    def work(self) -> Work:
        spec, n, first = self.spec, self.batch.num_tokens, num_expanded(self.spec, self.batch)
        flops = 2 * n * spec.attention_in_params - value_up_flops(spec, self.batch)
        moved = n * spec.hidden_dim
        if spec.latent is None:
            moved += n * (spec.q_dim + spec.kv_dim + spec.v_dim)
        else:
            moved += n * spec.kv_pieces[0].dim + first * (spec.q_dim + spec.kv_dim + spec.v_dim)
            moved += (n - first) * spec.cached_q_dim
        return Work(flops=flops, device_bytes=self.weight_bytes() + moved * spec.dtype_bytes)

    def cost_features(self) -> tuple[float, ...]:
        return row_features(self.spec, self.batch)

    def run(self, ctx: Context, packet: int) -> None:
        spec, n = self.spec, self.batch.num_tokens
        positions = device_rows(ctx, self.batch, self.acts)[1]
        hidden, w = rows(ctx, self.acts.hidden, n, spec.hidden_dim, spec.dtype), weights(ctx, self.parts[0])
        if spec.latent is not None:
            first = num_expanded(spec, self.batch)
            found = self.family.latents_in(spec, w, hidden, positions, first, self.layer)
            return keep_latents(ctx, self, found)
        q, k, v = self.family.attention_in(spec, w, hidden, positions, self.layer)
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
        self.reads = (acts.tokens, acts.q, *acts.prompt_kv(spec), *self.weight_keys)
        self.writes = ((acts.attention, "prefill"),)

    @once_a_batch(lambda op: op.spec.window(op.layer))
    def work(self) -> Work:
        moved = self.batch.num_prefill_tokens * self.spec.prompt_row_dim * self.spec.dtype_bytes
        return Work(flops=self._twice_pairs / 2 * self.spec.prefill_pair_flops, device_bytes=moved)

    @property
    def _twice_pairs(self) -> int:
        assert self.layer is not None
        return self.batch.twice_pairs(self.spec.window(self.layer))

    def cost_features(self) -> tuple[float, ...]:
        lens = self.batch.prefill_lens
        return (float(len(lens)), float(sum(lens)), float(self._twice_pairs))

    def run(self, ctx: Context, packet: int) -> None:
        spec, first = self.spec, self.batch.num_prefill_tokens
        (q, k, v), out = prompt_rows(ctx, self), prompt_results(ctx, self)
        w = attention_weights(ctx, self.part)
        if on_gpu.attends_in_prompts(spec, q):
            positions = device_rows(ctx, self.batch, self.acts)[1, :first]
            options = self.family.attention_options(spec, w, self.layer)
            return on_gpu.prefill_attention(options, q, k, v, positions, out)
        found = self.family.prefill_attention(spec, w, q, k, v, self.batch.prefill_lens, self.layer)
        out.copy_(found.view(out.shape))


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
        tokens = self._num_seen
        flops = tokens * self.spec.decode_pair_flops
        return Work(flops=flops, device_bytes=tokens * self.spec.kv_bytes_per_token_layer)

    @property
    def _num_read(self) -> int:
        return int(self.there.read_lens[self.rows.start : self.rows.stop].sum())

    @property
    def _num_seen(self) -> int:
        assert self.layer is not None
        return self.there.num_seen_tokens(self.spec, self.layer, self.rows)

    def cost_features(self) -> tuple[float, ...]:
        return (float(len(self.rows)), float(self._num_seen))

    def run(self, ctx: Context, packet: int) -> None:
        spec, n, first = self.spec, self.batch.num_tokens, self.batch.num_prefill_tokens
        mine = slice(first + self.rows.start, first + self.rows.stop)
        q = cached_queries(ctx, spec, self.acts.q, n, spec.q_row_dim)[mine]
        out = cached_results(ctx, spec, self.acts.attention, n, spec.o_row_dim)[mine]
        new = [
            ctx.tensor(buffer, (n, piece.num_heads, piece.width), spec.dtype)[mine]
            for piece, buffer in zip(spec.kv_pieces, self.acts.new_kv(spec), strict=True)
        ]
        token_dim = sum(piece.dim for piece in spec.kv_pieces)
        staging = ctx.tensor(self.staging, (self._num_read * token_dim,), spec.dtype)
        positions = device_rows(ctx, self.batch, self.acts)[1, mine]
        _add_newest(staging, positions, new)
        reads = self.there.reads.among(self.rows.start, self.rows.stop)
        if reads.num_shadows and on_gpu.attends(q):
            positions = on_gpu.numbers(reads.positions, q.device)

        w, layer = attention_weights(ctx, self.part), self.layer

        def attend(q: Any, out: Any) -> None:
            options = self.family.attention_options(spec, w, layer)
            if on_gpu.attends(q):
                if spec.latent is not None:
                    return on_gpu.latent_attention(options, q, staging, positions, out)
                return on_gpu.decode_attention(options, q, staging, positions, out, num_kv_heads=spec.num_kv_heads)
            if q.device.type == "cpu":
                return staged_attention(options, spec, q, staging, reads.lens, out.view(*q.shape[:2], -1))
            lens = reads.lens.tolist()
            for at, (keys, values) in enumerate(self._staged(staging, lens)):
                found = self.family.decode_attention(spec, w, q[at], keys, values, lens[at], layer)
                out[at] = found.view(out[at].shape)

        attend_each(reads, q, out, attend)

    def _staged(self, staging: Any, lens: list[int]) -> list[tuple[Any, Any]]:
        """Return keys and values of contexts that lie one after another, each [kv_heads, context, width]."""
        at, found = 0, []
        for length in lens:
            pieces = []
            for _, heads, width in self.spec.kv_pieces:
                pieces.append(staging[at : at + heads * length * width].view(heads, length, width))
                at += heads * length * width
            found.append(keys_and_values(self.spec, pieces))
        return found


def _add_newest(staging: Any, positions: Any, new: list[Any]) -> None:
    """Write the newest tokens' rows into their places in what `LoadKv` staged. The few launches are the same however
    many sequences there are. positions [seqs]; `new` has [seqs, heads, width] for each piece, all of one width."""
    width = new[0].shape[-1]
    lens, staged = (positions + 1)[:, None], staging.view(-1, width)
    begins = sum(piece.shape[1] for piece in new) * (lens.cumsum(0) - lens)  # of each sequence, in rows
    for piece in new:
        heads = piece.shape[1]
        at = begins + lens * arange(heads, device=piece.device) + positions[:, None]
        staged.index_copy_(0, at.view(-1), piece.reshape(-1, width))
        begins = begins + heads * lens


class BehindAttention(ComputeOp):
    """A gpu op that uses a layer's part behind attention, which in a dense layer has other matrices."""

    @property
    def cost_key(self) -> str:
        """The kind, with dense layers apart from those that have experts."""
        assert self.layer is not None
        return f"{self.kind}, dense" if self.spec.is_dense(self.layer) else self.kind


class AttentionOut(BehindAttention):
    """Computes what comes before the experts: output projection, residual, post-attention norm and router. Shared
    experts, or the MLP of a dense layer, are part of it."""

    kind: ClassVar[str] = "attention out"

    def __init__(
        self, family: Any, spec: ModelSpec, batch: MicroBatch, acts: Activations, part: PlacedPart, layer: int
    ) -> None:
        super().__init__(family, spec, batch, acts, (part,), layer)
        self.reads = (*acts.attention_keys, acts.hidden, *self.weight_keys)
        self.writes = (acts.hidden, acts.normed, acts.expert_ids, acts.expert_weights, acts.moe_out)

    @once_a_batch(lambda op: (op.weight_bytes(), op.spec.is_dense(op.layer)))
    def work(self) -> Work:
        assert self.layer is not None
        spec, n = self.spec, self.batch.num_tokens
        flops = 2 * n * (spec.attention_out_params + spec.common_mlp_params(self.layer))
        flops += value_up_flops(spec, self.batch)
        moved = n * (spec.o_dim + 3 * spec.hidden_dim) * spec.dtype_bytes
        return Work(flops=flops, device_bytes=self.weight_bytes() + moved)

    def cost_features(self) -> tuple[float, ...]:
        return row_features(self.spec, self.batch)

    def run(self, ctx: Context, packet: int) -> None:
        spec, acts, n = self.spec, self.acts, self.batch.num_tokens
        hidden = rows(ctx, acts.hidden, n, spec.hidden_dim, spec.dtype)
        w = weights(ctx, self.parts[0])
        projected = self.family.output_projection(spec, w, attended(ctx, self, w), self.layer)
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

    @once_a_batch(lambda op: len(op.sums))
    def work(self) -> Work:
        # For each sum a kernel of its own reads it, and reads and writes the hidden states.
        values = self.batch.num_tokens * self.spec.hidden_dim * len(self.sums)
        return Work(device_bytes=values * (2 * self.spec.dtype_bytes + 4))

    def cost_features(self) -> tuple[float, ...]:
        return (float(self.batch.num_tokens * len(self.sums)),)

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
        flops = 2 * self.batch.num_sequences * self.spec.hidden_dim * self.spec.vocab_size
        return Work(flops=flops, device_bytes=self.weight_bytes())

    def cost_features(self) -> tuple[float, ...]:
        return (float(self.batch.num_sequences),)

    def run(self, ctx: Context, packet: int) -> None:
        spec, n = self.spec, self.batch.num_tokens
        hidden = rows(ctx, self.acts.hidden, n, spec.hidden_dim, spec.dtype)
        num_sequences = self.batch.num_sequences
        last_rows = device_rows(ctx, self.batch, self.acts)[3, :num_sequences]
        sampled = ctx.tensor(self.acts.sampled, (num_sequences,), "int64")
        at_once = max(1, self.acts.workspace.nbytes // head_workspace_bytes(spec))
        for run in (slice(first, first + at_once) for first in range(0, num_sequences, at_once)):
            last = hidden.index_select(0, last_rows[run])  # its logits are gone before the next run's are made
            sampled[run].copy_(self.family.head(spec, weights(ctx, self.parts[0]), last).argmax(dim=-1))
