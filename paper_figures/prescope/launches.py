"""Ask what Python's launches explain of the published numbers: each beside two simulations.

The profiles charge an op on the GPU 5 us of launching. The public code that goes with PreScope's models takes a small
expert to cost 0.95 ms on the GPU, wherever its weights are: there its launches count, and hardly anything else. With
them each expert is an op of its own, as there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from paper_figures.prescope.ablation import lost
from paper_figures.prescope.cases import Case, find
from paper_figures.prescope.published import GPU_EXPERT_MS, LATENCY_V100, LOST, THROUGHPUT_A100_64
from paper_figures.support import markdown_table

WAYS: Mapping[str, tuple[str, ...]] = {
    "": (),
    "launches": (f"hardware.kernel_launch_us={1e3 * GPU_EXPERT_MS:g}", "strategy.experts_together=false"),
}
Place = tuple[str, str, int]


def _places() -> Iterator[tuple[Place, str]]:
    """Yield what has published numbers, and the systems that they need."""
    for model in THROUGHPUT_A100_64:
        yield ("A100", model, 64), "PreScope"
    for model, batch in LATENCY_V100:
        yield ("V100", model, batch), "PreScope"
    for gpu, model, batch, variant in LOST:
        yield (gpu, model, batch), "PreScope"
        yield (gpu, model, batch), variant


def wanted() -> list[Case]:
    cases = {
        (*place, system, way): Case(system=system, gpu=gpu, model=model, batch=batch, variant=way, more=more)
        for place, system in _places()
        for gpu, model, batch in [place]
        for way, more in WAYS.items()
    }
    return list(cases.values())


def tables(data: dict[str, Any]) -> str:
    def fact(place: Place, name: str, way: str) -> str:
        found = find(data["rows"], "PreScope", *place, way)
        return f"{found[name]:.3g}" if found else "-"

    rows = [(f"{model}, A100, 64: tok/s", f"{value:g}", ("A100", model, 64), "tok_s")
            for model, value in THROUGHPUT_A100_64.items()]  # fmt: skip
    rows += [(f"{model}, V100, {batch}: s a token", f"{value:g}", ("V100", model, batch), "token_s")
             for (model, batch), value in LATENCY_V100.items()]  # fmt: skip
    lines = [(what, value, *(fact(place, name, way) for way in WAYS)) for what, value, place, name in rows]
    for (gpu, model, batch, variant), share in LOST.items():
        found = [lost(data["rows"], gpu, model, batch, variant, way) for way in WAYS]
        told = ("-" if each is None else f"{each:.0%}" for each in found)
        lines.append((f"{model}, {gpu}, {batch}: lost {variant}", f"{share:.0%}", *told))
    headings = ("", "published", "5 us an op", f"{GPU_EXPERT_MS:g} ms an op")
    columns: dict[str, Any] = {name: lambda line, at=at: line[at] for at, name in enumerate(headings)}
    return f"# PreScope's published numbers (simulated)\n\n{markdown_table(columns, lines)}"
