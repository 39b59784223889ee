"""State what the kernels are meant to reach, and compare it with what they did."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from benchmarks.support.tables import marked, of_all_rounds, percent, table

Row = dict[str, Any]


def _times(value: float) -> str:
    return f"{value:.2f} x"


class Found(NamedTuple):
    value: float
    other: str  # the contestant it is a quotient with


Value = Callable[[Row], Found | None]  # None: the row is none of this aim's


@dataclass(frozen=True)
class Aim:
    """An aim is to reach at least `least`, or at most so much where `at_most` is set.

    A speed-up has a roof: what reading K and V at the machine's ceiling, with no arithmetic at all, would give. `limit`
    names what a missed aim without a roof ran into.
    """

    text: str
    value: Value
    least: float
    show: Callable[[float], str] = percent
    has_roof: bool = False
    limit: Callable[[Row], str] = lambda row: "-"
    at_most: bool = False

    def met(self, value: float) -> bool:
        return value <= self.least if self.at_most else value >= self.least


WIDE = ("group-6", "group-8")  # shapes of decode attention with so many query heads a KV head


def _share(
    kernel: str, num_threads: int | None = None, most_rows: int | None = None, *, wide: bool | None = None
) -> Value:
    def value(row: Row) -> Found | None:
        concerned = row["kernel"] == kernel and num_threads in (None, row["num_threads"])
        if wide is not None:
            concerned = concerned and (row["shape"] in WIDE) == wide
        if most_rows is not None:
            concerned = concerned and row["num_rows"] <= most_rows
        ceiling = "copy ceiling" if "copy_ceiling_gb_s" in row else "read ceiling"
        return Found(row["share_of_ceiling"], ceiling) if concerned else None

    return value


def _fastest(part: str, *kernels: str, most_rows: int | None = None) -> Value:
    """Return how to read the speed-up over the fastest contestant whose name contains `part`, at some kernels or at
    decode attention."""

    def value(row: Row) -> Found | None:
        if row["kernel"] not in (kernels or ("decode_attention",)):
            return None
        if most_rows is not None and row["num_rows"] > most_rows:
            return None
        ratios = [Found(ratio, name) for name, ratio in row["times_faster_than"].items() if part in name]
        return min(ratios) if ratios else None

    return value


def _call_us(row: Row) -> Found | None:
    """Return the time of a call that moves nearly nothing, on two threads."""
    concerned = row["kernel"] == "call_cost" and row["num_threads"] == 2
    return Found(row["call_us"], "torch") if concerned else None


def _microseconds(value: float) -> str:
    return f"{value:.1f} us"


def _in_cache(row: Row) -> str:
    """Tell the speed on KV that a core's L2 cache holds, in the same rounds: what remains without waiting for
    memory."""
    return f"from L2 {row['in_cache_gb_s']:.1f} GB/s, {percent(row['in_cache_gb_s'] / row['read_ceiling_gb_s'])}"


def _gemm(row: Row) -> str:
    return f"{percent(row['share_of_gemm'])} of the {row['gemm_dtype']} GEMM ceiling"


AIMS = (
    Aim(
        "decode attention, 1 thread: 65 % of the read ceiling",
        _share("decode_attention", 1, wide=False), 0.65, limit=_in_cache,
    ),
    Aim(
        "decode attention, 2 threads: 72 % of the read ceiling",
        _share("decode_attention", 2, wide=False), 0.72, limit=_in_cache,
    ),
    Aim(
        "decode attention, 6 and 8 query heads a KV head: 70 % of the read ceiling",
        _share("decode_attention", wide=True), 0.70, limit=_in_cache,
    ),
    Aim("decode attention: 10 x scalar", _fastest("scalar"), 10.0, _times, has_roof=True),
    Aim("decode attention: 3 x auto-vectorised", _fastest("auto-vectorised"), 3.0, _times, has_roof=True),
    Aim("decode attention: 2.5 x torch's best", _fastest("torch"), 2.5, _times, has_roof=True),
    Aim("decode attention: no slower than vLLM", _fastest("vllm"), 1.0, _times, has_roof=True),
    Aim("decode attention: no slower than llama.cpp", _fastest("llama"), 1.0, _times, has_roof=True),
    Aim("expert FFN, 1 to 16 tokens: 70 % of the read ceiling", _share("expert_ffn", most_rows=16), 0.70, limit=_gemm),
    Aim(
        "small experts in one call, 1 to 16 tokens: 75 % of the read ceiling",
        _share("expert_ffns", most_rows=16), 0.75,
    ),
    Aim(
        "experts, 1 to 64 tokens: no slower than vLLM",
        _fastest("vllm", "expert_ffn", "expert_ffns", most_rows=64), 1.0, _times,
    ),
    Aim("linear, 1 to 64 rows: no slower than vLLM", _fastest("vllm", "linear"), 1.0, _times),
    Aim("a call on two threads: 20 us", _call_us, 20.0, _microseconds, at_most=True),
)  # fmt: skip


def summary(results: dict[str, dict[str, Any]]) -> str:
    """Write a table of all aims that any of the results concerns, and one of each case that missed its aim."""
    aims = [["aim", "worst", "at", "best", "met"]]
    misses = [["missed", "at", "judged", "all rounds", "roof: reading at the ceiling", "what else limits"]]
    rows = [row for result in results.values() for row in result["rows"]]
    for aim in AIMS:
        cases = [(found, row) for row in rows if (found := aim.value(row)) is not None]
        if not cases:
            continue
        cases.sort(key=lambda case: case[0].value)
        if aim.at_most:
            cases.reverse()
        (worst, row), (best, _) = cases[0], cases[-1]
        missed = [case for case in cases if not aim.met(case[0].value)]
        num_met = f"{len(cases) - len(missed)} of {len(cases)}"
        aims.append([aim.text, aim.show(worst.value), _place(row), aim.show(best.value), num_met])
        misses += [_miss(aim, found, row) for found, row in missed]
    return table(aims) + ("\n\n" + table(misses) if len(misses) > 1 else "")


def _place(row: Row) -> str:
    return f"{row['shape']}, {row['num_threads']} thr."


def _miss(aim: Aim, found: Found, row: Row) -> list[str]:
    text = marked(row, found.other, aim.show(found.value))
    all_rounds = "-" if aim.at_most else aim.show(of_all_rounds(row, found.other, found.value))
    roof = aim.show(found.value / row["share_of_ceiling"]) if aim.has_roof else "-"
    return [aim.text, _place(row), text, all_rounds, roof, aim.limit(row)]
