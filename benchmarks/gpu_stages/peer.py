"""Run Hugging Face accelerate's CPU offload on the same dimensions.

It runs as a process of its own, since it needs the host memory that the harness had.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.gpu_stages.plan import MODEL, ROOT, Scale, free_host_gb
from harness.cli.overrides import composed_values
from harness.run.session import Session

_SPARE_GB = 4.0  # of host memory, beside the weights


def measure(scale: Scale, out: Path, left_s: float, *, batch: int) -> dict[str, Any]:
    if not scale.dry and find_spec("accelerate") is None:
        return {"peer": None, "reason": "accelerate is not installed: pip install accelerate"}
    session = Session.of(composed_values([*scale.workload(), "machine=simulated"]))
    spec = session.load_model().spec
    needed_gb, free_gb = spec.model_bytes / 1e9 + _SPARE_GB, free_host_gb()
    if not scale.dry and free_gb < needed_gb:
        return {"peer": None, "reason": f"it needs {needed_gb:.0f} GB of host memory, of which {free_gb:.0f} are free"}
    prompts = [list(request.prompt_ids) for request in session.load_workload().requests[:batch]]
    asked = {
        "dry": scale.dry, "model": MODEL, "device_gb": scale.device_gb, "max_new_tokens": scale.max_new_tokens,
        "prompts": prompts, "box_s": min(scale.box_s, left_s / 2),
        "config": {
            "num_hidden_layers": spec.num_layers, "hidden_size": spec.hidden_dim,
            "num_attention_heads": spec.num_heads, "num_key_value_heads": spec.num_kv_heads,
            "head_dim": spec.head_dim, "num_local_experts": spec.num_experts,
            "num_experts_per_tok": spec.experts_per_token, "intermediate_size": spec.expert_dim,
            "vocab_size": spec.vocab_size, "max_position_embeddings": spec.max_positions,
        },
    }  # fmt: skip
    asked_path, answer_path = out / "peer_asked.tmp", out / "peer_answer.tmp"
    asked_path.write_text(json.dumps(asked))
    answer_path.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.gpu_stages.accelerate_peer", str(asked_path), str(answer_path)]
    try:
        process = subprocess.run(command, cwd=ROOT, timeout=left_s, stdout=sys.stderr, check=False)
        ended = f"ended with exit code {process.returncode}" if process.returncode else None
    except subprocess.TimeoutExpired:
        ended = f"cut off after {left_s:.0f} s"
    answer = json.loads(answer_path.read_text()) if answer_path.exists() else {}
    for path in (asked_path, answer_path):
        path.unlink(missing_ok=True)
    print(f"   {answer or 'nothing measured'} {ended or ''}", flush=True)
    return {"peer": answer or None, **({"reason": ended} if ended else {})}
