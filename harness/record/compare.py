"""Compare runs: `python -m harness.record.compare FOLDER ...` takes run folders or folders that hold some.

Runs that differ only in their seed are repeats: one row, with the median and the spread. What all rows share is above
the table; every setting in which they differ is in it. Runs that failed or cannot be read are listed below, with the
cause. Exit code 2 also where no run has ended well.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from rich.console import Console

from harness.cli.arguments import USAGE_ERROR, CommandParser
from harness.cli.overrides import CONF
from harness.interrupts import exit_code
from harness.record.comparing.folders import Value, find, leaves
from harness.record.comparing.output import as_csv, as_json, as_markdown, print_left_out, print_table
from harness.record.comparing.rows import compared, in_order, with_ratios
from harness.record.files import RecordError, plain


def main(arguments: Sequence[str] | None = None) -> int:
    parser = CommandParser("harness.record.compare", __doc__)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="results, one run, or several of both")
    parser.add_argument(
        "--baseline", metavar="WHAT",
        help="what ratios are to: settings, such as strategy=NAME or strategy=NAME,kv_cache_gb=0.04, where a row's "
        "baseline agrees with it in all others but the strategy's own; or a run's name or last part (default: row 1)",
    )  # fmt: skip
    parser.add_argument(
        "--sort", metavar="NAME", help="a setting, tok/s or a column of the CSV (default: oldest first)"
    )
    parser.add_argument("--descending", action="store_true", help="sort the largest first")
    parser.add_argument(
        "--format", choices=("table", "csv", "json", "markdown"), default="table", help="(default: %(default)s)"
    )
    return parser.run(_compare, arguments, RecordError)


def _compare(given: Namespace) -> int:
    """Print what was asked for. Where the output has no place for runs that are no row, standard error tells them."""
    found, errors = find(given.folders), Console(stderr=True)
    if not found.finished:
        print("error: no run has ended well in " + ", ".join(map(str, given.folders)), file=sys.stderr)
        print_left_out(found.left_out, errors)
        return USAGE_ERROR
    comparison = with_ratios(compared(found.finished, yaml_defaults), given.baseline)
    if given.sort:
        comparison = in_order(comparison, given.sort, descending=given.descending)
    match given.format:
        case "csv":
            sys.stdout.write(as_csv(comparison))
            print_left_out(found.left_out, errors)
        case "json":
            sys.stdout.write(as_json(comparison, found.left_out))
        case "markdown":
            sys.stdout.write(as_markdown(comparison, found.left_out))
        case _:
            print_table(comparison, Console())
            print_left_out(found.left_out, Console())
    return 0


@cache
def yaml_defaults(group: str, choice: str) -> Mapping[str, Value]:
    """Return what conf/<group>/<choice>.yaml says, and nothing where that file does not exist (any more)."""
    if choice not in {path.stem for path in (CONF / group).glob("*.yaml")}:
        return {}
    with initialize_config_dir(str(CONF), version_base="1.3"):
        values = OmegaConf.to_container(compose("config", overrides=[f"{group}={choice}"])[group], resolve=True)
    return dict(leaves(plain({group: values})))


if __name__ == "__main__":
    sys.exit(exit_code(main))
