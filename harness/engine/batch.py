"""The tokens that go through the model together lie in plain arrays. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from operator import attrgetter
from typing import Any

import numpy as np

from harness.engine.held_blocks import HeldBlocks
from harness.engine.sequences import Sequence, num_tokens
from harness.machine.base import Work
from harness.memory.kv_cache import Blocks
from harness.model.spec import ModelSpec
from kernels import fields

_PADDING_ID = 0  # any token will do: nothing attends to it


@dataclass(eq=False, slots=True)
class PassPlan:
    """The scheduler decides this for one pass. The KV blocks for every token of the pass have been taken.

    `micro_batches` divides the pass's sequences into groups that go through a layer together, in the order in which
    they run; None where the scheduler leaves that to the pipeline. `assembled` has these groups if laid out already.
    """

    prefill: list[Sequence]
    decode: list[Sequence]
    mode: str
    num_preemptions: int = 0
    micro_batches: list[list[Sequence]] | None = None
    assembled: Seq[MicroBatch] | None = None

    @property
    def sequences(self) -> list[Sequence]:
        return [*self.prefill, *self.decode]


NUM_ROW_FIELDS = 4  # number of rows of `MicroBatch.rows`


@dataclass(eq=False, frozen=True)
class MicroBatch:
    """A micro-batch holds its tokens in rows: first the rows of prefilling sequences, one after another, then one row
    for each decoding sequence.

    In both groups, sequences whose KV cache lies in host memory come before those that have it on the device. Padding
    of a prompt follows the prompt, where causal attention hides it; in the cache it lies behind all tokens that the
    sequence will ever have, where a decoding sequence's context does not reach.

    A micro-batch never changes, and its arrays are read-only: ops that run later, and those of other GPUs, refer to
    them. What lies in which block is put together when it is asked for, which no machine does that computes nothing.
    """

    index: int
    prefill: tuple[Sequence, ...]
    decode: tuple[Sequence, ...]
    token_ids: np.ndarray  # int64 [tokens]
    positions: np.ndarray  # int64 [tokens]
    find_slots: Callable[[], np.ndarray]  # gives `slots`
    prefill_lens: tuple[int, ...]  # padding included
    kv_reads: KvReads  # of the decoding rows
    last_rows: np.ndarray  # int64 [sequences], the row whose hidden state gives the next token
    partitions: tuple[int, ...]
    num_host_prefill_tokens: int  # prefill tokens whose keys and values go to the host cache
    num_host_decode: int

    def __post_init__(self) -> None:
        _close_arrays(self)

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        return (*self.prefill, *self.decode)

    @cached_property
    def works(self) -> dict[Hashable, tuple[Work, ModelSpec]]:
        """The work of ops on this micro-batch in a model, as far as it is known: see `once_a_batch`."""
        return {}

    @cached_property
    def num_sequences(self) -> int:
        return len(self.last_rows)

    @cached_property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @cached_property
    def num_prefill_tokens(self) -> int:
        return len(self.token_ids) - len(self.decode)

    @cached_property
    def slots(self) -> np.ndarray:
        """The KV slot of each token, block * block_size + offset: int64 [tokens]."""
        return _read_only(self.find_slots())

    @cached_property
    def num_padding_tokens(self) -> int:
        """The number of rows that hold padding and no token of a sequence."""
        return sum(s.padding for s in self.prefill)

    def twice_pairs(self, window: int | None) -> int:
        """Return twice the number of pairs of a prompt's token and a token that it sees: itself and those before, at
        most `window` of them. Layers with the same window ask for the same."""
        if window not in self._twice_pairs:
            lens = np.asarray(self.prefill_lens, dtype=np.int64)
            seen = lens if window is None else lens.clip(max=window)
            self._twice_pairs[window] = int(((2 * lens - seen) * seen).sum())  # up to a window, each sees one more
        return self._twice_pairs[window]

    @cached_property
    def _twice_pairs(self) -> dict[int | None, int]:
        return {}

    @cached_property
    def on_host(self) -> CachedRows:
        """The rows whose keys and values lie in host memory."""
        first, count = self.num_prefill_tokens, self.num_host_decode
        return CachedRows(self, slice(0, self.num_host_prefill_tokens), slice(first, first + count))

    @cached_property
    def on_device(self) -> CachedRows:
        """The rows whose keys and values lie in device memory."""
        first, count = self.num_prefill_tokens, self.num_host_decode
        return CachedRows(self, slice(self.num_host_prefill_tokens, first), slice(first + count, self.num_tokens))

    @cached_property
    def rows(self) -> np.ndarray:
        """The facts that ops on the device need of the rows, int64 [4, tokens]: token ids, positions, KV slots, and
        `last_rows` with zeros behind them."""
        found = np.zeros((NUM_ROW_FIELDS, self.num_tokens), dtype=np.int64)
        found[0], found[1], found[2] = self.token_ids, self.positions, self.slots
        found[3, : len(self.last_rows)] = self.last_rows
        return _read_only(found)

    @cached_property
    def request_ids(self) -> np.ndarray:
        """The request of each row, int64 [tokens]."""
        lens = (*self.prefill_lens, *[1] * len(self.decode))
        return _read_only(np.repeat([s.request.request_id for s in self.sequences], lens).astype(np.int64))

    @cached_property
    def records_routing(self) -> bool:
        """True if a sequence of the micro-batch records its routing. Each layer asks, and the sequences are many."""
        return any(map(attrgetter("records"), self.sequences))

    @cached_property
    def records_weights(self) -> bool:
        """True if the weights of the experts are recorded too."""
        return any(s.records is not None and s.records.weights for s in self.sequences)

    @cached_property
    def sampled_rows(self) -> np.ndarray:
        """The rows whose router inputs are recorded, int64 [sampled], ascending; none of them holds padding."""
        samples = {s.records.sample for s in self.sequences if s.records is not None} - {None}
        assert len(samples) <= 1, "all sequences of a run are sampled alike"
        chosen = np.zeros(self.num_tokens, dtype=bool)
        for sample in filter(None, samples):
            sampled = sample(self.request_ids, self.positions)
            for _, rows in self.rows_of():
                chosen[rows] = sampled[rows]
        return _read_only(np.flatnonzero(chosen))

    @cached_property
    def sampled_runs(self) -> tuple[slice, ...]:
        """The `sampled_rows` as few slices of the micro-batch's rows."""
        rows = self.sampled_rows
        runs = np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1) if len(rows) else []
        return tuple(slice(int(run[0]), int(run[-1]) + 1) for run in runs)

    def rows_of(self) -> Iterable[tuple[Sequence, slice]]:
        """Yield each sequence with the rows of its own tokens."""
        paddings = (*(s.padding for s in self.prefill), *[0] * len(self.decode))
        lens, start = (*self.prefill_lens, *[1] * len(self.decode)), 0
        for sequence, length, padding in zip(self.sequences, lens, paddings, strict=True):
            yield sequence, slice(start, start + length - padding)
            start += length


