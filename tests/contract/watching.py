"""Finds what ops touch and do not declare, in one run of each, whatever order they run in.

An op's memory is found by the views that it takes from its context. Each packet runs twice: once as it is, and once
with every bit of that memory changed that the op does not declare; what it writes must be the same.

What ops declare and do not touch is collected over runs, by class and kind of key: one op may have no rows of a kind.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

import numpy as np
import torch

from harness.engine.activations import ATTENDED_BY
from harness.machine.base import Op
from harness.machine.shuffled import ShuffledMachine
from harness.memory.kv_cache import PoisonBlocks
from harness.memory.tiers import Buffer
from harness.memory.transfers import AllGather, CopyShare, Poison, fetched, share_of

EVERY_BIT = 0xFF
Range = tuple[Buffer, int, int]  # root, first byte, end
Declaration = tuple[str, str, str]  # class of the op, "reads" or "writes", kind of key


class Undeclared(AssertionError):
    """An op touches what it does not declare."""


class Watched:
    """A context that takes down which buffers an op gets hold of, and what was in them before."""

    def __init__(self, ctx: Any, look: Callable[[Buffer], torch.Tensor] | None = None) -> None:
        self._ctx, self._look = ctx, look
        self.before: dict[Buffer, torch.Tensor | None] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)

    def memo(self, buffer: Buffer) -> Any:
        self._note(buffer)
        return self._ctx.memo(buffer)

    def tensor(self, buffer: Buffer, *shape_and_dtype: Any) -> torch.Tensor:
        self._note(buffer)
        found: torch.Tensor = self._ctx.tensor(buffer, *shape_and_dtype)
        return found

    def copy(self, dst: Buffer, src: Buffer, *range_bytes: int) -> None:
        self._note(dst)
        self._note(src)
        self._ctx.copy(dst, src, *range_bytes)

    def _note(self, buffer: Buffer) -> None:
        if buffer not in self.before:
            self.before[buffer] = self._look(buffer).clone() if self._look else None


class WatchingMachine(ShuffledMachine):
    """The shuffled machine, with every packet of every op watched while it `watches`; `seen` has the classes of those
    that ran.

    `declared` has what they declared, and `touched` what of that any of them got hold of, or, of writes, changed.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.watches = True
        self.seen: set[type[Op]] = set()
        self.declared: set[Declaration] = set()
        self.touched: set[Declaration] = set()

    def _execute(self, op: Op, ctx: Any, packet: int) -> Any:
        if not self.watches:
            return super()._execute(op, ctx, packet)
        self.seen.add(type(op))
        memory = self._arenas.bytes_of
        watched = Watched(ctx, memory)
        value = op.run_packet(watched, packet)
        before = {buffer: found for buffer, found in watched.before.items() if found is not None}
        after = {buffer: memory(buffer).clone() for buffer in before}
        reads, writes = list(ranges(op, op.reads)), list(ranges(op, op.writes))
        declared = {buffer: mask_of(buffer, [*reads, *writes]) for buffer in before}
        changed = {buffer: found ^ after[buffer] for buffer, found in before.items()}
        for buffer, bits in changed.items():
            if (bits & ~mask_of(buffer, writes)).any():
                raise Undeclared(f"{told(op)} writes {buffer.name} and does not declare it")
        self._collect(op, changed)

        def is_same_without(hidden: list[Buffer]) -> bool:
            """Tell whether the op does the same where it finds nothing that it does not declare, in these buffers."""
            for buffer, found in reversed(before.items()):
                memory(buffer).copy_(found)
            for buffer in hidden:
                memory(buffer).bitwise_xor_(~declared[buffer])
            try:
                again = op.run_packet(ctx, packet)
            except Exception:
                return False  # such as of a token that is none
            return equal(value, again) and not any(
                ((memory(buffer) ^ found) & declared[buffer]).any() for buffer, found in after.items()
            )

        hidden = [buffer for buffer in before if not declared[buffer].all()]
        if hidden and not is_same_without(hidden):
            named = [buffer.name for buffer in hidden if not is_same_without([buffer])]
            raise Undeclared(f"{told(op)} reads {', '.join(named)} and does not declare it")
        for buffer, found in after.items():
            memory(buffer).copy_(found)
        return value

    def _collect(self, op: Op, changed: dict[Buffer, torch.Tensor]) -> None:
        """Take down what of its declared keys an op has touched; `changed` has the bits of what it got hold of."""
        for which, keys in (("reads", op.reads), ("writes", op.writes)):
            for key in keys:
                declaration = (type(op).__name__, which, kind_of(op, key))
                self.declared.add(declaration)
                if declaration in self.touched:
                    continue
                found = list(ranges(op, (key,)))
                if any(
                    ((bits if which == "writes" else torch.ones_like(bits)) & mask_of(buffer, found)).any()
                    for buffer, bits in changed.items()
                ):
                    self.touched.add(declaration)


