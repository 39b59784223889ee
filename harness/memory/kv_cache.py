"""Keep a paged KV cache in host or device memory: block bookkeeping (torch-free) and the buffers behind it.

`ModelSpec.kv_pieces` says what is cached of a token: keys and values, or a latent. A piece's layout in one layer is
[block, head, block_size, width]: a block holds `block_size` tokens of every head, and a block number means the same
place in every layer and piece.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from harness.machine.base import CPU, Context, Lane, LaneKind, Machine, Op, Work
from harness.memory.tiers import DEVICE, Buffer, device_tier

if TYPE_CHECKING:
    from harness.engine.sequences import Sequence
    from harness.model.spec import ModelSpec


class Blocks(Protocol):
    """Offers what schedulers ask of blocks, wherever these lie. See `BlockAllocator` for the contracts."""

    block_size: int

    @property
    def num_blocks(self) -> int: ...
    @property
    def num_free(self) -> int: ...
    @property
    def num_used(self) -> int: ...
    @property
    def max_sequence_blocks(self) -> int: ...

    def free_for(self, sequence: Sequence) -> int: ...
    def blocks_for(self, num_tokens: int) -> int: ...
    def missing_blocks(self, sequence: Sequence, num_tokens: int) -> int: ...
    def grow(self, sequence: Sequence, num_tokens: int) -> None: ...
    def release(self, sequence: Sequence) -> list[int]: ...
    def check_integrity(self, sequences: Iterable[Sequence]) -> None: ...


class BlockAllocator:
    """A free list of `num_blocks` blocks, handed out in `order` (default: ascending), and who holds the others.

    `on_device` is where the blocks lie, there in the memory of GPU `rank`; a sequence that takes some carries it on
    (`Sequence.kv_on_device`, `kv_rank`).
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        order: Iterable[int] | None = None,
        on_device: bool = False,
        rank: int = 0,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.on_device, self.rank = on_device, rank
        self._free = list(range(num_blocks) if order is None else order)[::-1]
        self._holders: dict[int, Sequence] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    @property
    def max_sequence_blocks(self) -> int:
        """The blocks that one sequence could hold if it were alone."""
        return self.num_blocks

    def free_for(self, sequence: Sequence) -> int:
        """Return how many blocks the sequence could take now."""
        return self.num_free

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def missing_blocks(self, sequence: Sequence, num_tokens: int) -> int:
        """Return how many blocks the sequence lacks to hold `num_tokens`."""
        return max(0, self.blocks_for(num_tokens) - len(sequence.blocks))

    def grow(self, sequence: Sequence, num_tokens: int) -> None:
        """Give the sequence the blocks it lacks for `num_tokens`; the caller has checked that they are free."""
        missing = self.missing_blocks(sequence, num_tokens)
        assert missing <= self.num_free, f"{missing} blocks asked, {self.num_free} free"
        if not sequence.blocks:
            sequence.kv_on_device, sequence.kv_rank = self.on_device, self.rank
        assert self.is_home_of(sequence), "a sequence's blocks lie on one side"
        if missing:
            taken = self._free[: -missing - 1 : -1]
            del self._free[-missing:]
            self._holders.update(dict.fromkeys(taken, sequence))
            sequence.blocks += taken

    def is_home_of(self, sequence: Sequence) -> bool:
        """Return whether the blocks that the sequence holds, if any, are this allocator's."""
        return (sequence.kv_on_device, sequence.kv_rank) == (self.on_device, self.rank)

    def release(self, sequence: Sequence) -> list[int]:
        """Take all blocks of the sequence back and return them, in the list in which it had them. Every op that touches
        them must have finished."""
        released, sequence.blocks = sequence.blocks, []
        holders = [self._holders.pop(block) for block in released]
        assert all(holder is sequence for holder in holders), "a block belongs to another sequence"
        self._free += released
        sequence.num_cached = 0
        return released

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Assert that every block is free or held by exactly the sequence that lists it. Every cached token must have a
        place."""
        sequences = list(sequences)
        free, tables = set(self._free), [(block, s) for s in sequences for block in s.blocks]
        assert len(self._free) == len(free), "a block is twice in the free list"
        assert free.isdisjoint(self._holders), "a held block is in the free list"
        assert free | self._holders.keys() == set(range(self.num_blocks)), "blocks were lost"
        assert len(tables) == len({block for block, _ in tables}), "a block is twice in the tables"
        assert {block for block, _ in tables} == self._holders.keys(), "held blocks and block tables differ"
        assert all(self._holders[block] is s for block, s in tables), "a block is in the wrong table"
        assert all(s.num_cached <= len(s.blocks) * self.block_size for s in sequences), "cached tokens without a block"


class KVCache:
    """Holds blocks with memory behind them: for each layer one buffer per piece of `pieces`, in `tier`. The tier is
    "pinned", or "device" for the memory of GPU `rank`.

    A cache made `like` another one has blocks of the same numbers, which the other's allocator hands out: that is how
    several GPUs each keep their heads of the same tokens. Its memory has room for as many blocks as the other has, and
    `capacity_bytes` is not asked for.
    """

    def __init__(
        self,
        machine: Machine,
        spec: ModelSpec,
        *,
        capacity_bytes: int | None = None,
        block_size: int = 16,
        tier: str = "pinned",
        rank: int = 0,
        like: KVCache | None = None,
    ) -> None:
        self.on_device = tier == DEVICE
        if like is None:
            assert capacity_bytes is not None, "a cache of its own needs a size"
            num_blocks = capacity_bytes // (block_size * spec.kv_bytes_per_token)
            self.allocator = BlockAllocator(
                num_blocks, block_size, on_device=self.on_device, rank=rank if self.on_device else 0
            )
        else:
            assert like.on_device is self.on_device, "blocks of the same numbers lie on the same side"
            self.allocator = like.allocator
            like._alike.append(self)
        num_blocks, block_size = self.allocator.num_blocks, self.allocator.block_size
        self.pieces, self.block_size, self.dtype = spec.kv_pieces, block_size, spec.dtype
        self._machine = machine
        self._alike: list[KVCache] = []
        self._lane = Lane(LaneKind.GPU, rank) if self.on_device else CPU
        tiers = machine.tiers[device_tier(rank) if self.on_device else tier]
        self._root = root = tiers.reserve("kv cache", num_blocks * block_size * spec.kv_bytes_per_token)
        self.layers: list[tuple[Buffer, ...]] = []
        at = 0
        for layer in range(spec.num_layers):
            buffers = []
            for piece in self.pieces:
                nbytes = num_blocks * block_size * piece.dim * spec.dtype_bytes
                buffers.append(root.sub(f"{piece.name} {layer}", at, nbytes))
                at += nbytes
            self.layers.append(tuple(buffers))

    @property
    def host(self) -> KVCache | None:
        """The part of the cache that lies in host memory, if any."""
        return None if self.on_device else self

    @property
    def device(self) -> KVCache | None:
        """The part of the cache that lies in device memory, if any."""
        return self if self.on_device else None

    @property
    def num_device_blocks(self) -> int:
        return self.allocator.num_blocks if self.on_device else 0

    def views(self, ctx: Context, layer: int) -> tuple[Any, ...]:
        """Return one layer's pieces, each [blocks, num_heads, block_size, width]."""
        return tuple(
            ctx.tensor(buffer, (self.allocator.num_blocks, piece.num_heads, self.block_size, piece.width), self.dtype)
            for piece, buffer in zip(self.pieces, self.layers[layer], strict=True)
        )

    def region(self, layer: int, partition: int) -> tuple[Buffer, int, int]:
        """Return the dependency key of one layer's cache, for the sequences in `partition`."""
        return (self._root, layer, partition)

    def release(self, sequence: Sequence) -> None:
        """Free a sequence's blocks. Retirement has waited for every op that touched them."""
        blocks = self.allocator.release(sequence)
        if self._machine.poisons and blocks:
            for cache in (self, *self._alike):
                cache._poison(sequence.partition, tuple(blocks))  # before another partition takes the blocks

    def _poison(self, partition: int, blocks: tuple[int, ...]) -> None:
        for layer in range(len(self.layers)):
            poison = PoisonBlocks(self, layer, partition, blocks)
            self._machine.wait(self._machine.submit(self._lane, poison))

    def close(self) -> None:
        """Give the memory back; no block may be held, and no op may use it any more."""
        assert self.allocator.num_used == 0, "sequences hold blocks"
        for cache in (self, *self._alike):
            self._machine.tiers[cache._root.tier].release(cache._root)
        self._alike.clear()


class PoisonBlocks(Op):
    """Fills released KV blocks of one layer with NaN (in tests)."""

    kind: ClassVar[str] = "poison kv"

    def __init__(self, cache: KVCache, layer: int, partition: int, blocks: tuple[int, ...]) -> None:
        self.cache, self.layer, self.blocks = cache, layer, blocks
        self.writes = (cache.region(layer, partition),)

    def work(self) -> Work:
        """Return no work: poison serves tests, on machines that time nothing."""
        return Work()

    def run(self, ctx: Context, packet: int) -> None:
        assert self.layer is not None
        for piece in self.cache.views(ctx, self.layer):
            piece[list(self.blocks)] = float("nan")
