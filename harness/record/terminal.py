"""Show a run on the terminal: progress on long work, then one table. It is plain text where nobody watches."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from harness.record.expert_hits import told_experts
from harness.record.summary import accuracy

_REDRAW_S = 0.25  # drawing takes the interpreter from the lanes: not more often than an eye needs
_BAR_WIDTH = 20
_SPREAD = ("mean", "p50", "p90", "p99")
_LATENCIES = {"first token": "ttft_s", "per token": "tpot_s", "token gaps": "itl_s", "request": "e2e_s"}
_PLANNED = {
    "as_built": "as built: by the published planner, memory model, staging and defaults; plan.json has their sources",
    "best": "best: by the search here, on this engine",
}
_PLAIN_STEPS = 4  # progress lines a stage where there is no terminal

NOT_COMPARED = "it is for a whole run, and is not compared with this part of one"  # a prediction


class Progress:
    """One line that tells stage, finished requests and tokens a second; plain lines, a few a stage, without a terminal.

    Draws only inside `stage` and `update`, never from a thread of its own.
    """

    def __init__(self, num_requests: int = 0, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._num_requests = num_requests
        self._stage = ""
        self._num_finished = 0
        self._tok_s: float | None = None
        self._rate = "tok/s"
        self._started_s = time.monotonic()
        self._drawn_s = 0.0
        self._steps_told = 0
        self._live: Live | None = None

    def __enter__(self) -> Progress:
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def stage(self, text: str, num_requests: int | None = None, *, rate: str = "tok/s") -> None:
        """Begin new work; counts start again. `rate` says what kind of tokens a second will be told."""
        self._rate = rate
        self._stage, self._num_finished, self._tok_s, self._steps_told = text, 0, None, 0
        self._started_s = time.monotonic()
        self._num_requests = self._num_requests if num_requests is None else num_requests
        if self._live is None:
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)
        self._draw(always=True)

    def update(self, num_finished: int, tok_s: float | None = None) -> None:
        """Show the requests finished so far in this stage, and the rate of generation."""
        self._num_finished, self._tok_s = num_finished, tok_s
        if self._live is not None:
            self._draw(always=num_finished == self._num_requests)
            return
        steps = _PLAIN_STEPS * num_finished // self._num_requests if self._num_requests else 0
        if steps > self._steps_told:
            self._steps_told = steps
            self._console.print(f"  {self._counts()}", highlight=False, markup=False, soft_wrap=True)

    def note(self, text: str) -> None:
        """Print one more line that stays."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _draw(self, always: bool) -> None:
        if self._live is None or (not always and time.monotonic() - self._drawn_s < _REDRAW_S):
            return
        self._drawn_s = time.monotonic()
        line = Table.grid(padding=(0, 1))
        cells: list[Any] = [Text(self._stage, style="bold")]
        if self._num_finished:
            cells.append(ProgressBar(total=max(1, self._num_requests), completed=self._num_finished, width=_BAR_WIDTH))
            cells.append(Text(self._counts()))
        cells.append(Text(f"{time.monotonic() - self._started_s:.0f} s of this computer", style="dim"))
        line.add_row(*cells)
        self._live.update(line, refresh=True)

    def _counts(self) -> str:
        rate = "" if self._tok_s is None else f", {number(self._tok_s)} {self._rate}"
        return f"{self._num_finished}/{self._num_requests} requests{rate}"


def print_summary(summary: Mapping[str, Any], run_folder: Path, console: Console | None = None) -> None:
    """Print the one table of a finished run. `summary` is what `build_summary` gave, whatever became of the run."""
    target = console or Console()
    target.print(summary_table(summary, ascii_only=target.options.ascii_only))
    target.print(_paths(run_folder, summary), soft_wrap=True)  # a path is for copying: never cut or folded


