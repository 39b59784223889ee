"""Simulate a system with a batch on a machine: one batch whole, its steps between some stops interpolated.

Prompts have 512 tokens and 64 are generated, as in PreScope's Section 6.1. Routing is as learned routing of small
trained models was fitted (`routing=trained_*`), and the gate's predictions hit as often as was recorded of these models
(results/reference/routing), one layer ahead. What those see that look further is stated: 4 points less for each layer,
as public measurements of Qwen3's gates have it (3.5 to 4; docs/route-ahead.md of Helldez/BigMoeOnEdge on GitHub), and,
for some cases, what gates of small trained models lose, whose eight layers differ more from one to the next.
PreScope is there twice: predicting by the gate, as the others do, and by LLaPor, which foresees each expert with the
chance of Table 3's share of tokens.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.plan.planning import DoesNotFit
from harness.record.provenance import code_version
from paper_figures.measuring import MOVED, Pass, batch_passes, counts, link_gb, over_passes, phase_facts
from paper_figures.passes import planned
from paper_figures.pool import each
from paper_figures.prescope.published import TABLE3_TOKENS

MODELS = ("deepseek-v2-lite", "mixtral-8x7b", "qwen3-30b-a3b", "moonlight-16b-a3b")
GPUS: Mapping[str, tuple[str, ...]] = {
    "V100": ("hardware=v100-32g", "model.dtype=float16"),  # Section 6.1: it has no bfloat16
    "A100": ("hardware=a100-40g-pcie",),
}
BATCHES = (4, 8, 16, 32, 64)
LLAPOR = "prescope, LLaPor"
SYSTEMS = ("prescope", LLAPOR, "hybrimoe", "fiddler", "klotski", "fate", "expert_cache", "ondemand")
PROMPT, G = 512, 64
_GATE_HITS = {"mixtral-8x7b": ("trained_mixtral", 0.82)}  # results/reference/routing/mixtral.md, by one layer ahead
TRACES = {"mixtral-8x7b": "mixtral", "deepseek-v2-lite": "deepseek", "moonlight-16b-a3b": "deepseek"}  # of their form
RECORDED = "recorded trace"  # the variant that has its routing and predictions from these
_OTHER_GATE_HITS = ("trained_deepseek", 0.85)  # results/reference/routing/deepseek.md
_LOSS = 0.04  # of the gate's hit rate, for each layer further
SMALL_MODELS = "gate's loss of small models"  # the variant in which a gate loses what it does in these, layer by layer
_SMALL_LOSSES = {"mixtral-8x7b": (0.0, 0.068, 0.121)}  # results/reference/prescope-prediction: mixtral-ten-minutes
_OTHER_SMALL_LOSSES = (0.0, 0.093, 0.168)  # qwen3
_LOOK = {"prescope": 2, "hybrimoe": 3}  # layers ahead; the others look one ahead, or none
_ROOM_IN_EACH = 2  # batches of Klotski, whose KV cache is on the device as well

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A system with a batch of sequences; Klotski has two such batches. `more` are overrides, named by `variant`.

    `system` names a strategy, and behind a comma what is other in it.
    """

    system: str
    model: str
    gpu: str
    batch: int
    variant: str = ""
    more: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[object, ...]:
        """The fields by which a row is found again."""
        return (self.system, self.model, self.gpu, self.batch, self.variant)

    @property
    def num_sequences(self) -> int:
        return self.batch * (_ROOM_IN_EACH if self.system == "klotski" else 1)

    @property
    def overrides(self) -> list[str]:
        """The overrides as `python -m harness.plan` takes them."""
        strategy, _, predictor = self.system.partition(", ")
        name, hits = _GATE_HITS.get(self.model, _OTHER_GATE_HITS)
        routing = [f"routing={name}"]
        if self.variant == RECORDED:
            routing = ["routing=trace", f"routing.path=results/reference/routing/{TRACES[self.model]}.jsonl.gz"]
        own = [] if strategy == "ondemand" else [f"strategy.batch_size={self.batch}"]
        if predictor:
            own.append("strategy.predictor=learned")
            routing.append(f"routing.hit_rates=[[{TABLE3_TOKENS[self.model]}]]")
        elif self.variant != RECORDED:
            losses: Sequence[float] = [_LOSS * further for further in range(max(_LOOK.values()))]
            if self.variant == SMALL_MODELS:
                losses = _SMALL_LOSSES.get(self.model, _OTHER_SMALL_LOSSES)
            rates = (f"[{hits - loss:g}]" for loss in losses[: _LOOK.get(strategy, 1)])
            routing.append(f"routing.hit_rates=[{','.join(rates)}]")
        return [
            *(f"strategy={strategy}", f"model={self.model}", *GPUS[self.gpu], *own, "strategy.packet_mb=10"),
            *("dataset=sharegpt", "dataset.synthetic=lengths", f"dataset.max_prompt_tokens={PROMPT}"),
            *(f"dataset.max_new_tokens={G}", f"dataset.num_requests={self.num_sequences}"),
            *(*routing, "kv_cache_gb=20", *self.more),
        ]


