"""Make a small trace of recorded runs: `python -m harness.study.excerpt --out FILE mathematics=RUN_FOLDER ...`.

Takes whole requests of each DOMAIN=PATH in turn, numbers them anew from 0, and writes them in the format of
docs/routing.md, compressed where FILE ends in ".gz". With --checkpoint, and runs that recorded every token's gating
input (record_hidden=true), the trace has what the next layer's router predicts from this layer's input.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from harness.cli.arguments import CommandParser, whole_number
from harness.config import ConfigError
from harness.interrupts import exit_code
from harness.record.files import RecordError
from harness.routing.trace_file import PredictionHeader, TraceFileError, TraceRow, TraceWriter
from harness.study.gates import EXTRA, Gates
from harness.study.inputs import domains_of, judged
from harness.study.recorded import Domain, Text

CONFIDENCE_DIGITS = 2
Item = TypeVar("Item")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = CommandParser("harness.study.excerpt", __doc__)
    parser.add_argument("domains", nargs="+", metavar="DOMAIN=PATH", help="a kind of text, and a run folder or trace")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the trace to write; must not exist")
    parser.add_argument(
        "--tokens", type=whole_number(1), default=1000, metavar="N", help="of a domain at most (default: %(default)s)"
    )
    parser.add_argument("--checkpoint", type=Path, metavar="FOLDER", help="whose routers are to predict")
    parser.add_argument(
        "--predicted", type=whole_number(1), metavar="N", help="experts to predict; default: as many as a token has"
    )
    return parser.run(_write, arguments, TraceFileError, RecordError)


def _write(given: Namespace) -> int:
    domains = domains_of(given.domains)
    header = next(iter(domains.values())).header
    gates = judged(domains, given.checkpoint)
    count = given.predicted or header.k
    if count > header.k + EXTRA:
        raise ConfigError("--predicted", f"must be at most k + {EXTRA} = {header.k + EXTRA}, got {count}")
    parts = [
        list(trace_rows(domain, domain.text.first(given.tokens), gates.get(name), count))
        for name, domain in domains.items()
    ]
    rows = _in_turn(parts)
    source = "; ".join(f"{name}: {domain.header.source}" for name, domain in domains.items())
    told = ", ".join(f"{len(part)} {name}" for name, part in zip(domains, parts, strict=True))
    predictions = None
    if gates:
        predictions = PredictionHeader(
            distance=1, experts=count, source="the next layer's router on this layer's gating input"
        )
    header = replace(header, source=f"{source}; requests by turns: {told}", weights=False, predictions=predictions)
    writer = TraceWriter(given.out, header)
    try:
        for number, row in enumerate(rows):
            writer.write(replace(row, request=number))
    finally:
        writer.close()
    tokens = sum(len(row.experts) for row in rows)
    print(f"{given.out}: {len(rows)} requests, {tokens} tokens, {given.out.stat().st_size:,} bytes")
    return 0


def _in_turn(lists: Sequence[Sequence[Item]]) -> list[Item]:
    """Return the first of each list, then the second of each, and so on."""
    return [item for item in chain.from_iterable(zip_longest(*lists)) if item is not None]


def trace_rows(domain: Domain, text: Text, gates: Gates | None, count: int) -> Iterator[TraceRow]:
    """Yield the requests of some text of a domain, all numbered 0, with the `count` experts that gates predict for each
    token. Raises ConfigError where gating inputs of some tokens are missing."""
    ids: Any = None
    chances: Any = None
    if gates is not None:
        part, places = gates.of(text.numbers)
        if len(places) != text.num_tokens:
            told = f"has gating inputs of {len(places)} of {text.num_tokens} tokens; predictions need those of all"
            raise ConfigError(domain.name, f"{domain.path}: {told}")
        ids = part.ahead[:, :, :count]
        likely = np.take_along_axis(part.chances, ids.astype(np.int64), axis=2)
        chances = likely.astype(np.float64).round(CONFIDENCE_DIGITS)  # as text, 32 bits have more digits
    for start, end in zip(text.starts[:-1], text.starts[1:], strict=True):
        rows = slice(start, end)
        row = TraceRow(0, 0, text.experts[rows])
        yield row if ids is None else replace(row, predicted=ids[rows], confidence=chances[rows])


if __name__ == "__main__":
    sys.exit(exit_code(main))
