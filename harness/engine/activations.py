"""Reserve fixed device and pinned buffers for the tokens of one micro-batch at a time."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from harness.engine.batch import NUM_ROW_FIELDS
from harness.engine.temporaries import workspace_bytes_per_token
from harness.machine.base import GpuKernels, Machine
from harness.memory.tiers import PINNED, Buffer, device_tier
from harness.model.spec import KvPiece, ModelSpec

ATTENDED_BY = ("prefill", "decode", "decode on device")


class Activations:
    """The buffers for `max_tokens` tokens of one micro-batch are reserved once and reused pass after pass.

    Device: `MicroBatch.rows`, hidden, q, k, v, what else is cached, attention output, normed hidden, routing. Pinned:
    the host copies of q, of what is cached (`ModelSpec.kv_pieces`) and of the attention output of decode tokens; these
    are left out where `host` is false, since nothing then attends on the host. `workspace` accounts for temporaries
    inside ops. `block_tables` has room for all `device_blocks` of a KV cache on the device, if there are any.
    `num_predicted` experts of each token can be predicted at a time (`Emitter.predict`). `spec` is the part of the
    model that GPU `rank` computes.
    """

    tokens: Buffer
    block_tables: Buffer | None
    hidden: Buffer
    sampled: Buffer
    q: Buffer
    k: Buffer  # this and v: not where prompts attend to latents
    v: Buffer
    latent: Buffer  # only where a latent is cached in place of k and v
    attention: Buffer
    normed: Buffer
    expert_ids: Buffer
    expert_weights: Buffer
    moe_out: Buffer
    workspace: Buffer
    predicted_ids: Buffer  # this and the next one: only where experts are predicted
    predicted_chances: Buffer
    host_q: Buffer
    host_k: Buffer
    host_v: Buffer
    host_latent: Buffer
    host_attention: Buffer
    host_normed: Buffer  # this and the next three: only where experts run on the host
    host_expert_ids: Buffer
    host_expert_weights: Buffer
    host_moe_out: Buffer
    num_predicted: int = 0  # experts of each token

    def __init__(
        self,
        machine: Machine,
        spec: ModelSpec,
        *,
        max_tokens: int,
        name: str,
        host: bool = True,
        host_experts: bool = False,
        rank: int = 0,
        device_blocks: int = 0,
        num_predicted: int = 0,
    ) -> None:
        self._machine = machine
        self.max_tokens, self.num_predicted = max_tokens, num_predicted
        behind = expert_bytes(spec, machine.gpu_kernels)
        device = {**state_bytes(spec), **attention_bytes(spec), **behind, **prediction_bytes(num_predicted)}
        pinned = {what: host * nbytes for what, nbytes in host_attention_bytes(spec).items()}
        pinned |= host_expert_bytes(spec) if host_experts else {}
        for tier, sizes in ((device_tier(rank), device), (PINNED, pinned)):
            for what, nbytes in sizes.items():
                label, backed = f"{name} {what.replace('_', ' ')}", what not in UNBACKED
                setattr(self, what, machine.tiers[tier].reserve(label, max_tokens * nbytes, backed=backed))
        self.block_tables = None
        if device_blocks:
            table_bytes = device_blocks * TABLE_ENTRY_BYTES
            self.block_tables = machine.tiers[device_tier(rank)].reserve(f"{name} block tables", table_bytes)

    @cached_property
    def attention_keys(self) -> tuple[tuple[Buffer, str], ...]:
        """The rows of `attention` by their writers. One attends for prefilling sequences, one for decoding sequences
        over the cache in host memory, and one for decoding sequences over the cache in device memory."""
        prefill, decode, on_device = ATTENDED_BY
        return ((self.attention, prefill), (self.attention, decode), (self.attention, on_device))

    def prompt_kv(self, spec: ModelSpec) -> tuple[Buffer, ...]:
        """Return what the prompts' tokens attend to among themselves."""
        return (self.k, self.v) if spec.expands_prefill else self.new_kv(spec)

    def new_kv(self, spec: ModelSpec) -> tuple[Buffer, ...]:
        """Return the device's rows of the new tokens that go into the KV cache, one buffer per piece of it."""
        return self._pieces(spec.kv_pieces, "")

    def host_new_kv(self, spec: ModelSpec) -> tuple[Buffer, ...]:
        """Return where `new_kv` lies in pinned memory."""
        return self._pieces(spec.kv_pieces, "host_")

    def _pieces(self, pieces: tuple[KvPiece, ...], prefix: str) -> tuple[Buffer, ...]:
        """Return the buffers of the pieces, which are the same for all who ask. Remembered, since each layer's ops
        do."""
        if (found := self._known_pieces.get(prefix)) is None:
            found = self._known_pieces[prefix] = tuple(getattr(self, f"{prefix}{piece.name}") for piece in pieces)
        return found

    @cached_property
    def _known_pieces(self) -> dict[str, tuple[Buffer, ...]]:
        return {}

    def close(self) -> None:
        """Give all memory back; from then on no op may use it."""
        for buffer in self.all_buffers():
            self._machine.tiers[buffer.tier].release(buffer)

    def all_buffers(self) -> tuple[Buffer, ...]:
        return tuple(value for value in vars(self).values() if isinstance(value, Buffer))


