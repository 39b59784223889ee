"""Describe MoE-Gen's settings C1, C2 and C3, the systems that run on them, and the case of a system with a workload.

Rates are those of conf/hardware/a5000.yaml and a6000.yaml, where each has its source; host memory is Table 3's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import ceil

from harness.model.spec import ModelSpec
from paper_figures.support import model_spec

SETTINGS: Mapping[str, tuple[str, ...]] = {
    "C1": ("hardware=a5000", "hardware.ram_gb=256"),
    "C2": ("hardware=a5000", "hardware.ram_gb=512"),
    "C3": ("hardware=a6000", "hardware.ram_gb=480"),
    "C2, 1 TB": ("hardware=a5000", "hardware.ram_gb=1024"),  # not the paper's: here DeepSeek-R1 fits
    # not the paper's: the CPU reads as fast as the paper's best share of attention for it tells
    "C1, CPU 15 GB/s": ("hardware=a5000", "hardware.ram_gb=256", "hardware.cpu_gb_s=15", "hardware.cpu_gflop_s=60"),
    "C2, 8 GPUs": ("hardware=a5000x8", "hardware.ram_gb=512"),  # Table 5, whose server's host memory is not told
    "C1, A6000": ("hardware=a6000", "hardware.ram_gb=256"),  # not the paper's: Fig. 4 (b) has a larger GPU
}
SYSTEMS: Mapping[str, tuple[str, ...]] = {  # the paper's names, and what runs under them here
    "llama.cpp": ("strategy=llamacpp_split",),
    "vLLM": ("strategy=vllm_offload", "strategy.continuous_batching=false"),
    "DeepSpeed": ("strategy=deepspeed_zero",),
    "FlexGen": ("strategy=flexgen",),
    "MoE-Lightning": ("strategy=moelightning", "strategy.staging=false"),  # pinned, as all systems here
    "MoE-Lens": ("strategy=moelens", "strategy.overlap_prefill_decode=false"),
    "MoE-Gen(G)": ("strategy=moegen_g",),
    "MoE-Gen(H)": ("strategy=moegen_h",),
}
_PAPERS = ("strategy.policy.gpu_ffn=true", "strategy.policy.resident_kv=0")  # of baselines that search policies
LIMITS = (
    "Three switches limit the baselines: vLLM runs static batches (`continuous_batching=false`), MoE-Lens does not "
    "overlap prefill with decode (`overlap_prefill_decode=false`), and FlexGen and MoE-Lightning search with experts "
    "on the GPU and no keys and values there (`gpu_ffn=true`, `resident_kv=0`). `unlimited.md` has them without.\n"
)
_BLOCK_TOKENS = 16  # kv_block_tokens of conf/config.yaml
_STAGED_GB = 4.0  # of host memory: pages and rows on their way, tables
_HIDDEN_COPIES = 1.25  # of a prompt's hidden states wait in host memory while it is computed
_PACKET_MB = 100

spec_of = cache(model_spec)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A system with a workload on a setting; all prompts have one length, as the paper pads them.

    Without `num_requests` there are as many as host memory holds beside the model, which is also what the KV cache has
    room for. `more` are overrides, and `variant` names what they change.
    """

    system: str
    setting: str
    model: str
    prompt: int = 512
    g: int = 256
    num_requests: int | None = None
    variant: str = ""
    more: tuple[str, ...] = ()
    kv_gb: float | None = None
    whole: bool = False  # all passes of all requests are simulated; `variant` says so

    @property
    def key(self) -> tuple[object, ...]:
        """The fields by which a row is found again."""
        return (self.system, self.setting, self.model, self.prompt, self.g, self.num_requests, self.variant)

    @property
    def overrides(self) -> list[str]:
        """The overrides as `python -m harness.plan` takes them."""
        most = most_sequences(self.setting, spec_of(self.model), self.prompt, self.g)
        kv_gb = self.kv_gb or max(most, 1) * sequence_gb(spec_of(self.model), self.prompt, self.g)
        papers = _PAPERS if self.system in ("FlexGen", "MoE-Lightning") else ()
        return [
            *(*SYSTEMS[self.system], f"model={self.model}", *SETTINGS[self.setting]),
            *("dataset=gsm8k", "dataset.synthetic=lengths", f"dataset.max_prompt_tokens={self.prompt}"),
            *(f"dataset.max_new_tokens={self.g}", f"dataset.num_requests={self.num_requests or max(most, 1)}"),
            *(f"kv_cache_gb={ceil(kv_gb * 1e4) / 1e4:.4f}", f"strategy.packet_mb={_PACKET_MB}", *papers, *self.more),
        ]


def most_sequences(setting: str, spec: ModelSpec, prompt: int, g: int) -> int:
    """Return how many sequences host memory holds beside the model: their KV cache and, while prompts are computed,
    their hidden states. That is constraint 2 of the paper with room for what this engine keeps in host memory."""
    room_gb = ram_gb(setting) - _STAGED_GB - spec.model_bytes / 1e9
    hidden_gb = _HIDDEN_COPIES * prompt * spec.hidden_dim * spec.dtype_bytes / 1e9
    return max(0, int(room_gb / (sequence_gb(spec, prompt, g) + hidden_gb)))


def sequence_gb(spec: ModelSpec, prompt: int, g: int) -> float:
    """Return the GB of one sequence's blocks. The last token is never cached."""
    blocks = -(-(prompt + g - 1) // _BLOCK_TOKENS)
    return blocks * _BLOCK_TOKENS * spec.kv_bytes_per_token / 1e9


@cache
def ram_gb(setting: str) -> float:
    """Return the host memory of a setting, in 10^9 bytes."""
    return next(float(o.split("=")[1]) for o in SETTINGS[setting] if "ram_gb" in o)
