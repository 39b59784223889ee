"""Recorded inputs of routers: never beyond the limit, whatever the workload; read back as written, also after a
kill."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.config import ConfigError
from harness.engine.sequences import Life, Records
from harness.record.files import RecordError
from harness.routing import hidden_file
from harness.routing.hidden_file import HiddenFileError, HiddenHeader, HiddenWriter, max_tokens, read_hidden
from harness.routing.recording import HIDDEN_FOLDER, hidden_sample, recording
from harness.routing.token_sample import sample_tokens
from tests.unit.engine.fakes import SPEC, sequences
from tests.unit.routing.models import steady

HEADER = HiddenHeader(
    model="tested", source="a test", layers=3, hidden=16, experts=8, k=2, num_sampled=5, num_tokens=9, seed=1
)


def tokens(count: int, first: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Positions, inputs and experts of successive tokens, each of which has numbers of its own."""
    positions = np.arange(first, first + count)
    inputs = np.random.default_rng(first).standard_normal((count, 3, 16)).astype(np.float16)
    experts = np.broadcast_to((positions[:, None, None] + np.arange(2)) % 8, (count, 3, 2)).astype(np.int16)
    return positions, inputs, experts


def size_of(folder) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@steady
@given(
    work=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 20), st.integers(0, 4)), min_size=1, max_size=8),
    limit_kb=st.floats(3, 60),
    hidden=st.sampled_from([8, 64, 300]),
    part_bytes=st.sampled_from([1, 2000, 10_000]),
    seed=st.integers(0, 3),
    is_killed=st.booleans(),
)
def test_a_recording_stays_within_its_limit(tmp_path_factory, work, limit_kb, hidden, part_bytes, seed, is_killed):
    """Requests (prompt, new tokens, preemptions) are computed from the start again after each preemption."""
    folder, spec = tmp_path_factory.mktemp("run"), replace(SPEC, hidden_dim=hidden)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hidden_file, "PART_BYTES", part_bytes)
        requests = sequences(*((prompt, new) for prompt, new, _ in work))
        try:
            sample = hidden_sample(spec, "a test", requests, limit_mb=limit_kb / 1000, seed=seed)
        except ConfigError as error:
            assert error.field == "record_hidden_mb"
            return
        assert sample.num_tokens == sum(prompt + new - 1 for prompt, new, _ in work)
        expected = {}
        recorders = recording(folder, spec, "a test", routing=False, sample=sample)
        record = recorders.__enter__()
        for sequence, (_, new, preemptions) in zip(requests, work, strict=True):
            sequence.records = Records(sample=sample)
            for life in range(preemptions + 1):
                is_last = life == preemptions
                expected |= run_once(sequence, spec, sample, life, new if is_last else min(life + 1, new))
            record(sequence)
            assert not any(life.inputs for life in sequence.lives), "what is on disk is let go of"
        if not is_killed:
            recorders.__exit__(None, None, None)
        assert size_of(folder) <= limit_kb * 1000
        if is_killed and not list((folder / HIDDEN_FOLDER).iterdir()):
            return
        found = read_hidden(folder / HIDDEN_FOLDER)
    read = list(zip(found.request_ids.tolist(), found.positions.tolist(), strict=True))
    assert read == sorted(read)
    if not is_killed:
        assert set(read) == set(expected) and len(read) == sample.num_sampled
        if sample.num_sampled < sample.num_tokens:
            assert size_of(folder) > 0.2 * limit_kb * 1000, "a sample uses the room there is"
    for row, token in enumerate(read):
        assert (found.inputs[row] == expected[token]).all()
        assert (found.experts[row] == np.array([token[1] % 7, 7])).all()
    assert (found.header.layers, found.header.hidden, found.header.num_tokens) == (3, hidden, sample.num_tokens)


def run_once(sequence, spec, sample, life, num_new) -> dict[tuple[int, int], float]:
    """Add a life that ends after so many new tokens. Inputs tell the life, request and position. Returns them by
    token."""
    request, count = sequence.request.request_id, len(sequence.request.prompt_ids) + num_new - 1
    sequence.lives.append(Life(0))
    expected = {}
    passes = np.split(np.arange(count), range(sequence.prompt_len, count))  # the prompt, then token by token
    for positions in passes:
        chosen = positions[sample(np.full(len(positions), request), positions)]
        value = ((life + 1) * 100 + request * 10 + chosen % 10).astype(np.float32)
        inputs = np.broadcast_to(value[:, None, None], (len(chosen), 3, spec.hidden_dim)).copy()
        experts = np.stack([positions % 7, np.full(len(positions), 7)], axis=-1).astype(np.int16)
        sequence.lives[-1].routing.append(np.broadcast_to(experts[:, None], (len(positions), 3, 2)))
        if len(chosen):
            sequence.lives[-1].inputs.append(inputs.view(np.uint8))
        expected |= dict(zip([(request, int(position)) for position in chosen], value, strict=True))
    return expected


def test_a_limit_that_holds_no_token_is_refused_with_what_one_takes():
    with pytest.raises(ConfigError, match=r"record_hidden_mb: holds no token of this model, which takes 0\.000\d+ MB"):
        hidden_sample(SPEC, "a test", sequences((3, 3)), limit_mb=1e-4, seed=0)


