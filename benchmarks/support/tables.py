"""Write results of the kernel benchmarks as Markdown, and put them in their places in docs/kernels.md."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

Row = dict[str, Any]
_ABSENT = "-"


def percent(value: float) -> str:
    return f"{100 * value:.0f} %"


def judged(row: Row) -> str:
    """Tell how many rounds were judged. With too few undisturbed rounds all were, and the text says so."""
    judged, taken = row["num_judged"]["ours"], row["num_rounds"]
    return f"all {taken}, disturbed" if row["all_count"]["ours"] else f"{judged} of {taken}"


def marked(row: Row, other: str, text: str) -> str:
    """Mark a quotient with another contestant's time by "(all)" where fewer than three rounds were quiet for both."""
    return f"{text} (all)" if row["all_count"].get(other) else text


def of_all_rounds(row: Row, other: str, value: float) -> float:
    """Convert a quotient with another contestant's time to all rounds, including the disturbed ones."""
    return value * row["ratio_of_all"][other] / row["ratio"][other]


def _value(key: str, text: Callable[[Any], str] = lambda value: f"{value:.2f}") -> Callable[[Row], str]:
    return lambda row: text(row[key]) if key in row else _ABSENT


def _share(key: str, ceiling: str) -> dict[str, Callable[[Row], str]]:
    """Make the columns for a share of a ceiling: in the rounds that count, and in all."""
    return {
        f"of {ceiling}": lambda row: marked(row, ceiling, percent(row[key])),
        "all rounds": lambda row: percent(of_all_rounds(row, ceiling, row[key])),
    }


_COMMON: dict[str, Callable[[Row], str]] = {
    "shape": _value("shape", str),
    "threads": _value("num_threads", str),
    "GB/s": _value("gb_s"),
    "spread": lambda row: percent(row["spread"]["ours"]),
    "rounds judged": judged,
}
_READ = {"read ceiling GB/s": _value("read_ceiling_gb_s"), **_share("share_of_ceiling", "read ceiling")}
_COPY = {"copy ceiling GB/s": _value("copy_ceiling_gb_s"), **_share("share_of_ceiling", "copy ceiling")}
_TOKENS = {"million KV tokens/s": _value("kv_tokens_s", lambda value: f"{value / 1e6:.2f}")}
_GFLOPS = {"GFLOP/s": _value("gflop_s", lambda value: f"{value:.0f}")}
_GEMM = {
    "GEMM ceiling GFLOP/s": _value("gemm_ceiling_gflop_s", lambda value: f"{value:.0f}"),
    "of GEMM ceiling": lambda row: marked(row, "GEMM ceiling", percent(row["share_of_gemm"])),
}
COLUMNS: dict[str, dict[str, Callable[[Row], str]]] = {
    "decode_attention": _TOKENS | _READ | {"GB/s with KV in L2": _value("in_cache_gb_s")},
    "latent_attention": _TOKENS | _READ | _GFLOPS | _GEMM,
    "read": {f"{n} streams": _value(f"streams_{n}_gb_s", lambda v: f"{v:.2f}") for n in (1, 4, 16)},
    "call_cost": {
        "us/call": _value("call_us", lambda value: f"{value:.1f}"),
        "fastest round": _value("fastest_call_us", lambda value: f"{value:.1f}"),
    },
    "kv_append": _TOKENS | _COPY,
    "kv_gather": _COPY,
    "linear": _GFLOPS | _READ,
    "expert_ffns": {"ms/expert": _value("expert_s", lambda value: f"{1e3 * value:.2f}")} | _GFLOPS | _READ,
    "expert_ffn": {"ms/expert": _value("expert_s", lambda value: f"{1e3 * value:.2f}")} | _GFLOPS | _READ | _GEMM,
}


def table(rows: list[list[str]]) -> str:
    """Write a table whose header is the first row."""
    header, *body = rows
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *body))


def speeds(kernel: str, rows: list[Row]) -> str:
    columns = {**_COMMON, **COLUMNS[kernel]}
    if not any("gb_s" in row for row in rows):
        del columns["GB/s"]
    order = [name for name in columns if name not in ("spread", "rounds judged")] + ["spread", "rounds judged"]
    order = [name for name in order if name in columns]
    return table([order, *([columns[name](row) for name in order] for row in rows)])


def comparison(rows: list[Row]) -> str:
    """Tell how many times faster ours is than each other contestant, with a column for each shape and number of
    threads."""
    names = list(dict.fromkeys(name for row in rows for name in row.get("times_faster_than", {})))
    if not names:
        return ""
    header = ["ours is faster than", *(f"{row['shape']}, {row['num_threads']} thr." for row in rows)]
    body = []
    for name in names:
        body.append([name, *(_faster(row, name) for row in rows)])
    return table([header, *body])


def _faster(row: Row, name: str) -> str:
    ratio = row.get("times_faster_than", {}).get(name)
    return marked(row, name, f"{ratio:.2f} x") if ratio else _ABSENT


def linear_fit(rows: list[Row]) -> str:
    """Tell how well time = a + b tokens describes the time of one expert, for each number of threads."""
    lines = [["threads", "fixed ms", "us for each token", "largest deviation from the line", "R squared"]]
    for num_threads in sorted({row["num_threads"] for row in rows}):
        chosen = [row for row in rows if row["num_threads"] == num_threads]
        tokens, seconds = [row["num_rows"] for row in chosen], [row["expert_s"] for row in chosen]
        if len(chosen) < 3:
            continue
        slope, fixed = statistics.linear_regression(tokens, seconds)
        worst = max(abs(fixed + slope * n - s) / s for n, s in zip(tokens, seconds, strict=True))
        r = statistics.correlation(tokens, seconds)
        values = (f"{1e3 * fixed:.2f}", f"{1e6 * slope:.0f}", percent(worst), f"{r * r:.4f}")
        lines.append([str(num_threads), *values])
    return table(lines)


def section(result: dict[str, Any]) -> str:
    """Write everything that one part's page section shows: where it was measured, speeds, comparisons."""
    machine = result["machine"]
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    peers = {version for row in result["rows"] for version in row.get("peers", {}).values()}
    where = [
        f"{result['label']} {result['date']}, code {result['code']}",
        f"{machine['processor']}, {machine['num_cores']} cores, {machine['memory_bytes'] / 2**30:.0f} GiB",
        f"path {machine['isa']}; {machine['compiler']}; Python {machine['python']}, {packages}",
        *sorted(peers),
    ]
    lines = [f"`{result['command']}`  ", "; ".join(where)]
    for kernel in dict.fromkeys(row["kernel"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["kernel"] == kernel]
        lines += ["", speeds(kernel, rows)]
        if versus := comparison(rows):
            lines += ["", versus]
        if kernel == "expert_ffn":
            lines += ["", linear_fit(rows)]
    return "\n".join(lines)


def write_into(page: Path, texts: dict[str, str]) -> None:
    """Replaces what stands between `<!-- results: part -->` and `<!-- end -->`."""
    content = page.read_text()
    for part, text in texts.items():
        start = f"<!-- results: {part} -->\n"
        if start in content:
            before, _, rest = content.partition(start)
            _, end, after = rest.partition("<!-- end -->")
            content = f"{before}{start}\n{text}\n\n{end}{after}"
    page.write_text(content)
