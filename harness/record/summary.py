"""Write `summary.json`: one flat, complete account of a run, from its passes, its spans and a few facts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.machine.base import H2D, EstimatedShares, LaneKind, Span
from harness.record.activity import Activity
from harness.record.files import plain
from harness.record.latency import latency
from harness.record.measured import Measured
from harness.record.metrics import (
    bottleneck,
    estimated,
    idle_share,
    kind_totals,
    link_rate,
    overlap_ratio,
    steady_window,
    stolen_core_share,
    utilization,
)
from harness.record.passes import PassRecord
from harness.record.spans import Window
from harness.record.steady import steady_decode


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """The facts of a run that passes and spans do not know. Times are host seconds; None means that nobody knows.

    `clock` is whose seconds those of passes and spans are: "host" or "virtual"; "none" where they are not seconds and
    no rate follows from them. `setup_s` is everything before the first pass but the wait for W&B, `wall_s` the whole
    run. `num_requests` were asked for; each ends finished or rejected. `gpu_tok_s` (the papers' T_GPU) is what the gpu
    lane would process if it never waited. `ceilings_gb_s` holds link ceilings by kind of lane. `verify` has mode,
    checked, mismatched, excused and tokens_checked. `token_times_s` has one row a finished request: when, on `clock`,
    each of its tokens was there. `estimated_shares` are the machine's.
    """

    status: str
    label: str
    strategy: str
    model: str
    dataset: str
    machine: str
    hardware: str
    clock: str = "host"
    machine_facts: Mapping[str, str] = field(default_factory=dict)
    estimated_shares: EstimatedShares | None = None
    num_requests: int = 0
    num_finished: int = 0
    num_rejected: int = 0
    prompt_tokens: int = 0
    wall_s: float = 0.0
    setup_s: float = 0.0
    predicted_throughput_tok_s: float | None = None
    gpu_tok_s: float | None = None
    ceilings_gb_s: Mapping[str, float] = field(default_factory=dict)
    peak_bytes: Mapping[str, int] = field(default_factory=dict)
    capacity_bytes: Mapping[str, int] = field(default_factory=dict)
    memory_holders: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    verify: Mapping[str, Any] = field(default_factory=lambda: {"mode": "off", "checked": 0, "mismatched": 0})
    data_source: str = "unknown"
    weights_source: str = "unknown"
    plan: Mapping[str, Any] = field(default_factory=dict)
    token_times_s: Sequence[Sequence[float]] = ()
    error: str | None = None


def build_summary(
    facts: RunFacts,
    passes: Sequence[PassRecord],
    spans: Iterable[Span] | Measured,
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Build the summary from all of `facts`, and what follows from passes and spans. Instead of these, what was
    measured of them will do; `extra` is added as it is.

    Throughput covers all passes, from the start of the first to the end of the last: `throughput_tok_s` counts
    generated tokens, `processed_tok_s` prefilled and decoded ones. Shares, rates and the bottleneck cover the steady
    window only.
    """
    window = _window(facts.clock, passes)
    measured = spans if isinstance(spans, Measured) else measure(facts.clock, passes, spans)
    summary = {
        **_identity(facts),
        **_requests(facts, passes),
        **_throughput(facts, passes),
        "latency": _latency(facts, passes),
        **_steady(facts, passes, measured.steady, window),
        "steady_decode": None if facts.clock == "none" else steady_decode(passes),
        "peak_bytes": {tier: facts.peak_bytes.get(tier) for tier in ("device", "pinned", "host")}
        | dict(facts.peak_bytes),
        "capacity_bytes": facts.capacity_bytes,
        "memory_holders": facts.memory_holders,
        "verify": facts.verify,
        "plan": facts.plan,
        "num_spans": measured.num_spans,
        "window": {"start_s": window[0], "end_s": window[1], "covers": _covers(passes)},
        **(extra or {}),
    }
    result = plain(summary)
    assert isinstance(result, dict)
    return result


def measure(clock: str, passes: Sequence[PassRecord], spans: Iterable[Span]) -> Measured:
    """Measure what the lanes of a run on `clock` did in its steady window; an empty one where times are no seconds."""
    return Measured.of(spans, _window(clock, passes))


def _window(clock: str, passes: Sequence[PassRecord]) -> Window:
    return steady_window(passes) if clock != "none" else (0.0, 0.0)


def accuracy(predicted: float | None, observed: float | None) -> float | None:
    """Return 1 - |predicted - observed| / observed, below 0 where the prediction is off by more than the
    observation."""
    if predicted is None or not observed:
        return None
    return 1.0 - abs(predicted - observed) / observed


def _identity(facts: RunFacts) -> dict[str, Any]:
    names = ("status", "error", "label", "strategy", "model", "dataset", "machine", "hardware", "clock")
    return {name: getattr(facts, name) for name in (*names, "machine_facts", "data_source", "weights_source")}


def _requests(facts: RunFacts, passes: Sequence[PassRecord]) -> dict[str, Any]:
    return {
        "num_requests": facts.num_requests,
        "num_finished": facts.num_finished,
        "num_rejected": facts.num_rejected,
        "prompt_tokens": facts.prompt_tokens,
        "padding_tokens": sum(p.num_padding_tokens for p in passes),
        "generated_tokens": sum(p.generated_tokens for p in passes),
        "preemptions": sum(p.num_preemptions for p in passes),
        "num_passes": len(passes),
    }


def _throughput(facts: RunFacts, passes: Sequence[PassRecord]) -> dict[str, Any]:
    """Return times and rates. `wall_s` and `setup_s` are host seconds on every machine, all others seconds of its
    `clock`. Generation time is prefill and decode, without set-up and verification."""
    timeless = facts.clock == "none"
    length_s = max(p.end_s for p in passes) - min(p.start_s for p in passes) if passes and not timeless else 0.0
    predicted = None if timeless else facts.predicted_throughput_tok_s
    observed = sum(p.generated_tokens for p in passes) / length_s if length_s > 0 else None
    processed = sum(p.num_tokens for p in passes) / length_s if length_s > 0 else None
    return {
        "wall_s": facts.wall_s,
        "setup_s": facts.setup_s,
        "generation_s": None if timeless else length_s,
        "throughput_tok_s": observed,
        "processed_tok_s": processed,
        "predicted_throughput_tok_s": predicted,
        "prediction_accuracy": accuracy(predicted, observed),
    }


def _latency(facts: RunFacts, passes: Sequence[PassRecord]) -> dict[str, Any] | None:
    timeless = facts.clock == "none" or not passes
    return None if timeless else latency(facts.token_times_s, min(p.start_s for p in passes))


def _steady(facts: RunFacts, passes: Sequence[PassRecord], did: Activity, window: Window) -> dict[str, Any]:
    length_s = window[1] - window[0]
    inside = [p for p in passes if window[0] <= p.start_s and p.end_s <= window[1]]
    processed_tok_s = sum(p.num_tokens for p in inside) / length_s if length_s > 0 else None
    h2d = link_rate(did, H2D)
    ranks = {lane.rank for lane in did.lanes}
    totals = kind_totals(did)
    return {
        "window_s": length_s,
        "utilization": utilization(did),
        "tokens_per_t_gpu": processed_tok_s / facts.gpu_tok_s
        if processed_tok_s is not None and facts.gpu_tok_s
        else None,
        "h2d_gb_s": h2d.window_gb_s,
        "h2d_busy_gb_s": h2d.busy_gb_s,
        "h2d_ceiling_gb_s": facts.ceilings_gb_s.get(LaneKind.H2D.value),
        "overlap_ratio": overlap_ratio(did),
        "idle_share": idle_share(did) if length_s > 0 else None,
        "stolen_core_share": None if facts.clock == "virtual" else stolen_core_share(did),
        "where_time_goes": totals,
        "estimated": None if facts.estimated_shares is None else estimated(totals, facts.estimated_shares),
        "bottleneck": bottleneck(did, facts.ceilings_gb_s),
        "num_ranks": len(ranks) or 1,
    }


def _covers(passes: Sequence[PassRecord]) -> str:
    return "all passes" if len(passes) < 4 else "second pass to last but one"
