"""Simulate MoE-Gen's Tables 1, 5, 6, 7 and 10: prefill and decode of every system, with the tokens an expert runs over.

Each system has the policy that its own search finds here, within the limits of `settings.LIMITS`. DeepSeek-V2 runs a
second time with the batch sizes that follow from Table 1's tokens an expert, for the systems of which the paper has
them, and MoE-Gen with such a prefill. llama.cpp searches nothing: Mixtral on C2 runs with its own number of slots, and
with more of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from paper_figures.moegen.published import (
    INCONSISTENT,
    OURS,
    SECTION53_C1_TOK_S,
    TABLE1,
    TABLE5,
    TABLE6,
    TABLE7,
    TABLE10,
)
from paper_figures.moegen.rows import Row, computed, find
from paper_figures.moegen.settings import LIMITS, SYSTEMS, Case, sequence_gb, spec_of
from paper_figures.moegen.text import number, pair, percent
from paper_figures.support import markdown_table, new_figure, with_one_legend

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NOTE = "prompts of 512 tokens (synthetic); rates of conf/hardware/a5000.yaml and a6000.yaml; published: MoE-Gen"
TABLE1_SIZES = "Table 1's batch"
WORKLOADS = (  # setting, model, tokens to decode
    ("C2", "mixtral-8x7b", 256), ("C2", "mixtral-8x7b", 1024), ("C2", "mixtral-8x22b", 256),
    ("C2", "mixtral-8x22b", 1024), ("C2", "deepseek-v2", 256), ("C2", "deepseek-v2-lite", 256),
    ("C1", "mixtral-8x7b", 256), ("C3", "mixtral-8x7b", 256), ("C3", "mixtral-8x22b", 256),
    ("C1", "deepseek-v2-lite", 256), ("C3", "deepseek-v2-lite", 256), ("C3", "deepseek-v2", 256),
    ("C2", "deepseek-r1", 256), ("C2, 1 TB", "deepseek-r1", 256),
    ("C2, 8 GPUs", "mixtral-8x22b", 256),
)  # fmt: skip
_ALONE = {("C2, 8 GPUs", "mixtral-8x22b"): "vLLM"}  # for Table 5
MOST_REQUESTS = {"deepseek-v2-lite": 4000}  # of the 18,000 that host memory would hold, for the simulation's sake
# Table 1's tokens an expert in decode times 160 experts, over 6 that a token passes. CGOPipe needs two micro-batches.
_SIZES = {
    "DeepSpeed": ("strategy.batch_size=8",),
    "FlexGen": ("strategy.policy.batch_size=8", "strategy.policy.micro_batch_size=8"),
    "MoE-Lightning": ("strategy.policy.batch_size=20", "strategy.policy.micro_batch_size=10"),
}
ON_HOST = "tokens wait in host memory"  # hidden states accumulate there, whatever would fit the device
_ON_HOST_WORKLOADS = (("C2", "mixtral-8x7b"), ("C2", "mixtral-8x22b"), ("C2", "deepseek-v2"))
TABLE1_PREFILL = "Table 1's prefill"  # 8,192 tokens an expert on average: 427 prompts, in host memory
_TABLE1_REQUESTS = 427
_TABLE1_PREFILL = (
    "strategy.policy.prefill_batch_size=427", "strategy.policy.prefill_expert_batch=16384",
    "strategy.policy.on_device=false",
)  # fmt: skip
_SLOTS = (16, 31, 64, 256)  # of llama.cpp; 4 are its default, and from 32 on it copies experts


def cases(workloads: Iterable[tuple[str, str, int]] = WORKLOADS) -> list[Case]:
    found = []
    for setting, model, g in workloads:
        for system in (_ALONE[setting, model],) if (setting, model) in _ALONE else SYSTEMS:
            case = Case(system=system, setting=setting, model=model, g=g, num_requests=MOST_REQUESTS.get(model))
            found.append(case)
            if system == "llama.cpp" and (setting, g) == ("C2", 256) and model in ("mixtral-8x7b", "mixtral-8x22b"):
                found += [
                    replace(case, variant=f"{slots} slots", more=(f"strategy.slots={slots}",)) for slots in _SLOTS
                ]
            if system == "MoE-Gen(H)" and (setting, model) in _ON_HOST_WORKLOADS and g == 256:
                found.append(replace(case, variant=ON_HOST, more=("strategy.policy.on_device=false",)))
            if (setting, model, g, system) == ("C2", "deepseek-v2", 256, "MoE-Gen(G)"):
                kv_gb = _TABLE1_REQUESTS * sequence_gb(spec_of(model), case.prompt, g)
                some = replace(
                    case, num_requests=_TABLE1_REQUESTS, kv_gb=kv_gb
                )  # so that host memory has room for them
                found.append(replace(some, variant=TABLE1_PREFILL, more=_TABLE1_PREFILL))
            if (setting, model, g) == ("C2", "deepseek-v2", 256) and system in _SIZES:
                found.append(
                    Case(
                        system=system, setting=setting, model=model, g=g, variant=TABLE1_SIZES, num_requests=20,
                        more=_SIZES[system],
                    )
                )  # fmt: skip
    return found


def compute(chosen: Sequence[Case] | None = None) -> dict[str, Any]:
    return {"label": "simulated", "rows": list(computed(cases() if chosen is None else chosen))}


def published_decode(setting: str, model: str, g: int, system: str) -> float | None:
    """Return Table 6's value, or what section 5.3 says of C1 without naming the variant; null where there is none."""
    if (setting, model, g) == ("C1", "mixtral-8x7b", 256):
        return SECTION53_C1_TOK_S if system == "MoE-Gen(H)" else None
    if (setting, model, g) == ("C2", "deepseek-v2", 256):
        of = TABLE1.get("MoE-Gen" if system == "MoE-Gen(G)" else system)
        return of and of["decode"].tok_s
    return TABLE6.get(system, {}).get((model, g)) if setting == "C2" else None


