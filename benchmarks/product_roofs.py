"""Find where the expert FFN's limit lies, and decode attention's: in reading, or in arithmetic out of registers.

    python benchmarks/product_roofs.py      # needs a processor with AVX-512 and products of bfloat16

Peaks are loops of independent instructions (baselines/product_peaks.cpp) on one thread. The roof is the share of the
read ceiling that a kernel could reach whose reading and arithmetic overlapped without loss.
"""

from __future__ import annotations

import ctypes
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.support.ceilings import Ceilings  # noqa: E402
from benchmarks.support.compiled import build  # noqa: E402
from benchmarks.support.stopwatch import stopwatch  # noqa: E402
from benchmarks.support.tables import percent, table  # noqa: E402
from harness.cli.arguments import CommandParser  # noqa: E402
from kernels._extension import native  # noqa: E402

GROUPS = (1, 4, 6, 8)
NUM_TOKENS = (1, 2, 4, 8, 16, 32, 64)
WORKING_SET_BYTES = 512 << 20
SUMS, OPERATIONS = 16, {"float32": 32, "bfloat16": 64}
PEAK_ROUNDS, TURNS = 1_000_000, 15


def peaks_and_ceiling() -> tuple[dict[str, float], float]:
    """Measure FLOP/s of each loop and bytes/s, each the best of turns that alternate."""
    ceilings = Ceilings(WORKING_SET_BYTES)  # owns what is read
    read = ceilings.read(1)
    with tempfile.TemporaryDirectory() as folder:
        library = build("product_peaks.cpp", ("-O2",), Path(folder))
        loops = {name: getattr(library, f"{name}_rounds") for name in OPERATIONS}
        runs = {
            name: stopwatch(lambda loop=loop: loop(ctypes.c_int64(PEAK_ROUNDS)))  # type: ignore[misc]
            for name, loop in loops.items()
        }
        seconds: dict[str, list[float]] = {name: [] for name in (*runs, "read")}
        for _ in range(TURNS):
            for name, run in {**runs, "read": read}.items():
                seconds[name].append(run())
    peaks = {name: PEAK_ROUNDS * SUMS * flops / min(seconds[name]) for name, flops in OPERATIONS.items()}
    return peaks, WORKING_SET_BYTES / min(seconds["read"])


def main(arguments: Sequence[str] | None = None) -> int:
    return CommandParser("benchmarks/product_roofs.py", __doc__).run(tell_roofs, arguments)


def tell_roofs(_: Namespace) -> int:
    if "avx512bf16" not in native().supported_isas():
        sys.exit("product_roofs: this processor has no products of bfloat16 in AVX-512")
    peaks, read_bytes_s = peaks_and_ceiling()
    print(f"float32 {peaks['float32'] / 1e9:.0f} GFLOP/s, bfloat16 {peaks['bfloat16'] / 1e9:.0f} GFLOP/s, ", end="")
    print(f"read {read_bytes_s / 1e9:.1f} GB/s\n")
    # Seconds for a weight and a token: two operations. An expert's down projection is in float32.
    cases = {
        "float32 throughout": 2 / peaks["float32"],
        "expert FFN": 4 / 3 / peaks["bfloat16"] + 2 / 3 / peaks["float32"],
        "linear": 2 / peaks["bfloat16"],
    }
    lines = [["tokens", *(f"roof, {name}" for name in cases)]]
    for tokens in NUM_TOKENS:
        roofs = (min(1.0, 2 / read_bytes_s / (tokens * seconds)) for seconds in cases.values())
        lines.append([str(tokens), *map(percent, roofs)])
    print(table(lines))
    # Of each number of K and of V, two operations a query head: scores in bfloat16, the sum of values in float32.
    lines = [["query heads on a KV head", "roof of decode attention", "share of the read ceiling"]]
    for group in GROUPS:
        roof = 4 / (group * (2 / peaks["bfloat16"] + 2 / peaks["float32"]))
        lines.append([str(group), f"{roof / 1e9:.1f} GB/s", percent(min(1.0, roof / read_bytes_s))])
    print(f"\n{table(lines)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
