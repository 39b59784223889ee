"""Measure everything that this project wants to know of a GPU, in one command of under nine minutes:

    python benchmarks/gpu.py --out results/gpu            # on a machine with an NVIDIA GPU
    python benchmarks/gpu.py --dry --out /tmp/dry         # the same logic on the emulated machine, tiny, in a minute

Touches the host's memory; builds the C++ extension; runs the tests that need a GPU; checks and times each GPU kernel,
and leaves one that is wrong to torch; measures ceilings; checks tokens on tiny checkpoints. Then, on random weights of
Mixtral-8x7B's shape in 16 GB of device memory: a stream of weights alone, a loop by hand without the harness, some
steady decode passes of every strategy, whole runs, a calibration, and what simulator and papers' models would have
said; beside them accelerate and DeepSpeed's ZeRO-Inference. What tells most comes first; a stage that was done is left
out with --stages. Results: ordinary run folders, gpu.json and gpu.md in --out, written as they come; --pack DIR also
packs them as they come.
"""

from __future__ import annotations

import faulthandler
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_NEEDED = (
    *("torch", "transformers", "hydra", "omegaconf", "antlr4", "pydantic", "rich", "yaml", "safetensors", "tokenizers"),
    *("numpy", "scipy", "highspy", "psutil"),
)
_BUILD_NEEDS = ("pybind11", "setuptools")


def require_packages(names: Sequence[str]) -> None:
    """Exit with one line where packages are missing, before any of the harness is imported."""
    if missing := [name for name in names if find_spec(name) is None]:
        told = f'these packages are missing: {", ".join(missing)}; pip install -e ".[dev]" brings them'
        print(f"benchmarks/gpu.py: error: {told}", file=sys.stderr)
        sys.exit(2)


require_packages(_NEEDED)
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.gpu_stages.processes import GROUPS  # noqa: E402  from this checkout
from harness.cli.arguments import CommandParser, whole_number  # noqa: E402
from harness.config import require  # noqa: E402

STAGES = tuple(stage for group in GROUPS for stage in group)  # in the order of their worth


def parser() -> CommandParser:
    """Return what reads the arguments of this script, and of the processes that it starts."""
    parser = CommandParser("benchmarks/gpu.py", __doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "results/gpu")
    parser.add_argument("--pack", type=Path, default=None, help="folder for at most 8 files of 16 MiB")
    parser.add_argument("--dry", action="store_true", help="tiny, on the emulated machine: shows that the script works")
    parser.add_argument("--budget-s", type=float, default=530.0, help="no stage begins that cannot end within this")
    parser.add_argument("--box-s", type=float, default=80.0, help="longest time of one strategy")
    parser.add_argument("--stages", default=",".join(STAGES), help=f"some of {','.join(STAGES)}")
    parser.add_argument("--go-on", action="store_true", help="add to the results in --out, in this process alone")
    parser.add_argument("--strategies", default=None, help="only these, by name; default: all of conf/strategy")
    parser.add_argument("--whole", default=None, help="only these in whole runs; default: all measured")
    parser.add_argument(
        "--decode-passes", type=whole_number(1), default=None, help="that are compared, in a row; default: 3"
    )
    parser.add_argument("--host-gb", type=float, default=None, help="memory of the host; default: what it says")
    parser.add_argument("--device-gb", type=float, default=16.0, help="memory of the GPU that is played")
    parser.add_argument("--kv-gb", type=float, default=None, help="KV cache; default: 24, or a fifth of the host")
    parser.add_argument(
        "--requests", type=whole_number(1), default=None, help="default: as many as the KV cache holds at once"
    )
    parser.add_argument(
        "--layers", type=whole_number(1), default=None, help="default: all, or as many as the host's memory holds"
    )
    parser.add_argument("--without", default="", help="GPU kernels whose work torch does: some of routing,experts,...")
    parser.add_argument("--new-tokens", type=whole_number(1), default=16)
    parser.add_argument(
        "--peer-batch", type=whole_number(1), default=None, help="sequences at once of outside peers; default: all"
    )
    return parser


def require_known_names(args: Namespace) -> None:
    """Raise ConfigError for a stage, a strategy or a kernel that there is not."""
    from kernels.triton import KERNELS

    strategies = sorted(path.stem for path in (ROOT / "conf/strategy").glob("[!_]*.yaml"))
    valid = {"stages": STAGES, "strategies": strategies, "whole": strategies, "without": KERNELS}
    for option, names in valid.items():
        given = getattr(args, option)
        unknown = set(given.split(",") if given else []) - set(names)
        told = f"unknown {', '.join(sorted(unknown))}; there are {', '.join(names)}"
        require(not unknown, f"--{option}", told)


