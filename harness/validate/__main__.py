"""Measure how far to trust the simulator: `python -m harness.validate`.

Runs every setting of every `strategies/*/validation.yaml` on the emulated machine and in the simulator, calibrated by a
table for each model, and reports the errors and whether they meet the aims (exit code 1 where they do not). No setting
is used to calibrate: a calibration measures ops and lanes together, never a strategy, whose own thread is timed in a
few simulated passes. First each workload's routing is recorded, with what the next layer's router predicts, into the
folder routing: the simulator has no model to ask, and what it gets wrong about time should not be mixed with how
synthetic routing differs. Repeats are interleaved (a model's calibration and right behind it its settings, model by
model, and all of it again), so that a machine whose speed drifts is measured at the same times; what counts is the
median. All cores are kept awake meanwhile, and a run beside which others had or slowed them is made again, twice at
most. Takes an hour, in which nothing else should run. Everything is written as it is finished; `--resume`
goes on with the rest, if the code is the same.
"""

from __future__ import annotations

import json
import re
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from rich.console import Console

import harness
from harness.calibration.local import measure, table_path
from harness.calibration.table import CalibrationTable
from harness.calibration.undisturbed import MAX_TAKEN_SHARE
from harness.cli.arguments import CommandParser, whole_number
from harness.cli.overrides import composed_values
from harness.config import ConfigError
from harness.hardware.awake import Awake
from harness.hardware.slowed import Watch
from harness.interrupts import exit_code
from harness.model.planned import planned_model
from harness.plan.planning import make_plan
from harness.record.provenance import code_version, environment, fingerprint, shown_command
from harness.run.experiment import run_experiment
from harness.settings import parse_settings
from harness.validate.recorded import record_routing
from harness.validate.report import AIMS, LINKS, aggregates, compared, figures, markdown, verdict

ROOT = Path(harness.__file__).resolve().parents[1]
SOURCES = ("harness", "kernels", "strategies", "conf")  # what a run's numbers depend on
QUIET = ("verify=off", "wandb.mode=disabled", "progress=false")
EMULATED = ("machine=emulated", "hardware=laptop")
SIMULATED = ("machine=simulated", "hardware=local")
MAX_RUNS, MAX_SLOWED_SHARE = 3, 0.4  # of a run that is kept without another one; up to then rates agreed to 0.5 %
LINK_RATES = tuple(f"hardware.{link}_gb_s=" for link in ("h2d", "d2h", "pin"))  # what a table does not depend on


@dataclass(frozen=True)
class Setting:
    strategy: str
    overrides: tuple[str, ...]

    @property
    def name(self) -> str:
        return " ".join((self.strategy, *self.overrides))

    @property
    def workload(self) -> tuple[str, ...]:
        """The overrides on which the routing of tokens depends."""
        return tuple(each for each in self.overrides if each.startswith(("model=", "dataset", "seed=")))

    def given(self, trace: Path) -> list[str]:
        """Return the overrides with the strategy's name, and the recorded routing where they say {recorded}."""
        return [f"strategy={self.strategy}", *(each.replace("{recorded}", f"'{trace}'") for each in self.overrides)]

    @property
    def calibrated(self) -> tuple[str, ...]:
        """The overrides on which measured costs depend: the model and the hardware, but not its links."""
        of_both = (each for each in self.overrides if each.startswith(("model=", "hardware.")))
        return tuple(each for each in of_both if not each.startswith(LINK_RATES))


def settings_of(root: Path = ROOT) -> list[Setting]:
    """Return every strategy's own settings; `base` goes in front of each. A package of several strategies names one in
    each setting, first of all."""
    found = []
    for path in sorted((root / "strategies").glob("*/validation.yaml")):
        values = yaml.safe_load(path.read_text())
        base = values.get("base", [])
        for overrides in values["settings"]:
            named = [each for each in overrides[:1] if each.startswith("strategy=")]
            strategy = named[0].removeprefix("strategy=") if named else path.parent.name
            found.append(Setting(strategy, (*base, *overrides[len(named) :])))
    return found


