"""Run the ops that strategies submit to the GPU's lane in a context in which their code needs no memory.

Their tensors have the real shapes of Mixtral-8x7B, or of the model that a case names, on torch's device "meta".
"""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from harness.machine.base import LaneKind
from harness.machine.simulated import SimulatedMachine
from harness.machine.threads.arenas import TORCH_DTYPES
from harness.model import families
from harness.plan.planning import make_plan
from kernels.triton import KERNELS
from tests.composing import composed

DEVICE = torch.device("meta")
FINE = {  # small experts and a large vocabulary, as Qwen3 has them
    "hidden_dim": 2048, "expert_dim": 768, "num_heads": 32, "num_kv_heads": 4, "num_experts": 32,
    "experts_per_token": 8, "vocab_size": 151936,
}  # fmt: skip
LATENT = [  # without a layer of its own kind in front
    *("model=deepseek-v2-lite", "model.spec.dense_layers=[]", "model.spec.dense_dim=0"),
]
MOELENS = ["strategy.n_real=2000", "strategy.profile_repeats=1"]
CASES = {
    "deepspeed_zero": [],
    "fastdecode": [],
    "flexgen": [],
    "flexgen_c": [],
    "llamacpp_split": ["strategy.cpu_moe_layers=1", "strategy.slots=64"],
    "moelens": MOELENS,
    "moelens on the gpu": [*MOELENS, "strategy.attention=gpu"],
    "moelightning": [],
    "flexgen, padded": ["strategy.padding=true"],
    "flexgen, padded, on the device": ["strategy.padding=true", "strategy.policy.resident_kv=0.9"],
    "moelens, latents": [*MOELENS, *LATENT],
    "moelens on the gpu, latents": [*MOELENS, "strategy.attention=gpu", *LATENT],
    "deepspeed_zero, latents": LATENT,
    "flexgen, latents, padded, on the device": ["strategy.padding=true", "strategy.policy.resident_kv=0.9", *LATENT],
    "ondemand": [],
    "ondemand, fine experts": [f"model.spec.{name}={value}" for name, value in FINE.items()],
    "ondemand, norms of heads": ["model=qwen3-30b-a3b"],
    "ondemand, norms over heads": ["model=olmoe-1b-7b", "+model.spec.clip_qkv=8.0"],
    "ondemand, a shared expert": ["model=qwen2-57b-a14b"],
}


class MetaContext:
    """Buffers whose memory is not there."""

    def __init__(self, spec) -> None:
        self.spec, self._memos = spec, defaultdict(dict)

    def memo(self, buffer):
        return self._memos[buffer.root]

    def tensor(self, buffer, shape, dtype):
        kind, size = TORCH_DTYPES[dtype], torch.Size(shape).numel()
        assert size * kind.itemsize <= buffer.nbytes, f"{shape} {dtype} does not fit {buffer}"
        with _disable_current_modes():
            root = torch.empty(buffer.root.nbytes, dtype=torch.uint8, device=DEVICE)
            start = buffer.offset_bytes
            return root[start : start + size * kind.itemsize].view(kind).view(tuple(shape))


def weight_views(ctx, part):
    """Give layouts without tensors, where weights are planned."""
    family, spec = families.family(ctx.spec.family), ctx.spec
    parts = (*family.layer_parts(spec, 0), family.embedding_part(spec), family.head_part(spec))
    layout = next(each for each in parts if each.name == part.layout.name)
    with _disable_current_modes():
        return {t.name: torch.empty(t.shape, dtype=TORCH_DTYPES[t.dtype], device=DEVICE) for t in layout.tensors}


def submitted(monkeypatch: pytest.MonkeyPatch, name: str, num_requests: int, more=(), kernels=KERNELS) -> list:
    """Return the gpu lane's ops of a whole run of a case, planned for a GPU with these `kernels`; `more` are further
    settings."""
    ops, original = [], SimulatedMachine.submit

    def submit(self, lane, op, **options):
        if lane.kind is LaneKind.GPU:
            ops.append(op)
        return original(self, lane, op, **options)

    model = [] if any(each.startswith("model=") for each in (*CASES[name], *more)) else ["model=mixtral-8x7b"]
    overrides = [
        *(f"strategy={name.split()[0].strip(',')}", "machine=simulated", *model, "hardware=a40"),
        *("model.spec.num_layers=2", "hardware.device_memory_gb=20", "kv_cache_gb=4", "dataset.max_new_tokens=2"),
        *(f"dataset.num_requests={num_requests}", f"machine.triton=[{','.join(kernels)}]", *CASES[name], *more),
    ]
    with monkeypatch.context() as patch:
        patch.setattr(SimulatedMachine, "submit", submit)
        make_plan(composed(*overrides))
    for op in ops:
        if hasattr(op, "family"):
            op.family = families.family(op.spec.family)
    return ops
