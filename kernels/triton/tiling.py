"""Tile sizes by dtype and problem: fixed, so that a pass never waits for a search. Torch and Triton are not needed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tiles:
    """A program's share of a product: `rows` tokens, `columns` outputs, `depth` inputs a step."""

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Chip:
    """Holds what tiles depend on. major: of the compute capability.
    shared_bytes: what one block may take: 227 KiB on 9.0, 163 on 8.0, 99 on 8.6 and 8.9, 64 on 7.5.
    processors: streaming multiprocessors, 132 of an H100 or H200; 0 where nobody knows them."""

    major: int = 8
    shared_bytes: int = 99 << 10
    processors: int = 0

    @property
    def has_warp_groups(self) -> bool:
        """True where whole warp groups multiply, with operands in shared memory: data-centre chips since Hopper. Those
        of 12.x, as all before 9, would spill what such products hold."""
        return self.major in (9, 10)


_LEAST_ROWS = 16  # of a tensor core's product
_GROUP_ROWS = 64  # of a product of a whole warp group
_MOST_STAGES = 4
_MEAN_ROWS = 1.5  # of a tile, over the tokens that an expert gets on average
_MOST_TOGETHER = 8  # column tiles
_TOGETHER_BYTES = 20 << 20  # of their weights, beside what else is in the 40 to 50 MB of a large GPU's second cache
_MOST_SPLITS = 32  # of a context
_PROGRAMS_OF_A_PROCESSOR = 2  # that keep its memory busy; on an H200, 4 to 32 programs a context took the same
# 16-bit: rows of a tile -> (columns of all weights, depth, warps). Few rows: the weights' bandwidth counts, so long
# rows of weights; many rows: operands are reused, as far as the float32 sums fit the registers.
_HALF = {16: (128, 128, 4), 32: (128, 128, 4), 64: (256, 64, 8), 128: (256, 64, 8)}
_HALF_BEFORE_9 = {**_HALF, 128: (128, 32, 8)}  # 128 x 256 sums spill to memory there
_FLOAT = {16: (64, 32, 4), 32: (128, 32, 4)}  # no tensor cores without TF32: small tiles, products in registers
_MOST_COLUMNS = 128  # of one weight


def expert_tiles(element_bytes: int, rows_per_expert: float, num_weights: int, chip: Chip) -> Tiles:
    """Choose tiles for a product of one expert's tokens with `num_weights` matrices at once.

    The tile's rows are the power of two that holds half as many tokens again as an expert gets on average, within what
    the table has: each tile reads the weights, and under a tile as high as the average half of the experts need two.
    (On an H200, 64 tokens of Mixtral-8x7B take 0.67 ms in tiles of 32 rows, 0.81 in tiles of 16.)
    """
    table = _FLOAT if element_bytes != 2 else _HALF if chip.has_warp_groups else _HALF_BEFORE_9
    rows = next((rows for rows in table if rows >= _MEAN_ROWS * rows_per_expert), max(table))
    all_columns, depth, num_warps = table[rows]
    columns = min(all_columns // num_weights, _MOST_COLUMNS)
    stage_bytes = (rows + num_weights * columns) * depth * element_bytes
    num_stages = max(1, min(_MOST_STAGES, chip.shared_bytes // stage_bytes))
    return Tiles(rows, columns, depth, num_warps, num_stages)


def columns_together(tiles: Tiles, num_weights: int, inputs: int, element_bytes: int) -> int:
    """Choose how many column tiles of a product run side by side over one row tile, which they then share in the cache.

    Their weights are shared by the row tiles that come next, so that they have to stay there as well.
    """
    return max(1, min(_MOST_TOGETHER, _TOGETHER_BYTES // (num_weights * tiles.columns * inputs * element_bytes)))


def mean_choices(element_bytes: int) -> tuple[int, ...]:
    """Return mean numbers of tokens an expert for which `expert_tiles` chooses each of its tile heights."""
    return tuple(rows // 2 for rows in (_HALF if element_bytes == 2 else _FLOAT))


def prefill_tiles(element_bytes: int, head_dim: int, chip: Chip) -> Tiles:
    """Choose tiles whose rows are queries, columns keys, and depth the padded head dimension."""
    if element_bytes != 2:
        rows, columns, num_warps = 16, 32, 4
    elif head_dim > 128:
        rows, columns, num_warps = 64, 32, 4
    elif chip.has_warp_groups:  # one a program: on an H200 0.19 ms where 128 rows of two took 0.25, over 64 prompts
        rows, columns, num_warps = _GROUP_ROWS, 32, 4
    else:
        rows, columns, num_warps = 128, 32, 8
    return Tiles(rows, columns, head_dim, num_warps, _attention_stages(element_bytes, rows, columns, head_dim, chip))


def decode_tiles(element_bytes: int, head_dim: int, group_size: int, chip: Chip) -> Tiles:
    """Choose tiles whose rows are the query heads of one KV head, padded, and whose columns are keys."""
    rows = _LEAST_ROWS
    while rows < group_size:
        rows *= 2
    columns = 64 if element_bytes == 2 and head_dim <= 256 else 32
    num_warps = 4 if element_bytes == 2 else 8  # of which fewer lack registers: no tensor core multiplies float32
    return Tiles(rows, columns, head_dim, num_warps, _attention_stages(element_bytes, rows, columns, head_dim, chip))


def decode_splits(programs: int, chip: Chip) -> int:
    """Choose how many programs share a context where there are `programs` of sequence and KV head."""
    return max(1, min(_MOST_SPLITS, _PROGRAMS_OF_A_PROCESSOR * chip.processors // programs))


def latent_tiles(element_bytes: int, width: int, num_heads: int, chip: Chip) -> Tiles:
    """Choose tiles whose rows are heads, whose columns are tokens, and whose depth is a token's padded row.

    More rows read each token fewer times, as far as the float32 sums fit the registers.
    """
    rows, columns, num_warps = _LEAST_ROWS, 32 if element_bytes == 2 else 16, 4
    step_bytes = columns * width * element_bytes
    if element_bytes == 2 and num_heads > _LEAST_ROWS:
        rows, num_warps = 32, 8
        if chip.has_warp_groups and num_heads > rows and _GROUP_ROWS * width * 2 + 2 * step_bytes <= chip.shared_bytes:
            rows = _GROUP_ROWS
    steps = (chip.shared_bytes - rows * width * element_bytes) // step_bytes  # that fit beside the queries
    num_stages = steps if rows == _GROUP_ROWS else steps + 1  # a warp's product has its step in registers
    return Tiles(rows, columns, width, num_warps, max(1, min(3, num_stages)))


def _attention_stages(element_bytes: int, rows: int, columns: int, head_dim: int, chip: Chip) -> int:
    """Choose how many steps' keys and values stand in shared memory at once, beside the queries."""
    left_bytes = chip.shared_bytes - rows * head_dim * element_bytes
    return max(1, min(3, left_bytes // (2 * columns * head_dim * element_bytes)))
