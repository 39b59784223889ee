"""Predict with Stage 2 what the run should reach by the paper, with every constant measured on this machine."""

from __future__ import annotations

from harness.engine.engine import Engine
from harness.engine.strategy import Prediction
from strategies.moelens.config import Config
from strategies.moelens.equations import stage1_tok_s, stage2
from strategies.moelens.planner import Policy

_CASES = {
    "kv capacity": "MoE-Lens Stage 2, bound by KV capacity (Eq. 10)",
    "gpu": "MoE-Lens Stage 2, bound by the GPU (Eq. 13)",
    "workload": "beyond MoE-Lens: the whole workload fits the KV cache",
}


def predict(config: Config, policy: Policy, engine: Engine) -> Prediction | None:
    """Return what Stage 2 predicts, or None for an empty workload and for ablations.

    The equations describe the system with all its parts.
    """
    complete = config.overlap_prefill_decode and config.pipeline == "vslpipe" and config.attention == "cpu"
    if not engine.sequences or not complete:
        return None
    num_requests = len(engine.sequences)
    p = sum(s.prompt_len for s in engine.sequences) / num_requests
    g = round(sum(s.request.max_new_tokens for s in engine.sequences) / num_requests)
    delta_s = policy.profile.layer_transfer_s * engine.spec.num_layers
    blocks = engine.kv.allocator
    answer = stage2(
        p=p,
        g=g,
        num_requests=num_requests,
        num_blocks=blocks.num_blocks,
        block_size=blocks.block_size,
        delta_s=delta_s,
        pass_tokens=policy.n_real,
    )
    upper = stage1_tok_s(
        p,
        g,
        kv_tokens=blocks.num_blocks * blocks.block_size,
        delta_s=delta_s,
        gpu_tok_s=policy.n_real / delta_s,
    )
    terms = {"p": p, "g": g, "K": num_requests, "q": answer.q, "delta_s": delta_s, "passes": answer.passes}
    terms |= {"pass_tokens": policy.n_real, "stage1_processed_tok_s": upper}
    model = _CASES[answer.bound]
    if answer.bound == "gpu" and config.n_real is None and policy.n_real < int(policy.n_real_measured):
        model = "MoE-Lens Stage 2, bound by device memory: n_real is cut to what it holds (Eq. 13)"
    return Prediction(throughput_tok_s=answer.throughput_tok_s, model=model, terms=terms)
