"""Simulate MoE-Lightning Fig. 7, S1 and S2: every system over generation lengths, next to what is published.

Each system runs best, with the policy that the search here finds on our memory model, and as built, where its policies
are published: with these, its own staging and defaults. A speed-up is of two systems of the same kind; DeepSpeed, which
has no planner, is the same either way.
One that is padded has prompts of the longest prompt's length. Of decode some steps are simulated; the others lie on
lines between these (`paper_figures.measuring`), as only the context grows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from harness.engine.strategy import Planning
from paper_figures.moelightning.batches import Case, row
from paper_figures.moelightning.published import FIG7_TOK_S, GENERATED, POLICIES, Sizes
from paper_figures.pool import each
from paper_figures.support import markdown_table, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NOTE = (
    "Mixtral-8x7B, MTBench lengths (synthetic prompts); rates of conf/hardware/t4.yaml and l4.yaml; "
    "published: MoE-Lightning Fig. 7, from its artifact"
)
HARDWARE = {"S1": "t4", "S2": "l4"}
STRATEGIES = {  # system: strategy, whether it pads
    "MoE-Lightning": ("moelightning", False),
    "MoE-Lightning(p)": ("moelightning", True),
    "FlexGen": ("flexgen", True),
    "FlexGen(c)": ("flexgen_c", True),
    "FastDecode": ("fastdecode", True),
    "DeepSpeed-Zero": ("deepspeed_zero", True),
}
_BASELINES = ("FlexGen", "FlexGen(c)", "DeepSpeed-Zero")


def cases(settings: Sequence[str] = tuple(HARDWARE), generated: Sequence[int] = GENERATED) -> Iterator[Case]:
    for setting in settings:
        for g in generated:
            for system, (strategy, padded) in STRATEGIES.items():
                case = Case(
                    system=system, strategy=strategy, setting=setting, hardware=HARDWARE[setting], g=g, padded=padded,
                )  # fmt: skip
                yield case
                if system in POLICIES[setting]:
                    yield with_sizes(case, POLICIES[setting][system][GENERATED.index(g)], "as_built")


def with_sizes(case: Case, sizes: Sizes, planning: Planning = "best") -> Case:
    """Return the case with a published policy; what the policy leaves open is planned so."""
    return replace(
        case, batch_size=sizes.batch_size, micro_batch_size=sizes.micro_batch_size, policy_source="published",
        planning=planning,
    )  # fmt: skip


def published_tok_s(row: dict[str, Any]) -> float | None:
    values = FIG7_TOK_S[row["setting"]].get(row["system"])
    return None if values is None else values[GENERATED.index(row["g"])]


def compute(chosen: Sequence[Case] | None = None) -> dict[str, Any]:
    wanted, rows = list(cases()) if chosen is None else chosen, []
    for case, made in zip(wanted, each(row, wanted), strict=True):
        rows.append({**made, "published_tok_s": published_tok_s(made)})
        print(
            f"{case.setting}, g {case.g}, {case.system}, {case.planning}: {made['simulated']['tok_s']:.4g} tok/s",
            flush=True,
        )
    return {"label": "simulated", "rows": rows, "ratios": ratios(rows)}


def ratios(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Divide MoE-Lightning by each baseline: as published, and as simulated with both as built or both best."""
    found = []
    by_key = {(r["setting"], r["g"], r["system"], r["planning"]): r for r in rows}
    for setting, g in dict.fromkeys((r["setting"], r["g"]) for r in rows):
        for ours in ("MoE-Lightning", "MoE-Lightning(p)"):
            for baseline in _BASELINES:
                values = {}
                for planning in ("as_built", "best"):
                    pair = [_planned(by_key, setting, g, system, planning) for system in (ours, baseline)]
                    if None not in pair:
                        values[planning] = pair[0]["simulated"]["tok_s"] / pair[1]["simulated"]["tok_s"]
                at = GENERATED.index(g)
                found.append({
                    "setting": setting, "g": g, "over": baseline, "system": ours,
                    "published": FIG7_TOK_S[setting][ours][at] / FIG7_TOK_S[setting][baseline][at],
                    "as_built": values.get("as_built"), "best": values.get("best"),
                })  # fmt: skip
    return found


