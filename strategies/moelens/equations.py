"""Equations 1 to 14 of MoE-Lens's performance model (paper section 5) are pure arithmetic and need no engine.

Symbols: p prompt length, g generation length, K requests, N KV blocks of b slots, N_e experts, N_k top-k, h model dim,
h_i expert dim, s GQA group size, n tokens processed together, B_IO link bytes/s, delta = model bytes / B_IO.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil


def gemm_intensity(n: float, *, top_k: int, experts: int, h: int, h_i: int, s: int) -> float:
    """Return the FLOPs per weight byte (bf16) of one layer over n tokens."""
    shared = 4 * h * h + 4 * h * h / s
    return n * (6 * top_k * h * h_i + shared) / (6 * experts * h * h_i + shared)  # Eq. 1


def saturating_tokens(gpu_flops_s: float, link_bytes_s: float, *, experts: int, top_k: int) -> float:
    """Return the number of tokens from which on the GPU is the limit, not the link.

    In bf16, two FLOPs and two bytes for each weight cancel.
    """
    return gpu_flops_s / link_bytes_s * experts / top_k  # Eq. 2


def parallelism_memory_efficiency(p: float, g: int) -> float:
    """Return the tokens processed per pass and per token slot of the KV cache; the sum has g + 1 terms."""
    return (p + g) / sum(p + j for j in range(g + 1))  # Eq. 3


def stage1_tok_s(p: float, g: int, *, kv_tokens: float, delta_s: float, gpu_tok_s: float) -> float:
    """Return an upper bound on the prefill and decode tokens per second, counted together."""
    return min(parallelism_memory_efficiency(p, g) * kv_tokens / delta_s, gpu_tok_s)  # Eq. 4


def memory_bandwidth_needed(total_memory_bytes: float, weight_bytes: float, link_bytes_s: float) -> float:
    """Return the host memory bandwidth, in bytes/s, that keeps KV reads within a pass and the link fed."""
    return total_memory_bytes / weight_bytes * link_bytes_s  # Eq. 5


def cpu_flops_needed(s: int, attention_flops_per_byte: float, kv_bytes_s: float) -> float:
    """Return the FLOP/s that decode attention needs of the CPU; intensity per float32 byte is about 0.5 FLOP/B."""
    return 2 * s * attention_flops_per_byte * kv_bytes_s  # Eq. 6


def effective_kv_capacity(p: float, g: float, capacity: float) -> float:
    """Return the KV capacity in effect. With prefill and decode overlapped, average, not final, lengths share the
    cache."""
    return (p + g) / (p + g / 2) * capacity  # Eq. 7


def prefills_per_pass(p: float, g: int, *, num_blocks: int, block_size: int) -> float:
    """Return q, the number of sequences admitted in every pass of the steady state."""
    return num_blocks / sum(ceil((p + i) / block_size) for i in range(g + 1))  # Eq. 8


@dataclass(frozen=True)
class Stage2:
    """The answer of Stage 2 is the generated tokens per second, and what bounds them."""

    throughput_tok_s: float
    bound: str  # "kv capacity" (Eq. 10), "gpu" (Eq. 13) or "workload" (all of it fits the cache)
    q: float
    passes: float
    pass_s: float


def stage2(
    *, p: float, g: int, num_requests: int, num_blocks: int, block_size: int, delta_s: float, pass_tokens: float
) -> Stage2:
    """Predict the generated tokens per second of K requests (Eq. 8 to 14). `pass_tokens` = T_GPU delta is the number of
    tokens that a pass can hold.

    Equation 12 is used only where q(p+g) exceeds the GPU's tokens per pass, and never below the passes that all tokens
    need at full GPU rate: unguarded it turns negative for g > 2p. Where all K requests fit the cache at full length,
    the capacity bounds nothing and K/q has no meaning: the passes are those of the prefill and g - 1 decodes after it.
    """
    q = prefills_per_pass(p, g, num_blocks=num_blocks, block_size=block_size)
    if num_requests * ceil((p + g) / block_size) <= num_blocks:
        prefill_passes = max(num_requests * p / pass_tokens, 1.0)
        passes, bound = max(prefill_passes + g - 1, num_requests * (p + g) / pass_tokens), "workload"
        return Stage2(num_requests * g / (passes * delta_s), bound, q, passes, delta_s)
    passes, bound = num_requests / q + g, "kv capacity"  # Eq. 10
    if q * (p + g) > pass_tokens:
        prefill_tokens = pass_tokens * p / (p + g)  # Eq. 11, tokens a pass
        middle = (num_requests * p - g * (prefill_tokens + pass_tokens) / 2) / prefill_tokens
        iterations = max(2 * g + middle, num_requests * (p + g) / pass_tokens)  # Eq. 12, guarded
        if iterations > passes:  # Eq. 14: the smaller throughput
            passes, bound = iterations, "gpu"
    return Stage2(num_requests * g / (passes * delta_s), bound, q, passes, delta_s)  # Eq. 10, 13
