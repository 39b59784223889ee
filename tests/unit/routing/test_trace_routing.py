"""A trace gives back what was recorded, repeats itself beyond, and refuses other models."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.config import ConfigError
from harness.machine.virtual.world import World
from harness.routing.build import build_routing
from harness.routing.kinds.trace import TraceRouting, read_trace
from harness.routing.trace_file import PredictionHeader, TraceFileError, TraceHeader, TraceRow
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
        (Model(4, 16, 2, num_dense_layers=1), "'experts' must be 16 for this model, got 8 (recorded from tested)"),
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


def marked(folder: Path, lengths: dict[int, int], num_layers: int, distance: int | None = None) -> Path:
    """A trace of experts 0 to 2^15 - 1 where each choice tells its request, position and layer: see `mark`."""
    num_experts = 2**15 - 1
    predictions = PredictionHeader(distance=distance, experts=1, source="a guess") if distance else None
    head = TraceHeader(
        model="tested", layers=num_layers, experts=num_experts, k=1, source="a test", predictions=predictions
    )
    rows = []
    for request, length in lengths.items():
        experts = np.array([[[mark(request, at, layer)] for layer in range(num_layers)] for at in range(length)])
        predicted = experts[:, distance:] if distance else None
        confidence = None if predicted is None else np.ones(predicted.shape)
        rows.append(TraceRow(request, 0, experts, predicted, confidence))
    return write(folder / "t.jsonl.gz", head, *rows)


def mark(request: int, position: int, layer: int) -> int:
    return (request * 32 + position) * 32 + layer


def unmarked(expert: int) -> tuple[int, int, int]:
    return expert // 1024, expert // 32 % 32, expert % 32


@steady
@given(
    lengths=st.dictionaries(st.integers(0, 20), st.integers(1, 30), min_size=1, max_size=5),
    num_recorded=st.integers(1, 6),
    num_layers=st.integers(1, 30),
    num_dense=st.integers(0, 2),
    distance=st.integers(0, 5),
    tokens=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 40)), min_size=1, max_size=5),
)
def test_a_model_of_any_depth_takes_blocks_of_the_recorded_layers(
    tmp_path_factory, lengths, num_recorded, num_layers, num_dense, distance, tokens
):
    distance = min(distance, num_recorded - 1)
    path = marked(tmp_path_factory.mktemp("t"), lengths, num_recorded, distance)
    model = Model(num_dense + num_layers, 2**15 - 1, 1, num_dense_layers=num_dense)
    num_blocks = -(-num_layers // num_recorded)
    values = {"name": "trace", "path": str(path)}
    if -(-num_blocks // len(lengths)) > min(lengths.values()):
        with pytest.raises(ConfigError, match=f"for {num_layers} layers in blocks of its {num_recorded}: "):
            build_routing(values, model, 0)
        return
    routing = build_routing(values, model, 0)
    columns = tuple(np.array(tokens).T)
    found = [routing.experts(*columns, layer)[:, 0].tolist() for layer in model.moe_layers]
    for token, (request, position) in enumerate(tokens):
        by_layer = [unmarked(experts[token]) for experts in found]
        sources = [(r, p) for r, p, _ in by_layer]
        assert [layer for _, _, layer in by_layer] == [index % num_recorded for index in range(num_layers)]
        blocks = [set(sources[at : at + num_recorded]) for at in range(0, num_layers, num_recorded)]
        assert all(len(block) == 1 for block in blocks), "a block has the layers of one token"
        assert len(set.union(*blocks)) == num_blocks, "no two blocks have those of the same one"
        if num_blocks <= len(lengths):
            assert len({r for r, _ in sources}) == num_blocks, "and not of the same request while there are others"
        if request in lengths and position < lengths[request]:
            assert sources[0] == (request, position)
    for index, layer in enumerate(model.moe_layers):
        if not distance:
            continue
        assert routing.predictions is not None
        predicted, _ = routing.predictions.experts(*columns, layer, distance)
        expected = [[expert] if index % num_recorded >= distance else [] for expert in found[index]]
        assert predicted.tolist() == expected, "what was predicted of the same token, in none across blocks"


def test_successive_tokens_of_a_block_are_those_of_one_recorded_request(tmp_path):
    path = marked(tmp_path, {0: 9, 1: 9, 2: 9}, 2)
    routing = build_routing({"name": "trace", "path": str(path)}, Model(6, 2**15 - 1, 1), 0)
    for layer, request in enumerate([1, 1, 2, 2, 0, 0]):
        found = routing.experts(np.ones(9, dtype=np.int64), np.arange(9), layer)[:, 0].tolist()
        assert [unmarked(expert) for expert in found] == [(request, at, layer % 2) for at in range(9)]


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (Model(4, 8, 2, num_dense_layers=1), ""),
        (Model(2, 8, 2, num_dense_layers=1), "; the first 1 of its 3 layers"),
        (Model(9, 8, 2, num_dense_layers=1), "; its 3 layers stand for 8, in 3 blocks of different requests"),
        (Model(3, 8, 2, num_dense_layers=0), "; its layer 1 stands for layer 0"),
    ],
)
def test_the_label_says_how_layers_were_mapped(tmp_path, other, told):
    rng = np.random.default_rng(0)
    rows = [TraceRow(request, 0, random_experts(rng, MODEL, 1)) for request in range(3)]
    path = write(tmp_path / "t.jsonl", header(MODEL), *rows)
    routing = build_routing({"name": "trace", "path": str(path)}, other, 0)
    assert routing.source == (
        "recorded: t.jsonl (a test; model tested), 3 requests; requests and positions beyond them repeat it" + told
    )
    assert World(routing, 8).source == routing.source


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
