"""MoE-Lens Table 2 and the other numbers that its section 5 prints: `python -m paper_figures.moelens.table2`.

The paper's units: a TFLOP/s is 1024 GFLOP/s, a token's keys and values are 0.125 MB (of 2^20 bytes), a GB has 1000 of
those; sizes are truncated, those of 512 tokens are twice the truncated ones of 256, and token counts are rounded up to
the next hundred (39,936 is printed as 40.0k). The decimal column uses powers of ten throughout, and rounds.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from rich import box
from rich.console import Console
from rich.table import Table

from harness.cli.arguments import CommandParser
from harness.interrupts import exit_code
from harness.model.spec import ModelSpec
from paper_figures.support import hardware_profile, model_spec
from strategies.moelens.equations import cpu_flops_needed, memory_bandwidth_needed, saturating_tokens

SOURCE = "MoE-Lens Table 2 and section 5"
LINK_GB_S = 32  # B of section 5.1; the link's own standard allows 31.5
MEASURED_LINK_GB_S = 19.5  # section 8.1
PUBLISHED = {  # Table 2: tokens, GB at 256 and at 512 tokens a sequence
    "A40": ("19.2k", 614, 1228),
    "L40": ("23.2k", 741, 1482),
    "A100": ("40.0k", 1277, 2554),
}
PROFILES = {"A40": "a40", "L40": "l40", "A100": "a100-80g"}
ATTENTION_FLOPS_PER_BYTE = 0.5  # I_cpu_attn: a multiply-add for each value read, widened to 4 bytes


@dataclass(frozen=True, kw_only=True)
class Row:
    what: str
    published: str
    paper_units: str
    decimal: str


def rows() -> list[Row]:
    spec = model_spec("mixtral-8x7b")
    found: list[Row] = []
    for gpu, profile in PROFILES.items():
        tflop_s = hardware_profile(profile).gemm_flop_s(spec.dtype, peak=True) / 1e12
        found += _gpu_rows(gpu, tflop_s, spec)
    return [*found, *_text_rows(spec)]


def tokens_paper_units(tflop_s: float, spec: ModelSpec) -> float:
    return _tokens(tflop_s * 1024, LINK_GB_S, spec)


def tokens_decimal(tflop_s: float, spec: ModelSpec, link_gb_s: float = LINK_GB_S) -> float:
    return _tokens(tflop_s * 1000, link_gb_s, spec)


def _tokens(gflop_s: float, link_gb_s: float, spec: ModelSpec) -> float:
    return saturating_tokens(gflop_s, link_gb_s, experts=spec.num_experts, top_k=spec.experts_per_token)


def _gpu_rows(gpu: str, tflop_s: float, spec: ModelSpec) -> list[Row]:
    tokens, gb_256, gb_512 = PUBLISHED[gpu]
    binary, decimal = tokens_paper_units(tflop_s, spec), tokens_decimal(tflop_s, spec)
    mib_per_token, gb_per_token = spec.kv_bytes_per_token / 2**20, spec.kv_bytes_per_token / 1e9
    truncated = int(binary * 256 * mib_per_token / 1000)
    ours = {256: truncated, 512: 2 * truncated}
    sizes = [
        Row(
            what=f"{gpu}: KV cache to saturate, {length} tokens (GB)",
            published=str(printed),
            paper_units=str(ours[length]),
            decimal=f"{decimal * length * gb_per_token:.0f}",
        )
        for length, printed in ((256, gb_256), (512, gb_512))
    ]
    count = Row(
        what=f"{gpu}: tokens to saturate, {tflop_s:g} TFLOP/s",
        published=tokens,
        paper_units=f"{ceil(binary / 100) / 10:.1f}k",
        decimal=f"{decimal:,.0f}",
    )
    return [count, *sizes]


def _text_rows(spec: ModelSpec) -> list[Row]:
    """Return the numbers in the text of section 5."""
    a40 = hardware_profile("a40").gemm_flop_s(spec.dtype, peak=True) / 1e12
    binary, decimal = tokens_paper_units(a40, spec), tokens_decimal(a40, spec)
    kv_tb = [tokens * 512 * spec.kv_bytes_per_token / unit for tokens, unit in ((binary, 1e6 * 2**20), (decimal, 1e12))]
    weights, kv = spec.model_bytes, 200e9  # "twice the size of the model weights ... a 200GB KV cache"
    memory = memory_bandwidth_needed(weights + kv, weights, MEASURED_LINK_GB_S)
    cpu = cpu_flops_needed(spec.group_size, ATTENTION_FLOPS_PER_BYTE, memory - MEASURED_LINK_GB_S)
    measured_link = tokens_decimal(a40, spec, MEASURED_LINK_GB_S)
    return [
        Row(what="5.1: tokens to saturate an A40", published="19,200", paper_units=f"{binary:,.0f}",
            decimal=f"{decimal:,.0f}"),
        Row(what="the same with the measured 19.5 GB/s", published="-", paper_units="-",
            decimal=f"{measured_link:,.0f}"),
        Row(what="5.1: KV cache of 512-token sequences (TB)", published="1.2", paper_units=f"{kv_tb[0]:.1f}",
            decimal=f"{kv_tb[1]:.2f}"),
        Row(what="5.3: B_mem with 200 GB of KV cache (GB/s)", published="about 60", paper_units="-",
            decimal=f"{memory:.1f}"),
        Row(what="5.3: B_mem over the link's rate", published="about 3", paper_units="-",
            decimal=f"{memory / MEASURED_LINK_GB_S:.2f}"),
        Row(what="5.3: CPU attention for that (GFLOP/s)", published="hundreds", paper_units="-",
            decimal=f"{cpu:.0f}"),
    ]  # fmt: skip


def table(found: Sequence[Row]) -> Table:
    shown = Table(box=box.SIMPLE_HEAD, title=f"{SOURCE}: published and computed (predicted, Eq. 2, 5, 6)")
    shown.add_column("", justify="left")
    for name in ("published", "ours, paper's units", "ours, decimal"):
        shown.add_column(name, justify="right")
    for row in found:
        shown.add_row(row.what, row.published, row.paper_units, row.decimal)
    return shown


def main(arguments: Sequence[str] | None = None) -> int:
    return CommandParser("paper_figures.moelens.table2", __doc__).run(lambda _: show(), arguments)


def show() -> int:
    """Print the table."""
    Console(width=110).print(table(rows()))
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
