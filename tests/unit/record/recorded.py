"""Make small recorded runs that the tests of this folder measure, write and read."""

from __future__ import annotations

from harness.machine.base import CPU, GPU, H2D, Lane, Span, Work
from harness.record.passes import PassRecord
from harness.record.summary import RunFacts


def span(lane: Lane, start_s: float, end_s: float, kind: str = "op", **fields) -> Span:
    values = {
        "layer": None,
        "micro_batch": None,
        "ticket": 0,
        "packet": 0,
        "num_packets": 1,
        "urgent": False,
        "cpu_s": 0.0,
        "work": Work(),
        **fields,
    }
    return Span(lane=lane, kind=kind, start_s=start_s, end_s=end_s, **values)


def link_bound_run(num_passes: int = 6) -> tuple[list[Span], list[PassRecord]]:
    """Make passes of 1 s from t = 100: the link moves 0.48 GB in 0.96 s, the GPU computes 0.5 s, the CPU 0.25 s. A pass
    prefills 90 tokens, decodes 10 and generates 11."""
    spans, passes = [], []
    for index in range(num_passes):
        start_s = 100.0 + index
        for packet in range(4):
            at_s = start_s + packet * 0.24
            spans.append(
                span(
                    H2D,
                    at_s,
                    at_s + 0.24,
                    "weights",
                    layer=index % 2,
                    ticket=index,
                    packet=packet,
                    num_packets=4,
                    work=Work(link_bytes=0.12e9),
                )
            )
        gpu = span(GPU, start_s, start_s + 0.5, "experts", layer=0, micro_batch=1, ticket=100 + index, cpu_s=0.4)
        cpu = span(CPU, start_s + 0.1, start_s + 0.35, "decode_attention", ticket=200 + index, urgent=True)
        spans += [gpu, cpu]
        passes.append(
            PassRecord(
                index=index,
                start_s=start_s,
                end_s=start_s + 1.0,
                num_prefill_tokens=90,
                num_decode_tokens=10,
                num_sequences=12,
                kv_blocks_used=3 * index,
                kv_blocks_total=40,
                num_preemptions=1 if index == 3 else 0,
                mode="preemption" if index == 3 else "normal",
                generated_tokens=11,
            )
        )
    return spans, passes


def facts(**changes) -> RunFacts:
    values = {
        "status": "ok",
        "label": "emulated",
        "strategy": "moelens",
        "model": "mixtral-mini",
        "dataset": "mtbench",
        "machine": "emulated",
        "hardware": "laptop",
        "num_requests": 20,
        "num_finished": 19,
        "num_rejected": 1,
        "prompt_tokens": 540,
        "wall_s": 9.5,
        "setup_s": 2.5,
        "predicted_throughput_tok_s": 10.0,
        "gpu_tok_s": 200.0,
        "ceilings_gb_s": {"h2d": 0.5},
        "peak_bytes": {"device": 120_000_000, "host": 1_100_000_000},
        "capacity_bytes": {"device": 150_000_000},
        "memory_holders": {"device": {"weight buffer": 84_000_000}},
        "verify": {"mode": "sample", "checked": 4, "mismatched": 0, "excused": 1, "tokens_checked": 512},
        "data_source": "synthetic prompts from published length statistics",
        "weights_source": "random weights, seed 0",
        "plan": {"n_real": 200},
        **changes,
    }
    return RunFacts(**values)