def summary_table(summary: Mapping[str, Any], *, ascii_only: bool = False) -> Group:
    dot = "-" if ascii_only else "·"
    names = f" {dot} ".join(str(summary.get(key)) for key in ("strategy", "model", "dataset", "machine", "hardware"))
    table = Table(box=box.SIMPLE_HEAD, show_header=False, pad_edge=False, expand=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _rows(summary, "#" if ascii_only else "▆", "." if ascii_only else "·"):
        table.add_row(name, value if isinstance(value, Text) else Text(str(value)))
    title = Text.assemble((f"{names}  ", "bold"), (f"[{summary.get('label')}]", "bold magenta"))
    return Group(Text(), title, table)


def _rows(summary: Mapping[str, Any], full: str, empty: str) -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    if summary.get("status") != "ok":
        rows.append(
            ("status", Text(" - ".join(filter(None, (summary.get("status"), summary.get("error")))), style="bold red"))
        )
    timeless = summary.get("clock") == "none"
    rows += [] if timeless else [("throughput", _throughput(summary))]
    if summary.get("disturbed"):
        rows.append(("disturbed", Text(f"{summary['disturbed']}: no time or rate here counts", style="bold red")))
    plan = summary.get("plan") or {}
    if why := plan.get("as_built_is_best"):
        rows.append(("planned", f"as built and best alike: {why}"))
    elif planning := plan.get("planning"):
        rows.append(("planned", _PLANNED.get(planning, planning)))
    rows += [("time", _times(summary)), ("requests", _requests(summary))]
    rows += [("stopped", Text(str(summary["stopped"]), style="bold yellow"))] if summary.get("stopped") else []
    rows += [("small batch", Text(each, style="bold yellow")) for each in summary.get("small_batch") or ()]
    rows += [("latency", _latency(summary))] if summary.get("latency") else []
    if summary.get("num_passes") and not timeless:
        shares = {lane: share for lane, share in summary["utilization"].items() if share or lane != "pin"}
        rows += [(f"{lane} busy", _bar(share, full, empty)) for lane, share in shares.items()]
        rows += [
            ("bottleneck", Text(summary["bottleneck"], style="bold")),
            ("virtual time in" if summary.get("clock") == "virtual" else "where time goes", _kinds(summary)),
            ("steady window", _window(summary)),
        ]
    if (experts := told_experts(summary.get("counted"))) is not None:
        rows.append(("experts", experts))
    if (summary.get("estimated") or {}).get("share"):
        rows.append(("estimated", Text(told_estimated(summary["estimated"]), style="bold yellow")))
    if summary.get("machine_facts"):
        rows.append((f"{summary['label']} with", ", ".join(f"{k} {v}" for k, v in summary["machine_facts"].items())))
    if summary.get("hardware_ratios"):
        rows.append(("GPU : link : host", _ratios(summary["hardware_ratios"])))
    rows += [] if timeless else [("prediction", _prediction(summary))]
    rows += [("memory peak", _memory(summary)), ("verified", _verified(summary))]
    rows += [("prompts", _source(summary.get("data_source"))), ("weights", _source(summary.get("weights_source")))]
    if str(summary.get("wandb", "")).startswith("not recorded"):
        rows.append(("wandb", Text(str(summary["wandb"]), style="yellow")))
    return rows


def number(value: float | None, unit: str = "") -> str:
    """Write three digits that count, with thousands grouped, and a dash for what is unknown."""
    if value is None:
        return "-"
    text = f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{text} {unit}".strip()


def human_bytes(value: float | None) -> str:
    if value is None:
        return "-"
    for unit in ("B", "KB", "MB", "GB"):
        if abs(value) < 999.5 or unit == "GB":
            break
        value /= 1000
    return number(value, unit)


def _throughput(summary: Mapping[str, Any]) -> Text:
    return Text.assemble(
        (f"{number(summary.get('throughput_tok_s'))} tok/s generated", "bold green"),
        f" ({number(summary.get('processed_tok_s'))} processed)",
    )


def _seconds(summary: Mapping[str, Any]) -> str:
    """Return the unit of what passes and spans tell."""
    return "virtual s" if summary.get("clock") == "virtual" else "s"


def _times(summary: Mapping[str, Any]) -> str:
    generating = f"{number(summary.get('generation_s'))} {_seconds(summary)} generating"
    setup, whole = number(summary.get("setup_s")), number(summary.get("wall_s"))
    if summary.get("clock") == "virtual":
        return f"{generating}; simulated in {whole} s of this computer, {setup} s of them set-up"
    if summary.get("clock") == "none":
        return f"{whole} s in all, {setup} s set-up; this machine checks orders, it times nothing"
    return f"{generating}, {setup} s set-up; {whole} s in all"


def _requests(summary: Mapping[str, Any]) -> str:
    parts = [f"{summary.get('num_finished')} of {summary.get('num_requests')} finished"]
    parts += [f"{summary['num_rejected']} rejected"] if summary.get("num_rejected") else []
    parts += [
        f"{number(summary.get('prompt_tokens'))} prompt and {number(summary.get('generated_tokens'))} generated tokens"
    ]
    parts += [f"{number(summary['padding_tokens'])} tokens of padding"] if summary.get("padding_tokens") else []
    parts += [f"{summary.get('num_passes')} passes, {summary.get('preemptions')} preemptions"]
    return "; ".join(parts)


def _latency(summary: Mapping[str, Any]) -> str:
    found = summary["latency"]
    lines = [
        f"{'virtual s' if summary.get('clock') == 'virtual' else 'seconds':<12}"
        + "".join(f"{name:>7}" for name in _SPREAD)
    ]
    for name, field in _LATENCIES.items():
        values = found[field] or {}
        lines.append(f"{name:<12}" + "".join(f"{number(values.get(column)):>7}" for column in _SPREAD))
    return "\n".join([*lines, found["arrival"]])


def _bar(share: float, full: str, empty: str) -> Text:
    filled = min(_BAR_WIDTH, round(share * _BAR_WIDTH))
    style = "red" if share >= 0.85 else "yellow" if share >= 0.5 else "green"
    return Text.assemble((full * filled, style), (empty * (_BAR_WIDTH - filled), "dim"), f" {share:6.1%}")


def _kinds(summary: Mapping[str, Any]) -> Text:
    top = summary["where_time_goes"][:6]
    return Text(
        "\n".join(
            f"{t['lane']:<4}{t['kind']:<22}{t['busy_s']:>8.2f} s {t['share']:>6.1%} {t['num_ops']:>7} ops" for t in top
        )
    )


def _window(summary: Mapping[str, Any]) -> str:
    length = f"{summary['window_s']:.2f} {_seconds(summary)}"
    text = f"{length}, {summary['window']['covers']}; lanes overlap {summary['overlap_ratio']:.2f}x"
    stolen = summary.get("stolen_core_share")
    text += "" if summary.get("tokens_per_t_gpu") is None else f"; tokens/T_GPU {summary['tokens_per_t_gpu']:.1%}"
    return text if stolen is None else f"{text}; gpu lane without a core {stolen:.1%}"


def _ratios(ratios: Mapping[str, Any]) -> str:
    """Write FLOPs and host bytes for each byte over the link, beside the papers' machines."""

    def pair(values: Mapping[str, Any]) -> str:
        flops, host = number(values["gpu_flop_per_link_byte"]), number(values["host_bytes_per_link_byte"])
        return f"{flops} FLOP : 1 B : {host} B"

    others = "; ".join(f"{name} {pair(values)}" for name, values in ratios["references"].items())
    return f"{pair(ratios)} (GPU as achieved; {others})"


def _prediction(summary: Mapping[str, Any]) -> str:
    if summary.get("predicted_throughput_tok_s") is None:
        return "none made for this strategy"
    predicted, observed = summary["predicted_throughput_tok_s"], summary.get("throughput_tok_s")
    if summary.get("stopped"):
        return f"{number(predicted)} tok/s predicted; {NOT_COMPARED}"
    text = f"{number(predicted)} tok/s predicted, {number(observed)} {summary.get('label')}"
    told = told_accuracy(predicted, observed, str(summary.get("label")))
    return text if told is None else f"{text}: {told}"


def told_accuracy(predicted: float | None, observed: float | None, label: str) -> str | None:
    """Tell a prediction's accuracy in words: below zero, where a percentage would read like a fault, as the ratio it
    is."""
    share = accuracy(predicted, observed)
    if share is None or predicted is None or not observed:
        return None
    return f"accuracy {share:.1%}" if share >= 0 else f"predicted {predicted / observed:.1f}x the {label}"


def _memory(summary: Mapping[str, Any]) -> str:
    capacity = summary.get("capacity_bytes") or {}
    peaks = {tier: peak for tier, peak in (summary.get("peak_bytes") or {}).items() if peak is not None}
    parts = [
        f"{tier} {human_bytes(peak)}" + (f" of {human_bytes(capacity[tier])}" if capacity.get(tier) else "")
        for tier, peak in peaks.items()
    ]
    return ", ".join(parts) or "-"


def _verified(summary: Mapping[str, Any]) -> Text:
    verify = summary.get("verify") or {}
    if verify.get("mode", "off") == "off" or not verify.get("checked"):
        return Text(f"no ({verify.get('mode', 'off')})", style="yellow")
    tokens = f", {number(verify['tokens_checked'])} tokens" if verify.get("tokens_checked") is not None else ""
    asked = f" of {verify['asked']}" if verify.get("asked", verify["checked"]) != verify["checked"] else ""
    text = f"{verify['checked']}{asked} requests ({verify['mode']}{tokens}): {verify.get('mismatched', 0)} mismatched"
    text += f", {verify['excused']} excused" if verify.get("excused") else ""
    return Text(text, style="bold red" if verify.get("mismatched") else "green")


def _source(source: Any) -> Text:
    """Write a source; data or weights that are not real say so loudly."""
    text = str(source or "unknown")
    loud = re.sub(r"\b(synthetic|random)\b", lambda word: word[0].upper(), text, flags=re.IGNORECASE)
    return Text(loud, style="" if loud == text else "bold yellow")


def told_estimated(estimated: Mapping[str, Any]) -> str:
    """Return, in words, how much of a calibrated machine's time was not measured, by lane and kind of op."""
    kinds = ", ".join(f"{name} {share:.1%}" for name, share in estimated["by_kind"].items())
    return f"{estimated['share']:.1%} of all lanes' time, by kinds of op that were not measured: {kinds}"


def _paths(run_folder: Path, summary: Mapping[str, Any]) -> Text:
    lines = [f"run    {run_folder}"]
    trace = next((run_folder / name for name in ("trace.json", "trace.json.gz") if (run_folder / name).exists()), None)
    if trace is not None:
        told = summary.get("trace_excerpt")
        lines.append(f"trace  {trace}  ({f'{told}; ' if told else ''}drag it into https://ui.perfetto.dev)")
    if str(summary.get("wandb", "")).startswith(("online", "offline")):
        lines.append(f"wandb  {summary['wandb']}")
    return Text("\n".join(lines))
