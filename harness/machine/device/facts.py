"""Tell on what a measured number was measured: the GPU, its driver, its link and its clocks."""

from __future__ import annotations

import subprocess
from importlib import metadata

import torch

_ASKED = {  # the columns of nvidia-smi, by the words under which they are told
    "driver": "driver_version",
    "PCIe generation": "pcie.link.gen.current",
    "most PCIe generation": "pcie.link.gen.max",
    "PCIe lanes": "pcie.link.width.current",
    "most PCIe lanes": "pcie.link.width.max",
    "SM clock": "clocks.sm",
    "most SM clock": "clocks.max.sm",
    "memory clock": "clocks.mem",
    "power limit": "power.limit",
}
_PATIENCE_S = 10.0


def gpu_facts(name: str, total_bytes: int, uuid: str) -> dict[str, str]:
    """Return the facts of a GPU. What its driver does not tell is left out; clocks and link are those of the moment,
    and an idle GPU lowers both."""
    facts = {"GPU": f"{name}, {total_bytes / 1e9:.4g} GB", "CUDA": str(torch.version.cuda)}
    try:
        facts["Triton"] = metadata.version("triton")
    except metadata.PackageNotFoundError:
        facts["Triton"] = "none"
    return facts | driver_facts(uuid)


def driver_facts(uuid: str) -> dict[str, str]:
    """Ask the driver's own tool about a GPU; return nothing where the tool is missing or fails."""
    columns = ",".join(_ASKED.values())
    command = ["nvidia-smi", f"--id=GPU-{uuid}", f"--query-gpu={columns}", "--format=csv,noheader"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    lines = asked.stdout.splitlines()
    values = [value.strip() for value in lines[0].split(",")] if asked.returncode == 0 and lines else []
    if len(values) != len(_ASKED):
        return {}
    return {word: value for word, value in zip(_ASKED, values, strict=True) if value and value[0] not in "[N"}
