"""Count the instructions of decode attention for each KV token and head, ours and a compiler's, in valgrind.

    python benchmarks/count_instructions.py     # needs valgrind, which knows instructions up to AVX2

The baseline is benchmarks/baselines/decode_attention.cpp with -O3 -march=haswell -ffast-math.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.support.compiled import compiler  # noqa: E402
from benchmarks.support.tables import table  # noqa: E402
from harness.cli.arguments import CommandParser  # noqa: E402

CSRC = ROOT / "kernels" / "csrc"
BASELINES = ROOT / "benchmarks" / "baselines"
SOURCES = [*(CSRC / "attention").glob("*.cpp"), CSRC / "core/isa.cpp", CSRC / "pool/thread_pool.cpp"]
GROUPS = (1, 4, 8)


def build(folder: Path) -> Path:
    command = [compiler() or "c++", "-std=c++17", "-O3", "-pthread", f"-I{CSRC}"]
    baseline = folder / "baseline.o"
    flags = ["-march=haswell", "-ffast-math", "-c", str(BASELINES / "decode_attention.cpp"), "-o", str(baseline)]
    subprocess.run([*command, *flags], check=True)
    program = folder / "count"
    sources = [str(BASELINES / "count_decode.cpp"), *map(str, SOURCES), str(baseline)]
    subprocess.run([*command, *sources, "-o", str(program)], check=True)
    return program


def instructions_per_row(program: Path, path: str, group: int) -> float:
    """Return the instructions of one call over the number of rows of K that it reads (as many of V)."""
    options = ["--tool=callgrind", "--toggle-collect=counted", f"--callgrind-out-file={program}.out"]
    done = subprocess.run(
        ["valgrind", *options, str(program), path, str(group)], capture_output=True, text=True, check=True
    )
    found = re.search(r"Collected : (\d+)", done.stderr)
    assert found, done.stderr
    return int(found.group(1)) / int(done.stdout)


def main(arguments: Sequence[str] | None = None) -> int:
    return CommandParser("benchmarks/count_instructions.py", __doc__).run(count, arguments)


def count(_: Namespace) -> int:
    lines = [["heads on a KV head", "ours, avx2", "auto-vectorised for AVX2", "quotient"]]
    with tempfile.TemporaryDirectory() as folder:
        program = build(Path(folder))
        for group in GROUPS:
            ours, baseline = (instructions_per_row(program, path, group) for path in ("avx2", "baseline"))
            lines.append([str(group), f"{ours:.0f}", f"{baseline:.0f}", f"{baseline / ours:.2f} x"])
    print(table(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
