"""Compare strategies on this machine, at several link rates, with what models and simulator say of each.

    python benchmarks/strategies_report.py                                   # every strategy, three link rates
    python benchmarks/strategies_report.py --strategies ondemand,moelens --links 0.5 --repeats 1
    python benchmarks/strategies_report.py --out results/reference/strategies-emulated -- dataset=mtbench_lightning

Runs are ordinary ones (tokens verified, W&B disabled), interleaved: every strategy at a link rate, then the next rate,
and all of it again for each repeat; medians count. The link has its rate in both directions. Each strategy takes its
own policy; those with batch and micro-batch sizes run a second time with the ones that `moelightning` has at that rate.
What follows `--` is given to every run. `emulated` numbers are of real runs in which a core plays the GPU, and links
and the cpu lane are held to stated rates. `predicted` is what the strategy's model says, `simulated` the simulator with
the costs measured on this computer, under the policy that the emulated run had planned: what a policy is worth is asked
of both, not which one each of them prefers. A run that fails is a row that says why.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.support.runs import Row, report, run  # noqa: E402
from harness.cli.arguments import CommandParser, whole_number  # noqa: E402
from harness.cli.overrides import composed_values  # noqa: E402
from harness.config import ConfigError  # noqa: E402
from harness.plan.__main__ import make_plan  # noqa: E402
from harness.plan.planning import DoesNotFit  # noqa: E402
from harness.record.files import read_json  # noqa: E402
from harness.record.summary import accuracy  # noqa: E402

LINKS_GB_S = (0.3, 0.5, 1.0)
GIVES_POLICY = "moelightning"
GIVEN = ("batch_size", "micro_batch_size", "gpu_ffn", "resident_weights", "resident_kv")  # attention is the schedule's


Run = tuple[dict[str, Any], Path]  # summary and folder


def available() -> list[str]:
    return sorted(path.stem for path in (ROOT / "conf" / "strategy").glob("*.yaml") if not path.stem.startswith("_"))


@dataclass(frozen=True)
class Variant:
    """A row: a strategy with its own settings, or with the policy of another."""

    strategy: str
    link_gb_s: float
    policy: str = "own"
    settings: tuple[str, ...] = ()

    def overrides(self, common: Sequence[str]) -> list[str]:
        rates = [f"hardware.{lane}_gb_s={self.link_gb_s}" for lane in ("h2d", "d2h")]
        return [f"strategy={self.strategy}", *common, *rates, *self.settings]


def decided(variant: Variant, plan: Mapping[str, Any]) -> list[str]:
    """Return overrides for what the variant's settings leave to its planner, as the plan of a run has it."""
    strategy = composed_values(variant.overrides(()))["strategy"]
    policy = strategy.get("policy", {})
    return [f"strategy.{name}={plan[name]}" for name, value in strategy.items() if value is None and name in plan] + [
        f"strategy.policy.{name}={plan[name]}" for name, value in policy.items() if value is None and name in plan
    ]


def takes_policy(name: str) -> bool:
    policy = composed_values([f"strategy={name}"])["strategy"].get("policy", {})
    return set(GIVEN) <= set(policy)


def with_policy_of(folder: Path, strategies: Sequence[str], link_gb_s: float) -> list[Variant]:
    """Return the strategies that take a policy, each with the policy that the run of `GIVES_POLICY` in `folder` has
    planned."""
    plan = read_json(folder / "plan.json")["plan"]
    given = tuple(f"strategy.policy.{name}={plan[name]}" for name in GIVEN)
    takers = (name for name in strategies if name != GIVES_POLICY and takes_policy(name))
    return [Variant(name, link_gb_s, GIVES_POLICY, given) for name in takers]


