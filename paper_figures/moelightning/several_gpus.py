"""Simulate MoE-Lightning's S6 to S9, 2 and 4 T4: its tensor parallelism, FlexGen's pipeline, DeepSpeed's sharding.

    python -m paper_figures.moelightning several_gpus --out FOLDER
    python -m paper_figures.moelightning.several_gpus --settings S6 S7 --g 32 --out FOLDER   # some; others are kept

Each system runs one full batch (for each GPU, where each has its own) of the size that its planner finds: best, our
search on this engine, and where it says so, as built, the system's own planner with its staging and its defaults. On S6
and S7 all are padded (to every lane the same as prompts that are all as long as the longest), on S8 and S9 none is.
Prefill and the first decode steps are simulated; the other steps are their linear continuation, as only the context
grows.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.cli.arguments import CommandParser
from harness.interrupts import exit_code
from harness.model.cache import make_writable
from harness.plan.planning import Plan
from harness.record.passes import PassRecord
from harness.record.provenance import code_version
from paper_figures.moelightning.batches import LONGEST_PROMPT
from paper_figures.passes import planned, simulated_passes
from paper_figures.pool import each
from paper_figures.reports import written_with
from paper_figures.support import REFERENCE, new_figure, read_json, write_json

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OUT = REFERENCE / "moelightning-simulated"
NOTE = (
    "MTBench lengths (synthetic prompts, mean 77, longest 418; S6 and S7 padded to 418, as published); rates of "
    "conf/hardware/t4x2.yaml and t4x4.yaml; one full batch, of whose decode steps the first are simulated, the rest "
    "continued"
)
SETTINGS = {  # MoE-Lightning Table 2: model and profile; and GB of the host for the KV cache, beside the weights
    "S6": ("mixtral-8x22b", "t4x2", 100),
    "S7": ("mixtral-8x22b", "t4x4", 100),
    "S8": ("dbrx", "t4x2", 120),
    "S9": ("dbrx", "t4x4", 120),
}
SCALING = {("S6", "S7"): (2.77, 3.38), ("S8", "S9"): (2.1, 2.8)}  # MoE-Lightning section 5.3: 4 GPUs over 2, its own
_AS_BUILT = ("strategy.planning=as_built",)
_STAGED_KV_GB = 60  # of FlexGen as built, whose planner takes 52; four stages have 40 GB of weights in staging buffers
_CGOPIPE, _PINNED = ("strategy=moelightning",), ("strategy=moelightning", "strategy.staging=false")
_PADDED = (f"dataset.lengths.mean={LONGEST_PROMPT['mtbench_lightning']}", "dataset.lengths.shape=constant")
# Section 5.3: "a small batch size of 32". It is taken as each GPU's; so many fit with one part of a layer at a time.
_PUBLISHED = ("strategy.batch_size=32", "strategy.prefetch=false")
SYSTEMS = {
    "MoE-Lightning(p)": (*_CGOPIPE, *_PADDED),
    "MoE-Lightning(p), weights pinned": (*_PINNED, *_PADDED),
    "FlexGen": ("strategy=flexgen", *_PADDED),
    "FlexGen(c)": ("strategy=flexgen_c", *_PADDED),
    "DeepSpeed-Zero": ("strategy=deepspeed_zero", *_PADDED),
    "DeepSpeed-Zero, batches of 32": ("strategy=deepspeed_zero", *_PADDED, *_PUBLISHED),
    "MoE-Lightning(p), as built": (*_CGOPIPE, *_AS_BUILT, *_PADDED),
    "FlexGen, as built": ("strategy=flexgen", *_AS_BUILT, *_PADDED),
    "FlexGen(c), as built": ("strategy=flexgen_c", *_AS_BUILT, *_PADDED),
    "MoE-Lightning": _CGOPIPE,
    "MoE-Lightning, weights pinned": _PINNED,
    "MoE-Lightning, as built": (*_CGOPIPE, *_AS_BUILT),
}
_PADDING, _NOT_PADDING = list(SYSTEMS)[:9], list(SYSTEMS)[9:]
SHOWN = {"S6": _PADDING, "S7": _PADDING, "S8": _NOT_PADDING, "S9": _NOT_PADDING}  # Fig. 7, and Fig. 8 without padding
GENERATED = (32, 64, 128, 256)  # Table 3
Cell = tuple[str, str, int]  # setting, system and tokens to generate
STEPS = 3  # of decode that are simulated; with 5, no row differs by more than 0.003 %
MOST_REQUESTS = 10_000  # "thousands of questions" (section 5.1), more than any batch has


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One batch, or one each of those in flight: when its prefill and its simulated decode steps ended."""

    num_sequences: int
    prefill_s: float
    steps_s: tuple[float, ...]
    new_tokens: int

    @property
    def total_s(self) -> float:
        """The first step still shares the machine with the prefill, so that the others are continued from those behind
        it: linear in the context."""
        simulated = np.arange(len(self.steps_s))
        missing = np.arange(len(self.steps_s), self.new_tokens - 1)
        if not len(missing):
            return self.prefill_s + sum(self.steps_s)
        slope, start = np.polyfit(simulated[1:], self.steps_s[1:], 1)
        return float(self.prefill_s + sum(self.steps_s) + (start + slope * missing).sum())

    @property
    def tok_s(self) -> float:
        """Generated tokens over the time of prefill and decode (section 5.1)."""
        return self.num_sequences * self.new_tokens / self.total_s


