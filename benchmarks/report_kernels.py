"""Measures every kernel on this machine and writes its results, its tables and what they say about each aim.

    python benchmarks/report_kernels.py                                  # about 6 minutes on 2 cores
    python benchmarks/report_kernels.py --only decode_attention          # one part, its ceilings with it
    python benchmarks/report_kernels.py --only decode_attention --vllm-python VENV/bin/python --llama-python ...
    python benchmarks/report_kernels.py --tables                         # write the tables of docs/kernels.md again

A part is one process with its own ceilings, whose JSON replaces that part's earlier one from the same processor and
code path in results/reference/kernels; results of other machines stay, and every table says whose it is.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.support import aims, tables  # noqa: E402
from harness.cli.arguments import CommandParser  # noqa: E402
from harness.record.provenance import code_version  # noqa: E402

OUT = ROOT / "results" / "reference" / "kernels"
PAGE = ROOT / "docs" / "kernels.md"
OTHERS = {"simulator", "plans"}  # are no kernels
PARTS = {path.stem.removeprefix("test_"): path for path in sorted((ROOT / "benchmarks").glob("test_*.py"))}
PARTS = {part: path for part, path in PARTS.items() if part not in OTHERS}
STATISTICS = ("min", "max", "median", "rounds")


def measure(part: str, arguments: list[str]) -> dict[str, Any] | None:
    """Measure one part and return its rows, machine and command; None where the part was skipped."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "benchmark.json"
        command = [sys.executable, "-m", "pytest", str(PARTS[part]), "-q", f"--benchmark-json={path}", *arguments]
        subprocess.run(command, cwd=ROOT, check=True)
        benchmarks = json.loads(path.read_text())["benchmarks"] if path.stat().st_size else []
    if not benchmarks:
        return None
    rows = []
    for benchmark in benchmarks:
        extra = benchmark["extra_info"]
        machine = extra.pop("machine")
        statistics = {name: benchmark["stats"][name] for name in STATISTICS}
        rows.append({"test": benchmark["name"], **extra, "all_rounds": statistics})
    shown = [Path(value).name if value.startswith("/") else value for value in arguments]
    return {
        "part": part,
        "label": "measured",
        "date": date.today().isoformat(),
        "code": code_version(ROOT),
        "command": " ".join(["python benchmarks/report_kernels.py --only", part, *shown]),
        "machine": machine,
        "rows": rows,
    }


def folder_of(machine: dict[str, Any]) -> str:
    """Name the results' folder by the processor's name, its model where that is known, and the code path, in letters
    that any file system takes."""
    name = machine["processor"].replace("(R)", "").replace("(TM)", "")
    model = machine.get("processor_model") or ""
    return "-".join(re.findall(r"[a-z0-9.?]+", f"{name} {model} {machine['isa']}".lower())).replace("?", "x")


def heading_of(machine: dict[str, Any]) -> str:
    """Return what heads a machine's tables, such as "AMD EPYC 25.17.1, path avx512bf16"."""
    name = " ".join(filter(None, (machine["processor"], machine.get("processor_model"))))
    return f"{name}, path {machine['isa']}"


def page_texts(folder: Path) -> dict[str, str]:
    """Write what every part's place on the page says, with a section for each machine."""
    texts: dict[str, list[str]] = {}
    for machine in sorted(path for path in folder.iterdir() if path.is_dir()):
        results = {path.stem: json.loads(path.read_text()) for path in sorted(machine.glob("*.json"))}
        sections = {part: tables.section(result) for part, result in results.items()}
        facts = next(iter(results.values()))["machine"]
        for part, text in {**sections, "aims": aims.summary(results)}.items():
            texts.setdefault(part, []).append(f"**{heading_of(facts)}**\n\n{text}")
    return {part: "\n\n".join(of_machines) for part, of_machines in texts.items()}


def main(given: Sequence[str] | None = None) -> int:
    parser = CommandParser("benchmarks/report_kernels.py", __doc__)
    parser.add_argument("--only", choices=sorted(PARTS), action="append", help="parts to run (default: all)")
    parser.add_argument("--out", type=Path, default=OUT, help="folder for <machine>/<part>.json")
    parser.add_argument("--tables", action="store_true", help="measure nothing")
    parser.add_argument("--quick", action="store_true", help="small shapes: numbers mean nothing")
    for name in ("rounds", "vllm-python", "llama-python"):
        parser.add_argument(f"--{name}", help="as for pytest benchmarks")
    return parser.run(write, given)


def write(args: Namespace) -> int:
    arguments = ["--quick"] if args.quick else []
    for name in ("rounds", "vllm_python", "llama_python"):
        if (value := getattr(args, name)) is not None:
            arguments += [f"--{name.replace('_', '-')}", value]
    for part in [] if args.tables else args.only or PARTS:
        result = measure(part, arguments)
        if result is None:
            print(f"{part}: skipped")
            continue
        place = args.out / folder_of(result["machine"])
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{part}.json").write_text(json.dumps(result, indent=1) + "\n")
    texts = page_texts(args.out)
    for part, text in texts.items():
        print(f"## {part}\n\n{text}\n")
    if args.out == OUT:
        tables.write_into(PAGE, texts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
