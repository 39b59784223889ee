"""A trace gives back what was recorded, repeats itself beyond, and refuses other models."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.config import ConfigError
from harness.routing.build import build_routing
from harness.routing.kinds.trace import TraceRouting, read_trace
from harness.routing.trace_file import PredictionHeader, TraceFileError, TraceRow
from tests.unit.routing.models import Model, header, random_experts, steady, write

MODEL = Model(num_layers=4, num_experts=8, experts_per_token=2, num_dense_layers=1)
LAYERS = list(MODEL.moe_layers)


@steady
@given(
    requests=st.dictionaries(
        st.integers(0, 12), st.tuples(st.integers(0, 50), st.lists(st.integers(1, 3), min_size=1, max_size=4)),
        min_size=1, max_size=5,
    ),
    data=st.data(),
)  # fmt: skip
def test_every_token_is_found(tmp_path_factory, requests, data):
    rng = np.random.default_rng(1)
    rows, recorded = [], {}
    for request, (first, lengths) in requests.items():
        whole = random_experts(rng, MODEL, sum(lengths))
        recorded[request] = (first, whole)
        at = 0
        for length in lengths:
            rows.append(TraceRow(request, first + at, whole[at : at + length]))
            at += length
    path = write(tmp_path_factory.mktemp("t") / "t.jsonl", header(MODEL), *data.draw(st.permutations(rows)))
    routing = build_routing({"name": "trace", "path": str(path)}, MODEL, seed=0)
    assert isinstance(routing, TraceRouting)

    tokens = data.draw(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 70)), min_size=1, max_size=20))
    tokens += [(request, first) for request, (first, _) in recorded.items()]
    columns = tuple(np.array(tokens).T)
    chosen = [routing.experts(*columns, layer) for layer in LAYERS]
    repeats = routing.repeats(*columns)
    ids = sorted(recorded)
    for row, (request, position) in enumerate(tokens):
        first, whole = recorded[request if request in recorded else ids[request % len(ids)]]
        inside = 0 <= position - first < len(whole)
        expected = whole[(position - first) % len(whole)]
        assert [layer[row].tolist() for layer in chosen] == expected.tolist()
        assert repeats[row] == (request not in recorded or not inside)


@pytest.mark.parametrize("distance", [1, 2])
def test_predictions_belong_to_the_layer_they_are_for(tmp_path, distance):
    rng = np.random.default_rng(2)
    head = header(MODEL, predictions=PredictionHeader(distance=distance, experts=4, source="a guess"))
    predicted = rng.random((5, 3 - distance, 8)).argsort(axis=-1)[..., :4].astype(np.int16)
    confidence = rng.random((5, 3 - distance, 4)).astype(np.float32)
    row = TraceRow(0, 0, random_experts(rng, MODEL, 5), predicted, confidence)
    routing = build_routing({"name": "trace", "path": str(write(tmp_path / "t.jsonl", head, row))}, MODEL, 0)
    assert isinstance(routing, TraceRouting) and routing.predictions is not None
    assert routing.predictions.source == "recorded: a guess"
    positions = np.array([4, 0, 6])
    for column, layer in enumerate(LAYERS[distance:]):
        for ahead in range(1, distance + 1):  # what was said earlier is still known
            ids, probability = routing.predictions.experts(np.array([0, 0, 1]), positions, layer, ahead)
            assert ids.tolist() == predicted[positions % 5, column].tolist()
            assert probability == pytest.approx(confidence[positions % 5, column])
    for layer, ahead in [*((layer, 1) for layer in LAYERS[:distance]), (LAYERS[-1], distance + 1)]:
        ids, probability = routing.predictions.experts(np.array([0, 0, 1]), positions, layer, ahead)
        assert ids.shape == probability.shape == (3, 0)


def test_a_trace_without_predictions_says_so(tmp_path):
    row = TraceRow(0, 0, random_experts(np.random.default_rng(0), MODEL, 1))
    routing = build_routing({"name": "trace", "path": str(write(tmp_path / "t.jsonl", header(MODEL), row))}, MODEL, 0)
    assert isinstance(routing, TraceRouting)
    assert routing.predictions is None


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (Model(4, 8, 2, num_dense_layers=0), "'first_layer' must be 0 for this model, got 1 (recorded from tested)"),
        (Model(5, 8, 2, num_dense_layers=1), "'layers' must be 4 for this model, got 3"),
        (Model(4, 16, 2, num_dense_layers=1), "'experts' must be 16 for this model, got 8"),
        (Model(4, 8, 3, num_dense_layers=1), "'k' must be 3 for this model, got 2"),
    ],
)
def test_a_trace_of_another_model_is_refused(tmp_path, other, told):
    path = write(
        tmp_path / "t.jsonl", header(MODEL), TraceRow(0, 0, random_experts(np.random.default_rng(0), MODEL, 1))
    )
    with pytest.raises(ConfigError) as caught:
        build_routing({"name": "trace", "path": str(path)}, other, 0)
    assert caught.value.field == "routing.path"
    assert f"{path}, line 1: {told}" in str(caught.value)


@pytest.mark.parametrize(
    ("places", "told"),
    [
        ([], "has a header and no complete row"),
        ([(0, 0, 2), (1, 0, 1), (0, 3, 1)], "line 4: position 3 of request 0 does not follow position 1"),
        ([(0, 2, 2), (0, 0, 3)], "line 2: position 2 of request 0 was recorded already"),
        ([(0, 0, 1), (0, 0, 1)], "line 3: position 0 of request 0 was recorded already"),
    ],
)
def test_rows_must_fit_together(tmp_path, places, told):
    rng = np.random.default_rng(0)
    rows = [TraceRow(request, position, random_experts(rng, MODEL, n)) for request, position, n in places]
    path = write(tmp_path / "t.jsonl", header(MODEL), *rows)
    with pytest.raises(TraceFileError) as caught:
        read_trace(path)
    assert told in str(caught.value)


def test_the_format_is_the_documented_one(tmp_path):
    """The example of docs/routing.md, as text."""
    from tests.conftest import ROOT

    page = (ROOT / "docs" / "routing.md").read_text(encoding="utf-8")
    example = page.split("```jsonl\n")[1].split("```")[0]
    (tmp_path / "example.jsonl").write_text(example)
    head = json.loads(example.splitlines()[0])
    model = Model(head["first_layer"] + head["layers"], head["experts"], head["k"], head["first_layer"])
    routing = build_routing({"name": "trace", "path": str(tmp_path / "example.jsonl")}, model, 0)
    assert isinstance(routing, TraceRouting) and routing.predictions is not None
    rows = [json.loads(line) for line in example.splitlines()[1:]]
    for row in rows:
        for offset, layers in enumerate(row["experts"]):
            at = np.array([row["request"]]), np.array([row["position"] + offset])
            assert [routing.experts(*at, layer)[0].tolist() for layer in model.moe_layers] == layers
