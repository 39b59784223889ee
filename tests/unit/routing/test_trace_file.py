"""What is written is read, a kill at any byte costs at most one row, and a broken file is answered with the line."""

from __future__ import annotations

import gzip
import json
import zlib
from contextlib import nullcontext, suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.routing.trace_file import PredictionHeader, TraceFileError, TraceRow, TraceWriter, read_header, read_rows
from tests.unit.routing.models import Model, header, random_experts, steady, write

MODEL = Model(num_layers=4, num_experts=8, experts_per_token=2, num_dense_layers=1)
PREDICTIONS = PredictionHeader(distance=2, experts=3, source="a guess")


def random_row(
    rng: np.random.Generator, request: int, position: int, count: int, *, predicts: bool, weighs: bool
) -> TraceRow:
    experts = random_experts(rng, MODEL, count)
    weights = rng.random(experts.shape).round(4).astype(np.float32) if weighs else None
    if not predicts:
        return TraceRow(request, position, experts, weights=weights)
    predicted = rng.random((count, 1, 8)).argsort(axis=-1)[..., :3].astype(np.int16)
    return TraceRow(request, position, experts, predicted, rng.random((count, 1, 3)).astype(np.float32), weights)


def same(one: TraceRow, two: TraceRow) -> bool:
    arrays = [(getattr(one, name), getattr(two, name)) for name in ("experts", "predicted", "confidence", "weights")]
    return (one.request, one.position) == (two.request, two.position) and all(
        (a is None) == (b is None) and (a is None or np.array_equal(a, b)) for a, b in arrays
    )


def texts(packed: bytes) -> bytes:
    """What can be decompressed of gzip members, the last of which may be cut off."""
    found = b""
    while packed:
        member = zlib.decompressobj(31)
        found += member.decompress(packed)
        packed = member.unused_data
    return found


@steady
@given(
    rows=st.lists(st.tuples(st.integers(0, 2**40), st.integers(0, 5000), st.integers(1, 4)), max_size=5),
    predicts=st.booleans(),
    weighs=st.booleans(),
    name=st.sampled_from(["t.jsonl", "t.jsonl.gz"]),
    seed=st.integers(0, 9),
    data=st.data(),
)
def test_what_is_written_is_read_up_to_a_kill_at_any_byte(tmp_path_factory, rows, predicts, weighs, name, seed, data):
    rng = np.random.default_rng(seed)
    written = [random_row(rng, *row, predicts=predicts, weighs=weighs) for row in rows]
    head = header(MODEL, predictions=PREDICTIONS if predicts else None, weights=weighs)
    path = write(tmp_path_factory.mktemp("trace") / name, head, *written)
    assert read_header(path) == head
    read = [row for _, row in read_rows(path)]
    assert len(read) == len(written) and all(map(same, read, written))
    assert all(row.experts.dtype == np.int16 for row in read)

    content = path.read_bytes()
    readable = texts if name.endswith(".gz") else bytes
    cut = data.draw(st.integers(0, len(content)))
    path = path.with_name("t")  # how a trace is read follows from its content
    path.write_bytes(content[:cut])
    complete = readable(content[:cut]).count(b"\n") - 1
    read = []
    with suppress(TraceFileError) if complete < 0 else nullcontext():
        read = [row for _, row in read_rows(path)]
    assert len(read) == max(complete, 0) and all(map(same, read, written))


def test_a_compressed_trace_is_an_ordinary_gzip_file_and_much_smaller(tmp_path):
    rows = [TraceRow(r, 0, random_experts(np.random.default_rng(r), MODEL, 200)) for r in range(3)]
    plain = write(tmp_path / "t.jsonl", header(MODEL), *rows)
    packed = write(tmp_path / "t.jsonl.gz", header(MODEL), *rows)
    assert gzip.decompress(packed.read_bytes()) == plain.read_bytes()
    assert packed.stat().st_size < 0.3 * plain.stat().st_size