def overrides(setting: str, system: str, g: int, num_requests: int) -> list[str]:
    """Return the overrides as `python -m harness.plan` takes them."""
    model, hardware, kv_gb = SETTINGS[setting]
    if _is_as_built(system) and system.startswith("FlexGen"):
        kv_gb = _STAGED_KV_GB
    return [
        *(f"model={model}", f"hardware={hardware}", f"kv_cache_gb={kv_gb}", "strategy.packet_mb=1000000"),
        *("dataset=mtbench_lightning", "dataset.synthetic=lengths", f"dataset.max_new_tokens={g}"),
        *SYSTEMS[system],
        f"dataset.num_requests={num_requests}",
    ]


def simulated(plan: Plan, *, new_tokens: int, steps: int = STEPS) -> Batch:
    """Simulate the first batch of a plan, of which all requests generate `new_tokens`. Its passes are as many prefills
    as batches are in flight, and then as many for each decode step."""
    passes: list[PassRecord] = []
    last_step = min(steps, new_tokens - 1)

    def is_last(record: PassRecord) -> bool:
        passes.append(record)
        prefills = sum(one.mode == "prefill" for one in passes)
        return len(passes) == prefills * (1 + last_step)

    start_s = plan.machine.now()
    simulated_passes(plan, until=is_last)
    prefills = [one for one in passes if one.mode == "prefill"]
    count = len(prefills)
    ends_s = [max(one.end_s for one in passes[at : at + count]) for at in range(0, len(passes), count)]
    return Batch(
        num_sequences=sum(one.num_sequences for one in prefills),
        prefill_s=ends_s[0] - start_s,
        steps_s=tuple(b - a for a, b in pairwise(ends_s)),
        new_tokens=new_tokens,
    )


def row(setting: str, system: str, g: int) -> dict[str, Any]:
    """Simulate a cell: the workload is cut to one batch of the size that the search finds for thousands of requests."""
    searched = planned(overrides(setting, system, g, MOST_REQUESTS))
    num_gpus = len(searched.engine.ranks)
    together = num_gpus if system.startswith(("FlexGen", "DeepSpeed-Zero")) else 1
    arguments = overrides(setting, system, g, together * searched.strategy.plan["batch_size"])
    plan = planned(arguments)
    batch = simulated(plan, new_tokens=g)
    policy = plan.strategy.plan
    return {
        "setting": setting,
        "model": SETTINGS[setting][0],
        "num_gpus": num_gpus,
        "system": system,
        "planning": policy.get("planning"),
        "code": code_version(),
        "g": g,
        "sequences": batch.num_sequences,
        "N": policy["batch_size"],
        "mu": policy.get("micro_batch_size"),
        "r_w": policy.get("resident_weights"),
        "attention": "GPU" if policy.get("gpu_attention", True) else "CPU",
        "simulated_tok_s": batch.tok_s,
        "predicted_tok_s": predicted_tok_s(plan, g),
        "prefill_s": batch.prefill_s,
        "steps_s": batch.steps_s,
        "command": f"python -m harness.plan {' '.join(arguments)}",
    }


def predicted_tok_s(plan: Plan, new_tokens: int) -> float | None:
    """Predict one full batch, or one each of those in flight, in tokens a second; None for a system without a model."""
    prediction = plan.strategy.prediction
    if prediction is None:
        return None
    prefill_s, decode_s = (
        max(seconds for name, seconds in prediction.terms.items() if name.startswith(f"{phase} layer, "))
        for phase in ("prefill", "decode")
    )
    total_s = plan.engine.spec.num_layers * (prefill_s + (new_tokens - 1) * decode_s)
    return plan.strategy.passes_in_flight * prediction.terms["N"] * new_tokens / total_s


def cells(
    settings: Sequence[str] = tuple(SETTINGS),
    generated: Sequence[int] = GENERATED,
    systems: Sequence[str] = tuple(SYSTEMS),
) -> list[Cell]:
    """Return the cells of these settings, lengths and systems, in the order of the report."""
    return [
        (setting, system, g)
        for g in generated
        for setting in settings
        for system in SHOWN[setting]
        if system in systems
    ]


def compute(wanted: Sequence[Cell] | None = None) -> dict[str, Any]:
    rows = []
    wanted = cells() if wanted is None else wanted
    for (setting, system, g), found in zip(wanted, each(row_of, wanted), strict=True):
        rows.append(found)
        print(f"{setting}, g {g}, {system}: {found['simulated_tok_s']:.4g} tok/s", flush=True)
    return report(rows)


def row_of(cell: Cell) -> dict[str, Any]:
    return row(*cell)


