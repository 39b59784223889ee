"""Describe what is simulated: a system, or a variant of PreScope, with a model and a batch on one of the two GPUs."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from harness.plan.planning import DoesNotFit
from harness.record.provenance import code_version
from paper_figures.moegen.measuring import batch_passes
from paper_figures.moegen.rows import facts
from paper_figures.passes import planned
from paper_figures.prescope.published import TABLE3_TOKENS
from paper_figures.support import REFERENCE, read_json, write_json

FOLDER = REFERENCE / "prescope-simulated"
PREFILL, GENERATED = 512, 64
GPUS: Mapping[str, tuple[str, ...]] = {
    "V100": ("hardware=v100-32g", "model.dtype=float16"),
    "A100": ("hardware=a100-40g-pcie",),
}
MODELS = tuple(TABLE3_TOKENS)
BATCHES = (4, 8, 16, 32, 64)
OURS: Mapping[str, tuple[str, ...]] = {  # Fig. 15's parts, and what stands in for each
    "PreScope": (),
    "without table": ("strategy.table=random",),
    "without PreSched": ("strategy.schedule=fixed",),
    "without LLaPor": ("strategy.predictor=none",),
    "without AsyncIO": ("strategy.copies=native",),
}
OTHERS: Mapping[str, tuple[str, ...]] = {
    "ondemand": ("strategy=ondemand",),
    "MoE-Lens": ("strategy=moelens",),
    "MoE-Gen(H)": ("strategy=moegen_h",),
}
_PACKET_MB = 16
NOTE = (
    "prompts of 512 tokens, 64 to generate; routing drawn by a Zipf law with exponent 1; the predictor's hit rate is "
    "stated: Table 3's share of tokens"
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A system with a batch of a model on a GPU; `system` is a name of `OURS` or `OTHERS`."""

    system: str
    gpu: str
    model: str
    batch: int
    generated: int = GENERATED
    more: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[object, ...]:
        return (self.system, self.gpu, self.model, self.batch)

    @property
    def overrides(self) -> list[str]:
        """The overrides as `python -m harness.plan` takes them."""
        own = ("strategy=prescope", f"strategy.batch_size={self.batch}", *OURS.get(self.system, ()))
        return [
            *(own if self.system in OURS else OTHERS[self.system]),
            *(f"model={self.model}", *GPUS[self.gpu], "dataset=sharegpt", f"dataset.num_requests={self.batch}"),
            *(f"dataset.max_new_tokens={self.generated}", "kv_cache_gb=40", f"strategy.packet_mb={_PACKET_MB}"),
            *("routing=skewed", f"routing.hit_rates=[[{TABLE3_TOKENS[self.model]}]]", *self.more),
        ]


def all_cases(systems: Iterable[str], batches: Sequence[int] = BATCHES) -> list[Case]:
    """Return the cases of some systems on both GPUs, with every model and batch, the largest batches first."""
    places = product(sorted(batches, reverse=True), GPUS, MODELS, systems)
    return [Case(system=system, gpu=gpu, model=model, batch=batch) for batch, gpu, model, system in places]


def row(case: Case) -> dict[str, Any]:
    """Simulate a case. Where it does not fit, the row says why and has no numbers."""
    began_s = time.monotonic()
    named = {
        "system": case.system, "gpu": case.gpu, "model": case.model, "batch": case.batch, "code": code_version(),
        "command": f"python -m harness.plan {' '.join(case.overrides)}",
    }  # fmt: skip
    try:
        plan = planned(case.overrides)
    except DoesNotFit as error:
        return {**named, "refused": str(error)}
    found = facts(plan, batch_passes(plan))
    kept = {name: found[name] for name in ("sequences", "tok_s", "prefill_s", "decode_s", "decode")}
    decoded = case.generated - 1
    return {
        **named,
        **kept,
        "token_s": found["decode_s"] / decoded,
        "counted": plan.strategy.counted(),
        "plan": plan.strategy.plan if case.system in OURS else {},
        "simulation_s": round(time.monotonic() - began_s, 1),
    }


def computed(name: str, cases: Iterable[Case], *, missing: bool = True) -> list[dict[str, Any]]:
    """Simulate cases one after another, and keep what is done in the report's file.

    With `missing`, a row of the same case that was made before is taken from there.
    """
    path, rows = FOLDER / f"{name}.json", []
    kept = {key_of(r): r for r in read_json(path)["rows"]} if missing and path.exists() else {}
    for case in cases:
        rows.append(kept.get(case.key) or row(case))
        told = rows[-1].get("refused") or f"{rows[-1]['tok_s']:.4g} tok/s, {rows[-1]['token_s']:.3g} s a token"
        print(f"{case.gpu}, {case.model}, {case.batch}, {case.system}: {told}", flush=True)
        later = [r for key, r in kept.items() if key not in {key_of(done) for done in rows}]
        write_json(path, {"label": "simulated", "rows": [*rows, *later]})
    return rows


def key_of(found: Mapping[str, Any]) -> tuple[object, ...]:
    return tuple(found[name] for name in ("system", "gpu", "model", "batch"))


def find(rows: Iterable[Mapping[str, Any]], *key: object) -> Mapping[str, Any] | None:
    """Return the row of (system, GPU, model, batch) that has numbers; None where there is none."""
    return next((r for r in rows if key_of(r) == key and "refused" not in r), None)
