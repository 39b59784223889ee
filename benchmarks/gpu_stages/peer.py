"""Run what others offer for weights in host memory on the same dimensions: accelerate, and DeepSpeed's ZeRO-Inference.

Each is a process of its own, since it needs the host memory that the harness had. One that is not installed is left
out, which its row says.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.gpu_stages.plan import MODEL, ROOT, Scale, free_host_gb
from harness.cli.overrides import composed_values
from harness.model.spec import ModelSpec
from harness.run.session import Session

_SPARE_GB = 4.0  # of host memory, beside the weights
PEERS = ("accelerate", "deepspeed")  # packages, each with a process of its own: {name}_peer.py


def measure(scale: Scale, out: Path, left_s: float, *, batch: int | None) -> dict[str, Any]:
    """Return by peer what it reached, and why it did not where it did not. `batch` is the most sequences at once; None:
    all of the workload's, or as many as fit the device."""
    session = Session.of(composed_values([*scale.workload(), "machine=simulated"]))
    spec = session.load_model().spec
    prompts = [list(request.prompt_ids) for request in session.load_workload().requests[:batch]]
    end_s, rows = time.monotonic() + left_s, {}
    for number, name in enumerate(PEERS):
        share_s = (end_s - time.monotonic()) / (len(PEERS) - number)
        asked = _asked(scale, spec, prompts, min(scale.box_s, share_s / 2))
        reason = _missing(name, scale, spec)
        rows[name] = {"answer": None, "reason": reason} if reason else _run(name, asked, out, share_s)
        print(f"   {name}: {rows[name]['answer'] or 'nothing measured'} {rows[name]['reason'] or ''}", flush=True)
    return {"peers": rows}


def _missing(name: str, scale: Scale, spec: ModelSpec) -> str | None:
    """Say in one line why a peer cannot run; None where it can. A dry run has transformers alone, on the CPU, in
    accelerate's place."""
    if scale.dry and name == PEERS[0]:
        return None
    if find_spec(name) is None:
        return f"{name} is not installed: pip install {name}"
    if scale.dry:
        return f"{name} needs a GPU"
    needed_gb, free_gb = spec.model_bytes / 1e9 + _SPARE_GB, free_host_gb()
    told = f"it needs {needed_gb:.0f} GB of host memory, of which {free_gb:.0f} are free"
    return told if free_gb < needed_gb else None


def _asked(scale: Scale, spec: ModelSpec, prompts: list[list[int]], box_s: float) -> dict[str, Any]:
    return {
        "dry": scale.dry, "model": MODEL, "device_gb": scale.device_gb, "max_new_tokens": scale.max_new_tokens,
        "prompts": prompts, "box_s": box_s,
        "config": {
            "num_hidden_layers": spec.num_layers, "hidden_size": spec.hidden_dim,
            "num_attention_heads": spec.num_heads, "num_key_value_heads": spec.num_kv_heads,
            "head_dim": spec.head_dim, "num_local_experts": spec.num_experts,
            "num_experts_per_tok": spec.experts_per_token, "intermediate_size": spec.expert_dim,
            "vocab_size": spec.vocab_size, "max_position_embeddings": spec.max_positions,
        },
    }  # fmt: skip


def _run(name: str, asked: dict[str, Any], out: Path, left_s: float) -> dict[str, Any]:
    asked_path, answer_path = out / "peer_asked.tmp", out / "peer_answer.tmp"
    asked_path.write_text(json.dumps(asked))
    answer_path.unlink(missing_ok=True)
    command = [sys.executable, "-m", f"benchmarks.gpu_stages.{name}_peer", str(asked_path), str(answer_path)]
    try:
        process = subprocess.run(command, cwd=ROOT, timeout=left_s, stdout=sys.stderr, check=False)
        ended = f"ended with exit code {process.returncode}" if process.returncode else None
    except subprocess.TimeoutExpired:
        ended = f"cut off after {left_s:.0f} s"
    answer = json.loads(answer_path.read_text()) if answer_path.exists() else {}
    for path in (asked_path, answer_path):
        path.unlink(missing_ok=True)
    return {"answer": answer or None, "reason": ended}
