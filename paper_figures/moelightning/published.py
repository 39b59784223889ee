"""Hold what MoE-Lightning and its artifact publish about settings S1 and S2: throughputs, policies and times.

Fig. 7's bars have no numbers in the paper; its artifact (github.com/caoshiyi/artifacts, branch asplos25, section D.5)
has them. All of it is of MTBench and Mixtral-8x7B; throughput is in generated tokens a second.
"""

from __future__ import annotations

from dataclasses import dataclass

GENERATED = (32, 64, 128, 256)  # Table 3

# At GENERATED: MoE-Lightning artifact, plots/main_results/plot_e2e_bar_all.py, the data of Fig. 7.
FIG7_TOK_S: dict[str, dict[str, tuple[float, ...]]] = {
    "S1": {
        "MoE-Lightning": (63.0, 101.3, 97.73, 96.7),
        "MoE-Lightning(p)": (15.6, 24.0, 30.1, 33.9),
        "FlexGen": (12.1, 12.3, 9.5, 9.6),
        "FlexGen(c)": (9.8, 9.4, 7.2, 6.8),
        "DeepSpeed-Zero": (7.1, 7.6, 7.8, 6.7),
    },
    "S2": {
        "MoE-Lightning": (203.0, 294.5, 217.5, 167.9),
        "MoE-Lightning(p)": (53.7, 67.4, 79.0, 78.6),
        "FlexGen": (29.2, 34.9, 37.2, 28.8),
        "FlexGen(c)": (17.5, 18.9, 20.0, 15.9),
        "DeepSpeed-Zero": (12.7, 13.3, 12.1, 11.8),
    },
}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    batch_size: int  # N
    micro_batch_size: int  # mu


def _sizes(micro_batch_size: int, *num_micro_batches: int) -> list[Sizes]:
    return [Sizes(batch_size=micro_batch_size * n, micro_batch_size=micro_batch_size) for n in num_micro_batches]


def _batches(*sizes: tuple[int, int]) -> list[Sizes]:
    return [Sizes(batch_size=batch, micro_batch_size=size) for size, batch in sizes]


# At GENERATED. FlexGen's and FlexGen(c)'s: artifact, benchmarks/flexgen/{T4,L4}/mtbench_8x7b_*.sh. MoE-Lightning's and
# MoE-Lightning(p)'s: N is throughput times time over g in benchmarks/mtbench/mtbench_moel{,_p}_*.jsonl. mu is stated in
# Table 5 for S1, padded (36), and in the artifact's README for S1, unpadded, g = 128 (164 x 14 = 2,296). Elsewhere it
# is what the artifact's optimiser gives (strategies/offloading/published) with 15 and 24 GiB on the device and 187 to
# 192 GiB on the host; its N is the published one where prompts are padded, and within 10 % of it where not.
POLICIES: dict[str, dict[str, list[Sizes]]] = {
    "S1": {
        "MoE-Lightning": _batches((164, 3097), (164, 3097), (164, 2296), (100, 1485)),
        "MoE-Lightning(p)": _sizes(36, 14, 14, 14, 14),
        "FlexGen": [*_sizes(32, 40), *_sizes(16, 78), *_sizes(8, 139, 113)],
    },
    "S2": {
        "MoE-Lightning": _batches((292, 4494), (228, 3616), (164, 2608), (132, 1560)),
        "MoE-Lightning(p)": _sizes(68, 16, 15, 13, 11),
        "FlexGen": [*_sizes(64, 21, 20, 18), *_sizes(32, 30)],
    },
}
for _policies in POLICIES.values():
    _policies["FlexGen(c)"] = _policies["FlexGen"]

# MoE-Lightning(p) at S1, N = 504 at every g: seconds by g (artifact, benchmarks/mtbench/mtbench_moel_p_t4.jsonl).
S1_SECONDS = {32: 1033.27, 64: 1344.18, 128: 2141.66, 256: 3801.77}


@dataclass(frozen=True, kw_only=True)
class Helm:
    """A cell of Table 4: HELM tasks, padded."""

    task: str
    setting: str
    system: str
    tok_s: float
    sizes: Sizes


def _helm(task: str, setting: str, **systems: tuple[float, int, int]) -> list[Helm]:
    """Build a task's cells from each system's throughput, mu and N / mu."""
    names = {"flexgen_c": "FlexGen(c)", "flexgen": "FlexGen", "deepspeed": "DeepSpeed-Zero", "ours": "MoE-Lightning(p)"}
    return [
        Helm(task=task, setting=setting, system=names[key], tok_s=tok_s, sizes=_sizes(mu, n)[0])
        for key, (tok_s, mu, n) in systems.items()
    ]


TABLE4 = [
    *_helm("synthetic_reasoning", "S1", flexgen_c=(16.903, 32, 61), flexgen=(22.691, 32, 61),
           deepspeed=(11.832, 102, 1), ours=(26.349, 36, 26)),
    *_helm("synthetic_reasoning", "S2", flexgen_c=(20.015, 64, 33), flexgen=(50.138, 64, 33),
           deepspeed=(18.589, 156, 1), ours=(105.29, 100, 15)),
    *_helm("summarization", "S1", flexgen_c=(2.614, 3, 92), flexgen=(3.868, 3, 92), deepspeed=(0.965, 8, 1),
           ours=(4.52, 4, 19)),
    *_helm("summarization", "S2", flexgen_c=(4.307, 8, 36), flexgen=(7.14, 8, 36), deepspeed=(1.447, 12, 1),
           ours=(12.393, 8, 36)),
]  # fmt: skip
HELM_GENERATED = {"synthetic_reasoning": 50, "summarization": 64}  # Table 3


@dataclass(frozen=True, kw_only=True)
class Ablation:
    """A row of Table 5 (S1, g = 128)."""

    name: str
    system: str
    sizes: Sizes
    tok_s: float


TABLE5 = tuple(
    Ablation(name=name, system=system, sizes=Sizes(batch_size=n, micro_batch_size=mu), tok_s=tok_s)
    for name, system, mu, n, tok_s in (
        ("FlexGen w/ their policy", "FlexGen", 8, 1112, 9.5),
        ("FlexGen w/ our policy", "FlexGen", 36, 504, 16.816),
        ("FlexGen w/ our policy + larger N", "FlexGen", 36, 1116, 20.654),
        ("MoE-Lightning (p)", "MoE-Lightning(p)", 36, 504, 30.12),
    )
)
