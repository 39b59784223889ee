"""Draw MoE-Lightning Fig. 6 from recorded traces: CGOPipe, S2, S3 and S4 on the emulated machine under one policy.

Four short runs of mixtral-mini, each N sequences in one batch; shown are neighbouring layers in the middle of a decode
step. Prompts are long beside what this machine is emulated with elsewhere, and host memory is slower, so that attention
and the cache's transfer can be seen: "square sizes vary with workloads and policies", as the figure's caption has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from harness.run.experiment import run_experiment
from paper_figures import timelines
from paper_figures.support import composed, markdown_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NOTE = (
    "mixtral-mini on two cores (hardware=laptop, host memory 1 GB/s), prompts of 384 tokens, N = 128, μ = 32; "
    "packets as recorded. A: norm, QKV; B: attention, on the CPU but for S4; C: projection, router, experts; "
    "D1: QKV to the host; D2: attention's results to the GPU; D4: keys and values to the GPU; the number is the "
    "micro-batch's"
)
SCHEDULES = {"moelightning": "CGOPipe", "fastdecode": "S2", "flexgen_c": "S3", "flexgen": "S4"}
LETTERS = {
    "attention in": "A", "decode attention": "B", "decode attention (device)": "B", "attention out": "C",
    "experts": "C", "offload qkv": "D1", "load attention": "D2", "load kv": "D4",
}  # fmt: skip
N, MU, PROMPT, LAYERS = 128, 32, 384, 2
SETTING = (
    *("dataset=mtbench", "wandb.mode=disabled", "progress=false", "verify=off", "hardware.cpu_gb_s=1.0"),
    "strategy.packet_mb=2",
)


def overrides(
    strategy: str, *, n: int = N, mu: int = MU, prompt: int = PROMPT, steps: int = 6, model: str = "mixtral-mini"
) -> list[str]:
    """Return the overrides as `python run.py` takes them."""
    policy = {"batch_size": n, "micro_batch_size": mu, "gpu_ffn": "true", "resident_weights": 0, "resident_kv": 0}
    return [
        *("machine=emulated", f"strategy={strategy}", f"model={model}", *SETTING),
        *(f"strategy.policy.{name}={value}" for name, value in policy.items()),
        *(f"dataset.num_requests={n}", f"dataset.max_new_tokens={steps}", "dataset.lengths.shape=constant"),
        *(f"dataset.lengths.mean={prompt}", f"dataset.lengths.max={prompt}", "dataset.lengths.min=1"),
        f"kv_cache_gb={n * (prompt + steps + 16) * _KV_BYTES / 1e9:.4f}",
    ]


_KV_BYTES = 6 * 2 * 2 * 64 * 2  # a token's of mixtral-mini: layers, keys and values, heads, head_dim, bfloat16


def recorded(strategy: str, results: Path, **sizes: Any) -> dict[str, Any]:
    """Record a run and return its window, with the seconds of all its decode steps; its folder is not kept."""
    summary, folder = run_experiment(composed(f"results_dir={results}", *overrides(strategy, **sizes)))
    found = timelines.window(folder, LAYERS)
    return {
        **found,
        "run": "not kept",
        "strategy": f"{SCHEDULES[strategy]} ({strategy})",
        "command": f"python run.py {' '.join(overrides(strategy, **sizes))}",
        "without_core": summary["stolen_core_share"],
    }


def compute(strategies: Sequence[str] = tuple(SCHEDULES), **sizes: Any) -> dict[str, Any]:
    with TemporaryDirectory() as results:
        windows = [recorded(strategy, Path(results), **sizes) for strategy in strategies]
    return {"label": "emulated", "layers": LAYERS, "windows": windows}


def busy(window: dict[str, Any], lane: str) -> float:
    """Return the share of the window in which the lane is busy."""
    return sum(end - start for *_, start, end in window["lanes"].get(lane, ())) / window["length_ms"]


def tables(data: dict[str, Any]) -> str:
    first = data["windows"][0]["length_ms"]
    columns = {
        "schedule": lambda w: w["strategy"],
        f"ms for {data['layers']} layers": lambda w: f"{w['length_ms']:.0f}",
        "beside the first": lambda w: f"{w['length_ms'] / first:.2f}",
        **{f"{lane} busy": lambda w, lane=lane: f"{busy(w, lane):.0%}" for lane in ("gpu", "cpu", "h2d", "d2h", "pin")},
    }
    return f"# Fig. 6 (emulated)\n\n{markdown_table(columns, data['windows'])}"


def draw(data: dict[str, Any]) -> Figure:
    return timelines.draw(data["windows"], letters=LETTERS)
