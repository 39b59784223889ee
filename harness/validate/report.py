"""Report what a validation finds: errors by figure and by kind of op, and whether the aims are met. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from types import MappingProxyType
from typing import Any

import numpy as np

LANES = ("gpu", "cpu", "h2d", "d2h")
FIGURES = ("throughput_tok_s", "pass_s", *(f"{lane}_busy_s" for lane in LANES))
MIN_BUSY_SHARE = 0.02  # of a pass: a lane that does less is not compared
MATTERS = 0.1  # of a pass: a lane that does as much must be right
LINKS = ("h2d", "d2h")
BOUNDS = ("link", "gpu", "cpu")  # what binds a setting: its busiest lane
FAR_OFF = 0.25  # an op's mistake that throughput should not hide
_MIN_OPS = 10  # of a kind in a setting: the mean of fewer says little
AIMS = {  # the most that may be, of absolute errors
    "mean": 0.03,  # of throughput, over strategies that all count alike
    "worst": 0.10,  # of throughput in any setting
    "lane": 0.10,  # of the busy time of any lane that matters
}

Row = Mapping[str, Any]


def figures(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures that are compared.

    These are throughput, and over the steady passes the time of one, each lane's busy time in it, and by kind of op the
    seconds and the number of ops. `link_bytes` are those of a pass.
    """
    passes = max(summary["num_passes"] - 2, 1) if summary["num_passes"] >= 4 else summary["num_passes"]
    pass_s = summary["window_s"] / passes
    busy = {f"{lane}_busy_s": summary["utilization"].get(lane, 0.0) * pass_s for lane in LANES}
    spent = summary["where_time_goes"]
    kinds = {f"{t['lane']} {t['kind']}": [t["busy_s"], t["num_ops"]] for t in spent}
    link_bytes = {link: sum(t["moved_bytes"] for t in spent if t["lane"] == link) / passes for link in LINKS}
    return {
        "throughput_tok_s": summary["throughput_tok_s"],
        "pass_s": pass_s,
        "num_passes": summary["num_passes"],
        "preemptions": summary["preemptions"],
        **busy,
        "kinds": kinds,
        "link_bytes": link_bytes,
    }


def compared(
    name: str, runs: Sequence[Row], imagined: Row, *, strategy: str, link_bytes_s: Mapping[str, float]
) -> dict[str, Any]:
    """Compare medians of the emulated runs with the simulated run; errors are (simulated - emulated) / emulated.

    `spreads` say how far the emulated runs are apart themselves, as a share of their median. `links_alone` is the error
    of a predictor that knows nothing but the links: a pass lasts as long as the bytes of the busiest one take at its
    rate.
    """
    seen = {key: median(run[key] for run in runs) for key in FIGURES}
    told = [key for key in FIGURES if not key.endswith("busy_s") or seen[key] > MIN_BUSY_SHARE * seen["pass_s"]]
    of_runs = {key: [run[key] for run in runs] for key in told}
    links_s = max(imagined["link_bytes"][link] / rate for link, rate in link_bytes_s.items())
    return {
        "setting": name,
        "strategy": strategy,
        "links_alone": links_s / seen["pass_s"] - 1,
        "emulated": seen,
        "simulated": {key: imagined[key] for key in FIGURES},
        "passes": [sorted({run["num_passes"] for run in runs}), imagined["num_passes"]],
        "preemptions": [sorted({run["preemptions"] for run in runs}), imagined["preemptions"]],
        "num_runs": len(runs),
        "taken_share": max(run["taken_share"] for run in runs),
        "slowed_share": max(run["slowed_share"] for run in runs),
        "errors": {key: imagined[key] / seen[key] - 1 for key in told},
        "spreads": {key: (max(values) - min(values)) / seen[key] for key, values in of_runs.items()},
        "kinds": {
            kind: [*_middle([run["kinds"].get(kind, [0.0, 0]) for run in runs]), *imagined["kinds"].get(kind, [0.0, 0])]
            for kind in sorted({kind for run in (*runs, imagined) for kind in run["kinds"]})
        },
    }