def emulated(setting: Setting, trace: Path, cores: Watch) -> dict[str, Any]:
    """Return figures of one run, or of the least disturbed one of several. `taken_share` is what others had of the
    cores, `slowed_share` for how much of the run they slowed them."""
    found: dict[str, Any] | None = None
    for _ in range(MAX_RUNS):
        before = cores.read()
        run = _emulated_once(setting, trace) | {"slowed_share": cores.read().slowed_share_since(before)}
        found = min(found or run, run, key=disturbance)
        if disturbance(found) <= 1:
            break
    assert found is not None
    return found


def disturbance(run: Mapping[str, float]) -> float:
    """Return by how much a run was disturbed; above 1 is too much."""
    return max(run["taken_share"] / MAX_TAKEN_SHARE, run["slowed_share"] / MAX_SLOWED_SHARE)


def _emulated_once(setting: Setting, trace: Path) -> dict[str, Any]:
    with TemporaryDirectory() as folder:
        values = composed_values([*EMULATED, *QUIET, *setting.given(trace), f"results_dir={folder}"])
        summary, _ = run_experiment(values)
    return figures(summary) | {"taken_share": summary["others_core_share"] or 0.0}


def in_simulation(setting: Setting, runs: Sequence[Mapping[str, Any]], trace: Path) -> dict[str, Any]:
    """Simulate the setting with its recorded routing and compare it with its emulated runs."""
    routing = ("routing=trace", f"routing.path='{trace}'")
    plan = make_plan(composed_values([*SIMULATED, *routing, *setting.given(trace)]))
    assert plan.summary is not None
    link_bytes_s = {link: getattr(plan.settings.hardware, f"{link}_gb_s") * 1e9 for link in LINKS}
    found = figures(plan.summary)
    return compared(setting.name, runs, found, strategy=setting.strategy, link_bytes_s=link_bytes_s)


def made(header: Mapping[str, Any]) -> str:
    """Say when, by which code and where a report was made."""
    where = header["environment"]
    return (
        f"Made on {header['date']} with code {header['code']} on {where['num_cores']} cores of {where['processor']} by "
        f"`{header['command']}`."
    )


