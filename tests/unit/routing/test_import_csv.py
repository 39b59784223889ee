"""CSV files of others become traces; what is wrong in them is told with its line."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.routing.build import build_routing
from harness.routing.import_csv import main
from harness.routing.kinds.trace import read_trace
from tests.unit.routing.models import Model, random_experts, steady

MODEL = Model(num_layers=4, num_experts=8, experts_per_token=2, num_dense_layers=1)
ARGUMENTS = ["--num-experts", "8", "--top-k", "2"]


@steady
@given(columns=st.sets(st.sampled_from(["request", "position"])), data=st.data())
def test_any_csv_comes_back_as_routing(tmp_path_factory, columns, data):
    folder = tmp_path_factory.mktemp("csv")
    rng = np.random.default_rng(data.draw(st.integers(0, 9)))
    num_requests = data.draw(st.integers(1, 3)) if "request" in columns else 1
    first = data.draw(st.integers(0, 3)) if "position" in columns else 0
    names = data.draw(st.permutations(["layer", "expert", *sorted(columns)]))
    recorded = {r: random_experts(rng, MODEL, data.draw(st.integers(1, 4))) for r in range(num_requests)}
    tokens = [  # a token's lines in a layer stay in order; without positions so do the tokens of a layer
        {"request": r, "position": first + p, "layer": layer}
        for r, whole in recorded.items() for p in range(len(whole)) for layer in MODEL.moe_layers
    ]  # fmt: skip
    if "position" in columns:
        tokens = data.draw(st.permutations(tokens))
    lines = [",".join(names)]
    for token in tokens:
        for expert in recorded[token["request"]][token["position"] - first, token["layer"] - 1]:
            lines.append(",".join(str({**token, "expert": expert}[name]) for name in names))
    (folder / "in.csv").write_text("\n".join(lines) + "\n")
    assert main([str(folder / "in.csv"), str(folder / "out.jsonl"), *ARGUMENTS, "--model", "tested"]) == 0

    routing = build_routing({"name": "trace", "path": str(folder / "out.jsonl")}, MODEL, 0)
    assert "CSV in.csv; model tested" in routing.source
    for request, whole in recorded.items():
        positions = first + np.arange(len(whole))
        found = [routing.experts(np.full(len(whole), request), positions, layer) for layer in MODEL.moe_layers]
        assert np.stack(found, axis=1).tolist() == whole.tolist()
    assert read_trace(folder / "out.jsonl").first_positions.tolist() == [first] * num_requests


def test_plain_layer_expert_pairs(tmp_path):
    (tmp_path / "in.csv").write_text("layer, expert\n0,3\n0,1\n1,7\n1,0\n\n0,2\n0,5\n1,1\n1,6\n")
    assert main([str(tmp_path / "in.csv"), str(tmp_path / "out.jsonl"), *ARGUMENTS]) == 0
    recorded = read_trace(tmp_path / "out.jsonl")
    assert recorded.experts.tolist() == [[[3, 1], [7, 0]], [[2, 5], [1, 6]]]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "line 1: must name the columns layer and expert"),
        ("layer,token\n", "line 1: must name the columns layer and expert, and may name request and position; got"),
        ("layer,expert,weight\n", "line 1: must name the columns"),
        ("layer,expert,layer\n", "line 1: must name the columns"),
        ("layer,expert\n", "has no line after its column names"),
        ("layer,expert\n0,1\n0\n", "line 3: must have 2 columns, got 1"),
        ("layer,expert\n0,1.5\n", "line 2: 'expert' must be a whole number >= 0, got '1.5'"),
        ("layer,expert\n-1,1\n", "line 2: 'layer' must be a whole number >= 0, got '-1'"),
        ("layer,expert\n0,8\n", "line 2: request 0, layer 0, position 0: 'expert' must lie between 0 and 7, got 8"),
        (
            "layer,expert\n0,1\n0,1\n",
            "line 3: request 0, layer 0, position 0: must have 2 different experts, got [1, 1]",
        ),
        (
            "layer,expert,position\n0,1,4\n0,2,4\n0,3,4\n",
            "line 4: request 0, layer 0, position 4: must have 2 different",
        ),
        ("layer,expert\n0,1\n", "request 0, layer 0, position 0: must have 2 experts like every layer, got [1]"),
        ("layer,expert\n0,1\n0,2\n1,1\n1,2\n0,1\n0,2\n", "layer 1, position 1: must have 2 experts like every layer"),
        ("layer,expert\n0,1\n0,2\n2,1\n2,2\n", "layers must follow one another without a gap, got [0, 2]"),
        ("layer,expert,position\n0,1,0\n0,2,0\n0,1,2\n0,2,2\n", "request 0 has no position 1"),
    ],
)
def test_mistakes_are_told_with_file_and_line(tmp_path, capsys, content, told):
    (tmp_path / "in.csv").write_text(content)
    assert main([str(tmp_path / "in.csv"), str(tmp_path / "out.jsonl"), *ARGUMENTS]) == 2
    error = capsys.readouterr().err
    assert told in error and f"{tmp_path / 'in.csv'}" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out.jsonl").exists()


def test_impossible_calls_are_told(tmp_path, capsys):
    source = tmp_path / "in.csv"
    source.write_text("layer,expert\n0,1\n0,2\n")
    assert main([str(source), str(source), *ARGUMENTS]) == 2
    assert "exists already" in capsys.readouterr().err
    assert main([str(source), str(tmp_path / "o"), "--num-experts", "8", "--top-k", "9"]) == 2
    assert "--top-k: must lie between 1 and --num-experts 8, got 9" in capsys.readouterr().err
    assert main([str(tmp_path / "none.csv"), str(tmp_path / "o"), *ARGUMENTS]) == 2
    assert "none.csv: cannot be read" in capsys.readouterr().err