def published_prefill(setting: str, model: str, system: str) -> float | None:
    """Return Table 7's value; null where there is none or the system failed."""
    return TABLE7.get(system, {}).get(model) if setting in ("C2", "C2, 1 TB") else None


def tables(data: dict[str, Any]) -> str:
    rows = data["rows"]
    return "\n".join([
        "# Throughput by phase (simulated)\n", _phases(rows), LIMITS, "## What did not fit\n", _refused(rows),
        "## Tokens an expert, Table 1\n", _table1(rows), LIMITS,
        "## One GPU beside eight, Table 5\n", _table5(rows),
        "## Share of the batch that the CPU attends to, Table 10\n", _table10(rows), "## Inconsistent in the paper\n",
        *(f"* {INCONSISTENT[name]}" for name in ("r1", "prefill", "decode", "lightning", "batch")), "",
    ])  # fmt: skip


def _phases(rows: list[Row]) -> str:
    def decode(r: Row) -> str:
        published = None if r["variant"] else published_decode(r["setting"], r["model"], r["g"], r["system"])
        return pair(published, r["decode_tok_s"])

    def prefill(r: Row) -> str:
        published = None if r["variant"] else published_prefill(r["setting"], r["model"], r["system"])
        return pair(published, r["prefill_tok_s"])

    columns = {
        "setting": lambda r: r["setting"],
        "model": lambda r: r["model"],
        "g": lambda r: str(r["g"]),
        "system": lambda r: " ".join([r["system"], *([f"({r['variant']})"] if r["variant"] else [])]),
        "N": lambda r: f"{r['sequences']:,}",
        "prefill tok/s: published / here": prefill,
        "decode tok/s: published / here": decode,
        "both phases, tok/s": lambda r: number(r["tok_s"]),
        "predicted": lambda r: number(r["predicted_tok_s"]),
        "tokens an expert run: prefill / decode": lambda r: pair(
            r["prefill"]["tokens_an_expert_run"], r["decode"]["tokens_an_expert_run"]
        ),
        "busy in decode: gpu": lambda r: percent(r["decode"]["busy"]["gpu"]),
        "cpu": lambda r: percent(r["decode"]["busy"]["cpu"]),
        "link": lambda r: percent(r["decode"]["busy"]["h2d"]),
        "GB a step: weights / KV": lambda r: pair(r["decode"]["link_gb"]["weights"], r["decode"]["link_gb"]["kv"]),
    }
    return markdown_table(columns, [r for r in rows if "refused" not in r])


def _refused(rows: list[Row]) -> str:
    columns = {
        "setting": lambda r: r["setting"],
        "model": lambda r: r["model"],
        "system": lambda r: r["system"],
        "GB needed at the least: host, with this cache / device": lambda r: pair(
            _needed_gb(r, "pinned", "host"), _needed_gb(r, "device")
        ),
        "why": lambda r: r["refused"],
    }
    return markdown_table(columns, [r for r in rows if "refused" in r])


def _needed_gb(row: Row, *tiers: str) -> float | None:
    needed = row.get("needed_gb")
    return needed and sum(needed.get(tier, 0.0) for tier in tiers)


