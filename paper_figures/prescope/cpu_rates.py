"""Ask how fast the CPU may be for prediction to pay: PreScope beside each layer by itself, over the CPU's rate."""

from __future__ import annotations

from itertools import product
from typing import Any

from paper_figures.prescope.cases import Case, find
from paper_figures.support import markdown_table

RATES_GFLOP_S = (110, 220, 440, 880, 2446)  # 440 as measured; 2446: 0.7 of the processor's peak
_MEASURED_GFLOP_S, _MEASURED_OP_US = 440, 200
# A100, with the memory that it has or, where all experts nearly fit, with so much that three of five do: so many as
# LayerScope keeps (see conf/hardware/a100-40g-pcie.yaml).
PLACES = (
    ("mixtral-8x7b", 64, 32),
    ("moonlight-16b-a3b", 32, 22),
    ("deepseek-v2-lite", 64, 22),
    ("qwen3-30b-a3b", 64, 32),
)
SYSTEMS = ("PreScope", "without LLaPor", "without LLaPor, larger table")
_LARGER_TABLE = ("strategy.predictor=none", "strategy.prefetch_slots=null")  # it has the room of the prefetches


def case(system: str, model: str, batch: int, memory_gb: int, gflop_s: int) -> Case:
    op_us = _MEASURED_OP_US * _MEASURED_GFLOP_S / gflop_s
    more = (f"hardware.device_memory_gb={memory_gb}", f"hardware.cpu_gemm_gflop_s={gflop_s}")
    name = "without LLaPor" if system == SYSTEMS[2] else system
    return Case(
        system=name, gpu="A100", model=model, batch=batch,
        variant=f"{memory_gb} GB, {gflop_s} GFLOP/s" + ", larger table" * (system == SYSTEMS[2]),
        more=(*more, f"hardware.cpu_op_us={op_us:.4g}", *(_LARGER_TABLE if system == SYSTEMS[2] else ())),
    )  # fmt: skip


def wanted() -> list[Case]:
    return [case(system, *place, rate) for place, rate, system in product(PLACES, RATES_GFLOP_S, SYSTEMS)]


def tables(data: dict[str, Any]) -> str:
    def cell(of: tuple[str, int, int], gflop_s: int) -> str:
        found = [find(data["rows"], c.system, c.gpu, c.model, c.batch, c.variant)
                 for c in (case(system, *of, gflop_s) for system in SYSTEMS)]  # fmt: skip
        if not all(found):
            return "-"
        ours, *without = [each["tok_s"] for each in found if each]
        return f"{ours:.3g}: " + ", ".join(f"{ours / other - 1:+.1%}" for other in without)

    columns: dict[str, Any] = {"model, batch, GB": lambda of: ", ".join(map(str, of))}
    for rate in RATES_GFLOP_S:
        columns[f"{rate} GFLOP/s"] = lambda of, rate=rate: cell(of, rate)
    return (
        "# PreScope over the CPU's rate, A100 (simulated)\n\n"
        "tok/s of PreScope, and how much more that is than each layer by itself reaches: with the same table, and with "
        "a table that has the room of the prefetches. An expert's fixed cost on the CPU falls as the rate rises.\n\n"
        f"{markdown_table(columns, PLACES)}"
    )
