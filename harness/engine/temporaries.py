"""The bytes that ops of the gpu lane take beside their buffers, for each of a micro-batch's tokens.

Planners and `Activations` reserve by these functions and no others. They depend on the model and on `kernels`: which
GPU kernels do the work (`Machine.gpu_kernels`; torch does what they leave out), or None on machines without a GPU.
`tests/contract/test_gpu_lane.py` runs the ops and holds them to what is reserved here. Torch-free.
"""

from __future__ import annotations

from harness.machine.base import GpuKernels
from harness.model.spec import ModelSpec
from kernels.triton import grouped_experts_bytes


def workspace_bytes_per_token(spec: ModelSpec, kernels: GpuKernels, *, padded: bool = False) -> int:
    """Return the bytes per token of the widest op's temporaries. `padded`: prompts are, and decode attention over the
    cache reads their padding too."""
    return max(routed_workspace_bytes(spec, kernels), dense_workspace_bytes(spec, kernels, padded=padded))


def routed_workspace_bytes(spec: ModelSpec, kernels: GpuKernels) -> int:
    """Return the bytes per token of the temporaries of routed experts that find their rows themselves.

    The grouped kernel takes gated projections and outputs of all pairs of token and expert at once. In torch, rows and
    float32 results of all pairs stand beside the widest expert, which may have a row of every token. Machines without
    a GPU count one expert's rows.
    """
    if kernels is None:
        return expert_workspace_bytes(spec, None)
    if "experts" in kernels:
        return grouped_experts_bytes(
            1,
            top_k=spec.experts_per_token,
            num_experts=spec.num_experts,
            num_present=spec.num_experts,
            hidden_dim=spec.hidden_dim,
            expert_dim=spec.expert_dim,
            number_bytes=spec.dtype_bytes,
        )
    pair = spec.hidden_dim * (spec.dtype_bytes + 4) + _PAIR_BYTES
    return _in_pieces(spec.experts_per_token * pair + _expert_math_bytes(spec))


def expert_workspace_bytes(spec: ModelSpec, kernels: GpuKernels) -> int:
    """Return the bytes of the temporaries of one expert for each of its rows, which its submitter chose. Torch computes
    it on every machine.

    Machines without a GPU count gate and up projections with input and output in float32.
    """
    if kernels is None:
        return 4 * (3 * spec.expert_dim + 2 * spec.hidden_dim)
    return _in_pieces(spec.hidden_dim * (spec.dtype_bytes + 4) + _expert_math_bytes(spec))


_PAIR_BYTES = 3 * 8  # of torch's sorting by expert: numbers of pairs and tokens, and values that the sort gives


def _expert_math_bytes(spec: ModelSpec) -> int:
    """Return the bytes of `family.expert` for a row: gate and up, what they become, and the output with its bias."""
    expert, hidden = spec.expert_dim, spec.hidden_dim
    steps = [4 * expert, 3 * expert + hidden]
    if spec.clamped_swiglu is not None:
        steps += [7 * expert, 2 * (expert + hidden)]
    return max(steps) * spec.dtype_bytes


def _in_pieces(nbytes: int) -> int:
    """Add what torch's allocator may have left in pieces that are too small when it has to give the last one."""
    return nbytes * 13 // 12


def dense_workspace_bytes(spec: ModelSpec, kernels: GpuKernels, *, padded: bool = False) -> int:
    """Return the bytes per token of the temporaries of the widest op but the experts.

    A norm has its results and input in the model's dtype beside two float32 copies. An MLP that all tokens pass takes
    its gate and up projections twice, and four rows. Where prompts are `padded`, attention over the cache has queries
    and results of the tokens and of their padding once more (`attend_each`). Machines without a GPU count two rows more
    for a norm, and a wider rotary embedding.
    """
    number_bytes, hidden = spec.dtype_bytes, spec.hidden_dim
    mlp = (4 * max(spec.shared_expert_dim, spec.dense_dim) + 4 * hidden) * number_bytes
    if kernels is None:
        norm = (2 * 4 + 4 * number_bytes) * hidden
        return max(norm, mlp, _projected_numbers(spec) * number_bytes)
    norm = (2 * 4 + 2 + 2 * number_bytes) * hidden + _ROW_BYTES
    shadows = 2 * (spec.cached_q_dim + spec.cached_o_dim) * number_bytes if padded else 0
    return max(norm, mlp, _projected_bytes(spec), shadows)


