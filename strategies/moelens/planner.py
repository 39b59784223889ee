"""Decide MoE-Lens's policy: n_real from the profiler (or as given), and the size of the activation buffers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from harness.config import ConfigError
from harness.engine.engine import Engine
from harness.engine.limits import longest_sequence, tokens_that_fit
from harness.memory.tiers import enough
from strategies.moelens.config import Config
from strategies.moelens.profiler import PipelineProfiler, Profile


@dataclass(frozen=True, kw_only=True)
class Policy:
    n_real: int  # tokens a pass may have before the GPU is slower than the link
    n_real_measured: float  # what the profiler found, before any limit
    max_pass_tokens: int  # what each half's activation buffers hold
    profile: Profile

    def as_record(self) -> dict[str, Any]:
        return asdict(self)


def plan_policy(config: Config, engine: Engine) -> Policy:
    """Measure the pipeline and choose the size of the buffers. Raises ConfigError naming what is too small."""
    longest = longest_sequence(engine)
    context_bytes = longest * engine.spec.kv_bytes_per_token_layer
    if config.attention == "gpu" and context_bytes > int(config.gpu_kv_staging_mb * 1e6):
        raise ConfigError(
            "strategy.gpu_kv_staging_mb",
            f"must hold the longest context of one layer, {enough(context_bytes, 10**6)} MB, "
            f"got {config.gpu_kv_staging_mb:g}",
        )
    packet_bytes = int(config.packet_mb * 1e6)
    staging_bytes = int(2 * config.gpu_kv_staging_mb * 1e6) if config.attention == "gpu" else 0
    fitting = tokens_that_fit(
        engine,
        num_layers_buffered=2,
        num_micro_batches=2,
        at_least=longest,
        reserved_bytes={"kv staging": staging_bytes},
    )
    mean_prompt = sum(s.prompt_len for s in engine.sequences) // max(1, len(engine.sequences))
    profiler = PipelineProfiler(
        engine,
        prompt_tokens=max(1, mean_prompt),
        max_tokens=fitting,
        packet_bytes=packet_bytes,
        repeats=config.profile_repeats,
    )
    profile = profiler.measure()
    profiler.close()
    n_real = config.n_real or max(1, int(profile.n_real))
    all_tokens = sum(s.max_tokens for s in engine.sequences)
    concurrency = min(len(engine.sequences), engine.kv.allocator.num_blocks)
    # All that can decode at once runs in one pass, and the scheduler may exceed n_real by one prompt.
    max_pass_tokens = min(fitting, all_tokens, max(n_real, concurrency) + longest)
    return Policy(
        n_real=min(n_real, max_pass_tokens),
        n_real_measured=profile.n_real,
        max_pass_tokens=max_pass_tokens,
        profile=profile,
    )