@steady
@given(
    positions=st.dictionaries(st.integers(0, 2**40), st.integers(1, 40), min_size=1, max_size=6),
    share=st.floats(0, 1.2),
    seed=st.integers(0, 5),
    data=st.data(),
)
def test_a_sample_has_as_many_tokens_as_asked_however_they_are_batched(positions, share, seed, data):
    total = sum(positions.values())
    sample = sample_tokens(positions, int(share * total), seed)
    every = [(request, position) for request, count in positions.items() for position in range(count)]
    whole = sample(*np.array(every).T)
    assert whole.sum() == sample.num_sampled == min(total, int(share * total))
    order = data.draw(st.permutations(range(total)))[:10]
    assert [bool(sample(*np.array([every[at]]).T)[0]) for at in order] == whole[order].tolist()


def test_samples_of_two_seeds_differ_and_are_spread_over_requests_and_positions():
    positions = dict.fromkeys(range(40), 50)
    every = np.array([(request, position) for request in range(40) for position in range(50)]).T
    one, two = (sample_tokens(positions, 1000, seed)(*every).reshape(40, 50) for seed in (0, 1))
    assert 0.35 < (one & two).mean() / one.mean() < 0.65
    assert one.mean(axis=0).min() > 0.25 and one.mean(axis=1).min() > 0.25


def test_parts_that_are_there_are_read_while_the_recording_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(hidden_file, "PART_BYTES", 4 * HEADER.token_bytes)
    writer = HiddenWriter(tmp_path / "hidden", HEADER)
    given_tokens = tokens(10)
    writer.add(5, *given_tokens)
    assert len(read_hidden(tmp_path / "hidden").positions) == 8
    writer.add(2, *tokens(1, first=3))
    (tmp_path / "hidden" / ".part-00002.safetensors.77.tmp").write_bytes(b"half")  # left by a kill
    writer.close()
    found = read_hidden(tmp_path / "hidden")
    assert found.request_ids.tolist() == [2] + [5] * 10
    assert found.positions.tolist() == [3, *range(10)]
    assert (found.inputs[1:] == given_tokens[1]).all() and (found.experts[1:] == given_tokens[2]).all()
    assert found.header == HEADER and found.num_clamped == 0
    assert found.inputs.dtype == np.float16 and found.header.share == pytest.approx(5 / 9)


def test_what_float16_cannot_hold_is_clamped_and_counted(tmp_path):
    writer = HiddenWriter(tmp_path / "hidden", HEADER)
    positions, _, experts = tokens(2)
    inputs = np.ones((2, 3, 16), dtype=np.float32)
    inputs[0, 1, :4] = [1e30, -70000, np.inf, np.nan]
    inputs[1, 2, 0] = 65504
    writer.add(0, positions, inputs, experts)
    writer.close()
    found = read_hidden(tmp_path / "hidden")
    assert found.inputs[0, 1, :3].tolist() == [65504, -65504, 65504] and np.isnan(found.inputs[0, 1, 3])
    assert found.num_clamped == 3
    assert found.inputs[1, 2, 0] == 65504 and (found.inputs[1, :2] == 1).all()


def test_a_folder_that_exists_is_not_written_to(tmp_path):
    with pytest.raises(RecordError, match="cannot be made"):
        HiddenWriter(tmp_path, HEADER)


def test_a_folder_without_a_recording_is_answered_with_what_is_wrong(tmp_path):
    with pytest.raises(HiddenFileError, match=r"has no part-\*\.safetensors; a run with record_hidden=true"):
        read_hidden(tmp_path)
    for folder, header in (("one", HEADER), ("two", replace(HEADER, seed=2))):
        writer = HiddenWriter(tmp_path / folder, header)
        writer.add(0, *tokens(2))
        writer.close()
    part = "part-00000.safetensors"
    (tmp_path / "two" / part).rename(tmp_path / "one" / "part-00001.safetensors")
    with pytest.raises(HiddenFileError, match=r"part-00001\.safetensors: is of another recording than part-00000"):
        read_hidden(tmp_path / "one")
    (tmp_path / "one" / "part-00001.safetensors").unlink()
    content = (tmp_path / "one" / part).read_bytes()
    for broken, told in (
        (content[:-1], "is no part of a recording"),
        (b"", "is no part of a recording"),
        (content.replace(b"moe-hidden", b"moe-hiddex"), "must have the format moe-hidden and the version 1"),
        (content.replace(b'\\"k\\": 2', b'\\"k\\": 3'), r"'experts' must be int16 \['tokens', 3, 3\]"),
        (content.replace(b'"clamped"', b'"clampex"'), "is no part of a recording: 'clamped'"),
    ):
        assert broken != content
        (tmp_path / "one" / part).write_bytes(broken)
        with pytest.raises(HiddenFileError, match=told) as caught:
            read_hidden(tmp_path / "one")
        assert "\n" not in str(caught.value)


def test_nearly_all_of_a_limit_is_used():
    for header in (HEADER, replace(HEADER, hidden=4096, layers=32)):
        assert 0.97 * 64e6 < max_tokens(header, 64_000_000) * header.token_bytes < 64e6


def test_reading_needs_no_torch():
    code = "import sys; import harness.routing.hidden_file; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
