"""Fixed device and pinned buffers for the tokens of one micro-batch at a time."""

from __future__ import annotations

from harness.machine.base import Machine
from harness.memory.tiers import Buffer
from harness.model.spec import ModelSpec


class Activations:
    """Room for `max_tokens` tokens of one micro-batch, reserved once; reused pass after pass.

    Device: tokens [2, n] (ids, positions), hidden, q, k, v, attention output, normed hidden, routing. Pinned: the host
    copies of q, k, v and of the attention output of decode tokens. `workspace` accounts for temporaries inside ops.
    """

    def __init__(self, machine: Machine, spec: ModelSpec, *, max_tokens: int, name: str) -> None:
        self._machine = machine
        self.max_tokens = max_tokens
        device, pinned = machine.tiers["device"], machine.tiers["pinned"]
        row = spec.dtype_bytes

        def on(tier, what: str, bytes_per_token: int) -> Buffer:  # type: ignore[no-untyped-def]
            return tier.reserve(f"{name} {what}", max_tokens * bytes_per_token)

        self.tokens = on(device, "tokens", 16)
        self.hidden = on(device, "hidden", spec.hidden_dim * row)
        self.q = on(device, "q", spec.q_dim * row)
        self.k = on(device, "k", spec.kv_dim * row)
        self.v = on(device, "v", spec.kv_dim * row)
        self.attention = on(device, "attention", spec.q_dim * row)
        self.normed = on(device, "normed", spec.hidden_dim * row)
        self.expert_ids = on(device, "expert ids", spec.experts_per_token * 8)
        self.expert_weights = on(device, "expert weights", spec.experts_per_token * 4)
        self.moe_out = on(device, "moe out", spec.hidden_dim * 4)
        self.sampled = on(device, "sampled", 8)
        self.workspace = on(device, "workspace", workspace_bytes_per_token(spec))
        self.host_q = on(pinned, "host q", spec.q_dim * row)
        self.host_k = on(pinned, "host k", spec.kv_dim * row)
        self.host_v = on(pinned, "host v", spec.kv_dim * row)
        self.host_attention = on(pinned, "host attention", spec.q_dim * row)

    def close(self) -> None:
        """Give all memory back; no op may use it any more."""
        for buffer in self.all_buffers():
            self._machine.tiers[buffer.tier].release(buffer)

    def all_buffers(self) -> tuple[Buffer, ...]:
        return tuple(value for value in vars(self).values() if isinstance(value, Buffer))


def workspace_bytes_per_token(spec: ModelSpec) -> int:
    """Temporaries of the widest op: one expert's gate and up projections with its input and output, in float32."""
    return 4 * (3 * spec.expert_dim + 2 * spec.hidden_dim)


def device_bytes_per_token(spec: ModelSpec) -> int:
    """Device memory of `Activations` per token of capacity."""
    row = spec.dtype_bytes
    tensors = row * (2 * spec.hidden_dim + 2 * spec.q_dim + 2 * spec.kv_dim)
    return 16 + tensors + 12 * spec.experts_per_token + 4 * spec.hidden_dim + 8 + workspace_bytes_per_token(spec)
