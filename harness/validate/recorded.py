"""Record how a model routes the tokens of a workload, for a simulation that has no model to ask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from harness.cli.overrides import composed_values
from harness.model.loading import load_model
from harness.routing.trace_file import PredictionHeader, TraceWriter
from harness.run.experiment import run_experiment
from harness.settings import parse_settings
from harness.study.excerpt import trace_rows
from harness.study.inputs import gates_of
from harness.study.recorded import read_domain

# Which strategy computes them does not matter to a token's experts, nor does the links' rate. Requests that come
# together meet the same experts as alone.
RECORDING = (
    "machine=emulated",
    "hardware=laptop",
    "hardware.h2d_gb_s=20",
    "hardware.d2h_gb_s=20",
    "record_routing=true",
    "record_hidden=true",
    "record_hidden_mb=10000",
    "verify=off",
    "wandb.mode=disabled",
    "progress=false",
)


def record_routing(workload: Sequence[str], path: Path) -> None:
    """Write the routing of every token of the workload, which overrides describe, as a trace to `path`.

    With it stands what the next layer's router predicts from each layer's gating input, as `emit.predict` does on
    machines with tensors. The model must be one that is made here or a checkpoint.
    """
    with TemporaryDirectory() as results:
        values = composed_values([*RECORDING, *workload, f"results_dir={results}"])
        _, folder = run_experiment(values)
        checkpoint = load_model(parse_settings(values).model, has_tensors=True, seed=0).checkpoint
        assert checkpoint is not None, "the settings' models are checkpoints"
        domain = read_domain("workload", folder)
        gates = gates_of(domain, checkpoint.folder)
    count, made = domain.header.k, path.with_name(f"making-{path.name}")
    predictions = PredictionHeader(distance=1, experts=count, source="the next layer's router on this layer's input")
    made.unlink(missing_ok=True)
    writer = TraceWriter(made, replace(domain.header, predictions=predictions))
    try:
        for request, row in zip(domain.request_ids, trace_rows(domain, domain.whole, gates, count), strict=True):
            writer.write(replace(row, request=int(request)))
    finally:
        writer.close()
    made.replace(path)  # a trace that is there is whole
