"""Write what `python -m harness.plan` prints."""

from __future__ import annotations

from collections.abc import Mapping

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from harness.engine.strategy import Strategy
from harness.memory.tiers import RAM
from harness.plan.planning import DoesNotFit, Plan
from harness.record.terminal import NOT_COMPARED, human_bytes, number, told_accuracy, told_estimated
from harness.run.small_batch import requests_at_once, small_batch
from harness.workload.config import DatasetConfig

_MAX_HOLDERS = 8  # of a tier, shown by name


def memory_and_policy_tables(plan: Plan) -> Group:
    """Write what is known before anything is simulated."""
    settings, spec = plan.settings, plan.engine.spec
    title = f"{settings.strategy_name} · {spec.name} · {settings.dataset.name} · {settings.hardware.name}"
    held = {name: {} if name == RAM else tier.holders() for name, tier in plan.machine.tiers.items()}
    return Group(
        Text(title, style="bold"),
        Text(f"prompts: {plan.data_source}; {_requests(settings.dataset)}", style="dim"),
        _memory(held, {name: tier.capacity_bytes for name, tier in plan.machine.tiers.items()}),
        *_kv_cache(plan),
        *([_policy(plan.strategy)] if plan.strategy.plan else []),
    )


def does_not_fit_table(error: DoesNotFit) -> Group:
    """Compare for every tier what the harness asks of it at the least with what there is."""
    what = "What the harness asks for at the least for this strategy, which may want more (see below)."
    note = Text(what, style="dim")
    return Group(_memory(error.needed, error.there_is), note)


def throughput_table(plan: Plan) -> Table:
    table = Table(
        box=None, show_header=False, pad_edge=False, title="throughput", title_justify="left", title_style="bold"
    )
    prediction, summary = plan.strategy.prediction, plan.summary
    if prediction is None:
        table.add_row("  predicted", "the strategy's paper gives no model for this setting")
    else:
        table.add_row("  predicted", f"{number(prediction.throughput_tok_s)} tok/s: {prediction.model}")
    if summary is None:
        return table
    observed = summary["throughput_tok_s"]
    if observed is None:
        reason = next((s.reject_reason for s in plan.engine.sequences if s.reject_reason), "nothing ran")
        table.add_row(f"  {plan.machine.label}", f"every request is rejected; the first: {reason}")
        return table
    table.add_row(
        f"  {plan.machine.label}",
        f"{number(observed)} tok/s in {summary['num_passes']} passes, {summary['preemptions']} preemptions",
    )
    if plan.stopped is not None:
        rest = "the simulated numbers are those of this part; --max-simulated-ops=N goes further"
        table.add_row("  INCOMPLETE", Text(f"{plan.stopped}; {rest}", style="bold yellow"))
    shares = ", ".join(f"{lane} {share:.1%}" for lane, share in summary["utilization"].items() if share)
    table.add_row("  lanes busy", shares)
    table.add_row("  bottleneck", str(summary["bottleneck"]))
    if (summary["estimated"] or {}).get("share"):
        table.add_row("  ESTIMATED", Text(told_estimated(summary["estimated"]), style="bold yellow"))
    if prediction is not None:
        told = told_accuracy(prediction.throughput_tok_s, observed, plan.machine.label) or "-"
        table.add_row("  prediction", told if plan.stopped is None else NOT_COMPARED)
    return table


def _memory(held: Mapping[str, Mapping[str, int]], capacities: Mapping[str, int]) -> Table:
    """Write a table of `held` by tier and name; memory modules that tiers share hold what those tiers hold."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="memory", title_justify="left", title_style="bold")
    for name, justify in (("tier", "left"), ("held by", "left"), ("size", "right"), ("of", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for name, capacity_bytes in capacities.items():
        holders = dict(held.get(name, {}))
        used_bytes = sum(holders.values())
        if name == RAM:
            used_bytes = sum(sum(held.get(tier, {}).values()) for tier in ("pinned", "host"))
        shown = [(holder, size) for holder, size in holders.items() if size][:_MAX_HOLDERS]
        for row, (holder, size) in enumerate(shown):
            table.add_row(name if row == 0 else "", holder, human_bytes(size))
        if rest := sum(holders.values()) - sum(size for _, size in shown):
            table.add_row("", "others", human_bytes(rest))
        share = f"{used_bytes / capacity_bytes:.0%}" if capacity_bytes else "-"
        fits = used_bytes <= capacity_bytes
        table.add_row(
            "" if shown else name,
            Text("in all", style="bold"),
            human_bytes(used_bytes),
            Text(f"{human_bytes(capacity_bytes)} ({share}){'' if fits else ' TOO SMALL'}", "" if fits else "bold red"),
            end_section=True,
        )
    return table


def _requests(dataset: DatasetConfig) -> str:
    published = f"; the paper has {dataset.published_requests:,} at its lengths" if dataset.published_requests else ""
    return f"{dataset.num_requests:,} requests{published}"


def _kv_cache(plan: Plan) -> list[Text]:
    """Say how far the KV cache goes, and warn where it or the number of requests is that of a far smaller machine."""
    kv, size_gb = plan.engine.kv.allocator, plan.settings.kv_cache_gb
    in_host_memory = plan.engine.kv.host is not None
    cache = f"kv_cache_gb={size_gb:g}" if in_host_memory else "the KV cache in device memory"
    at_once = requests_at_once(plan.engine)
    told = f"{cache} holds {kv.num_blocks * kv.block_size:,} tokens, about {at_once:,} of these requests at once"
    if in_host_memory:
        told += f"; {human_bytes(plan.machine.tiers['pinned'].free_bytes)} of pinned memory are free"
    warnings = [Text(f"{warning}\n", style="bold yellow") for warning in small_batch(plan.settings, plan.engine)]
    return [Text(f"{told}\n"), *warnings]


def _policy(strategy: Strategy) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, title="policy", title_justify="left", title_style="bold")
    for name, value in strategy.plan.items():
        of_mappings = isinstance(value, list | tuple) and any(isinstance(each, Mapping) for each in value)
        if not isinstance(value, Mapping) and not of_mappings:  # those are for plan.json
            table.add_row(f"  {name}", f"{value:.6g}" if isinstance(value, float) else str(value))
    return table
