"""A run's own routing: the last life of every position, and the same from machines and strategies of all kinds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.engine.sequences import Life
from harness.record.store import read_run
from harness.routing.build import build_routing
from harness.routing.kinds.trace import read_trace
from harness.routing.recording import FILE_NAME, last_routing, recording
from harness.run.experiment import run_experiment
from tests.composing import composed
from tests.unit.engine.fakes import SPEC, sequences
from tests.unit.routing.models import steady


def life(value: int, first_generated: int, *lengths: int) -> Life:
    """Passes of so many tokens; `value` marks the life."""
    return Life(first_generated, [np.full((n, SPEC.num_layers, 2), value, dtype=np.int16) for n in lengths])


@steady
@given(prompt=st.integers(1, 5), decoded=st.lists(st.integers(0, 4), min_size=1, max_size=4))
def test_a_position_is_what_the_last_life_that_reached_it_computed(prompt, decoded):
    """Each life prefills prompt and generated tokens, then decodes some; the next begins again."""
    (sequence,) = sequences((prompt, 40))
    sequence.records_routing = True
    assert last_routing(sequence) is None
    generated, expected = 0, {}
    for number, steps in enumerate(decoded):
        prefilled = prompt + generated
        sequence.lives.append(life(number, generated, prefilled, *[1] * steps))
        expected |= dict.fromkeys(range(prefilled + steps), number)
        generated += 1 + steps
    sequence.lives.append(Life(generated))  # a prefill that never ended
    routing = last_routing(sequence)
    assert routing is not None
    assert routing.shape == (len(expected), SPEC.num_layers, 2)
    assert routing[:, 0, 0].tolist() == [expected[position] for position in range(len(expected))]


def test_a_shorter_life_leaves_the_rest_to_the_one_before():
    (sequence,) = sequences((2, 9))
    sequence.records_routing = True
    sequence.lives = [life(1, 0, 2, 1, 1), life(2, 3, 3)]
    routing = last_routing(sequence)
    assert routing is not None and routing[:, 0, 0].tolist() == [2, 2, 2, 1]


def test_rows_are_written_as_sequences_end(tmp_path):
    one, two, rejected = sequences((2, 4), (3, 4), (9, 9))
    rng = np.random.default_rng(0)
    for sequence in (one, two):
        noise = rng.random((5, SPEC.num_layers, 8))
        sequence.lives = [Life(0, [noise.argsort(axis=-1)[..., :2].astype(np.int16)])]
    for sequence in (one, two, rejected):
        sequence.records_routing = True
    with recording(True, tmp_path, SPEC, "a test") as record:
        record(two)
        assert read_trace(tmp_path / FILE_NAME).request_ids.tolist() == [1]
        record(rejected)
        record(one)
    recorded = read_trace(tmp_path / FILE_NAME)
    assert recorded.request_ids.tolist() == [0, 1]
    assert (recorded.experts == np.concatenate([one.lives[0].routing[0], two.lives[0].routing[0]])).all()
    assert recorded.header.source == "a test"


def test_nothing_is_written_unless_asked(tmp_path):
    with recording(False, tmp_path, SPEC, "a test") as record:
        record(sequences((2, 4))[0])
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs of one workload: alone on the machine of threads; preempted, overlapped, in random order."""
    folder = tmp_path_factory.mktemp("runs")
    common = ["experiment=smoke", "record_routing=true", "wandb.mode=disabled", "progress=false", "verify=off"]
    calm = composed(*common, "strategy=ondemand", f"results_dir={folder / 'calm'}")
    tight = ["machine=shuffled", "strategy=moelens", "strategy.n_real=600", "kv_cache_gb=0.0002"]
    return [run_experiment(calm), run_experiment(composed(*common, *tight, f"results_dir={folder / 'tight'}"))]


def test_a_run_records_every_token_that_went_through_the_model(runs):
    summary, folder = runs[0]
    recorded = read_trace(folder / FILE_NAME)
    rows = {row["request_id"]: row for row in read_run(folder).requests}
    assert recorded.request_ids.tolist() == sorted(rows) and len(rows) == summary["num_finished"]
    lengths = np.diff(recorded.starts).tolist()
    prompts = [int(request["prompt_tokens"]) for _, request in sorted(rows.items())]
    generated = [len(request["generated_ids"]) for _, request in sorted(rows.items())]
    assert lengths == [p + g - 1 for p, g in zip(prompts, generated, strict=True)]
    assert recorded.header.source.startswith("emulated run; random weights")
    assert "synthetic:" in recorded.header.source


def test_strategies_machines_and_preemption_record_the_same(runs):
    (_, calm), (summary, tight) = runs
    assert summary["preemptions"] > 0
    one, two = read_trace(calm / FILE_NAME), read_trace(tight / FILE_NAME)
    assert (one.starts == two.starts).all()
    assert (np.sort(one.experts) == np.sort(two.experts)).all()


def test_a_recorded_run_can_be_replayed(runs):
    _, folder = runs[0]
    recorded = read_trace(folder / FILE_NAME)
    header = recorded.header
    model = replace(SPEC, num_layers=header.layers, num_experts=header.experts, experts_per_token=header.k)
    routing = build_routing({"name": "trace", "path": str(folder / FILE_NAME)}, model, 0)
    assert routing.source.startswith("recorded: routing.jsonl.gz (emulated run;")
    length = int(recorded.starts[1])
    found = routing.experts(np.zeros(length, dtype=np.int64), np.arange(length), 1)
    assert (found == recorded.experts[:length, 1]).all()
