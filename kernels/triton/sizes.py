"""The bytes of scratch memory that kernels take, for whoever plans them: torch and Triton are not needed."""

from __future__ import annotations

ALIGNMENT_BYTES = 128  # of a tensor in scratch memory
PAIRS_OF_A_CHUNK = 64  # pairs of token and expert that one program counts or places
_INT32_BYTES = 4


def aligned(nbytes: int) -> int:
    """Return what a tensor of so many bytes takes in scratch memory."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def chunks_of(num_pairs: int) -> int:
    """Return in how many chunks pairs are counted and placed."""
    return -(-num_pairs // PAIRS_OF_A_CHUNK)


def grouped_experts_bytes(
    num_tokens: int,
    *,
    top_k: int,
    num_experts: int,
    num_present: int,
    hidden_dim: int,
    expert_dim: int,
    number_bytes: int,
) -> int:
    """Return the bytes of scratch memory that `grouped_experts` uses for so many tokens at once.

    It has the grouping in int32, and for each pair of a token and a present expert gated projections and output in the
    weights' dtype. No token adds more than the first one takes.
    """
    pairs = num_tokens * min(top_k, num_present)
    counts = (chunks_of(num_tokens * top_k) * num_experts, pairs, num_tokens * top_k, num_experts + 1, num_experts)
    grouping = sum(aligned(count * _INT32_BYTES) for count in counts)
    products = sum(aligned(pairs * dim * number_bytes) for dim in (expert_dim, hidden_dim))
    return ALIGNMENT_BYTES + grouping + products  # the memory may start anywhere