def test_damaged_compressed_data_are_told_with_the_place(tmp_path):
    rows = [TraceRow(r, 0, random_experts(np.random.default_rng(r), MODEL, 20)) for r in range(3)]
    path = write(tmp_path / "t.jsonl.gz", header(MODEL), *rows)
    content = path.read_bytes()
    path.write_bytes(content[:-200] + bytes(20) + content[-180:])
    with pytest.raises(TraceFileError, match=r"t\.jsonl\.gz, behind line [123]: its compressed data are damaged"):
        list(read_rows(path))


def test_weights_are_kept_to_four_digits_and_only_they_need_a_newer_reader(tmp_path):
    experts = random_experts(np.random.default_rng(0), MODEL, 1)
    weights = np.full(experts.shape, 0.123456, dtype=np.float32)
    heads = []
    for weighs in (False, True):
        path = write(tmp_path / f"{weighs}", header(MODEL, weights=weighs), TraceRow(0, 0, experts, weights=weights))
        heads.append(json.loads(path.read_text().splitlines()[0]))
        ((_, row),) = read_rows(path)
        assert row.weights is None or np.array_equal(row.weights, np.full(experts.shape, np.float32(0.1235)))
        assert (row.weights is not None) == weighs
    assert [head["version"] for head in heads] == [1, 2]
    assert "weights" not in heads[0]


def test_rows_are_on_disk_before_the_writer_closes(tmp_path):
    writer = TraceWriter(tmp_path / "t.jsonl", header(MODEL))
    writer.write(TraceRow(3, 0, random_experts(np.random.default_rng(0), MODEL, 2)))
    assert [row.request for _, row in read_rows(tmp_path / "t.jsonl")] == [3]
    writer.close()


def test_nothing_is_overwritten(tmp_path):
    path = write(tmp_path / "t.jsonl", header(MODEL))
    with pytest.raises(TraceFileError, match="exists already; name a new file"):
        TraceWriter(path, header(MODEL))


HEADER = {
    "format": "moe-routing", "version": 1, "model": "m", "first_layer": 0, "layers": 3, "experts": 8, "k": 2,
    "source": "s",
}  # fmt: skip
ROW = {"request": 0, "position": 0, "experts": [[[0, 1], [2, 3], [4, 5]]]}
WEIGHS, WEIGHTS = {"version": 2, "weights": True}, [[[0.5, 0.5], [0.7, 0.3], [1, 0]]]
FORESEEN = {"predictions": {"distance": 1, "experts": 1, "source": "p"}}
FORESIGHT = {"predicted": [[[1], [2]]], "confidence": [[[0.5], [1.0]]]}


