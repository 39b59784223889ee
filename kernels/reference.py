"""Oracles in float64: slow, plain, and sharing no code with the kernels."""

from __future__ import annotations

import numpy as np
import torch


def gather_cache(cache: torch.Tensor, block_table: torch.Tensor, context_len: int) -> np.ndarray:
    """The `context_len` cached rows of one sequence as float64 [tokens, kv_heads, head_dim]."""
    num_kv_heads, block_size, head_dim = cache.shape[1:]
    rows = np.zeros((context_len, num_kv_heads, head_dim))
    for token in range(context_len):
        block = int(block_table[token // block_size])
        rows[token] = cache[block, :, token % block_size].double().numpy()
    return rows


def softmax(scores: np.ndarray) -> np.ndarray:
    """Over the last axis; a row of -inf only gives zeros."""
    top = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isneginf(top), 0.0, top))
    total = weights.sum(axis=-1, keepdims=True)
    return weights / np.where(total == 0, 1.0, total)


def round_bf16(values: np.ndarray) -> np.ndarray:
    """Nearest bfloat16, ties to even, kept as float64. Goes through float32, as the kernels' accumulators do."""
    return torch.from_numpy(np.asarray(values, dtype=np.float32)).bfloat16().double().numpy()


def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    scale: float,
    sliding_window: int = 0,
    bf16_round: bool = False,
) -> torch.Tensor:
    """float64 [seqs, heads, head_dim]; arguments as `kernels.decode_attention`."""
    num_seqs, num_heads, head_dim = q.shape
    group = num_heads // k_cache.shape[1]
    out = np.zeros((num_seqs, num_heads, head_dim))
    for seq in range(num_seqs):
        length = int(context_lens[seq])
        if length == 0:
            continue
        first = max(0, length - sliding_window) if sliding_window else 0
        keys, values = (_attended(c, block_tables[seq], first, length) for c in (k_cache, v_cache))
        for head in range(num_heads):
            scores = keys[:, head // group] @ q[seq, head].double().numpy()
            if bf16_round:
                scores = round_bf16(scores)
            row = softmax(scores * scale) @ values[:, head // group]
            out[seq, head] = round_bf16(row) if bf16_round else row
    return torch.from_numpy(out)


def _attended(cache: torch.Tensor, block_table: torch.Tensor, first: int, last: int) -> np.ndarray:
    block_size = cache.shape[2]
    skipped = first // block_size  # blocks before the window may have been freed: their entries mean nothing
    return gather_cache(cache, block_table[skipped:], last - skipped * block_size)[first - skipped * block_size :]


def kv_append(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """One assignment a token, through torch's own dtype conversion."""
    block_size = k_cache.shape[2]
    for token, slot in enumerate(slots.tolist()):
        k_cache[slot // block_size, :, slot % block_size] = k[token].to(k_cache.dtype)
        v_cache[slot // block_size, :, slot % block_size] = v[token].to(v_cache.dtype)