def build(left_s: float, *, dry: bool) -> dict[str, Any]:
    """Build the extension in place, unless it is there and newer than its sources, and compile the GPU kernels."""
    environment = {**os.environ, "KERNELS_BUILD_JOBS": str(len(os.sched_getaffinity(0)))}
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    subprocess.run(command, cwd=ROOT, env=environment, timeout=left_s, check=True, stdout=sys.stderr)
    import kernels
    from benchmarks.gpu_stages.runs import compile_kernels

    return {"isa": kernels.isa(), **({} if dry else {"compiled_s": compile_kernels()})}


def facts(dry: bool) -> dict[str, Any]:
    from harness.record.provenance import code_version, environment

    here = environment()
    found = {"code": code_version(), "processor": f"{here['processor']}, {here['num_cores']} cores"}
    found["versions"] = ", ".join(f"{name} {version}" for name, version in here["packages"].items())
    if dry:
        found["dry"] = "emulated machine and tiny dimensions: numbers say that the script works, nothing else"
    return found


def gpu_fact() -> str:
    """Describe the GPU. Only processes that use the GPU ask, since the question makes a context there."""
    import torch

    properties = torch.cuda.get_device_properties(0)
    return f"{properties.name}, {properties.total_memory / 1e9:.0f} GB, CUDA {torch.version.cuda}"