class Report:
    """The report, `validation.json` and `validation.md`, is rewritten after every run. Raises ConfigError where
    `resume` would mix the runs of different code."""

    def __init__(self, folder: Path, header: Mapping[str, Any], *, resume: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._header = folder, header
        self.runs: dict[str, list[dict[str, Any]]] = {}
        self.slowed_shares: dict[str, float] = {}  # of the time of each calibration
        path = folder / "validation.json"
        if resume and path.exists():
            earlier = json.loads(path.read_text())
            if earlier.get("sources") != header["sources"]:
                raise ConfigError("--resume", f"the runs in {path} are of other code; start anew without it")
            self.runs, self.slowed_shares = earlier["runs"], earlier["slowed_shares"]

    def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        seen = {"slowed_shares": self.slowed_shares, "rows": rows, "runs": self.runs}
        content = {**self._header, "aims": AIMS, "aggregates": aggregates(rows), **seen}
        (self._folder / "validation.json").write_text(json.dumps(content, indent=1) + "\n")
        if rows:
            (self._folder / "validation.md").write_text(markdown(rows, made(self._header), self.slowed_shares))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = CommandParser("harness.validate", __doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "results/reference/validation", metavar="FOLDER")
    parser.add_argument("--repeats", type=whole_number(1), default=3, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--limit", type=whole_number(1), metavar="N", help="only the first so many settings")
    parser.add_argument(
        "--only",
        nargs="+",
        default=[""],
        metavar="TEXT",
        help="only settings that contain one of these, such as model=",
    )
    parser.add_argument("--resume", action="store_true", help="keep the runs that --out has, if the code is the same")
    given = sys.argv[1:] if arguments is None else arguments
    return parser.run(partial(_validate, shown_command("-m harness.validate", given)), given)


def _validate(command: str, args: Namespace) -> int:
    header = {
        "date": date.today().isoformat(),
        "code": code_version(),
        "sources": fingerprint(SOURCES),
        "environment": environment(),
        "command": command,
        "labels": "emulated runs, simulated with a table calibrated on the same computer",
    }
    report = Report(args.out, header, resume=args.resume)
    everything = [each for each in settings_of() if any(text in each.name for text in args.only)][: args.limit]
    if not everything:
        told = ", ".join(map(repr, args.only))
        raise ConfigError("--only", f"must be part of a setting in strategies/*/validation.yaml, got {told}")
    traces = record_all(everything, args.out / "routing", keep=args.resume)
    with Awake(), Watch() as cores:
        measure_all(everything, report, args.out, traces, cores, repeats=args.repeats, resume=args.resume)
    rows: list[dict[str, Any]] = []
    for setting in everything:
        rows.append(in_simulation(setting, report.runs[setting.name], traces[setting.workload]))
        report.write(rows)
    print((args.out / "validation.md").read_text())
    met, text = verdict(rows)
    print(text)
    return 0 if met else 1


def record_all(everything: Sequence[Setting], folder: Path, *, keep: bool) -> dict[tuple[str, ...], Path]:
    """Record the routing of every workload, unless it is kept, and return the traces' paths."""
    folder.mkdir(parents=True, exist_ok=True)
    workloads = dict.fromkeys(setting.workload for setting in everything)
    traces = {each: folder / f"{_file_name(each)}.jsonl.gz" for each in workloads}
    for workload, path in traces.items():
        if not (keep and path.exists()):
            record_routing(workload, path)
    return traces


def _file_name(workload: Sequence[str]) -> str:
    return re.sub(r"[^\w.-]+", "-", "-".join(workload).replace("dataset.", ""))


def measure_all(
    everything: Sequence[Setting],
    report: Report,
    out: Path,
    traces: Mapping[tuple[str, ...], Path],
    cores: Watch,
    *,
    repeats: int,
    resume: bool,
) -> None:
    """Run the missing calibrations, and behind each the missing emulated runs of its settings. Then make one table of
    all calibrations of a model and hardware."""
    console = Console(stderr=True)
    needed = dict.fromkeys(setting.calibrated for setting in everything)
    tables = {overrides: [table_of(out, overrides, repeat) for repeat in range(repeats)] for overrides in needed}
    for repeat, (overrides, paths) in product(range(repeats), tables.items()):
        before = cores.read()
        if calibrate(paths[repeat], overrides, console, keep=resume):
            report.slowed_shares[paths[repeat].name] = cores.read().slowed_share_since(before)
        for number, setting in enumerate(everything):
            runs = report.runs.setdefault(setting.name, [])
            if setting.calibrated != overrides or len(runs) > repeat:
                continue
            run = emulated(setting, traces[setting.workload], cores)
            runs.append(run)
            rate = f"{run['throughput_tok_s']:.1f} tok/s"
            if disturbance(run) > 1:
                slowed = f"slowed them for {run['slowed_share']:.0%} of the time"
                rate += f", DISTURBED: others had {run['taken_share']:.0%} of the cores and {slowed}"
            console.print(f"{repeat + 1}.{number + 1} {setting.name}: {rate}", highlight=False, soft_wrap=True)
            report.write([])
    for overrides, paths in tables.items():
        merge_calibrations(paths, overrides)


def table_of(out: Path, overrides: Sequence[str], repeat: int) -> Path:
    """Return where a repeat's calibration of a model and hardware is kept."""
    name = "".join(f"-{_file_name([each.removeprefix('model=').removeprefix('hardware.')])}" for each in overrides)
    return out / f"calibration{name}-{repeat + 1}.json"


def calibrate(path: Path, overrides: Sequence[str], console: Console, *, keep: bool) -> bool:
    """Measure the ops of a model and hardware into a table of their own; return whether it was not there."""
    if keep and path.exists():
        return False
    settings = parse_settings(composed_values([*EMULATED, *overrides]))
    measure(settings, lambda text: console.print(text, style="dim", highlight=False)).write(path)
    return True


def merge_calibrations(paths: Sequence[Path], overrides: Sequence[str]) -> None:
    """Merge the tables of a model and hardware to one, where the simulator looks for it."""
    settings = parse_settings(composed_values([*SIMULATED, *overrides]))
    cached = table_path(settings, planned_model(settings.model).spec)
    CalibrationTable.merged([CalibrationTable.read(path) for path in paths]).write(cached)


if __name__ == "__main__":
    sys.exit(exit_code(main))