def row(case: Case) -> Row:
    """Simulate a case. Where it does not fit, the row says why and has no numbers."""
    began_s = time.monotonic()
    fields = ("system", "model", "gpu", "batch", "variant")
    named = {name: getattr(case, name) for name in fields} | {
        "code": code_version(),
        "command": f"python -m harness.plan {' '.join(case.overrides)}",
    }
    try:
        plan = planned(case.overrides)
    except DoesNotFit as error:
        return {**named, "refused": str(error)}
    passes = batch_passes(plan)
    prefill, decode = [p for p in passes if p.step is None], [p for p in passes if p.step is not None]
    num_sequences = round(over_passes(prefill, lambda p: p.record.num_sequences))
    return {
        **named,
        "sequences": num_sequences,
        **_times(prefill, decode, num_sequences),
        "link_gb": {what: over_passes(decode, lambda p, what=what: link_gb(p, what)) for what in MOVED},
        "decode": phase_facts(plan, decode),
        "decode_counts": _where_experts_were(decode),
        "policy": {name: value for name, value in plan.strategy.plan.items() if isinstance(value, (int, float, str))},
        "host_seconds": round(time.monotonic() - began_s, 1),
    }


def _where_experts_were(decode: Sequence[Pass]) -> dict[str, float]:
    """Return what the system counted in decode, and the share of active experts that were on the device when the router
    chose them."""
    found = counts(decode)
    if active := found.get("active"):
        found["hit_rate"] = sum(found[way] for way in ("resident", "cached", "prefetched")) / active
    return found


def _times(prefill: Sequence[Pass], decode: Sequence[Pass], num_sequences: int) -> Row:
    """Return throughput, time to the first token and per output token, and percentiles of the gaps between tokens."""
    prefill_s, decode_s = (over_passes(phase, lambda p: p.length_s) for phase in (prefill, decode))
    gaps = np.sort(np.repeat([p.length_s for p in decode], [round(p.count) for p in decode]))
    return {
        "tok_s": num_sequences * G / (prefill_s + decode_s),
        "first_token_s": prefill_s,
        "token_s": decode_s / (G - 1),
        **{f"gap_p{share}_s": float(np.percentile(gaps, share)) for share in (50, 90, 99)},
    }


def computed(cases: Sequence[Case]) -> Iterator[Row]:
    """Yield a row of each case, and tell its result."""
    for case, found in zip(cases, each(row, cases), strict=True):
        told = found.get("refused") or f"{found['tok_s']:.4g} tok/s, {found['token_s']:.4g} s a token"
        print(f"{case.gpu}, {case.model}, batch {case.batch}, {case.system} {case.variant}: {told}", flush=True)
        yield found


def find(rows: Iterable[Mapping[str, Any]], **wanted: Any) -> Mapping[str, Any] | None:
    """Return the first row with these fields that has numbers."""
    return next(
        (r for r in rows if "refused" not in r and all(r[name] == value for name, value in wanted.items())), None
    )