def main(given: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if given is None else given
    return parser().run(partial(measure, given=given), given)


def measure(args: Namespace, given: Sequence[str]) -> int:
    """Measure as the arguments say. Processes of its own are `given` the same ones."""
    require_known_names(args)
    stages = args.stages.split(",")
    if "build" in stages:
        require_packages(_BUILD_NEEDS)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    args.out.mkdir(parents=True, exist_ok=True)
    from benchmarks.gpu_stages.host_memory import touched
    from benchmarks.gpu_stages.packing import pack
    from benchmarks.gpu_stages.plan import dry_scale, free_host_gb, gpu_scale
    from benchmarks.gpu_stages.processes import run_in_processes
    from benchmarks.gpu_stages.record import Record
    from benchmarks.gpu_stages.table import markdown
    from harness.machine.cuda import device_found

    if not args.dry and not device_found():
        print("error: torch finds no GPU; --dry runs the same on the emulated machine", file=sys.stderr)
        return 2
    grown = {} if args.host_gb or args.dry else touched()
    args.host_gb = args.host_gb or free_host_gb()
    scale = dry_scale(args.strategies) if args.dry else gpu_scale(
        host_gb=args.host_gb, device_gb=args.device_gb, kv_gb=args.kv_gb, requests=args.requests,
        new_tokens=args.new_tokens, box_s=args.box_s, names=args.strategies, most_layers=args.layers,
    )  # fmt: skip
    if args.decode_passes is not None:
        scale = replace(scale, decode_passes=args.decode_passes)

    def after(content: dict[str, Any]) -> None:
        (args.out / "gpu.md").write_text(markdown(content))
        if args.pack is not None:
            for line in pack(args.out, args.pack):
                print(f"   not packed: {line}", flush=True)

    if args.go_on:
        return go_on(args, stages, scale, Record(args.out, None, budget_s=args.budget_s, after=after))
    sizes = f"{scale.layers} layers, {scale.num_requests} requests of {scale.max_new_tokens} new tokens, "
    sizes += f"{scale.device_gb:g} GB of device memory, {scale.kv_gb:.3g} GB of KV cache, random weights"
    title = "Mixtral-8x7B's shape on a real GPU" if not args.dry else "Dry run"
    shown = {"title": title, "facts": {**facts(args.dry), "sizes": sizes, "host memory": grown or "not touched"}}
    record = Record(args.out, shown, budget_s=args.budget_s, after=after)
    if args.dry:
        run_stages(args, stages, scale, record)
    else:
        run_in_processes(stages, record, lambda names, left_s: child_command(given, args.host_gb, names, left_s))
    print((args.out / "gpu.md").read_text())
    broken = [name for name, stage in record.content["stages"].items() if stage["status"] == "failed"]
    return 1 if broken else 0


def child_command(given: Sequence[str], host_gb: float, stages: Sequence[str], left_s: float) -> list[str]:
    """Give the command of a process with the same sizes, whatever memory is free when the process begins."""
    changes = ["--go-on", "--host-gb", f"{host_gb:.6f}", "--stages", ",".join(stages), "--budget-s", f"{left_s:.1f}"]
    return [sys.executable, str(Path(__file__).resolve()), *given, *changes]


def go_on(args: Namespace, stages: list[str], scale: Any, record: Any) -> int:
    """Run stages as one of the processes of a run. A stage that hangs reports where, and the process ends."""
    from benchmarks.gpu_stages.processes import DEVICE_LOST
    from benchmarks.gpu_stages.record import DeviceLost

    faulthandler.enable()
    faulthandler.dump_traceback_later(args.budget_s + 5.0, exit=True)
    if not args.dry:
        record.content["facts"]["gpu"] = gpu_fact()
    try:
        run_stages(args, stages, scale, record)
    except DeviceLost as lost:
        print(f"   the device has failed: {lost}", flush=True)
        os._exit(DEVICE_LOST)  # the ordinary way out may wait for the device
    return 0


def run_stages(args: Namespace, stages: list[str], scale: Any, record: Any) -> None:
    """Run the stages in the order of their worth; each stage knows what the earlier ones found."""
    if "build" in stages:
        record.run("build", lambda left_s: build(left_s, dry=args.dry), needs_s=0.0)
    from benchmarks.gpu_stages import accuracy, ceilings, kernels, loop, peer, runs, stream, tests_on_gpu
    from benchmarks.gpu_stages.plan import strategies
    from benchmarks.gpu_stages.processes import reserved_s
    from harness.machine.device.pinned import keeping
    from kernels import triton as gpu_kernels

    def keep(name: str) -> Any:
        return lambda found: record.keep(name, found)

    def done(name: str) -> Any:
        return record.found(name).get("runs")

    if "tests" in stages:
        record.run("tests", lambda left_s: tests_on_gpu.run(args.out, min(120.0, left_s / 3)), needs_s=30.0)
    if "kernels" in stages and not args.dry:
        record.run("kernels", lambda left_s: kernels.measure(keep("kernels"), done("kernels")), needs_s=10.0)
    without = [] if args.dry else kernels.overrides(done("kernels") or {}, args.without.split(","))
    if "ceilings" in stages:
        record.run("ceilings", lambda left_s: ceilings.measure(scale), needs_s=5.0)
    if "tokens" in stages:
        share_s = min(120.0, record.left_s / 3)
        tokens = lambda left_s: runs.check_tokens(  # noqa: E731
            scale, args.out, share_s, keep("tokens"), done("tokens"), without
        )
        record.run("tokens", tokens, needs_s=10.0)
    found = record.found("ceilings")
    rates = [f"hardware.{name}={found[name]}" for name in ("h2d_gb_s", "d2h_gb_s", "host_gb_s") if name in found]
    with keeping():  # host memory is pinned once for all strategies and the calibration
        if "memory" in stages:
            record.run("memory", lambda left_s: runs.take_memory(scale), needs_s=30.0)
        if "stream" in stages:
            record.run("stream", lambda left_s: stream.measure(scale, [*rates, *without]), needs_s=20.0)
        if "loop" in stages:
            record.run("loop", lambda left_s: loop.measure(scale, [*rates, *without]), needs_s=40.0)
        whole = replace(scale, strategies=strategies(args.whole)) if args.whole else scale
        for name, of, more in (("steady", scale, [scale.stop]), ("strategies", whole, [])):
            if name in stages:
                reserve_s = 0.0 if args.dry else reserved_s(stages, record.left_s)
                measured = lambda left_s, name=name, of=of, more=more, reserve_s=reserve_s: runs.measure_strategies(  # noqa: E731
                    of, args.out, [*rates, *without, *more], left_s - reserve_s, keep(name), done(name)
                )
                record.run(name, measured, needs_s=20.0)
        if "calibrate" in stages:
            calibrated = lambda left_s: accuracy.calibrate(scale, rates, args.out, without)  # noqa: E731
            record.run("calibrate", calibrated, needs_s=20.0)
    if "simulate" in stages:
        both = done("strategies") or {}, done("steady") or {}
        links = record.found("calibrate").get("links", {})
        counted = [] if args.dry else without or [f"machine.triton=[{','.join(gpu_kernels.KERNELS)}]"]
        same = with_links(rates, links)
        record.run("simulate", lambda left_s: accuracy.simulate(scale, same, *both, counted), needs_s=5.0)
    if "peer" in stages:
        record.run("peer", lambda left_s: peer.measure(scale, args.out, left_s, batch=args.peer_batch), needs_s=10.0)


def with_links(rates: Sequence[str], links: Mapping[str, float]) -> list[str]:
    """Return the overrides with the links' rates from which the calibration subtracted: its costs are those beyond."""
    told = {rate.partition("=")[0]: rate for rate in rates}
    return list((told | {f"hardware.{name}": f"hardware.{name}={rate}" for name, rate in links.items()}).values())


if __name__ == "__main__":
    sys.exit(main())
