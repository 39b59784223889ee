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
        lines += ["", f"Tokens against Hugging Face: {_of_tokens(tokens['runs'])}."]
    lines += (
        _ceilings(stages.get("ceilings", {})) + _kernels(stages) + _stream(stages) + _loop(stages) + _steady(stages)
    )
    lines += _strategies(stages) + _peers(stages)
    return "\n".join(lines) + "\n"


def _of_tokens(runs: dict[str, Any]) -> str:
    """Say how many runs gave the right tokens, and which did not, by how they ended.

    One that was skipped or cut off gave no wrong token.
    """
    ends: dict[str, list[str]] = {}
    for name, row in runs.items():
        if row["status"] != "ok":
            ends.setdefault(row["status"], []).append(name)
    others = [f"{status}: {', '.join(names)}" for status, names in ends.items()]
    return "; ".join([f"{len(runs) - sum(map(len, ends.values()))} of {len(runs)} runs exact", *others])


def _ceilings(found: dict[str, Any]) -> list[str]:
    rows = [(k, v) for k, v in found.items() if k not in ("status", "seconds", "reason")]
    return ["", "| ceiling | value |", "| --- | --- |", *(f"| {k} | {v} |" for k, v in rows)] if rows else []


def _kernels(stages: dict[str, Any]) -> list[str]:
    runs = stages.get("kernels", {}).get("runs", {})
    names = ("kernel", "us", "TFLOP/s", "GB/s", "rival", "us", "largest error", "end")
    rows = [
        (
            name, _number(row.get("us")), _number(row.get("tflop_s")), _number(row.get("gb_s")), row.get("rival", "-"),
            _number(row.get("rival_us")), _number(row.get("largest_error")), row.get("error") or row["status"],
        )
        for name, row in runs.items()
    ]  # fmt: skip
    left_out = stages.get("kernels", {}).get("left_out")
    return _table(names, rows) + (["", f"Left to torch in all runs: {', '.join(left_out)}."] if left_out else [])


def _stream(stages: dict[str, Any]) -> list[str]:
    found = stages.get("stream", {}).get("packets", {})
    rows = [(name, _number(row["gb_s"]), _share(row["of_ceiling"])) for name, row in found.items()]
    return _table(("weights alone", "GB/s", "of ceiling"), rows)


def _loop(stages: dict[str, Any]) -> list[str]:
    """Show the loop by hand, and each strategy's steady passes as a share of its rate."""
    found = stages.get("loop", {})
    if not (row := found.get("decode")):
        return []
    told = f"{found['tokens']['exact']} of {found['tokens']['of']} sequences of a tiny model as Hugging Face's"
    lines = ["", f"Loop by hand ({row['kernels']}; {told}): {_number(row['tok_s'])} tok/s with {row['sequences']} "
             f"sequences, {_number(row['pass_s'])} s a pass, weights at {_number(row['h2d_gb_s'])} GB/s."]  # fmt: skip
    rates = {
        name: (run.get("steady_decode") or {}).get("tok_s")
        for name, run in stages.get("steady", {}).get("runs", {}).items()
    }
    rows = [(name, _share(rate / row["tok_s"])) for name, rate in rates.items() if rate]
    return lines + _table(("steady decode", "of the loop's tok/s"), rows)


def _steady(stages: dict[str, Any]) -> list[str]:
    simulated = stages.get("simulate", {}).get("runs", {})
    rows = []
    for name, run in stages.get("steady", {}).get("runs", {}).items():
        found, other = run.get("steady_decode") or {}, simulated.get(name, {})
        rate = run.get("h2d_busy_gb_s")
        rows.append((
            name, run.get("label", "-"), _number(found.get("tok_s")), _number(found.get("pass_s")),
            str(found.get("passes", "-")), _number(other.get("steady_tok_s")), _share(other.get("steady_accuracy")),
            _number(rate), run.get("error") or "as asked",
        ))  # fmt: skip
    names = ("steady decode", "label", "tok/s", "s a pass", "passes", "simulator", "accuracy", "h2d GB/s", "end")
    return _table(names, rows)


def _table(names: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    head = ["", f"| {' | '.join(names)} |", "|" + " --- |" * len(names)]
    return [*head, *(f"| {' | '.join(row)} |" for row in rows)] if rows else []


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


def _peers(stages: dict[str, Any]) -> list[str]:
    rows = []
    for name, row in stages.get("peer", {}).get("peers", {}).items():
        found = row["answer"] or {}
        rows.append((
            found.get("system", name), _number(found.get("throughput_tok_s")), str(found.get("batch", "-")),
            str(found.get("steps", "-")), row["reason"] or found.get("cannot") or "-",
        ))  # fmt: skip
    return _table(("outside peer", "tok/s", "sequences at once", "tokens of each", "note"), rows)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