def _table1(rows: list[Row]) -> str:
    def cell(phase: str, fact: str, r: Row) -> str:
        of = TABLE1.get(r["system"].split("(")[0])
        published = of and getattr(of[phase], fact if fact != "tokens_an_expert_run" else "tokens_an_expert")
        here = (
            r[f"{phase}_tok_s"] if fact == "tok_s" else r[phase][fact if fact != "utilization" else "expert_flops_used"]
        )
        return pair(published, here)

    columns = {"system": lambda r: " ".join([r["system"], *([f"({r['variant']})"] if r["variant"] else [])])}
    titles = {"tokens_an_expert_run": "tokens an expert", "utilization": "FLOPs used", "tok_s": "tok/s"}
    for phase in ("prefill", "decode"):
        for fact, title in titles.items():
            columns[f"{phase}, {title}"] = lambda r, phase=phase, fact=fact: cell(phase, fact, r)
    chosen = [r for r in rows if (r["setting"], r["model"], r["g"]) == ("C2", "deepseek-v2", 256)]
    return (
        markdown_table(columns, [r for r in chosen if "refused" not in r])
        + "\nDeepSeek-V2 on C2; published / here. Published tokens count experts without any, those here do not. FLOPs "
        "used are the experts', of what the GPU achieves while they run.\n"
    )


def _table5(rows: list[Row]) -> str:
    """Write vLLM's eight GPUs above MoE-Gen's one; a row that was not computed leaves its cells empty."""
    cases = [
        ("8", "vLLM", Case(system="vLLM", setting="C2, 8 GPUs", model="mixtral-8x22b")),
        *(("1", "MoE-Gen", Case(system=system, setting="C2", model="mixtral-8x22b")) for system in OURS),
    ]

    def here(fact: str, of: tuple[str, str, Case]) -> str:
        found = find(rows, of[2])
        return number(found and found[fact])

    columns = {
        "GPUs": lambda of: of[0],
        "system": lambda of: of[2].system,
        "published tok/s": lambda of: number(TABLE5[of[1]][0]),
        "published W": lambda of: number(TABLE5[of[1]][1]),
        "decode tok/s here": lambda of: here("decode_tok_s", of),
        "both phases, tok/s here": lambda of: here("tok_s", of),
    }
    return (
        markdown_table(columns, cases)
        + "\nMixtral-8x22B on C2's A5000, with Table 6's lengths, 512 and 256 tokens: Table 5 tells none. Bytes and "
        "busy shares that the first table has of eight GPUs are those of one of them.\n"
    )


def _table10(rows: list[Row]) -> str:
    def here(of: tuple[tuple[str, str], float]) -> str:
        (model, setting), _ = of
        found = find(rows, Case(system="MoE-Gen(H)", setting=setting, model=model))
        if found is None or found["policy"].get("chosen_by") == "memory alone":
            return ""  # nothing was searched
        return number(found["policy"].get("cpu_attention"))

    columns = {
        "model": lambda of: of[0][0],
        "setting": lambda of: of[0][1],
        "published": lambda of: number(of[1]),
        "searched here": here,
    }
    return markdown_table(columns, TABLE10.items())


def draw(data: dict[str, Any]) -> Figure:
    """Draw a line for each system, published beside simulated: prefill above decode, one column a workload of C2."""
    workloads = [w for w in WORKLOADS if w[0] == "C2" and any(_is_of(r, w) for r in data["rows"])]
    figure = new_figure(2.0 + 1.5 * len(workloads), 4.6)
    blocks = figure.subplots(2, max(1, len(workloads)), squeeze=False, sharex="row", sharey=True)
    for line, phase in zip(blocks, ("prefill", "decode"), strict=True):
        for axes, workload in zip(line, workloads, strict=False):
            _dots(axes, [r for r in data["rows"] if _is_of(r, workload)], workload, phase)
        line[0].set_yticks(range(len(SYSTEMS)), list(SYSTEMS))
        line[0].set_ylim(len(SYSTEMS) - 0.5, -0.5)
    for axes, (_, model, g) in zip(blocks[0], workloads, strict=False):
        axes.set_title(f"{model}\n{g:,} to decode", fontsize=8)
    return with_one_legend(figure)


def _is_of(row: Row, workload: tuple[str, str, int]) -> bool:
    return (row["setting"], row["model"], row["g"]) == workload and "refused" not in row and not row["variant"]


def _dots(axes: Axes, rows: list[Row], workload: tuple[str, str, int], phase: str) -> None:
    setting, model, g = workload
    for name, colour, filled in (("here, simulated", "#1f4e8c", "full"), ("published", "#e07b39", "none")):
        found = {}
        for r in rows:
            if filled == "full":
                found[r["system"]] = r[f"{phase}_tok_s"]
            elif phase == "prefill":
                found[r["system"]] = published_prefill(setting, model, r["system"])
            else:
                found[r["system"]] = published_decode(setting, model, g, r["system"])
        at = [(tok_s, list(SYSTEMS).index(system)) for system, tok_s in found.items() if tok_s is not None]
        if at:
            axes.plot(*zip(*at, strict=True), "o", color=colour, fillstyle=filled, markersize=5, label=name)
    axes.set(xscale="log", xlabel=f"{phase} tok/s")
    axes.xaxis.set_major_formatter("{x:,.10g}")
