"""Make random tensors and paged caches on a device."""

import torch

TOLERANCE = {torch.float32: 3e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


class Draw:
    """Draws random tensors on a device."""

    def __init__(self, device, dtype, seed):
        self.device, self.dtype, self.generator = device, dtype, torch.Generator().manual_seed(seed)

    def __call__(self, *shape, dtype=None):
        return torch.randn(shape, generator=self.generator).to(self.device, dtype or self.dtype)


def close(found, expected):
    torch.testing.assert_close(found.double().cpu(), expected, rtol=0, atol=TOLERANCE[found.dtype])


def make_cache(draw, context_lens, num_kv_heads, head_dim, block_size):
    """Make two caches with blocks in random order, NaN where no token lies, and a stride between blocks."""
    needed = [-(-n // block_size) for n in context_lens]
    num_blocks = sum(needed) + 2
    order = torch.randperm(num_blocks, generator=draw.generator).tolist()
    tables = torch.full((len(context_lens), max(needed, default=0) + 1), -1, dtype=torch.int32)
    caches = []
    for _ in "kv":
        room = torch.full((num_blocks, num_kv_heads + 1, block_size, head_dim), float("nan"), dtype=draw.dtype)
        caches.append(room.to(draw.device)[:, :num_kv_heads])
    for row, (length, count) in enumerate(zip(context_lens, needed, strict=True)):
        blocks = [order.pop() for _ in range(count)]
        tables[row, :count] = torch.tensor(blocks, dtype=torch.int32)
        for cache in caches:
            for token in range(length):
                cache[blocks[token // block_size], :, token % block_size] = draw(num_kv_heads, head_dim)
    return (*caches, tables.to(draw.device))


def flat(tables, context_lens, block_size):
    """Return the used entries of each row, one row behind the other; as `UploadTokens` brings them."""
    return torch.cat([row[: -(-length // block_size)] for row, length in zip(tables, context_lens, strict=True)])
