"""A table of finished runs: `python -m harness.record.compare RUN_DIR ...` (run folders, or a results folder)."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.record.files import RecordError
from harness.record.store import Run, list_runs, read_run
from harness.record.terminal import number

_FACTS = ("model", "dataset", "machine", "hardware", "label", "data_source", "weights_source")


def compare_table(runs: Sequence[Run]) -> Table:
    """One row a run; the ratio is to the first run that has a throughput. What all runs share is in the title."""
    summaries = [run.summary or {} for run in runs]
    shared = _shared(summaries)
    varying = [fact for fact in _FACTS if fact not in shared]
    base = next((s["throughput_tok_s"] for s in summaries if s.get("throughput_tok_s")), None)
    title = "; ".join(f"{fact.replace('_', ' ')} {value}" for fact, value in shared.items() if value is not None)
    table = Table(title=title or None, title_justify="left", title_style="", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("strategy", overflow="fold")
    for fact in varying:
        table.add_column(fact.replace("_", " "), overflow="fold")
    for name in ("tok/s", "ratio"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("busiest lane", no_wrap=True)
    table.add_column("accuracy", justify="right", no_wrap=True)
    table.add_column("verify", overflow="fold")
    table.add_column("run", overflow="fold", style="dim")
    for run, summary in zip(runs, summaries, strict=True):
        observed = summary.get("throughput_tok_s")
        table.add_row(
            str(summary.get("strategy") or _asked(run)),
            *(str(summary.get(fact, "-")) for fact in varying),
            number(observed) if run.status == "ok" else Text(run.status, style="red"),
            f"{observed / base:.2f}x" if observed and base and run.status == "ok" else "-",
            _busiest(summary.get("utilization") or {}),
            "-" if summary.get("prediction_accuracy") is None else f"{summary['prediction_accuracy']:.1%}",
            _verify(summary.get("verify") or {}),
            _short(run.run_id),
        )
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 2 where an argument is no run."""
    asked = list(sys.argv[1:] if arguments is None else arguments)
    if not asked:
        print("usage: python -m harness.record.compare RUN_DIR ...", file=sys.stderr)
        return 2
    try:
        runs = [run for folder in asked for run in _runs(Path(folder))]
        Console().print(compare_table(runs))
    except RecordError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _shared(summaries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Facts that are the same in every run that got as far as a summary."""
    told = [summary for summary in summaries if summary]
    same = [fact for fact in _FACTS if len({str(summary.get(fact)) for summary in told}) == 1]
    return {fact: told[0].get(fact) for fact in same}


def _runs(folder: Path) -> list[Run]:
    return list_runs(folder) if (folder / "runs").is_dir() else [read_run(folder)]


def _asked(run: Run) -> Any:
    strategy = run.config.get("strategy")
    return strategy.get("name") if isinstance(strategy, dict) else strategy


def _short(run_id: str) -> str:
    """The hash, which tells runs of one table apart, with the number of a repetition."""
    found = re.search(r"[0-9a-f]{8}(-\d+)?$", run_id)
    return found[0] if found else run_id


def _busiest(utilization: dict[str, float]) -> str:
    if not utilization or not any(utilization.values()):
        return "-"
    lane = max(utilization, key=lambda name: utilization[name])
    return f"{lane} {utilization[lane]:.1%}"


def _verify(verify: dict[str, object]) -> str:
    if not verify.get("checked"):
        return "no"
    return (
        f"{verify['checked']} ok"
        if not verify.get("mismatched")
        else f"{verify['mismatched']} of {verify['checked']} WRONG"
    )


if __name__ == "__main__":
    sys.exit(main())