def _planned(by_key: dict[Any, Any], setting: str, g: int, system: str, planning: str) -> Any:
    """Return the system's row that is planned so, or its only one where it has no planner of its own."""
    return by_key.get((setting, g, system, planning)) or by_key.get((setting, g, system, None))


def tables(data: dict[str, Any]) -> str:
    rows = {
        "setting": lambda r: r["setting"],
        "g": lambda r: str(r["g"]),
        "system": lambda r: r["system"],
        "planned": lambda r: _told(r["planning"]),
        "μ": lambda r: str(r["mu"]),
        "N": lambda r: f"{r['N']:,}",
        "published tok/s": lambda r: _number(r["published_tok_s"]),
        "simulated tok/s": lambda r: _number(r["simulated"]["tok_s"]),
        "predicted tok/s": lambda r: _number(r["predicted"] and r["predicted"]["tok_s"]),
        "simulated / published": lambda r: _number(
            r["published_tok_s"] and r["simulated"]["tok_s"] / r["published_tok_s"]
        ),
        "prefill s": lambda r: _number(r["simulated"]["prefill_s"]),
        "s a step": lambda r: _number(r["simulated"]["step_s"]),
        "GPU busy in decode": lambda r: f"{r['simulated']['decode_busy']['gpu']:.0%}",
        "link busy in decode": lambda r: f"{r['simulated']['decode_busy']['h2d']:.0%}",
    }  # fmt: skip
    speed_ups = {
        "setting": lambda r: r["setting"],
        "g": lambda r: str(r["g"]),
        "system": lambda r: r["system"],
        "over": lambda r: r["over"],
        "published": lambda r: _number(r["published"]),
        "simulated, both as built": lambda r: _number(r["as_built"]),
        "simulated, both best": lambda r: _number(r["best"]),
    }
    return (
        f"# Systems on S1 and S2 (simulated)\n\n{markdown_table(rows, data['rows'])}\n"
        f"## Speed-ups\n\n{markdown_table(speed_ups, data['ratios'])}"
    )


def _told(planning: str | None) -> str:
    return "either way" if planning is None else planning.replace("_", " ")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def draw(data: dict[str, Any]) -> Figure:
    """Draw published next to simulated bars, one block a setting and generation length."""
    settings = list(dict.fromkeys(r["setting"] for r in data["rows"]))
    figure = new_figure(10.0, 3.2 * len(settings))
    blocks = figure.subplots(len(settings), 1, squeeze=False)[:, 0]
    kinds = {
        "published": ("#bab0ac", lambda r: r["published_tok_s"] if r["planning"] != "as_built" else None),
        "simulated, as built": ("#86bcec", lambda r: _planned_so(r, "as_built")),
        "simulated, best": ("#1f4e8c", lambda r: _planned_so(r, "best", None)),
    }
    for axes, setting in zip(blocks, settings, strict=True):
        rows = [r for r in data["rows"] if r["setting"] == setting]
        places = list(dict.fromkeys((r["g"], r["system"]) for r in rows))
        for number, (label, (colour, value)) in enumerate(kinds.items()):
            bars = [(places.index((r["g"], r["system"])), value(r)) for r in rows if value(r) is not None]
            axes.bar([x + 0.27 * (number - 1) for x, _ in bars], [y for _, y in bars], 0.25, color=colour, label=label)
        axes.set_xticks(range(len(places)), [system for _, system in places], rotation=60, ha="right", fontsize=7)
        for x, (g, system) in enumerate(places):
            if system == places[0][1]:
                axes.text(x - 0.4, 1.02, f"g = {g}", transform=axes.get_xaxis_transform(), fontsize=8)
                axes.axvline(x - 0.5, color="0.7", linewidth=0.7)
        axes.set(yscale="log", ylabel=f"{setting} ({HARDWARE[setting].upper()}): tok/s", xlim=(-0.6, len(places) - 0.4))
    figure.legend(*blocks[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    return figure


def _planned_so(row: dict[str, Any], *plannings: str | None) -> float | None:
    return row["simulated"]["tok_s"] if row["planning"] in plannings else None
