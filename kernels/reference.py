"""The oracles of the kernels in float64: they are slow and plain, and share no code with the kernels."""

from __future__ import annotations

import math

import numpy as np
import torch


def gather_cache(cache: torch.Tensor, block_table: torch.Tensor, context_len: int) -> np.ndarray:
    """Gather the `context_len` cached rows of one sequence as float64 [tokens, kv_heads, head_dim]."""
    num_kv_heads, block_size, head_dim = cache.shape[1:]
    rows = np.zeros((context_len, num_kv_heads, head_dim))
    for token in range(context_len):
        block = int(block_table[token // block_size])
        rows[token] = cache[block, :, token % block_size].double().numpy()
    return rows


def softmax(scores: np.ndarray) -> np.ndarray:
    """Compute the softmax over the last axis; a row that holds only -inf gives zeros."""
    top = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isneginf(top), 0.0, top))
    total = weights.sum(axis=-1, keepdims=True)
    return weights / np.where(total == 0, 1.0, total)


def round_bf16(values: np.ndarray) -> np.ndarray:
    """Round to the nearest bfloat16, ties to even, kept as float64. The values go through float32, as the kernels'
    accumulators do."""
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
    sinks: torch.Tensor | None = None,
    bf16_round: bool = False,
) -> torch.Tensor:
    """Compute decode attention as float64 [seqs, heads, head_dim]; the arguments are as in
    `kernels.decode_attention`."""
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
            weights = _weights(scores * scale, None if sinks is None else float(sinks[head]))
            row = weights @ values[:, head // group]
            out[seq, head] = round_bf16(row) if bf16_round else row
    return torch.from_numpy(out)


def _weights(scores: np.ndarray, sink: float | None) -> np.ndarray:
    return softmax(scores) if sink is None else softmax(np.append(scores, sink))[:-1]


def _attended(cache: torch.Tensor, block_table: torch.Tensor, first: int, last: int) -> np.ndarray:
    block_size = cache.shape[2]
    skipped = first // block_size  # blocks before the window may have been freed: their entries mean nothing
    return gather_cache(cache, block_table[skipped:], last - skipped * block_size)[first - skipped * block_size :]


def kv_append(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """Assign one token after another, through torch's own dtype conversion."""
    block_size = k_cache.shape[2]
    for token, slot in enumerate(slots.tolist()):
        k_cache[slot // block_size, :, slot % block_size] = k[token].to(k_cache.dtype)
        v_cache[slot // block_size, :, slot % block_size] = v[token].to(v_cache.dtype)


def latent_attention(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    key_up: torch.Tensor,
    value_up: torch.Tensor,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    scale: float,
) -> torch.Tensor:
    """Attend to keys and values decompressed for each token, as the model defines it: float64 [seqs, heads, value_dim].

    q_nope [seqs, heads, nope_dim], q_rope [seqs, heads, rope_dim], key_up [heads, nope_dim, latent_dim],
    value_up [heads, value_dim, latent_dim], cache [num_blocks, block_size, latent_dim + rope_dim].
    """
    num_seqs, num_heads, _ = q_nope.shape
    latent_dim = key_up.shape[2]
    out = np.zeros((num_seqs, num_heads, value_up.shape[1]))
    for seq in range(num_seqs):
        length = int(context_lens[seq])
        if length == 0:
            continue
        rows = gather_cache(cache.unsqueeze(1), block_tables[seq], length)[:, 0]
        latent, rope = rows[:, :latent_dim], rows[:, latent_dim:]
        for head in range(num_heads):
            keys = latent @ key_up[head].double().numpy().T
            values = latent @ value_up[head].double().numpy().T
            scores = keys @ q_nope[seq, head].double().numpy() + rope @ q_rope[seq, head].double().numpy()
            out[seq, head] = softmax(scores * scale) @ values
    return torch.from_numpy(out)


def gated(gate: np.ndarray, up: np.ndarray, activation: str, alpha: float = 1.702, limit: float = 7.0) -> np.ndarray:
    """Compute the input of the down projection by each activation's definition."""
    with np.errstate(over="ignore"):
        if activation == "silu":
            return gate / (1 + np.exp(-gate)) * up
        if activation == "gelu":
            return gate * 0.5 * (1 + np.vectorize(math.erf, otypes=[float])(gate / math.sqrt(2))) * up
        if activation == "gelu_tanh":
            return gate * 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up
        assert activation == "clamped_swiglu", activation
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
        return (up + 1) * gate / (1 + np.exp(-alpha * gate))


def expert_ffn(
    x: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    *,
    row_weights: torch.Tensor | None = None,
    activation: str = "silu",
    gate_bias: torch.Tensor | None = None,
    up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute one expert as float64 [tokens, hidden]; the arguments are as in `kernels.expert_ffn`."""

    def project(inputs: np.ndarray, weight: torch.Tensor, bias: torch.Tensor | None) -> np.ndarray:
        return inputs @ weight.double().numpy().T + (0 if bias is None else bias.double().numpy())

    rows = x.double().numpy()
    h = gated(project(rows, gate, gate_bias), project(rows, up, up_bias), activation)
    result = torch.from_numpy(project(h, down, down_bias))
    return result if row_weights is None else row_weights.double()[:, None] * result