def report(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {"label": "simulated", "rows": list(rows), "scaling": scaling(rows)}


def joined(kept: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join rows in the order of a whole run, with new ones in the place of old ones."""

    def key(r: dict[str, Any]) -> tuple[int, int, int]:
        return GENERATED.index(r["g"]), list(SETTINGS).index(r["setting"]), list(SYSTEMS).index(r["system"])

    found = {key(r): r for r in (*kept, *rows)}
    return [found[at] for at in sorted(found)]


def scaling(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Compare throughput with 4 GPUs and with 2, and give the range that the paper states for itself."""
    by_key = {(r["setting"], r["system"], r["g"]): r["simulated_tok_s"] for r in rows}
    found = []
    for (two, four), published in SCALING.items():
        for system, g in dict.fromkeys((r["system"], r["g"]) for r in rows):
            if (two, system, g) in by_key and (four, system, g) in by_key:
                ratio = by_key[four, system, g] / by_key[two, system, g]
                stated = list(published) if system.startswith("MoE-Lightning") else None
                found.append({"of": f"{four}/{two}", "system": system, "g": g, "simulated": ratio, "published": stated})
    return found


def tables(data: dict[str, Any]) -> str:
    """Write the tables as Markdown."""
    lines = [
        "# Several GPUs (simulated)\n",
        "Systems that are planned are planned best, but for those that are named as built.\n",
        "| setting | g | system | N | μ | r_w | attention | sequences | simulated tok/s | predicted tok/s | s a step |",
        "|" + " ---: |" * 11,
    ]
    for r in data["rows"]:
        predicted = "-" if r["predicted_tok_s"] is None else f"{r['predicted_tok_s']:.4g}"
        share = "-" if r["r_w"] is None else f"{r['r_w']:.2f}"
        lines.append(
            f"| {r['setting']} | {r['g']} | {r['system']} | {r['N']:,} | {r['mu'] or '-'} | {share} | {r['attention']} "
            f"| {r['sequences']:,} | {r['simulated_tok_s']:.4g} | {predicted} | {r['steps_s'][-1]:.3g} |"
        )
    lines += ["\n## 4 GPUs over 2\n", "| of | g | system | simulated | published |", "|" + " ---: |" * 5]
    for r in data["scaling"]:
        stated = "-" if r["published"] is None else f"{r['published'][0]}-{r['published'][1]}"
        lines.append(f"| {r['of']} | {r['g']} | {r['system']} | {r['simulated']:.2f} | {stated} |")
    return "\n".join(lines) + "\n"


def draw(data: dict[str, Any]) -> Figure:
    """Draw throughput over generation length, with a block for each setting; settings of one model have one scale."""
    from matplotlib.ticker import LogLocator

    settings = list(dict.fromkeys(r["setting"] for r in data["rows"]))
    figure = new_figure(3.0 * len(settings) + 0.6, 3.4)
    colours = dict(zip(map(_plain, SYSTEMS), ("C0", "C1", "C2", "C4", "C3", "C5"), strict=False))
    first_of: dict[str, Axes] = {}
    for axes, setting in zip(figure.subplots(1, len(settings), squeeze=False)[0], settings, strict=True):
        model, hardware, _ = SETTINGS[setting]
        rows = [r for r in data["rows"] if r["setting"] == setting]
        for system in dict.fromkeys(r["system"] for r in rows):
            points = [(r["g"], r["simulated_tok_s"]) for r in rows if r["system"] == system]
            style = "--" if _is_as_built(system) else "-"
            name, colour = system.replace("(p)", ""), colours[_plain(system)]
            axes.plot(*zip(*points, strict=True), marker="o", color=colour, linestyle=style, label=name)
        padded = ", padded" if SHOWN[setting] == _PADDING else ""
        axes.set(title=f"{setting}: {model}, {hardware}{padded}", xlabel="generated tokens", xscale="log", yscale="log")
        axes.set_xticks(GENERATED, [str(g) for g in GENERATED])
        axes.minorticks_off()
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        if first_of.setdefault(model, axes) is not axes:
            axes.sharey(first_of[model])
            axes.autoscale(axis="y")
    figure.axes[0].set_ylabel("tok/s")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    return figure


def _is_as_built(system: str) -> bool:
    return system.endswith(", as built")


def _plain(system: str) -> str:
    return system.replace("(p)", "").removesuffix(", as built")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = CommandParser("paper_figures.moelightning.several_gpus", __doc__)
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument(
        "--g", type=int, nargs="+", default=list(GENERATED), choices=GENERATED, help="tokens to generate"
    )
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=list(SYSTEMS))
    parser.add_argument("--out", type=Path, default=OUT, metavar="FOLDER")
    return parser.run(_simulate_more, arguments)


def _simulate_more(args: Namespace) -> int:
    """Simulate some cells and add their rows to those in the folder."""
    make_writable(args.out, "--out")  # before the work
    numbers = args.out / "several_gpus.json"
    kept = read_json(numbers)["rows"] if numbers.exists() else []
    rows = joined(kept, compute(cells(args.settings, args.g, args.systems))["rows"])
    data = {**written_with("python -m paper_figures.moelightning several_gpus", rows), **report(rows)}
    write_json(numbers, data)
    text = tables(data)
    (args.out / "several_gpus.md").write_text(text, encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
