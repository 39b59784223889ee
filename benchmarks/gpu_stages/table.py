"""The results as a page of Markdown."""

from __future__ import annotations

from typing import Any


def markdown(content: dict[str, Any]) -> str:
    stages = content["stages"]
    lines = [f"# {content['title']}", "", *(f"* {name}: {value}" for name, value in content["facts"].items()), ""]
    for name, stage in stages.items():
        if stage["status"] not in ("ok", "under way"):
            lines.append(f"* {name}: {stage['status']}, {stage.get('reason')}")
    tokens = stages.get("tokens", {})
    if "runs" in tokens:
        wrong = [name for name, row in tokens["runs"].items() if row["status"] != "ok"]
        said = f"not exact: {', '.join(wrong)}" if wrong else "all exact"
        lines += ["", f"Tokens against Hugging Face: {len(tokens['runs'])} runs, {said}."]
    lines += _ceilings(stages.get("ceilings", {})) + _strategies(stages) + _peer(stages)
    return "\n".join(lines) + "\n"


def _ceilings(found: dict[str, Any]) -> list[str]:
    rows = [(k, v) for k, v in found.items() if k not in ("status", "seconds", "reason")]
    return ["", "| ceiling | value |", "| --- | --- |", *(f"| {k} | {v} |" for k, v in rows)] if rows else []


def _strategies(stages: dict[str, Any]) -> list[str]:
    runs = stages.get("strategies", {}).get("runs", {})
    simulated = stages.get("simulate", {}).get("runs", {})
    if not runs:
        return []
    names = (
        *("strategy", "label", "tok/s", "paper's model", "accuracy", "simulator", "accuracy", "h2d GB/s (of ceiling)"),
        *("busiest lane", "passes", "end"),
    )
    lines = ["", f"| {' | '.join(names)} |", "|" + " --- |" * len(names)]
    for name, run in runs.items():
        whole = run.get("status") == "ok"
        other = simulated.get(name, {})
        rate, ceiling = run.get("h2d_busy_gb_s"), run.get("h2d_ceiling_gb_s")
        share = f" ({rate / ceiling:.0%})" if rate and ceiling else ""
        lanes = run.get("utilization") or {}
        busiest = max(lanes, key=lambda lane: lanes[lane]) if lanes else None
        cells = [
            name, run.get("label", "-"), _number(run.get("throughput_tok_s")),
            _number(run.get("predicted_throughput_tok_s")),
            _share(run.get("prediction_accuracy")) if whole else "-",
            _number(other.get("simulated_tok_s")), _share(other.get("accuracy")),
            f"{_number(rate)}{share}", f"{busiest} {lanes[busiest]:.0%}" if busiest else "-",
            str(run.get("num_passes", "-")), "whole" if whole else str(run.get("error")),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _peer(stages: dict[str, Any]) -> list[str]:
    stage = stages.get("peer")
    if not stage:
        return []
    found = stage.get("peer")
    if not found:
        return ["", f"Outside peer: none, {stage.get('reason')}."]
    text = f"Outside peer, {found['system']}: {_number(found['throughput_tok_s'])} tok/s"
    return ["", f"{text} with {found['batch']} sequences at once, {found['steps']} tokens each."]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