def rows(
    strategies: Sequence[str], links_gb_s: Sequence[float], repeats: int, common: Sequence[str], results_dir: Path
) -> Iterator[Row]:
    """Yield rows by link rate, with each strategy's own policy first."""
    planned = {link: [Variant(name, link) for name in strategies] for link in links_gb_s}
    found: dict[Variant, list[Run]] = {}
    refused: dict[Variant, str] = {}
    for repeat in range(repeats):
        for link_gb_s, variants in planned.items():
            for variant in variants:  # grows while it is read
                try:
                    summary, folder = run(variant.overrides(common), results_dir, verify=True)
                except Exception as error:
                    refused[variant] = str(error).splitlines()[0]
                    print(f"{variant}: {refused[variant]}", flush=True)
                    continue
                print(f"{variant}: {summary['throughput_tok_s']:.4g} tok/s, {folder}", flush=True)
                found.setdefault(variant, []).append((summary, folder))
                if not repeat and variant.strategy == GIVES_POLICY:
                    variants += with_policy_of(folder, strategies, link_gb_s)
    for variants in planned.values():
        floor_tok_s = median(map(_tok_s, found[variants[0]])) if variants[0] in found else None
        for variant in variants:
            if variant in refused:
                yield {**_names(variant), "why_not": refused[variant]}
            else:
                yield _row(variant, found[variant], floor_tok_s, strategies[0], common)


def simulated_tok_s(variant: Variant, common: Sequence[str], folder: Path) -> float | None:
    """Simulate under the policy of the run in `folder`. Returns None, and prints why, where the calibration or the plan
    does not fit."""
    planned = decided(variant, read_json(folder / "plan.json")["plan"])
    values = composed_values(["machine=simulated", *variant.overrides(common), *planned, "hardware=local"])
    try:
        summary = make_plan(values, log=lambda text: None).summary
    except (ConfigError, DoesNotFit) as error:
        print(f"{variant}: not simulated: {error}", flush=True)
        return None
    assert summary is not None, "a simulation was asked for"
    return float(summary["throughput_tok_s"])


def _names(variant: Variant) -> Row:
    return {"strategy": variant.strategy, "policy": variant.policy, "link_gb_s": variant.link_gb_s}


def _tok_s(of: Run) -> float:
    return float(of[0]["throughput_tok_s"])


def _row(variant: Variant, runs: list[Run], floor_tok_s: float | None, first: str, common: Sequence[str]) -> Row:
    rates = sorted(map(_tok_s, runs))
    emulated = median(rates)
    middle, folder = min(runs, key=lambda of: abs(_tok_s(of) - emulated))
    simulated = simulated_tok_s(variant, common, folder)
    predicted, busy = middle["predicted_throughput_tok_s"], middle["utilization"]
    busiest = max(busy, key=lambda lane: busy[lane])
    return {
        **_names(variant),
        "emulated_tok_s": emulated,
        f"ratio_to_{first}": emulated / floor_tok_s if floor_tok_s else None,
        "spread": (rates[-1] - rates[0]) / emulated,
        "passes": middle["num_passes"],
        "busiest_lane": busiest,
        "busiest_share": busy[busiest],
        "gpu_busy": busy["gpu"],
        "cpu_busy": busy["cpu"],
        "h2d_busy": busy["h2d"],
        "predicted_tok_s": predicted,
        "accuracy_against_emulated": None if predicted is None else accuracy(predicted, emulated),
        "simulated_tok_s": simulated,
        "simulated_error": None if simulated is None else simulated / emulated - 1,
        "gpu_lane_without_core": middle["stolen_core_share"],
        "host_steal": middle["host_steal_share"],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else list(arguments)
    parser = CommandParser("benchmarks/strategies_report.py", __doc__)
    parser.add_overrides()
    parser.add_argument("--strategies", default=None, help="comma-separated; ratios are to the first (default: all)")
    parser.add_argument("--links", default=",".join(map(str, LINKS_GB_S)), help="GB/s, comma-separated")
    parser.add_argument("--repeats", type=whole_number(1), default=3)
    parser.add_argument("--out", type=Path, default=None, help="folder for strategies.json and strategies.md")
    parser.add_argument("--results-dir", type=Path, default=ROOT / "results", help="where run folders go")
    return parser.run(partial(compare, given=given), given)


def compare(args: Namespace, given: list[str]) -> int:
    strategies = args.strategies.split(",") if args.strategies else sorted(available(), key=lambda n: n != "ondemand")
    links = [float(link) for link in args.links.split(",")]
    made = rows(strategies, links, args.repeats, args.overrides, args.results_dir)
    report("strategies", made, args.out, script="benchmarks/strategies_report.py", arguments=given, label="emulated")
    return 0


if __name__ == "__main__":
    sys.exit(main())
