"""The kernels compile for GPUs that are not here, into the instructions that make them fast."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.conftest import ROOT

HERE = Path(__file__).parent
PTXAS = Path((find_spec("triton") or find_spec("json")).origin).parent / "backends/nvidia/bin/ptxas"
needs_compiler = pytest.mark.skipif(not PTXAS.exists(), reason="no Triton with a bundled ptxas is installed")


CHIPS = ((80, 163, "bfloat16"), (90, 227, "bfloat16"), (90, 227, "float32"))  # capability, KiB of shared memory
PRODUCTS = {"experts._gate_up", "experts._down", "prefill._attend", "decode._attend", "latent._attend_latents"}
OTHERS = {"routing._choose", "grouping._count", "grouping._offsets", "grouping._place", "experts._combine"}
OTHERS |= {"decode._join", "copies._bring", "copies._gather", "foresee._foresee", "grouping._group_few"}
OTHERS |= {"rows._norm", "rows._rotate", "rows._append"}


@needs_compiler
@pytest.mark.slow
def test_compiles(tmp_path):
    """One process compiles for all chips, since it takes seconds to start and Triton's compiler uses one core."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path)}
    chips = [",".join(map(str, chip)) for chip in CHIPS]
    command = [sys.executable, str(HERE / "compile_for.py"), *chips]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for chip, line in zip(CHIPS, done.stdout.splitlines(), strict=True):
        check(json.loads(line), *chip)


def check(rows, capability, shared_kib, dtype):
    chip = f"compute capability {capability}, {dtype}"
    assert {row["kernel"] for row in rows} == PRODUCTS | OTHERS, chip
    for row in rows:
        row["chip"] = chip
        assert row["cubin_bytes"] > 0
        assert row["shared_bytes"] <= shared_kib << 10, row
        assert row["spill_bytes"] == 0, row
        assert row["atomics"] == 0, row
        assert not row["tf32"], row
        if row["kernel"] == "rows._rotate" and capability >= 90:  # before, fused ones are all that bfloat16 has
            assert row["fused_products"] == 0, "the model rounds both products"
        assert row["kernel"] != "copies._gather" or row["loads_of_16_bytes"] > 0, "each read crosses the link"
    for row in (row for row in rows if row["kernel"] in PRODUCTS):
        # Weights by address: the compiler must know their alignment, else it loads them number by number.
        assert row["copies_of_16_bytes"] > 0 and row["loads_of_2_bytes"] == 0, row
        if row["kernel"].startswith("experts"):
            assert row["copies_of_4_bytes"] == 0, row
        products = row["warp_group_products"] + row["warp_products"]
        assert (products > 0) == (dtype != "float32"), row
    tall = [row for row in rows if row["kernel"] == "experts._gate_up" and row["tile_rows"] >= 64]
    assert all((row["warp_group_products"] > 0) == (capability >= 90) for row in tall)
    assert (dtype == "float32") == (not tall)
