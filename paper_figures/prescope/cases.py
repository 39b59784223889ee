"""Describe what is simulated: a system, or a variant of PreScope, with a model and a batch on one of the two GPUs."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from harness.plan.planning import DoesNotFit
from harness.record.provenance import code_version
from paper_figures.measuring import batch_passes, counts
from paper_figures.moegen.rows import facts
from paper_figures.passes import planned
from paper_figures.pool import each
from paper_figures.prescope.published import ACTIVE, TABLE3_TOKENS
from paper_figures.support import REFERENCE, read_json, write_json

FOLDER = REFERENCE / "prescope-simulated"
PROMPT, GENERATED = 512, 64
GPUS: Mapping[str, tuple[str, ...]] = {
    "V100": ("hardware=v100-32g", "model.dtype=float16"),
    "A100": ("hardware=a100-40g-pcie",),
}
MODELS = tuple(TABLE3_TOKENS)
BATCHES = (4, 8, 16, 32, 64)
# Fig. 15's parts, and what stands in for each. The table has the same room in all of them (section 6.1).
OURS: Mapping[str, tuple[str, ...]] = {
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
# Systems of single experts, as Fig. 17 has them; their batch is a setting of theirs.
OF_EXPERTS: Mapping[str, tuple[str, ...]] = {"HybriMoE": ("strategy=hybrimoe",), "Fiddler": ("strategy=fiddler",)}
_PACKET_MB = 16
_WRITE_EVERY_S = 5.0  # writing 200 rows takes 24 ms, simulating one 0.6 s: on a core of a Xeon
_FIELDS = ("system", "gpu", "model", "batch", "variant")
NOTE = (
    "prompts of 512 tokens, 64 to generate; 7 steps simulated, those between interpolated; routing drawn by a Zipf law "
    "with exponent 1; Table 3's share of tokens is stated as the chance that any expert of a token is foreseen"
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A system with a batch of a model on a GPU. `system` is a name of `OURS`, `OTHERS` or `OF_EXPERTS`; `variant`
    names the overrides in `more`."""

    system: str
    gpu: str
    model: str
    batch: int
    generated: int = GENERATED
    variant: str = ""
    more: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[object, ...]:
        return (self.system, self.gpu, self.model, self.batch, self.variant)

    @property
    def named(self) -> dict[str, Any]:
        """The fields by which a row is found again, as the row has them."""
        return dict(zip(_FIELDS, self.key, strict=True))

    @property
    def command(self) -> str:
        return f"python -m harness.plan {' '.join(self.overrides)}"

    @property
    def overrides(self) -> list[str]:
        """The overrides as `python -m harness.plan` takes them."""
        slots = f"strategy.prefetch_slots={ACTIVE[self.model]}"
        sized = f"strategy.batch_size={self.batch}"
        prescope = ("strategy=prescope", "strategy.predictor=learned", sized, slots)
        chosen = {
            **{name: (*prescope, *own) for name, own in OURS.items()},
            **OTHERS,
            **{name: (*own, sized) for name, own in OF_EXPERTS.items()},
        }
        return [
            *chosen[self.system],
            *(f"model={self.model}", *GPUS[self.gpu], "dataset=sharegpt", "dataset.synthetic=lengths"),
            *(f"dataset.max_prompt_tokens={PROMPT}", f"dataset.max_new_tokens={self.generated}"),
            *(f"dataset.num_requests={self.batch}", "kv_cache_gb=40", f"strategy.packet_mb={_PACKET_MB}"),
            *("routing=skewed", f"routing.hit_rates=[[{TABLE3_TOKENS[self.model]}]]", *self.more),
        ]


def all_cases(systems: Iterable[str], batches: Sequence[int] = BATCHES) -> list[Case]:
    """Return the cases of some systems on both GPUs, with every model and batch, the largest batches first."""
    places = product(sorted(batches, reverse=True), GPUS, MODELS, systems)
    return [Case(system=system, gpu=gpu, model=model, batch=batch) for batch, gpu, model, system in places]


def row(case: Case) -> dict[str, Any]:
    """Simulate a case. Where it does not fit, the row says why and has no numbers."""
    began_s = time.monotonic()
    named = {**case.named, "code": code_version(), "command": case.command}
    try:
        plan = planned(case.overrides)
    except DoesNotFit as error:
        return {**named, "refused": str(error)}
    passes = batch_passes(plan)
    found = facts(plan, passes)
    kept = {name: found[name] for name in ("sequences", "tok_s", "prefill_s", "decode_s", "decode")}
    decoded = case.generated - 1
    return {
        **named,
        **kept,
        "token_s": found["decode_s"] / decoded,
        "decode_counts": counts([p for p in passes if p.step is not None]),
        "plan": plan.strategy.plan if case.system in OURS else {},
        "simulation_s": round(time.monotonic() - began_s, 1),
    }


def computed(name: str, cases: Sequence[Case], out: Path, *, again: bool = False) -> list[dict[str, Any]]:
    """Simulate cases, and keep what is done in the report's file in `out`.

    A row with the same command that stands in this file or in that of any committed report is taken from there; where
    all are to be computed `again`, only one that this very code has computed.
    """
    path, rows = out / f"{name}.json", []
    files = [*(other for other in FOLDER.glob("*.json") if other != path), path]
    read = (r for file in files if file.exists() for r in read_json(file)["rows"] if r.keys() & {"tok_s", "refused"})
    code = code_version()
    kept = {r["command"]: r for r in read if not again or r["code"] == code}
    missing = [case for case in cases if case.command not in kept]
    computed, written_s = each(row, missing), time.monotonic()
    try:
        for case in cases:
            found = kept.get(case.command)
            rows.append({**found, **case.named} if found else next(computed))
            told = rows[-1].get("refused") or f"{rows[-1]['tok_s']:.4g} tok/s, {rows[-1]['token_s']:.3g} s a token"
            print(f"{case.gpu}, {case.model}, {case.batch}, {case.system} {case.variant}: {told}", flush=True)
            if time.monotonic() - written_s > _WRITE_EVERY_S:
                write_json(path, {"label": "simulated", "rows": rows})
                written_s = time.monotonic()
    finally:
        if rows:
            write_json(path, {"label": "simulated", "rows": rows})
    return rows


def key_of(found: Mapping[str, Any]) -> tuple[object, ...]:
    return tuple(found[name] for name in _FIELDS)


def find(
    rows: Iterable[Mapping[str, Any]], system: str, gpu: str, model: str, batch: int, variant: str = ""
) -> Mapping[str, Any] | None:
    """Return the row of a case that has numbers; None where there is none."""
    key = (system, gpu, model, batch, variant)
    return next((r for r in rows if key_of(r) == key and "refused" not in r), None)
