"""Simulate MoE-Lightning Fig. 7, S1 and S2: every system over generation lengths, next to what is published.

Each system runs with the policy that its own search finds on our memory model, and, where one is published, with that.
One that is padded has prompts of the longest prompt's length. Of decode the first steps are simulated; the rest is
their linear continuation (`paper_figures.passes.Batch`), as only the context grows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from paper_figures.moelightning.batches import Case, row
from paper_figures.moelightning.published import FIG7_TOK_S, GENERATED, POLICIES, Sizes
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
STEPS = 18  # of decode that are simulated
_BASELINES = ("FlexGen", "FlexGen(c)", "DeepSpeed-Zero")


def cases(settings: Sequence[str] = tuple(HARDWARE), generated: Sequence[int] = GENERATED) -> Iterator[Case]:
    for setting in settings:
        for g in generated:
            for system, (strategy, padded) in STRATEGIES.items():
                case = Case(
                    system=system, strategy=strategy, setting=setting, hardware=HARDWARE[setting], g=g, padded=padded,
                    max_steps=STEPS,
                )  # fmt: skip
                yield case
                if system in POLICIES[setting]:
                    yield with_sizes(case, POLICIES[setting][system][GENERATED.index(g)])


def with_sizes(case: Case, sizes: Sizes) -> Case:
    """Return the case with a published policy."""
    return replace(
        case, batch_size=sizes.batch_size, micro_batch_size=sizes.micro_batch_size, policy_source="published"
    )


def published_tok_s(row: dict[str, Any]) -> float | None:
    values = FIG7_TOK_S[row["setting"]].get(row["system"])
    return None if values is None else values[GENERATED.index(row["g"])]


def compute(chosen: Sequence[Case] | None = None) -> dict[str, Any]:
    rows = []
    for case in cases() if chosen is None else chosen:
        made = row(case)
        rows.append({**made, "published_tok_s": published_tok_s(made)})
        print(
            f"{case.setting}, g {case.g}, {case.system}, {case.policy_source}: {made['simulated']['tok_s']:.4g} tok/s",
            flush=True,
        )
    return {"label": "simulated", "rows": rows, "ratios": ratios(rows)}


def ratios(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Divide MoE-Lightning by each baseline where both are known: published, with published policies, with searched
    ones."""
    found = []
    by_key = {(r["setting"], r["g"], r["system"], r["policy_source"]): r for r in rows}
    for setting, g in dict.fromkeys((r["setting"], r["g"]) for r in rows):
        for ours in ("MoE-Lightning", "MoE-Lightning(p)"):
            for baseline in _BASELINES:
                values = {}
                for source in ("published", "searched"):
                    pair = [_with_source(by_key, setting, g, system, source) for system in (ours, baseline)]
                    if None not in pair:
                        values[source] = pair[0]["simulated"]["tok_s"] / pair[1]["simulated"]["tok_s"]
                at = GENERATED.index(g)
                found.append({
                    "setting": setting, "g": g, "over": baseline, "system": ours,
                    "published": FIG7_TOK_S[setting][ours][at] / FIG7_TOK_S[setting][baseline][at],
                    "published_policies": values.get("published"), "searched_policies": values.get("searched"),
                })  # fmt: skip
    return found


def _with_source(by_key: dict[Any, Any], setting: str, g: int, system: str, source: str) -> Any:
    """Return the system's row; a system whose policy nobody publishes is represented by its searched one."""
    return by_key.get((setting, g, system, source)) or by_key.get((setting, g, system, "searched"))


def tables(data: dict[str, Any]) -> str:
    rows = {
        "setting": lambda r: r["setting"],
        "g": lambda r: str(r["g"]),
        "system": lambda r: r["system"],
        "policy": lambda r: r["policy_source"],
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
        "simulated, published policies": lambda r: _number(r["published_policies"]),
        "simulated, searched policies": lambda r: _number(r["searched_policies"]),
    }
    return (
        f"# Systems on S1 and S2 (simulated)\n\n{markdown_table(rows, data['rows'])}\n"
        f"## Speed-ups\n\n{markdown_table(speed_ups, data['ratios'])}"
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def draw(data: dict[str, Any]) -> Figure:
    """Draw published next to simulated bars, one block a setting and generation length."""
    settings = list(dict.fromkeys(r["setting"] for r in data["rows"]))
    figure = new_figure(10.0, 3.2 * len(settings))
    blocks = figure.subplots(len(settings), 1, squeeze=False)[:, 0]
    kinds = {
        "published": ("#bab0ac", lambda r: r["published_tok_s"] if r["policy_source"] == "searched" else None),
        "simulated, published policy": ("#86bcec", lambda r: _of_source(r, "published")),
        "simulated, searched policy": ("#1f4e8c", lambda r: _of_source(r, "searched")),
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


def _of_source(row: dict[str, Any], source: str) -> float | None:
    return row["simulated"]["tok_s"] if row["policy_source"] == source else None