def lines(*contents) -> str:
    return "".join((c if isinstance(c, str) else json.dumps(c)) + "\n" for c in contents)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "has no complete line"),
        (json.dumps(HEADER), "has no complete line"),
        (lines("layer,expert"), "line 1: must be one JSON object, got 'layer,expert'"),
        (lines({**HEADER, "format": "x"}), 'line 1: the header must have "format": "moe-routing"'),
        (lines({**HEADER, "version": 3}), "and \"version\": 1 or 2, got 'moe-routing' and 3"),
        (lines({**HEADER, "version": True}), "and \"version\": 1 or 2, got 'moe-routing' and True"),
        (lines({**HEADER, "weights": True}), 'line 1: weights: need "version": 2, got 1'),
        (lines(HEADER | WEIGHS, ROW), "must have exactly the keys request, position, experts, weights; got"),
        (lines(HEADER | WEIGHS, {**ROW, "weights": [[[1, 0], [1, 0], [1, -1]]]}), "'weights' must be finite and >= 0"),
        (lines(HEADER | WEIGHS, {**ROW, "weights": [[[1, 0], [1, 0]]]}), "'weights' must be numbers [positions"),
        (lines(HEADER | WEIGHS, {**ROW, "weights": WEIGHTS * 2}), "'weights' must have as many positions"),
        (lines(ROW), "line 1: the header must have"),
        (lines({**HEADER, "expertz": 8}), "line 1: expertz: unknown key"),
        (lines({**HEADER, "layers": "3"}), "line 1: layers: must be a valid integer"),
        (lines({**HEADER, "k": 9}), "line 1: k: must lie between 1 and experts 8, got 9"),
        (lines({**HEADER, "experts": 40000}), "line 1: experts: must lie between 1 and 32767"),
        (lines({**HEADER, "predictions": {"distance": 3, "experts": 1, "source": "p"}}), "distance: must lie between"),
        (lines(HEADER, "{"), "line 2: must be one JSON object, got '{'"),
        (lines(HEADER, ROW, "[]"), "line 3: must be one JSON object"),
        (lines(HEADER, {**ROW, "request": -1}), "line 2: 'request' must be a whole number >= 0, got -1"),
        (lines(HEADER, {**ROW, "request": True}), "'request' must be a whole number >= 0, got True"),
        (lines(HEADER, {**ROW, "position": 0.5}), "'position' must be a whole number >= 0, got 0.5"),
        (lines(HEADER, {"request": 0, "position": 0}), "must have exactly the keys request, position, experts"),
        (lines(HEADER, {**ROW, "weights": 1}), "must have exactly the keys request, position, experts"),
        (lines(HEADER, {**ROW, "experts": [[[0, 1], [2, 3]]]}), "[positions >= 1, 3 layers, 2 experts], got [1, 2, 2]"),
        (lines(HEADER, {**ROW, "experts": [[0, 1], [2, 3], [4, 5]]}), "got [3, 2]"),
        (lines(HEADER, {**ROW, "experts": []}), "or nothing"),
        (lines(HEADER, {**ROW, "experts": None}), "got something else than whole numbers"),
        (lines(HEADER, {**ROW, "experts": [[[0, 1], [2, 3], [4, 5.5]]]}), "got something else than whole numbers"),
        (lines(HEADER, {**ROW, "experts": [[[0, 1], [2, 3], [4]]]}), "lists of different lengths"),
        (lines(HEADER, {**ROW, "experts": [[[0, 1], [2, 3], [4, 8]]]}), "must lie between 0 and 7, got 0 to 8"),
        (lines(HEADER, {**ROW, "experts": [[[0, 1], [2, 3], [4, -1]]]}), "must lie between 0 and 7, got -1 to 4"),
        (lines(HEADER, {**ROW, "experts": [[[0, 1], [2, 3], [4, 2**70]]]}), "got something else than whole numbers"),
        (lines(HEADER, {**ROW, "experts": [[[0, 1], [2, 3], [4, 4]]]}), "must name different experts"),
        (lines(HEADER | FORESEEN, ROW), "request, position, experts, predicted, confidence"),
        (lines(HEADER, ROW | FORESIGHT), "must have exactly the keys request, position, experts;"),
        (lines(HEADER | FORESEEN, ROW | {"predicted": [[[1]]], "confidence": [[[0.5]]]}), "2 layers, 1 experts]"),
        (lines(HEADER | FORESEEN, ROW | FORESIGHT | {"confidence": [[[0.5], [1.5]]]}), "must lie between 0 and 1"),
        (lines(HEADER | FORESEEN, ROW | FORESIGHT | {"confidence": [[[0.5], [float("nan")]]]}), "between 0 and 1"),
        (lines(HEADER | FORESEEN, ROW | FORESIGHT | {"predicted": [[[1], [2]]] * 2}), "as many positions as 'experts'"),
    ],
)
def test_a_broken_file_is_answered_with_file_line_and_what_is_valid(tmp_path, content, told):
    path = tmp_path / "broken.jsonl"
    path.write_text(content)
    with pytest.raises(TraceFileError) as caught:
        list(read_rows(path))
    assert told in str(caught.value)
    assert str(caught.value).startswith(f"{path}")
    assert "\n" not in str(caught.value)


def test_the_broken_files_above_are_broken_by_what_they_change(tmp_path):
    good = {
        "a": lines(HEADER, ROW),
        "b": lines(HEADER | FORESEEN, ROW | FORESIGHT),
        "c": lines(HEADER | WEIGHS, {**ROW, "weights": WEIGHTS}),
        "d": lines({**HEADER, "version": 2}, ROW),
    }
    for name, content in good.items():
        (tmp_path / name).write_text(content)
        assert len(list(read_rows(tmp_path / name))) == 1
