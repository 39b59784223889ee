"""The commands: from traces and run folders to numbers, pages and excerpts, and mistakes in one line."""

from __future__ import annotations

import gzip
import json
import re

import numpy as np
import pytest

from harness.routing.kinds.trace import read_trace
from harness.study import excerpt
from harness.study.__main__ import main
from harness.study.recorded import read_domain
from tests.unit.study.texts import random_text, write_trace


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    folder = tmp_path_factory.mktemp("traces")
    for seed, name in enumerate(("plays", "code")):
        write_trace(folder / f"{name}.jsonl.gz", random_text(seed, lengths=(30, 20, 25, 40), num_experts=8))
    write_trace(folder / "other.jsonl", random_text(0, num_experts=4, lengths=(5, 5)))
    write_trace(folder / "one.jsonl", random_text(0, lengths=(9,), num_experts=8))
    return folder


def test_a_study_writes_numbers_and_a_page(traces, tmp_path, capsys):
    words = [f"{name}={traces}/{name}.jsonl.gz" for name in ("plays", "code")]
    assert main(["--out", str(tmp_path / "made"), *words, "--passes", "20"]) == 0
    numbers = json.loads((tmp_path / "made.json").read_text())
    assert numbers["model"] == {"model": "tested", "layers": 3, "first_layer": 0, "experts": 8, "k": 2}
    assert numbers["domains"]["plays"]["tokens"] == 115 and numbers["domains"]["plays"]["test_tokens"] == 60
    assert str(traces) not in json.dumps(numbers), "a report names no folder of the machine"
    page = capsys.readouterr().out
    assert page.strip() == (tmp_path / "made.md").read_text().strip()
    for heading in ("Popularity", "Drift", "Predicting", "Caches", "fitted"):
        assert heading in page


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["plays"], "DOMAIN=PATH: must name a domain and its run folder or trace, got plays"),
        (["a={}/plays.jsonl.gz", "a={}/code.jsonl.gz"], "a: named twice"),
        (["a={}/plays.jsonl.gz", "b={}/other.jsonl"], "b: .*other.jsonl: 'experts' must be 8 as in a, got 4"),
        (["a={}/one.jsonl"], "a: .*one.jsonl: needs 2 requests or more"),
        (["a={}"], "a: .* has no routing.jsonl.gz or routing.jsonl; record it with record_routing=true"),
        (["a={}/nothing.jsonl"], "a: .*nothing.jsonl: cannot be read"),
        (["a={}/plays.jsonl.gz", "--checkpoint", "x"], "--checkpoint: no domain has gating inputs; record them"),
    ],
)
def test_mistakes_are_one_line(words, told, traces, tmp_path, capsys):
    given = [word.format(traces) for word in words]
    for command in (main, excerpt.main):
        assert command(["--out", str(tmp_path / "made.jsonl"), *given]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert re.match(f"error: {told}", line), line
    assert not list(tmp_path.iterdir())


def test_an_excerpt_has_whole_requests_of_each_domain_in_turn(traces, tmp_path, capsys):
    out = tmp_path / "small.jsonl.gz"
    words = [f"{name}={traces}/{name}.jsonl.gz" for name in ("plays", "code")]
    assert excerpt.main(["--out", str(out), "--tokens", "50", *words]) == 0
    found = read_trace(out)
    assert gzip.decompress(out.read_bytes()).startswith(b"{")
    assert np.diff(found.starts).tolist() == [30, 30, 20, 20], "25 more would be beyond 50"
    domains = [read_domain(name, traces / f"{name}.jsonl.gz").text.experts for name in ("plays", "code")]
    for request, (domain, rows) in enumerate([(0, slice(0, 30)), (1, slice(0, 30)), (0, slice(30, 50))]):
        start, end = found.starts[request : request + 2]
        assert np.array_equal(found.experts[start:end], domains[domain][rows])
    assert "requests by turns: 2 plays, 2 code" in found.header.source
    assert excerpt.main(["--out", str(out), *words]) == 2
    assert "exists already" in capsys.readouterr().err