def bound(row: Row) -> tuple[str, float]:
    """Return what binds a setting, the lane that was busiest in its emulated runs, and that lane's share of a pass."""
    seen = row["emulated"]
    lane = max(LANES, key=lambda lane: seen[f"{lane}_busy_s"])
    return ("link" if lane in LINKS else lane), seen[f"{lane}_busy_s"] / seen["pass_s"]


def same_passes(row: Row) -> bool:
    """Tell whether emulated and simulated runs were the same schedule, as far as passes and preemptions tell."""
    return all(row[key][0] == [row[key][1]] for key in ("passes", "preemptions"))


def aggregates(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Return mean, median, 90th percentile and worst of the absolute errors, by figure, and how many settings had the
    figure. `bias` is the mean of the errors with their signs, `spread` that of how far emulated runs are apart."""
    found = {}
    for key in sorted({key for row in rows for key in row["errors"]}):
        errors = [row["errors"][key] for row in rows if key in row["errors"]]
        sizes = np.abs(errors)
        found[key] = {
            "mean": float(np.mean(sizes)),
            "median": float(np.median(sizes)),
            "p90": float(np.percentile(sizes, 90)),
            "worst": float(np.max(sizes)),
            "bias": float(np.mean(errors)),
            "spread": float(np.mean([row["spreads"][key] for row in rows if key in row["errors"]])),
            "settings": len(sizes),
        }
    return found


def strategies(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return by strategy the mean absolute errors of throughput, of a pass, and of a pass as the
    links alone predict it."""
    return _by("strategy", lambda row: row["strategy"], sorted({row["strategy"] for row in rows}), rows)


def bounds(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return by what binds a setting the same errors as `strategies` does."""
    return _by("bound", lambda row: bound(row)[0], BOUNDS, rows)


def _by(name: str, of: Callable[[Row], str], values: Iterable[str], rows: Sequence[Row]) -> list[dict[str, Any]]:
    found = []
    for value in values:
        own = [row for row in rows if of(row) == value]
        if own:
            found.append({
                name: value,
                "settings": len(own),
                "throughput_tok_s": float(np.mean([abs(row["errors"]["throughput_tok_s"]) for row in own])),
                "pass_s": float(np.mean([abs(row["errors"]["pass_s"]) for row in own])),
                "links_alone": float(np.mean([abs(row["links_alone"]) for row in own])),
            })  # fmt: skip
    return found


def lanes_that_matter(rows: Sequence[Row]) -> list[tuple[float, float]]:
    """Return the absolute errors of busy times, each with how far the emulated runs are apart in it. Lanes count that
    are busy for a tenth of a pass or more."""
    return [
        (abs(row["errors"][f"{lane}_busy_s"]), row["spreads"][f"{lane}_busy_s"])
        for row in rows
        for lane in LANES
        if row["emulated"][f"{lane}_busy_s"] >= MATTERS * row["emulated"]["pass_s"]
    ]


def by_kind(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """List every kind of op over all settings, the one that takes longest first.

    Beside emulated seconds and the mean seconds of an op, emulated and simulated, stand the least and the largest error
    of an op's seconds in any setting that ran `_MIN_OPS` or more in either, and in how many it exceeds `FAR_OFF`.
    """
    sums: dict[str, np.ndarray] = {}
    errors: dict[str, list[float]] = {}
    for row in rows:
        for kind, values in row["kinds"].items():
            sums[kind] = sums.get(kind, np.zeros(4)) + np.array(values, dtype=float)
            emulated_s, emulated_ops, simulated_s, simulated_ops = values
            if min(emulated_ops, simulated_ops) >= _MIN_OPS:
                errors.setdefault(kind, []).append(simulated_s / simulated_ops / (emulated_s / emulated_ops) - 1)
    found = [
        {
            "kind": kind,
            "busy_s": float(emulated_s),
            "emulated_s": float(emulated_s / emulated_ops),
            "simulated_s": float(simulated_s / simulated_ops),
            "errors": [min(errors[kind]), max(errors[kind])] if kind in errors else None,
            "settings": len(errors.get(kind, [])),
            "far_off": sum(abs(error) > FAR_OFF for error in errors.get(kind, [])),
        }
        for kind, (emulated_s, emulated_ops, simulated_s, simulated_ops) in sums.items()
        if emulated_ops and simulated_ops
    ]
    return sorted(found, key=lambda entry: -entry["busy_s"])


def alone(rows: Sequence[Row]) -> dict[str, tuple[int, int]]:
    """Return the kinds of op that one machine ran and the other did not, in any one setting: emulated and simulated
    ops, over those settings."""
    found: dict[str, tuple[int, int]] = {}
    for row in rows:
        for kind, (_, emulated_ops, _, simulated_ops) in row["kinds"].items():
            if not emulated_ops or not simulated_ops:
                before = found.get(kind, (0, 0))
                found[kind] = (before[0] + int(emulated_ops), before[1] + int(simulated_ops))
    return found


def verdict(rows: Sequence[Row]) -> tuple[bool, str]:
    """Tell whether the aims are met, with a line that says so, and whether links alone would have predicted as well."""
    by_strategy, lanes = strategies(rows), [error for error, _ in lanes_that_matter(rows)]
    found = {
        "mean": float(np.mean([each["throughput_tok_s"] for each in by_strategy])),
        "worst": max(abs(row["errors"]["throughput_tok_s"]) for row in rows),
        "lane": max(lanes, default=0.0),
    }
    names = {
        "mean": "mean error of throughput over strategies",
        "worst": "worst setting",
        "lane": f"worst busy time of the {len(lanes)} lanes that matter",
    }
    parts = [f"{names[key]} {found[key]:.1%} (aim: at most {aim:.0%})" for key, aim in AIMS.items()]
    met = all(found[key] <= aim for key, aim in AIMS.items())
    ours, theirs = (np.mean([each[key] for each in by_strategy]) for key in ("pass_s", "links_alone"))
    beside = f"a pass: {ours:.1%}, where bytes of the busiest link over its rate alone are {theirs:.1%} off"
    return met, f"aims {'MET' if met else 'MISSED'}: {', '.join(parts)}; {beside}"


def markdown(rows: Sequence[Row], made: str, slowed_shares: Mapping[str, float] = MappingProxyType({})) -> str:
    """Write the report: the aims, aggregates, kinds of ops, then every setting, the worst first. `made` tells when,
    where and how, `slowed_shares` of how much of each calibration's time others slowed the cores."""
    num_runs = min(row["num_runs"] for row in rows)
    others = sum(not same_passes(row) for row in rows)
    what = f"Medians of {num_runs} emulated runs" if num_runs > 1 else "Single emulated runs, no medians"
    lines = ["# The simulator against the emulated machine", "", made, ""]
    lines += [
        f"{len(rows)} settings, none of them used to calibrate. {what}. Errors of simulated against emulated.",
        "",
    ]
    lines += [f"{verdict(rows)[1]}.", "", *_slowed(rows, slowed_shares), *_apart(rows)]
    if others:
        lines += [
            f"In {others} settings emulated and simulated runs differ in passes or preemptions: marked with `!`.",
            "",
        ]
    lines += ["| figure | mean | median | 90th percentile | worst | bias | runs apart | settings |", "|" + " --- |" * 8]
    for key, values in aggregates(rows).items():
        shares = " | ".join(f"{values[name]:.1%}" for name in ("mean", "median", "p90", "worst"))
        apart = f"{values['spread']:.1%}" if num_runs > 1 else "-"
        lines.append(f"| {key} | {shares} | {values['bias']:+.1%} | {apart} | {values['settings']} |")
    for name, found in (("strategy", strategies(rows)), ("bound", bounds(rows))):
        lines += ["", f"| {name} | settings | throughput | pass | pass by links alone |", "|" + " --- |" * 5]
        for each in found:
            errors = " | ".join(f"{each[key]:.1%}" for key in ("throughput_tok_s", "pass_s", "links_alone"))
            lines.append(f"| {each[name]} | {each['settings']} | {errors} |")
    heads = ("kind of op", "seconds in all", "an op, emulated", "simulated", "error", "by setting", "far off")
    lines += ["", f"| {' | '.join(heads)} |", "|" + " --- |" * len(heads)]
    for entry in by_kind(rows):
        error = entry["simulated_s"] / entry["emulated_s"] - 1
        times = f"{entry['emulated_s'] * 1e6:.0f} us | {entry['simulated_s'] * 1e6:.0f} us"
        among = "-" if entry["errors"] is None else " to ".join(f"{each:+.0%}" for each in entry["errors"])
        far_off = f"{entry['far_off']} of {entry['settings']}"
        lines.append(f"| {entry['kind']} | {entry['busy_s']:.1f} | {times} | {error:+.0%} | {among} | {far_off} |")
    lines += [
        "",
        f"*By setting*: least and largest error of an op's mean time in the settings that ran {_MIN_OPS} or more; "
        f"*far off*: in how many of them it is wrong by more than {FAR_OFF:.0%}, whether throughput shows that or not.",
    ]
    if missing := alone(rows):
        told = "; ".join(f"{kind} {ours} and {theirs}" for kind, (ours, theirs) in missing.items())
        lines += [
            "",
            f"Ops that in some setting one machine ran and the other did not, emulated and simulated: {told}.",
        ]
    return "\n".join([*lines, "", *_settings(rows)]) + "\n"


def _slowed(rows: Sequence[Row], slowed_shares: Mapping[str, float]) -> list[str]:
    """Say how far the calibrations and the runs were made on the same cores, as to their speed."""
    shares = sorted(row["slowed_share"] for row in rows)
    told = f"Others slowed the cores for {median(shares):.0%} of a run's time (median; {shares[-1]:.0%} at most)"
    if not slowed_shares:
        return [f"{told}.", ""]
    tables = ", ".join(f"{share:.0%}" for share in slowed_shares.values())
    return [f"{told}, for {tables} of the calibrations'.", ""]


def _apart(rows: Sequence[Row]) -> list[str]:
    """Say how well the emulated machine repeats the busy times that the simulator is to tell. It repeats nothing where
    each setting ran once."""
    if min(row["num_runs"] for row in rows) < 2:
        return []
    lanes, aim = lanes_that_matter(rows), AIMS["lane"]
    off, apart = ({number for number, values in enumerate(lanes) if values[which] > aim} for which in (0, 1))
    return [
        f"Of the {len(lanes)} busy times that matter {len(off)} are off by more than {aim:.0%}. The emulated runs of a "
        f"setting are themselves farther apart than that in {len(off & apart)} of these, and in {len(apart - off)} of "
        "the others.",
        "",
    ]


def _settings(rows: Sequence[Row]) -> list[str]:
    keys = FIGURES[1:]
    others = ("taken", "slowed")
    heads = ("setting", "bound", "emulated tok/s", "simulated", "error", "spread", "passes", "pass", *LANES, *others)
    lines = [f"| {' | '.join(heads)} |", "|" + " --- |" * len(heads)]
    for row in sorted(rows, key=lambda row: -abs(row["errors"]["throughput_tok_s"])):
        errors = row["errors"]
        cells = [f"{errors[key]:+.1%}" if key in errors else "-" for key in keys]
        by, share = bound(row)
        rates = (
            f"{by} {share:.0%} | {row['emulated']['throughput_tok_s']:.1f} | {row['simulated']['throughput_tok_s']:.1f}"
        )
        lines.append(
            f"| {row['setting']} | {rates} | {errors['throughput_tok_s']:+.1%} | "
            f"{row['spreads']['throughput_tok_s']:.1%} | {_passes(row)} | {' | '.join(cells)} | "
            f"{row['taken_share']:.1%} | {row['slowed_share']:.0%} |"
        )
    return lines


def _passes(row: Row) -> str:
    seen, imagined = row["passes"]
    text = "/".join(str(count) for count in seen)
    return text if same_passes(row) else f"{text}, simulated {imagined} `!`"


def _middle(pairs: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return the medians of busy seconds and of numbers of ops."""
    return median(busy_s for busy_s, _ in pairs), median(num_ops for _, num_ops in pairs)