TABLE_ENTRY_BYTES = 4  # one block of a KV cache on the device
UNBACKED = ("workspace",)  # torch allocates temporaries while an op runs; they are gone with it

# Bytes per token by buffer, in the groups in which micro-batches need them.


def state_bytes(spec: ModelSpec) -> Mapping[str, int]:
    """Return the bytes per token that a micro-batch keeps from layer to layer, by buffer."""
    return {"tokens": 8 * NUM_ROW_FIELDS, "hidden": spec.hidden_dim * spec.dtype_bytes, "sampled": 8}


def attention_bytes(spec: ModelSpec) -> Mapping[str, int]:
    """Return the bytes per token that live from the QKV projection to the output projection, by buffer."""
    numbers = {"q": spec.q_row_dim}
    numbers |= {"k": spec.kv_dim, "v": spec.v_dim} if spec.expands_prefill else {}
    numbers |= {piece.name: piece.dim for piece in spec.kv_pieces}
    return {what: dim * spec.dtype_bytes for what, dim in (*numbers.items(), ("attention", spec.o_row_dim))}


def host_attention_bytes(spec: ModelSpec) -> Mapping[str, int]:
    """Return the bytes per token in pinned memory for attention over the cache on the host, by buffer."""
    row = spec.dtype_bytes
    return {
        "host_q": spec.cached_q_dim * row,
        **{f"host_{piece.name}": piece.dim * row for piece in spec.kv_pieces},
        "host_attention": spec.cached_o_dim * row,
    }


def expert_row_bytes(spec: ModelSpec) -> Mapping[str, int]:
    """Return the bytes per token of rows that ops behind attention read and write, by buffer; they live within one op's
    reach."""
    return {
        "normed": spec.hidden_dim * spec.dtype_bytes,
        "expert_ids": spec.experts_per_token * 8,
        "expert_weights": spec.experts_per_token * 4,
        "moe_out": spec.hidden_dim * 4,
    }


def expert_bytes(spec: ModelSpec, kernels: GpuKernels, *, padded: bool = False) -> Mapping[str, int]:
    """Return the bytes per token of `expert_row_bytes` and of all ops' workspace, by buffer. `kernels` are the
    machine's (`Machine.gpu_kernels`); `padded`: prompts are."""
    return {**expert_row_bytes(spec), "workspace": workspace_bytes_per_token(spec, kernels, padded=padded)}


def prediction_bytes(num_predicted: int) -> Mapping[str, int]:
    """Return the bytes per token for so many predicted experts, by buffer; none where none are predicted."""
    return {"predicted_ids": 8 * num_predicted, "predicted_chances": 4 * num_predicted} if num_predicted else {}


def host_expert_bytes(spec: ModelSpec) -> Mapping[str, int]:
    """Return the bytes per token in pinned memory that experts on the host read and write, by buffer."""
    return {
        "host_normed": spec.hidden_dim * spec.dtype_bytes,
        "host_expert_ids": spec.experts_per_token * 8,
        "host_expert_weights": spec.experts_per_token * 4,
        "host_moe_out": spec.hidden_dim * 4,
    }


def device_bytes_per_token(spec: ModelSpec, kernels: GpuKernels) -> int:
    """Return the device memory of `Activations` in bytes per token of capacity."""
    groups = (state_bytes(spec), attention_bytes(spec), expert_bytes(spec, kernels))
    return sum(sum(group.values()) for group in groups)


def host_bytes_per_token(spec: ModelSpec) -> int:
    """Return the pinned memory of `Activations` in bytes per token of capacity."""
    return sum(host_attention_bytes(spec).values())