_ROW_BYTES = 64  # a norm's few numbers of each row


def _projected_bytes(spec: ModelSpec) -> int:
    """Return the bytes per token that the ops around attention hold at the same time.

    Projections stay while biases, norms of heads (in float32), clipping and rotary embedding work on them.
    """
    if spec.latent is not None:
        return _in_pieces(_latent_numbers(spec) * spec.dtype_bytes)
    q, both = spec.q_dim, spec.q_dim + spec.kv_dim
    projected, tables = both + spec.v_dim, 2 * spec.head_dim
    normed = both if spec.qk_norm else 0
    steps = [
        spec.hidden_dim + projected,
        projected * (2 if spec.qkv_bias else 1),
        normed + projected * (2 if spec.clip_qkv is not None else 1),
        normed + projected + q + q // 2 + tables,
        normed + projected + both + spec.kv_dim // 2 + tables,
        normed + projected + both + spec.v_dim + tables,
    ]
    heads = projected * spec.dtype_bytes + 8 * q if spec.qk_norm else 0
    hole = 4 * spec.hidden_dim if spec.qk_norm else 0  # where the norm in front had its copy: too small for theirs
    return max(_in_pieces(max(heads, max(steps) * spec.dtype_bytes)), heads + hole) + _ROW_BYTES


def _latent_numbers(spec: ModelSpec) -> int:
    """Return the numbers per token that ops around attention over latents hold at the same time.

    They are those of `latents_in` when it joins its results, for a prompt that is expanded and for a token that attends
    to latents, or those in front of the output projection.
    """
    latent = spec.latent
    assert latent is not None
    cached, rotated = spec.kv_pieces[0].dim, (spec.num_heads + 1) * latent.rope_dim
    shared = spec.hidden_dim + spec.q_dim + cached + latent.kv_rank + rotated + cached
    expanded = spec.num_heads * (latent.nope_dim + latent.value_dim) + spec.num_heads * spec.head_dim + spec.q_dim
    absorbed = spec.cached_o_dim + spec.cached_q_dim
    return max(shared + max(expanded, absorbed), 3 * spec.o_dim + spec.hidden_dim)


def _projected_numbers(spec: ModelSpec) -> int:
    """Return the numbers per token that machines without a GPU count for the ops around attention.

    Rotary embedding takes the projections, its results, and the queries' halves on the way. With latents, queries and
    keys are joined from two parts each, or queries are absorbed; values come out of latents behind attention. Attention
    over the cache takes queries and results twice where prompts are padded (`attend_each`).
    """
    if (latent := spec.latent) is None:
        return 2 * (spec.q_dim + spec.kv_dim + spec.v_dim) + 3 * spec.q_dim
    both = spec.hidden_dim + spec.q_dim + spec.num_heads * latent.rope_dim + 4 * spec.kv_pieces[0].dim
    expanded = 2 * spec.q_dim + spec.num_heads * (latent.nope_dim + latent.value_dim)
    absorbed = spec.cached_o_dim + spec.cached_q_dim
    return max(both + expanded, both + absorbed, 2 * absorbed, 3 * spec.o_dim + spec.hidden_dim)


def head_workspace_bytes(spec: ModelSpec) -> int:
    """Return the bytes of the head's temporaries for one sequence. They are its logits in the model's dtype and in
    float32, or the temporaries of its norm, and also the rows that go in and out of that."""
    widest = max((spec.dtype_bytes + 4) * spec.vocab_size, 2 * 4 * spec.hidden_dim)
    return widest + 4 * spec.dtype_bytes * spec.hidden_dim
