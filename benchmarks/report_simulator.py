"""Measures the speed of the simulated machine here and keeps it in results/reference/simulator/simulator.json.

python benchmarks/report_simulator.py       # half a minute, in which nothing else should run
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from harness.cli.arguments import CommandParser  # noqa: E402
from harness.record.provenance import code_version, environment  # noqa: E402

OUT = ROOT / "results" / "reference" / "simulator" / "simulator.json"


def measured() -> list[dict[str, object]]:
    """Return a row for each benchmark: ops a second in the median round, in the fastest and in the slowest."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "benchmark.json"
        test = str(ROOT / "benchmarks" / "test_simulator.py")
        subprocess.run([sys.executable, "-m", "pytest", test, "-q", f"--benchmark-json={path}"], cwd=ROOT, check=True)
        benchmarks = json.loads(path.read_text())["benchmarks"]
    rows = []
    for benchmark in benchmarks:
        num_ops, seconds = benchmark["extra_info"]["num_ops"], benchmark["stats"]
        rates = {name: round(num_ops / seconds[of]) for name, of in (("ops_per_s", "median"), ("fastest", "min"))}
        rows.append(
            {"test": benchmark["name"], "num_ops": num_ops, "rounds": seconds["rounds"], **rates}
            | {"slowest": round(num_ops / seconds["max"])}
        )
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    return CommandParser("benchmarks/report_simulator.py", __doc__).run(keep, arguments)


def keep(_: Namespace) -> int:
    result = {
        "label": "measured",
        "date": date.today().isoformat(),
        "code": code_version(ROOT),
        "command": "python benchmarks/report_simulator.py",
        "machine": environment(("numpy",)),
        "rows": measured(),
    }
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(result, indent=1) + "\n")
    for row in result["rows"]:
        print(f"{row['test']:<36}{row['ops_per_s']:>12,} ops/s ({row['slowest']:,} to {row['fastest']:,})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
