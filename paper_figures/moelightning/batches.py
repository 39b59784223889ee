"""One batch of a system on a simulated machine, beside what the performance model predicts for it.

Systems run one batch after another; the first one is simulated and stands for all. A padded system gets prompts that
are all as long as the longest: to every lane that is the same as padding. One that does not pad gets as many requests
as its policy has sequences: request batching takes the longest first, so the first batch of more is not typical.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from harness.engine.strategy import Planning, Prediction
from harness.record.provenance import code_version
from harness.record.summary import accuracy
from paper_figures.measuring import Batch, first_batch
from paper_figures.passes import planned

LONGEST_PROMPT = {"mtbench_lightning": 418, "synthetic_reasoning": 256, "summarization": 1984}  # Table 3
MOST_REQUESTS = 5000  # "thousands of questions" (section 5.1); the memory allows no system more in one batch
KV_GB = 84.0  # of 192 GB of host memory, beside 93.4 GB of weights and what is staged; more where a policy needs it
_BLOCK_TOKENS, _KV_BYTES_PER_TOKEN = 16, 2**17  # kv_block_tokens of conf/config.yaml; Mixtral-8x7B


@dataclass(frozen=True, kw_only=True)
class Case:
    """A system with a policy on a setting. Sizes are null where `planning` finds the policy. `policy_source` says where
    given sizes come from; DeepSpeed has no planner of its own, so that both ways of planning are the same."""

    system: str
    strategy: str
    setting: str
    hardware: str
    g: int
    dataset: str = "mtbench_lightning"
    padded: bool = True
    batch_size: int | None = None
    micro_batch_size: int | None = None
    policy_source: str = "planned"
    planning: Planning = "best"
    extended_model: bool = False  # Eq. 12-14 as printed
    more: tuple[str, ...] = ()  # overrides

    @property
    def kv_gb(self) -> float:
        """The GB of KV cache: `KV_GB`, or more where a given policy pads to more."""
        if not self.padded or self.batch_size is None:
            return KV_GB
        kept = -(-(LONGEST_PROMPT[self.dataset] + self.g - 1) // _BLOCK_TOKENS) * _BLOCK_TOKENS
        return max(KV_GB, ceil(self.batch_size * kept * _KV_BYTES_PER_TOKEN / 1e8) / 10)

    @property
    def overrides(self) -> list[str]:
        """The overrides as `python -m harness.plan` takes them."""
        given = {"batch_size": self.batch_size, "micro_batch_size": self.micro_batch_size}
        field = "strategy" if self.strategy == "deepspeed_zero" else "strategy.policy"
        policy = [f"{field}.{name}={value}" for name, value in given.items() if value is not None]
        if self.strategy != "deepspeed_zero":  # the paper's policies have neither experts on the CPU nor KV on the GPU
            policy += [f"{field}.gpu_ffn=true", f"{field}.resident_kv=0"]
            policy += [f"strategy.planning={self.planning}"]
            policy += [f"strategy.extended_model={str(self.extended_model).lower()}"]
        longest = LONGEST_PROMPT[self.dataset]
        padded = (f"dataset.lengths.mean={longest}", "dataset.lengths.shape=constant") if self.padded else ()
        return [
            *(f"strategy={self.strategy}", "model=mixtral-8x7b", f"hardware={self.hardware}"),
            *(f"dataset={self.dataset}", "dataset.synthetic=lengths", *padded, f"dataset.max_new_tokens={self.g}"),
            *(f"dataset.num_requests={self.batch_size or MOST_REQUESTS}", f"kv_cache_gb={self.kv_gb:g}"),
            *("strategy.packet_mb=100", *policy, *self.more),
        ]


def row(case: Case) -> dict[str, Any]:
    """Collect the facts of a case that tables and figures need, in seconds, tokens a second and shares of 1."""
    plan = planned(case.overrides)
    if not case.padded and case.batch_size is None:  # Algorithm 2 would take the longest of all requests
        policy = plan.strategy.plan
        case = replace(case, batch_size=policy["batch_size"], micro_batch_size=policy["micro_batch_size"])
        plan = planned(case.overrides)
    batch = first_batch(plan)
    policy = plan.strategy.plan
    return {
        "system": case.system,
        "setting": case.setting,
        "dataset": case.dataset,
        "g": case.g,
        "padded": case.padded,
        "policy_source": case.policy_source,
        "planning": policy.get("planning"),
        "code": code_version(),
        "N": policy["batch_size"],
        "mu": policy.get("micro_batch_size", policy["batch_size"]),
        "r_w": policy.get("resident_weights", 0.0),
        "simulated": _simulated(batch),
        "predicted": predicted(plan.strategy.prediction, batch, plan.engine.spec.num_layers),
        "command": f"python -m harness.plan {' '.join(case.overrides)}",
    }


def _simulated(batch: Batch) -> dict[str, Any]:
    return {
        "sequences": batch.num_sequences,
        "tok_s": batch.throughput_tok_s,
        "prefill_s": batch.prefill_s,
        "step_s": batch.step_s,
        "steps_simulated": batch.steps_simulated,
        "prefill_busy": dict(batch.prefill_busy),
        "decode_busy": dict(batch.decode_busy),
    }


def predicted(prediction: Prediction | None, batch: Batch, num_layers: int) -> dict[str, Any] | None:
    """Return what the performance model says of one full batch; null for a system without a model. A workload's last
    batch is smaller, and is part of the prediction of a run; here it is left out on both sides."""
    if prediction is None:
        return None
    phases = {
        phase: max(value for name, value in prediction.terms.items() if name.startswith(f"{phase} layer, "))
        for phase in ("prefill", "decode")
    }
    prefill_s, step_s = num_layers * phases["prefill"], num_layers * phases["decode"]
    tok_s = prediction.terms["N"] * (batch.num_steps + 1) / (prefill_s + batch.num_steps * step_s)
    return {
        "tok_s": tok_s,
        "prefill_s": prefill_s,
        "step_s": step_s,
        "accuracy": accuracy(tok_s, batch.throughput_tok_s),
    }
