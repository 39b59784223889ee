"""Tell what recorded routing is like: `python -m harness.study --out FILE mathematics=RUN_FOLDER plays=RUN_FOLDER ...`.

Each DOMAIN=PATH names a kind of text and what was recorded with it: a run folder (record_routing=true) or a trace.
Every second request is learned from, the others test. Numbers go to FILE.json and tables to FILE.md: popularity of
experts and its drift, correlation of tokens and of layers, how well the next layer's experts are predicted, hit rates
of caches, and settings of synthetic routing that come near. With --checkpoint, and runs that recorded gating inputs
too (record_hidden=true), the next layer's router is among the predictors.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from datetime import date
from functools import partial
from pathlib import Path

from harness.cli.arguments import CommandParser, whole_number
from harness.interrupts import exit_code
from harness.record.files import RecordError, plain
from harness.record.provenance import code_version, environment, shown_command
from harness.routing.trace_file import TraceFileError
from harness.study.inputs import domains_of, judged
from harness.study.tables import markdown, write_rounded
from harness.study.whole import studied

MOST_PASSES = 2000


def main(arguments: Sequence[str] | None = None) -> int:
    parser = CommandParser("harness.study", __doc__)
    parser.add_argument("domains", nargs="+", metavar="DOMAIN=PATH", help="a kind of text, and a run folder or trace")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="FILE.json and FILE.md are written")
    parser.add_argument("--checkpoint", type=Path, metavar="FOLDER", help="whose routers are predictors too")
    parser.add_argument("--title", metavar="TEXT", help="of the page; default: the model's name")
    parser.add_argument(
        "--passes", type=whole_number(1), default=MOST_PASSES, metavar="N",
        help="of one request, which caches replay at the most (default: %(default)s)",
    )  # fmt: skip
    words = sys.argv[1:] if arguments is None else arguments
    return parser.run(partial(_study, words), arguments, TraceFileError, RecordError)


def _study(words: Sequence[str], given: Namespace) -> int:
    domains = domains_of(given.domains)
    gates = judged(domains, given.checkpoint)
    made = {
        "label": "recorded",
        "title": given.title or next(iter(domains.values())).header.model,
        "date": date.today().isoformat(),
        "code": code_version(),
        "command": shown_command("-m harness.study", map(_without_folder, words)),
        "environment": environment(),
    }
    found = studied(domains, gates, most_passes=given.passes, log=lambda text: print(text, file=sys.stderr))
    numbers = write_rounded(given.out.with_suffix(".json"), plain({**made, **found}))
    page = markdown(numbers)
    given.out.with_suffix(".md").write_text(page, encoding="utf-8")
    print(page)
    return 0


def _without_folder(word: str) -> str:
    """Return a word of the command line without a folder of the machine that it ran on."""
    name, given, path = word.partition("=")
    return f"{name}=FOLDER" if given and Path(path).is_absolute() else word


if __name__ == "__main__":
    sys.exit(exit_code(main))