def untouched(machines: list[WatchingMachine]) -> set[Declaration]:
    """Return what ops of these runs declare and none of their class touches. `Poison` has all keys that name any
    part."""
    declared, touched = (
        set().union(*(getattr(machine, what) for machine in machines)) for what in ("declared", "touched")
    )
    return {each for each in declared - touched if each[0] != "Poison"}


def kind_of(op: Op, key: Hashable) -> str:
    """Name what a key is to an op, whichever its buffer is: where the op has it from, else its name without numbers."""
    if isinstance(key, tuple) and len(key) == 3:
        return "blocks of the cache"
    buffer, part = key if isinstance(key, tuple) else (key, "")
    for holder in (getattr(op, "acts", None), op):
        for name, value in vars(holder).items() if holder is not None else ():
            if name not in ("reads", "writes") and (value is buffer or (isinstance(value, tuple) and buffer in value)):
                return f"{name} {part}".strip()
    return re.sub(r"\d+", "#", f"{buffer.name} {part}").strip()


def undeclared_views(op: Op, touched: Iterable[Buffer]) -> list[str]:
    """Name the buffers of which the op has got hold and of which it declares no byte."""
    declared = [buffer for key in (*op.reads, *op.writes) for buffer in _named_by(op, key)]
    return [buffer.name for buffer in touched if not any(_overlap(buffer, other) for other in declared)]


def _named_by(op: Op, key: Hashable) -> list[Buffer]:
    """Return what a key is about, whatever part of it."""
    if isinstance(key, tuple) and len(key) == 3:
        return list(op.cache.layers[key[1]])
    return [key if isinstance(key, Buffer) else key[0]]


def _overlap(a: Buffer, b: Buffer) -> bool:
    apart = a.offset_bytes + a.nbytes <= b.offset_bytes or b.offset_bytes + b.nbytes <= a.offset_bytes
    return a.root is b.root and not apart


def mask_of(buffer: Buffer, declared: list[Range]) -> torch.Tensor:
    """Return uint8 [bytes of the buffer] with every bit set of the bytes that lie in a range."""
    mask = torch.zeros(buffer.nbytes, dtype=torch.uint8)
    for root, begin, end in declared:
        if root is buffer.root:
            mask[max(0, begin - buffer.offset_bytes) : max(0, end - buffer.offset_bytes)] = EVERY_BIT
    return mask


def ranges(op: Op, keys: Iterable[Hashable]) -> Iterator[Range]:
    """Yield what each key of an op stands for. A key of an unknown form is a failure."""
    for key in keys:
        if isinstance(key, Buffer):
            yield _part(key, 0, key.nbytes)
        elif isinstance(key, tuple) and len(key) == 2 and isinstance(key[0], Buffer):
            yield from _named(op, *key)
        elif isinstance(key, tuple) and len(key) == 3:
            yield from _blocks(op, *key)
        else:
            raise Undeclared(f"{told(op)} declares {key}, which names no memory")


def _part(buffer: Buffer, begin: int, end: int) -> Range:
    return buffer.root, buffer.offset_bytes + begin, buffer.offset_bytes + end


def _named(op: Op, buffer: Buffer, name: Hashable) -> Iterator[Range]:
    """Yield rows of attention results by who writes them, or a GPU's own share of a buffer."""
    if isinstance(op, Poison):
        yield _part(buffer, 0, buffer.nbytes)
    elif (buffer, name) == fetched(buffer) and isinstance(op, AllGather):
        share = share_of(op.nbytes, op.buffers.index(buffer), len(op.buffers))
        yield _part(buffer, share.start, share.stop)
    elif (buffer, name) == fetched(buffer) and isinstance(op, CopyShare):
        yield _part(buffer, op.share.start, op.share.stop)
    elif name in ATTENDED_BY:
        batch = op.batch
        prefill = slice(0, batch.num_prefill_tokens)
        rows = dict(zip(ATTENDED_BY, (prefill, batch.on_host.decode, batch.on_device.decode), strict=True))[name]
        row_bytes = op.spec.o_row_dim * op.spec.dtype_bytes
        yield _part(buffer, rows.start * row_bytes, rows.stop * row_bytes)
    else:
        raise Undeclared(f"{told(op)} declares {name} of {buffer.name}, which names no memory")


def _blocks(op: Op, root: Buffer, layer: int, partition: int) -> Iterator[Range]:
    """Yield the blocks of a partition's sequences in one layer of a KV cache, as far as the op knows these
    sequences."""
    assert root is op.cache.layers[0][0].root, f"{told(op)} declares another cache than its own"
    sequences = [] if isinstance(op, PoisonBlocks) else [s for s in op.batch.sequences if s.partition == partition]
    blocks = op.blocks if isinstance(op, PoisonBlocks) else [b for s in sequences for b in s.blocks]
    for buffer in op.cache.layers[layer]:
        block_bytes = buffer.nbytes // op.cache.allocator.num_blocks
        yield from (_part(buffer, block * block_bytes, (block + 1) * block_bytes) for block in blocks)


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return one is other or np.array_equal(one, other)


def told(op: Op) -> str:
    return f"{type(op).__name__} ({op})"