@dataclass(frozen=True, eq=False)
class KvReads:
    """Decode attention reads these: entry i is the query of row `queries[i]` over the first `lens[i]` tokens in blocks
    `tables[i]`.

    The first `num_rows` entries are the decoding rows' contexts, in the order of the rows. The entries behind them are
    shadows: the padding of a prompt, which a padded system reads behind a mask. The result of a shadow is dropped.
    """

    queries: np.ndarray  # int64 [entries], decoding rows
    find_tables: Callable[[], np.ndarray]  # gives `tables`
    lens: np.ndarray  # int32 [entries], of a context with the new token
    num_rows: int
    block_size: int  # tokens of a KV block

    def __post_init__(self) -> None:
        _close_arrays(self)

    @property
    def num_shadows(self) -> int:
        return len(self.lens) - self.num_rows

    @property
    def contexts(self) -> KvReads:
        """The reads of contexts, without the shadows."""
        return self if not self.num_shadows else self._take(slice(0, self.num_rows), 0, self.num_rows)

    def among(self, start: int, stop: int) -> KvReads:
        """Return the reads of the rows from `start` to `stop`; their rows are then counted from 0."""
        kept: Any = slice(start, stop)
        if self.num_shadows:
            kept = (self.queries >= start) & (self.queries < stop)
        return self._take(kept, start, stop - start)

    def _take(self, kept: Any, start: int, num_rows: int) -> KvReads:
        lens = self.lens[kept]
        return KvReads(self.queries[kept] - start, lambda: self.tables[kept], lens, num_rows, self.block_size)

    @cached_property
    def tables(self) -> np.ndarray:
        """The blocks of each entry: int32 [entries, blocks]."""
        return _read_only(self.find_tables())

    @property
    def positions(self) -> np.ndarray:
        """The position of the last token that each entry reads, int64 [entries], counted within the entry."""
        return self.lens.astype(np.int64) - 1

    @cached_property
    def lens_by_row(self) -> np.ndarray:
        """The number of tokens that each row's entries read together, int64 [num_rows]."""
        found = self.lens[: self.num_rows].astype(np.int64)
        np.add.at(found, self.queries[self.num_rows :], self.lens[self.num_rows :])
        return _read_only(found)

    @property
    def num_blocks(self) -> np.ndarray:
        """The number of blocks that each entry reads, int32 [entries]."""
        return -(-self.lens // self.block_size)

    @cached_property
    def flat_blocks(self) -> np.ndarray:
        """The blocks that the first entry reads, then those that the second one reads, and so on: int32."""
        return _read_only(self.tables[np.arange(self.tables.shape[1]) < self.num_blocks[:, None]])


class CachedRows:
    """The rows of a micro-batch whose keys and values lie on one side: `prefill` and `decode` as slices of all rows."""

    def __init__(self, batch: MicroBatch, prefill: slice, decode: slice) -> None:
        first = batch.num_prefill_tokens
        self.prefill, self.decode = prefill, decode
        self.num_decode = decode.stop - decode.start
        self.num_tokens = prefill.stop - prefill.start + self.num_decode
        self.reads = batch.kv_reads.among(decode.start - first, decode.stop - first)

    @property
    def ranges(self) -> list[slice]:
        """All the rows as few slices of the micro-batch's rows; no slice is empty."""
        if self.prefill.stop == self.decode.start:
            found = [slice(self.prefill.start, self.decode.stop)]
        else:
            found = [self.prefill, self.decode]
        return [rows for rows in found if rows.start < rows.stop]

    @property
    def read_lens(self) -> np.ndarray:
        """The KV-cache tokens that decode attention reads for each row, int64 [decode]: the context, and padding."""
        return self.reads.lens_by_row

    @cached_property
    def num_context_tokens(self) -> int:
        """The number of KV-cache tokens that decode attention reads."""
        return int(self.read_lens.sum())

    @property
    def num_blocks(self) -> int:
        """The length of `flat_blocks`, for those who need no more."""
        return int(self.reads.contexts.num_blocks.sum())

    @cached_property
    def flat_blocks(self) -> np.ndarray:
        """The blocks of the first decoding sequence's context, then those of the second one, and so on: int32."""
        return self.reads.contexts.flat_blocks

    def num_seen_tokens(self, spec: ModelSpec, layer: int, rows: range | None = None) -> int:
        """Return how many of the tokens that decode attention reads, for all rows or some, lie within the layer's
        window."""
        window = spec.seen_tokens(layer, spec.max_positions)
        if rows is None and window >= spec.max_positions:
            return self.num_context_tokens
        lens = self.read_lens if rows is None else self.read_lens[rows.start : rows.stop]
        return int((lens if window >= spec.max_positions else lens.clip(max=window)).sum())


def _read_only(array: np.ndarray) -> np.ndarray:
    array.setflags(write=False)
    return array


def _close_arrays(frozen: MicroBatch | KvReads) -> None:
    for value in vars(frozen).values():
        if isinstance(value, np.ndarray):
            _read_only(value)


def _host_first(sequences: Seq[Sequence]) -> list[Sequence]:
    return [sequences[at] for at in np.argsort(fields.values(sequences, "kv_on_device"), kind="stable").tolist()]


def assemble(index: int, prefill: Seq[Sequence], decode: Seq[Sequence], allocator: Blocks) -> MicroBatch:
    """Lay out the pending tokens of the given sequences, whose blocks have been taken, as a micro-batch. All rows are
    made at once, since sequences are many."""
    prefill, decode = _host_first(prefill), _host_first(decode)
    prompts, contexts = HeldBlocks(prefill, allocator.block_size), HeldBlocks(decode, allocator.block_size)
    lens, paddings = num_tokens(prefill), fields.values(prefill, "padding")
    texts, newest = _prefill_rows(prompts, lens, paddings), _decode_rows(contexts)
    lens = lens + paddings
    ends = np.cumsum(lens)
    return MicroBatch(
        index=index,
        prefill=tuple(prefill),
        decode=tuple(decode),
        token_ids=np.concatenate((texts.token_ids, newest.token_ids)),
        positions=np.concatenate((texts.positions, newest.positions)),
        find_slots=lambda: np.concatenate((texts.find_slots(), newest.find_slots())),
        prefill_lens=tuple(lens.tolist()),
        kv_reads=_kv_reads(contexts),
        last_rows=np.concatenate((ends - 1 - paddings, lens.sum() + np.arange(len(decode)))),
        partitions=tuple(np.unique(fields.values([*prefill, *decode], "partition")).tolist()),
        num_host_prefill_tokens=int(lens[~_on_device(prefill)].sum()),
        num_host_decode=int((~_on_device(decode)).sum()),
    )


def _on_device(sequences: Seq[Sequence]) -> np.ndarray:
    return fields.values(sequences, "kv_on_device").astype(bool)


@dataclass(frozen=True, slots=True)
class _Rows:
    token_ids: np.ndarray  # int64 [tokens]
    positions: np.ndarray  # int64 [tokens]
    find_slots: Callable[[], np.ndarray]  # int64 [tokens]


def _prefill_rows(held: HeldBlocks, own: np.ndarray, paddings: np.ndarray) -> _Rows:
    """Return the rows of each sequence's whole text, `own` tokens, and of the padding behind it."""
    assert not fields.values(held.sequences, "num_cached").any(), "a prefill starts from an empty cache"
    lens = own + paddings
    which = np.repeat(np.arange(len(lens)), lens)
    positions = np.arange(len(which)) - np.repeat(np.cumsum(lens) - lens, lens)
    pads, at = positions >= own[which], positions
    token_ids = np.full(len(which), _PADDING_ID, dtype=np.int64)
    token_ids[~pads] = np.fromiter(chain.from_iterable(s.pending_ids() for s in held.sequences), np.int64)
    if pads.any():
        behind = fields.values(held.sequences, "max_tokens") - own
        held.require(np.where(paddings > 0, lens + behind, own))
        at = positions + np.where(pads, behind[which], 0)
    else:
        held.require(own)
    return _Rows(token_ids, positions, partial(held.slots, which, at))


def _decode_rows(held: HeldBlocks) -> _Rows:
    """Return the row of each sequence's newest token."""
    cached = fields.values(held.sequences, "num_cached")
    assert (num_tokens(held.sequences) - cached == 1).all(), "a decoding sequence has exactly one new token"
    held.require(cached + 1)
    return _Rows(fields.last(held.sequences, "generated"), cached, partial(held.slots, np.arange(len(cached)), cached))


def _kv_reads(held: HeldBlocks) -> KvReads:
    """Return the reads of decoding sequences: their contexts, and the padding of those that have any, from the block in
    which the padding begins."""
    decode, paddings = held.sequences, fields.values(held.sequences, "padding")
    padded = np.flatnonzero(paddings)
    starts = [decode[row].max_tokens for row in padded]
    return KvReads(
        queries=np.concatenate((np.arange(len(decode)), padded)),
        find_tables=partial(_tables, held, padded, starts),
        lens=np.concatenate((fields.values(decode, "num_cached") + 1, paddings[padded])).astype(np.int32),
        num_rows=len(decode),
        block_size=held.block_size,
    )


def _tables(held: HeldBlocks, padded: np.ndarray, starts: list[int]) -> np.ndarray:
    """Return the blocks of all contexts, and then those of the padding of the rows `padded` from tokens `starts` on."""
    shadows = [held.behind(row, start) for row, start in zip(padded, starts, strict=True)]
    used = np.concatenate((held.counts, np.asarray([len(blocks) for blocks in shadows], dtype=np.int64)))
    tables = np.zeros((len(used), used.max(initial=0)), dtype=np.int32)
    behind = np.fromiter(chain.from_iterable(shadows), np.int64)
    tables[np.arange(tables.shape[1]) < used[:, None]] = np.concatenate((held.blocks, behind))
    return tables
